"""The shell scripts that run inside build sandboxes."""

from __future__ import annotations

from importlib import resources


def script(*names: str) -> str:
    """Return one script made of several: the common beginning, then these, then the common end.

    Args:
        names: files beside this one, without ``.sh``.
    """
    folder = resources.files(__name__)
    return "\n".join((folder / f"{name}.sh").read_text("utf-8") for name in ("common", *names, "finish"))
