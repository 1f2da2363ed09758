"""Patches, judged as text before git applies them inside a sandbox.

``tasks.patches`` reads and explains a patch in full; here only what git itself would let through is refused, because
recipes can be made without tasks.
"""

from __future__ import annotations

import re

from minisandbox.errors import PatchError

_HEADER = re.compile(r"^(?:diff --git |--- |\+\+\+ |@@ |index |(?:new|old|deleted) (?:file )?mode )", re.MULTILINE)
_LINK = re.compile(r"^(?:new file mode|new mode) (120000|160000)\r?$", re.MULTILINE)
_LINKED = re.compile(r"^index [0-9a-f]+\.\.[0-9a-f]+ (120000|160000)\r?$", re.MULTILINE)


def check_patch(patch: str, name: str) -> None:
    """Refuse a patch that is damaged or makes links.

    Absolute paths, ``..`` and ``.git`` are refused by git apply itself.

    Args:
        patch: its text; empty for none.
        name: what errors call it.

    Raises:
        PatchError: it has a NUL byte, makes or changes a symbolic link or a submodule, or is no patch.
    """
    if not patch.strip():
        return
    if "\0" in patch:
        raise PatchError(f"{name} has a NUL byte in it", reason="it is binary, or UTF-16 text", hint="use git diff")
    if _LINK.search(patch) or _LINKED.search(patch):
        raise PatchError(f"{name} makes a symbolic link or a submodule", hint="leave links out of it")
    if _HEADER.search(patch) is None:
        raise PatchError(f"{name} is not a unified diff", hint="make it with git diff")


def readings(patch: str) -> tuple[str, ...]:
    """Return the texts that a patch may stand for, the likeliest first.

    A patch whose headers end in CR LF was converted on its way. Either the whole of it was, or the files have CR LF
    themselves and only the headers were meant to have LF.
    """
    text = patch if patch.endswith("\n") else patch + "\n"
    if not any(line.endswith("\r") for line in text.split("\n") if _HEADER.match(line)):
        return (text,)
    headers = "\n".join(line.rstrip("\r") if _is_header(line) else line for line in text.split("\n"))
    return text.replace("\r\n", "\n"), headers


def _is_header(line: str) -> bool:
    return line[:1] not in {"+", "-", " "} or line.startswith(("--- ", "+++ "))
