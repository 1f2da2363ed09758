"""What reading a tree may cost: what a build left behind must not hold up the host."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from minisandbox.errors import DiskFull, StoreError, UnfitTree
from minisandbox.store import Made, Store, step_key
from minisandbox.store.disk.faults import store_faults

KEY = step_key(None, {"kind": "test"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _deep(root: Path, depth: int) -> None:
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        child = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)


def _staged(store: Store) -> list[str]:
    return [name for name in os.listdir(store.root / "staging") if not name.startswith(".")]


def test_reading_a_tree_ends_with_its_time(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        with (work / "tree/endless").open("wb") as file:
            file.truncate(1 << 42)  # a hole, which took no time to make
        return Made(work / "tree", patience=0.5)

    begun = time.monotonic()
    with pytest.raises(UnfitTree, match="takes too long to read"):
        store.ensure_layer(KEY, parent=None, step={}, make=make)
    assert time.monotonic() - begun < 60
    assert not store.has_layer(KEY)
    assert _staged(store) == []


@pytest.mark.slow
def test_a_path_that_is_too_long_is_not_told_whole(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        _deep(work / "tree", 3_000)
        return Made(work / "tree")

    with pytest.raises(UnfitTree, match="too long") as caught:
        store.ensure_layer(KEY, parent=None, step={}, make=make)
    assert len(str(caught.value)) < 1000
    assert _staged(store) == []


def test_the_kernels_words_are_not_told_whole() -> None:
    with pytest.raises(StoreError) as caught, store_faults("look"):
        raise OSError(errno.EIO, "Input/output error", "/".join(["directory"] * 1000))
    assert len(str(caught.value)) < 1000
    assert "Input/output error" in str(caught.value)
    with pytest.raises(DiskFull) as full, store_faults("look"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "short")
    assert "[Errno 122] Disk quota exceeded: 'short'" in str(full.value)
