"""A copy of an interpreter's prefix that starts from another place: selected, cleaned, and its paths rewritten."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.images.elf import is_elf, relocate_runpath, strip_debug
from minisandbox.images.probe import Interpreter

PREFIX_VERSION = 3
"""Part of the layer's key: raise it when a copy made by this module changes."""

_PROGRAMS = re.compile(r"(?:python|pip|easy_install|idle|pydoc|2to3|pyvenv|wheel|smtpd)[\w.\-]*")
_PACKAGES = re.compile(
    r"(?:pip|setuptools|wheel)(?:-[\w.+]*\.(?:dist|egg)-info)?|pkg_resources|_distutils_hack|easy_install\.py"
    r"|distutils-precedence\.pth|README(?:\.txt)?"
)
_LIBRARY = re.compile(r"lib.*\.so(?:\.[\w.]+)?")
# The tests of the standard library; of `test` itself the helpers stay, which projects import.
_TESTS = frozenset(
    {
        "ctypes/test",
        "distutils/tests",
        "idlelib/idle_test",
        "lib2to3/tests",
        "sqlite3/test",
        "tkinter/test",
        "turtledemo",
        "unittest/test",
        "lib-tk/test",
        "bsddb/test",
        "email/test",
        "json/tests",
    }
)
_TEST_HELPERS = frozenset({"__init__.py", "support", "test_support.py", "script_helper.py"})
_DROPPED_FILES = re.compile(r"EXTERNALLY-MANAGED|.*\.py[co]|libpython.*\.a|.*\.exe")


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copying.

    Attributes:
        source: the prefix on the host.
        target: the copy's directory here.
        names: the ways the prefix is spelled in its files.
        home: the copy's path inside the image.
    """

    source: Path
    target: Path
    names: tuple[bytes, ...]
    home: bytes


def copy_prefix(interpreter: Interpreter, target: Path, home: str) -> None:
    """Copy what makes an interpreter, without what its owner installed into it, byte code and debugging sections.

    Args:
        interpreter: one with a prefix of its own.
        target: the directory to make.
        home: the path at which the copy will lie inside the image.

    Raises:
        OSError: something cannot be read or written.
        ProgramNotFound: there is no patchelf.
        HostError: patchelf failed.
    """
    spellings = {str(interpreter.prefix), str(interpreter.executable.parent.parent)}
    job = _Copy(interpreter.prefix, target, tuple(sorted(map(os.fsencode, spellings))), home.encode())
    target.mkdir()
    library = f"python{interpreter.minor}"
    for folder, keep in _parts(library):
        if (job.source / folder).is_dir():
            _copy_folder(job, Path(folder), keep)
    files = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
    strip_debug([path for path in files if is_elf(_beginning(path))])  # before patchelf: strip may damage its work
    for path in files:
        _rewrite(job, path)
    _link_names(job, interpreter.minor)


def _parts(library: str) -> Iterator[tuple[str, Callable[[Path], bool]]]:
    """The folders of a prefix that are looked into, and what is taken of each (paths relative to the folder)."""
    yield "bin", lambda path: len(path.parts) == 1 and _PROGRAMS.fullmatch(path.name) is not None
    yield "lib", lambda path: len(path.parts) == 1 and _LIBRARY.fullmatch(path.name) is not None
    yield f"lib/{library}", _wanted_in_library
    yield "include", lambda path: path.parts[0].startswith(library)
    yield "lib/pkgconfig", lambda path: path.name.startswith("python")
    for folder in ("lib/engines-3", "lib/ossl-modules", "ssl", "share/terminfo", "lib/tcl8.6", "lib/tk8.6"):
        yield folder, lambda _: True


def _wanted_in_library(path: Path) -> bool:
    """Whether a path of lib/pythonX.Y is part of the bare interpreter."""
    parts = path.parts
    if "__pycache__" in parts or _DROPPED_FILES.fullmatch(path.name):
        return False
    if parts[0] == "site-packages":
        return len(parts) == 1 or _PACKAGES.fullmatch(parts[1]) is not None
    if parts[0] == "test":
        return len(parts) == 1 or parts[1] in _TEST_HELPERS
    return "/".join(parts[:2]) not in _TESTS and parts[0] not in _TESTS


def _copy_folder(job: _Copy, folder: Path, keep: Callable[[Path], bool]) -> None:
    root = job.source / folder
    for directory, names, files in os.walk(root):
        here = Path(directory).relative_to(root)
        links = [name for name in names if (Path(directory) / name).is_symlink()]
        names[:] = [name for name in names if name not in links and keep(here / name)]
        for name in [*files, *links]:
            if keep(here / name):
                _copy_file(job, folder / here / name)


def _copy_file(job: _Copy, path: Path) -> None:
    source, target = job.source / path, job.target / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        link = os.readlink(source)
        if not link.startswith("/"):
            target.symlink_to(link)
            return
    if source.is_file():
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def _rewrite(job: _Copy, path: Path) -> None:
    """Point a file's mentions of the prefix at the copy: run paths of programs, plain text elsewhere."""
    data = path.read_bytes()
    if not any(name in data for name in job.names):
        return
    if is_elf(data):
        relocate_runpath(path, [os.fsdecode(name) for name in job.names], job.target)
        return
    if b"\0" in data:
        return
    for name in job.names:
        data = data.replace(name, job.home)
    path.write_bytes(data)


def _link_names(job: _Copy, minor: str) -> None:
    """Make sure of the names that scripts use: python, pythonX, pythonX.Y."""
    folder = job.target / "bin"
    real = f"python{minor}"
    for name in (f"python{minor[0]}", "python"):
        if not (folder / name).exists():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(real)
