"""The host's side without any sandbox: records of owners, and what is read off the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from minisandbox.host import reaper, surroundings
from minisandbox.images.base import base_entries


def _record(number: int) -> reaper.Record:
    return reaper.Record(f"box-{number}", os.getpid(), "host", time.time(), os.getpid(), "off")


def test_what_is_no_owners_directory_stands_in_nobodys_way(tmp_path: Path) -> None:
    records = reaper.Records(tmp_path)
    records.add(_record(1))
    (tmp_path / "owners/notes.txt").write_text("x", encoding="ascii")
    (tmp_path / "owners/999999999-1/deep").mkdir(parents=True)
    assert [one.id for one in reaper.live_records(tmp_path)] == ["box-1"]
    assert reaper.reap(tmp_path) == 2


def test_an_owner_whose_directory_was_cleaned_away_goes_on(tmp_path: Path) -> None:
    records = reaper.Records(tmp_path)
    records.close()
    records.add(_record(2))
    assert [one.id for one in reaper.live_records(tmp_path)] == ["box-2"]
    records.remove("box-2")
    assert list(reaper.live_records(tmp_path)) == []


def test_a_relative_runtime_directory_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISANDBOX_RUNTIME", "here")
    assert reaper.runtime_directory() == tmp_path / "here"


def test_the_file_system_of_a_directory() -> None:
    assert surroundings.file_system(Path("/proc/self")) == "proc"
    assert surroundings.file_system(Path("/")) not in {"unknown", "proc"}


def test_libraries_that_are_a_link_beside_real_ones(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib64").symlink_to("lib")
    (tmp_path / "bin").symlink_to("/nix/store/bin")
    found = {entry.path: entry.data for entry in base_entries(tmp_path)}
    assert found["lib64"] == b"lib"
    assert "bin" not in found
