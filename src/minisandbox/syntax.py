"""Parse untrusted Python source without raising errors."""

from __future__ import annotations

import ast
import threading

_TRIES = 5
_LOCK = threading.Lock()


def parse_python(source: str) -> ast.Module | None:
    """Return the syntax tree of a module.

    CPython 3.11 counts the depth of the trees of all threads in one variable, so concurrent parsing can fail with a
    SystemError (https://github.com/python/cpython/issues/106905). Threads therefore take turns, and parse again if
    other code has parsed at the same time.

    Args:
        source: source text of the module.

    Returns:
        The tree, or None if this Python cannot parse the source.
    """
    for _ in range(_TRIES):
        try:
            with _LOCK:
                return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:
            continue
    return None
