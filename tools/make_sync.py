"""Generate the synchronous handles (``sandbox/_sync``) from the asynchronous handles (``sandbox/_async``).

    PYTHONPATH=src python tools/make_sync.py

The versions differ in keywords, names and a few phrases of docstrings. Code that differs in other ways is written by
hand in ``io_async.py`` and ``io_sync.py``. A test compares the committed files with the output of this tool.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

SANDBOX = Path(__file__).resolve().parent.parent / "src" / "minisandbox" / "sandbox"
NAMES = {
    "AsyncCaller": "Caller",
    "AsyncFiles": "Files",
    "AsyncIterator": "Iterator",
    "AsyncProcess": "Process",
    "AsyncSandbox": "Sandbox",
    "AsyncSharedConnection": "SharedConnection",
    "AsyncShell": "Shell",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "_async": "_sync",
    "io_async": "io_sync",
}
KEYWORDS = ("async", "await")
PHRASES = {
    "an ``async with``": "a ``with``",
    "an asynchronous": "a",
    "Tasks of one event loop": "Threads",
    "tasks of one event loop": "threads",
    "A cancellation": "Ctrl-C",
    "a cancellation": "Ctrl-C",
    "is cancelled": "is interrupted",
    "asynchronous": "synchronous",
}
NOTICE = "# Generated from {source} by tools/make_sync.py: change that file, then run the tool.\n"


def derive(source: str) -> str:
    """Return the synchronous version of a module.

    Args:
        source: text of the asynchronous module.
    """
    lines = source.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        (first, begin), (last, end) = token.start, token.end
        if token.type == tokenize.NAME and token.string in KEYWORDS:
            lines[first - 1] = lines[first - 1][:begin] + lines[first - 1][end:].removeprefix(" ")
        elif token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            text = _plain(token.string)
            if text != token.string:
                lines[first - 1 : last] = [lines[first - 1][:begin] + text + lines[last - 1][end:]]
    return "".join(lines)


def _plain(text: str) -> str:
    """Replace the names and phrases of the asynchronous version."""
    for phrase, replacement in PHRASES.items():
        text = text.replace(phrase, replacement)
    return re.sub(r"\b\w+\b", lambda word: NAMES.get(word[0], word[0]), text)


def modules() -> dict[Path, str]:
    """Return the content of each synchronous module by its path."""
    contents = {}
    for path in sorted((SANDBOX / "_async").glob("*.py")):
        if path.name != "__init__.py":
            notice = NOTICE.format(source=f"_async/{path.name}")
            contents[SANDBOX / "_sync" / path.name] = notice + derive(path.read_text(encoding="utf-8"))
    return contents


def main() -> None:
    """Write the synchronous modules."""
    for path, text in modules().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
