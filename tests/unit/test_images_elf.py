"""Debugging sections are dropped from ELF files, and nothing else is."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from minisandbox.images.elf import without_debug

SOURCE = "static int offset = 41;\nint answer(int x) { return x + offset; }\n"


def library(directory: Path, *options: str) -> Path:
    """A shared library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (directory / "answer.c").write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", *options, "-o", str(directory / "answer.so"), str(directory / "answer.c")]
    subprocess.run(command, check=True)
    return directory / "answer.so"


def test_a_library_without_debugging_sections_works(tmp_path: Path) -> None:
    data = library(tmp_path, "-g3").read_bytes()
    lean = without_debug(data)
    assert len(lean) < len(data) - 1000
    assert b"answer.c" in data
    assert without_debug(lean) == lean
    (tmp_path / "lean.so").write_bytes(lean)
    assert ctypes.CDLL(str(tmp_path / "lean.so")).answer(1) == 42
    if shutil.which("readelf"):
        for name in ("answer.so", "lean.so"):
            done = subprocess.run(
                ["readelf", "-aW", str(tmp_path / name)],
                capture_output=True,
                text=True,
                env={"LC_ALL": "C"},
                check=True,
            )
            assert done.stderr == ""
        assert "FUNC    GLOBAL DEFAULT" in done.stdout, "the symbols stay"


def test_a_library_that_has_none_stays_as_it_is(tmp_path: Path) -> None:
    data = library(tmp_path, "-g0").read_bytes()
    assert without_debug(data) == data


@pytest.mark.parametrize("cut", [10, 64, 100, -64, -1])
def test_what_is_broken_stays_as_it_is(tmp_path: Path, cut: int) -> None:
    data = library(tmp_path, "-g").read_bytes()[:cut]
    assert without_debug(data) == data


def test_what_is_loaded_from_behind_stays(tmp_path: Path) -> None:
    data = bytearray(library(tmp_path, "-g").read_bytes())
    (programs,) = struct.unpack_from("<Q", data, 32)
    struct.pack_into("<Q", data, programs + 32, len(data))  # the first segment reaches to the end
    assert without_debug(bytes(data)) == bytes(data)


def test_other_files_stay_as_they_are() -> None:
    for data in (b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100)):
        assert without_debug(data) == data
