"""Temporary directories outlive their owners until the next one starts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from minisandbox.errors import HostError
from minisandbox.sandbox import scratch

HOLD = """
import time
from minisandbox.sandbox.scratch import scratch
with scratch() as place:
    (place / "tests").mkdir()
    (place / "tests/test_hidden.py").touch()
    (place / "tests").chmod(0o500)
    print(place, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_it_ends_with_its_use() -> None:
    with scratch.scratch() as place:
        (place / "x").touch()
        assert place.stat().st_mode & 0o777 == 0o700
        assert not list(scratch.leftovers())
    assert not place.exists()


def test_what_a_killed_owner_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        place = Path(owner.stdout.readline().strip())
        scratch.reap()
        alive = place.is_dir()
        owner.send_signal(signal.SIGKILL)
    assert alive
    assert (place / "tests/test_hidden.py").exists()
    assert [one.path for one in scratch.leftovers()] == [place]
    scratch.reap()
    assert not list(tmp_path.iterdir())


def test_whoever_starts_next_may_have_another_place(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Path(os.environ["MINISANDBOX_RUNTIME"], "temporary")
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        place = Path(owner.stdout.readline().strip())
        monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("elsewhere")))
        monkeypatch.setattr("tempfile.tempdir", None)
        scratch.reap()
        alive = place.is_dir()
        owner.send_signal(signal.SIGKILL)
    assert alive
    assert [one.path for one in scratch.leftovers()] == [place]
    (notes / "half-written").write_bytes(b"")
    with scratch.scratch():
        scratch.reap()
        assert len(list(notes.iterdir())) == 1, "that of the place in use"
    assert not list(tmp_path.iterdir())
    scratch.reap()
    assert not list(notes.iterdir())


def test_a_note_stays_while_a_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tempfile.mkdtemp

    def slowly(**options: Any) -> str:
        subprocess.run([sys.executable, "-c", "from minisandbox.sandbox import scratch; scratch.reap()"], check=True)
        return str(real(**options))

    monkeypatch.setattr("tempfile.mkdtemp", slowly)
    place = scratch.new_scratch()
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert [found for _, found in scratch._read_notes()] == [place.parent]


def test_a_full_place_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(HostError, match=f"make a temporary directory in {tmp_path}.*no room left.*set TMPDIR"):
        scratch.new_scratch()


def test_without_any_place_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    assert not list(scratch.leftovers())
    with pytest.raises(HostError, match="make a temporary directory"):
        scratch.new_scratch()
