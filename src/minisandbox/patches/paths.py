"""Parse the paths in diff headers: undo git's quoting, strip ``a/`` and ``b/``, and reject unsafe paths.

The parser adds the line number to the errors raised here.
"""

from __future__ import annotations

import re

from minisandbox.errors import PatchError

_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_LONGEST = 4 * 4096
"""The maximum length in bytes of a path in a header: PATH_MAX, with every byte escaped as ``\\ooo``."""


def text(raw: bytes) -> str:
    """Decode a path; bytes that are not UTF-8 become surrogates, as in ``os.fsdecode``."""
    return raw.decode("utf-8", "surrogateescape")


def unquoted(raw: bytes) -> bytes:
    r"""Undo git's C-style quoting (``"caf\303\251.py"``); return a path without quotes unchanged.

    Raises:
        PatchError: the path exceeds PATH_MAX, has an unknown escape, or has a control character without being quoted.
            Git quotes control characters, and treats a carriage return as the end of a path.
    """
    if len(raw) > _LONGEST:
        raise PatchError(f"a path of {len(raw)} bytes is longer than any file's", reason="the patch was edited by hand")
    match = _QUOTED.match(raw)
    if match is not None:
        return _ESCAPE.sub(_unescape, match[1])
    if _CONTROL.search(raw):
        raise PatchError(f"the path {text(raw)!r} has a control character", reason="the patch was edited by hand")
    return raw


def _unescape(match: re.Match[bytes]) -> bytes:
    escape = match[1].decode("latin-1")
    if len(escape) == 3:
        return bytes([int(escape, 8)])
    if escape not in _ESCAPES:
        raise PatchError(f"a quoted path has the unknown escape \\{escape}")
    return bytes([_ESCAPES[escape]])


def header_path(raw: bytes) -> str | None:
    """Return the repository path of a ``---`` or ``+++`` line, or None for ``/dev/null``.

    Args:
        raw: the line after its marker; in a plain diff, a tab and a timestamp may follow the path.

    Raises:
        PatchError: the path is absolute, has no leading directory to strip, or is rejected by :func:`checked_path`.
    """
    path = unquoted(raw if raw.startswith(b'"') else raw.split(b"\t", 1)[0])
    return None if path == b"/dev/null" else without_prefix(text(path))


def without_prefix(path: str) -> str:
    """Strip the leading directory (``a/``) and check the remaining path.

    Raises:
        PatchError: see :func:`header_path`.
    """
    if path.startswith("/"):
        raise _absolute(path)
    prefix, slash, inner_path = path.partition("/")
    if prefix == "..":
        raise _outside(path)
    if not slash:
        raise PatchError(
            f"the path {path!r} has no leading directory",
            reason="it was made with --no-prefix or diff.noprefix",
            hint="make it with 'git diff' and the usual a/ and b/ prefixes",
        )
    return checked_path(inner_path)


def same_path(raw: bytes) -> str | None:
    """Return the path of a ``diff --git a/X b/X`` line, or None if its two halves name different files.

    Args:
        raw: the rest of the line after ``diff --git``. Unquoted paths may contain spaces, so the line is ambiguous
            unless both halves name the same file.

    Raises:
        PatchError: see :func:`header_path`; or the two halves are identical, so the ``a/`` and ``b/`` are missing.
    """
    quoted = _QUOTED.match(raw)
    if quoted is not None:
        old, new = unquoted(quoted[0]), unquoted(raw[quoted.end() + 1 :])
    else:
        middle = len(raw) // 2
        old, new = unquoted(raw[:middle]), raw[middle + 1 :]
        if raw[middle : middle + 1] != b" ":
            return None
    if old == new:
        raise PatchError(
            f"the paths {text(old)!r} have no a/ and b/ before them",
            reason="it was made with --no-prefix or diff.noprefix",
            hint="make it with 'git diff' and the usual prefixes",
        )
    old_parts, new_parts = text(old).partition("/"), text(new).partition("/")
    return without_prefix(text(new)) if old_parts[1:] == new_parts[1:] and old_parts[1] else None


def checked_path(path: str) -> str:
    """Return a repository path unchanged if a patch may touch it.

    Raises:
        PatchError: the path is empty or absolute, leaves the repository, or lies in a ``.git`` directory.
    """
    if path.startswith("/"):
        raise _absolute(path)
    components = path.split("/")
    if ".." in components:
        raise _outside(path)
    if not path or "" in components or "." in components:
        raise PatchError(f"the path {path!r} is not a file's")
    if any(component.lower() == ".git" for component in components):
        raise PatchError(f"the path {path!r} lies in git's own directory", hint="take that file out of the patch")
    return path


def leads_inside(path: str, target: bytes) -> bool:
    """Return whether a symbolic link leads to a path of the repository, outside of ``.git``.

    A ``..`` is accepted only at the start of the target. After a name, which may be another link, it could lead out of
    the repository.

    Args:
        path: the link's path in the repository. Its parents are not links, because git does not write through links.
        target: the link's target.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    depth = next((index for index, part in enumerate(parts) if part != b".."), len(parts))
    names = [part.lower() for part in parts[depth:]]
    return bool(target) and not target.startswith(b"/") and depth <= path.count("/") and not {b"..", b".git"} & {*names}


def _absolute(path: str) -> PatchError:
    return PatchError(
        f"the path {path!r} is absolute",
        reason="two files outside of the repository were compared",
        hint="make it with 'git diff' in the repository: paths are relative to its root",
    )


def _outside(path: str) -> PatchError:
    return PatchError(
        f"the path {path!r} leaves the repository ('..')",
        reason="it was made in another directory, or to reach outside",
        hint="make it with 'git diff' in the repository: paths are relative to its root",
    )
