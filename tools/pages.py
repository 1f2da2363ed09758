"""Replace the generated part of a page between two marker comments, and keep the text around it."""

from __future__ import annotations


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with one generated part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- {name}: made -->", f"<!-- {name}: end -->"
    before, begin_mark, remainder = page.partition(begin)
    _, end_mark, after = remainder.partition(end)
    if not begin_mark or not end_mark:
        raise ValueError(f"the page has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
