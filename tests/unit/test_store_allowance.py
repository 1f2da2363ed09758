"""What reading a tree may cost: what a build left behind must not hold up the host."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest

from minisandbox.errors import DiskFull, StoreError, UnfitTree
from minisandbox.store import Made, Store, step_key
from minisandbox.store.allowance import Allowance
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.scanning import Lifted, hash_file, scan

KEY = step_key(None, {"kind": "test"})
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


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


def test_a_file_of_holes_is_refused_before_it_is_read(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        _sparse(work / "tree/endless", 1 << 42)
        return Made(work / "tree")

    begun = time.monotonic()
    with pytest.raises(UnfitTree, match="8 GiB of holes") as caught:
        store.ensure_layer(KEY, parent=None, step={}, make=make)
    assert time.monotonic() - begun < 60
    assert "endless (4096.0 GiB)" in str(caught.value)
    assert str(store.root) not in str(caught.value)
    assert not store.has_layer(KEY)
    assert _staged(store) == []


def test_holes_of_many_files_count_together_and_the_largest_are_named(tmp_path: Path) -> None:
    for number in range(1, 9):
        _sparse(tmp_path / f"s{number}", number * MIB)
    assert len(list(scan(tmp_path, Lifted(), Allowance(holes=36 * MIB)))) == 9
    with pytest.raises(UnfitTree) as caught:
        list(scan(tmp_path, Lifted(), Allowance(holes=36 * MIB - 1)))
    assert [name for name in ("s8", "s7", "s6", "s5") if f"{name} (" in str(caught.value)] == ["s8", "s7", "s6"]


def test_further_names_of_a_file_cost_nothing(tmp_path: Path) -> None:
    _sparse(tmp_path / "a", MIB)
    os.link(tmp_path / "a", tmp_path / "b")
    assert len(list(scan(tmp_path, Lifted(), Allowance(holes=MIB)))) == 3


def test_bytes_are_no_holes_and_hashes_are_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "mixed"
    with path.open("wb") as file:
        file.write(b"head" * 1024)
        file.seek(MIB)
        file.write(b"tail" * 1024)
        file.truncate(2 * MIB)
    content = path.read_bytes()
    allowance = Allowance(seconds=600.0, holes=2 * MIB - 8192)
    assert hash_file(str(path), 2 * MIB, "mixed", allowance) == hashlib.sha256(content).hexdigest()
    (tmp_path / "dense").write_bytes(b"x" * MIB)
    assert (
        hash_file(str(tmp_path / "dense"), MIB, "dense", Allowance(holes=0)) == hashlib.sha256(b"x" * MIB).hexdigest()
    )


def test_reading_a_tree_ends_with_its_time(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        (work / "tree/dense").write_bytes(b"x" * MIB)
        return Made(work / "tree", patience=0.0)

    with pytest.raises(UnfitTree, match="takes too long to read"):
        store.ensure_layer(KEY, parent=None, step={}, make=make)
    assert not store.has_layer(KEY)


@pytest.mark.slow
def test_a_path_that_is_too_long_is_not_told_whole(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        _deep(work / "tree", 30_000)
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
