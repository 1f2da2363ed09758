"""Pages that are partly made: what stands between two comments is replaced, what people wrote stays."""

from __future__ import annotations


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with one of its generated parts replaced.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- {name}: made -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
