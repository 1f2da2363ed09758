"""Whether a disk has room, asked of the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from minisandbox.store.disk.faults import is_full

MIB = 1 << 20


def test_a_disk_with_room_is_not_full_and_nothing_stays(tmp_path: Path) -> None:
    assert not is_full(tmp_path, MIB)
    assert is_full(tmp_path, 1 << 62)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("said", "full"), [(errno.EDQUOT, True), (errno.ENOSPC, True), (errno.EOPNOTSUPP, False)])
def test_a_quota_is_met_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int, full: bool) -> None:
    """No file system here has quotas, so the kernel's answer is made up."""

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert is_full(tmp_path, MIB) is full
    assert os.listdir(tmp_path) == []
