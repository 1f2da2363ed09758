"""Parse Python source that others wrote."""

from __future__ import annotations

import ast

_TRIES = 5


def parse_python(source: str) -> ast.Module | None:
    """Return the syntax tree of a module.

    CPython 3.11 counts the depth of all threads' trees in one variable, so that one thread's parsing can fail by
    another's (SystemError; https://github.com/python/cpython/issues/106905). It is tried again then.

    Args:
        source: the module's text.

    Returns:
        The tree; None for what this Python cannot parse.
    """
    for _ in range(_TRIES):
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:
            continue
    return None
