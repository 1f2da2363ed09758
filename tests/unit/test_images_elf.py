"""Debugging sections are dropped from ELF files where the machine has strip(1), and nothing else is."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from minisandbox.images.python.prefix import strip_debug

SOURCE = "static int offset = 41;\nint answer(int x) { return x + offset; }\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A shared library with debugging sections."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "answer.c").write_text(SOURCE)
    made = tmp_path / "answer.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-g3", "-o", str(made), str(tmp_path / "answer.c")], check=True)
    return made


@pytest.mark.skipif(shutil.which("strip") is None, reason="no strip here (Debian's package is binutils)")
def test_a_library_without_debugging_sections_works(library: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(library.read_bytes()[:100])
    before = library.stat().st_size
    strip_debug([damaged, library])
    assert library.stat().st_size < before - 1000
    assert damaged.stat().st_size == 100, "what strip does not understand stays"
    assert ctypes.CDLL(str(library)).answer(1) == 42


def test_without_strip_they_stay(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.read_bytes()
    monkeypatch.setenv("PATH", "/nonexistent")
    strip_debug([library])
    assert library.read_bytes() == before
