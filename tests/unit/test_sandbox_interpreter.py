"""What sandboxes are forked from is executed so that no file of the caller's is in their reach."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisandbox.errors import HostError
from minisandbox.sandbox import helper_process

TELL = "import os; print(os.readlink('/proc/self/exe'))"
REAL = os.path.realpath(sys.executable)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is shorter than that of the loader."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    yield place
    shutil.rmtree(place)


def run(start: helper_process.Loader, *words: str) -> str:
    done = subprocess.run(
        [start.arguments[0], *words], executable=start.program, pass_fds=(start.descriptor,), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@contextmanager
def found(path: str) -> Iterator[helper_process.Loader]:
    start = helper_process.sealed_loader(path)
    try:
        yield start
    finally:
        os.close(start.descriptor)


def copied_loader(place: Path) -> str:
    """The path of the loader, of which a copy lies at a place."""
    loader = helper_process._loader(REAL)
    assert loader is not None
    shutil.copy(loader, place)
    return loader


def test_what_is_executed_is_a_copy_in_memory() -> None:
    with found(sys.executable) as start:
        assert run(start, *start.arguments[1:], "-c", TELL).startswith("/memfd:loader")


def test_a_loader_of_the_callers_own_is_copied(short: Path) -> None:
    """As in a store of packages that belongs to the user: its mode could be changed from inside."""
    own, asking = short / "l", short / "python"
    loader = copied_loader(own).encode()
    asking.write_bytes(Path(REAL).read_bytes().replace(loader, bytes(own).ljust(len(loader), b"\0"), 1))
    with found(str(asking)) as start:
        assert start.arguments == (str(own), str(asking))
        assert run(start, REAL, "-c", TELL).startswith("/memfd:loader")
        with open(start.program, "r+b", buffering=0) as copy, pytest.raises(OSError, match="Operation not permitted"):
            copy.write(b"x")
        assert fcntl.fcntl(start.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_static_program_is_executed_itself(short: Path) -> None:
    static = short / "static"
    copied_loader(static)
    with found(str(static)) as start:
        assert start.arguments == (str(static),)
        assert run(start, REAL, "-c", "print('here')") == "here"


def test_what_is_no_program_is_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n", encoding="ascii")
    with pytest.raises(HostError, match="is not a 64-bit program"):
        helper_process.sealed_loader(str(script))
    with pytest.raises(HostError, match="cannot read"):
        helper_process.sealed_loader(str(tmp_path / "missing"))


def test_a_kernel_that_refuses_copies_is_named(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    static = short / "static"
    copied_loader(static)
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(HostError, match="memfd_noexec"):
        helper_process.sealed_loader(str(static))
