"""Equal files of different layers are one inode; equal files of one stack never are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minisandbox.errors import StoreError
from minisandbox.store import Made, Store, measure_tree, step_key
from minisandbox.store.entries import Entry, read_entries

MOMENT = 946684800


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def key_of(name: str) -> str:
    return step_key(None, {"name": name})


def publish(
    store: Store, name: str, fill: Callable[[Path], object], *, parent: str | None = None, beside: tuple[str, ...] = ()
) -> Path:
    """A layer whose tree ``fill`` writes; files get one mtime, as build steps give them."""

    def make(work: Path) -> Made:
        tree = work / "tree"
        tree.mkdir()
        fill(tree)
        for path in tree.rglob("*"):
            if not path.is_dir() or path.is_symlink():
                os.utime(path, (MOMENT, MOMENT), follow_symlinks=False)
        return Made(tree)

    store.ensure_layer(key_of(name), parent=parent, step={"name": name}, make=make, stacked_with=beside)
    return store.layer_tree(key_of(name))


def one_file(text: str = "content", name: str = "f", mode: int = 0o644) -> Callable[[Path], object]:
    def fill(tree: Path) -> None:
        (tree / name).write_text(text)
        (tree / name).chmod(mode)

    return fill


def listed(store: Store, name: str) -> dict[str, Entry]:
    return {entry.path: entry for entry in read_entries(store.layer_directory(key_of(name)))}


def inode(path: Path) -> int:
    return path.lstat().st_ino


def test_equal_files_of_two_layers_are_one_inode(store: Store) -> None:
    first = publish(store, "a", one_file(name="x"))
    second = publish(store, "b", one_file(name="y"))
    assert inode(first / "x") == inode(second / "y")
    assert (second / "y").read_text() == "content"
    assert (first / "x").stat().st_nlink == 3  # two layers and the pool
    entry = listed(store, "b")["y"]
    assert store.pool.path(entry.object_name).stat().st_ino == inode(first / "x")


@pytest.mark.parametrize("difference", ["content", "mode", "mtime", "attribute"])
def test_what_an_inode_holds_must_be_equal_too(store: Store, difference: str) -> None:
    def fill(tree: Path) -> None:
        one_file("CONTENT" if difference == "content" else "content", mode=0o600 if difference == "mode" else 0o644)(
            tree
        )
        if difference == "attribute":
            try:
                os.setxattr(tree / "f", "user.note", b"1")
            except OSError:
                pytest.skip("this file system has no extended attributes")

    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        fill(work / "tree")
        moment = MOMENT + (difference == "mtime")
        os.utime(work / "tree/f", (moment, moment))
        return Made(work / "tree")

    first = publish(store, "a", one_file())
    store.ensure_layer(key_of("b"), parent=None, step={}, make=make)
    assert inode(first / "f") != inode(store.layer_tree(key_of("b")) / "f")


def test_within_a_layer_equal_files_stay_two(store: Store) -> None:
    def fill(tree: Path) -> None:
        for name in ("a", "b", "c"):
            one_file(name=name)(tree)

    first, second = publish(store, "1", fill), publish(store, "2", fill)
    assert len({inode(first / name) for name in ("a", "b", "c")}) == 3
    assert [inode(first / name) for name in "abc"] == [inode(second / name) for name in "abc"]
    assert sorted(listed(store, "1")[name].copy for name in "abc") == [0, 1, 2]


def test_within_a_stack_equal_files_stay_two(store: Store) -> None:
    base = publish(store, "base", one_file())
    middle = publish(store, "middle", one_file("other", "o"), parent=key_of("base"))
    top = publish(store, "top", one_file(name="g"), parent=key_of("middle"))
    beside = publish(store, "beside", one_file(name="h"), beside=(key_of("top"), key_of("base")))
    elsewhere = publish(store, "elsewhere", one_file(name="i"))
    assert len({inode(base / "f"), inode(top / "g"), inode(beside / "h")}) == 3
    assert inode(elsewhere / "i") == inode(base / "f")
    assert (middle / "o").read_text() == "other"


def test_hard_links_of_a_layer_stay_links(store: Store) -> None:
    def fill(tree: Path) -> None:
        (tree / "d").mkdir()
        one_file(name="d/f")(tree)
        os.link(tree / "d/f", tree / "g")

    first, second = publish(store, "1", fill), publish(store, "2", fill)
    for tree in (first, second):
        assert {(inode(path), path.stat().st_nlink) for path in (tree / "d/f", tree / "g")} == {(inode(tree / "g"), 2)}
    assert {entry.path: entry.same for entry in listed(store, "2").values() if entry.same} == {"d/f": "g"}


def test_empty_files_are_not_shared(store: Store) -> None:
    first, second = publish(store, "1", one_file("")), publish(store, "2", one_file(""))
    assert inode(first / "f") != inode(second / "f")


def test_an_inode_that_takes_no_further_name_gets_a_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, most = os.link, 3

    def link(source: str, target: str, **options: bool) -> None:
        if os.lstat(source).st_nlink >= most:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    trees = [publish(store, str(number), one_file()) for number in range(5)]
    assert [inode(tree / "f") for tree in trees].count(inode(trees[0] / "f")) == 2
    assert len({inode(tree / "f") for tree in trees}) == 3
    assert all((tree / "f").read_text() == "content" for tree in trees)


def test_what_a_build_left_unreadable_is_read_and_stays_so(store: Store) -> None:
    def fill(tree: Path) -> None:
        (tree / "closed").mkdir()
        one_file(name="closed/f", mode=0)(tree)
        one_file("other", name="closed/g", mode=0o400)(tree)

    def close(tree: Path) -> None:
        fill(tree)
        (tree / "closed").chmod(0o500)

    first, second = publish(store, "1", fill), publish(store, "2", close)
    assert (second / "closed").stat().st_mode & 0o777 == 0o500
    (second / "closed").chmod(0o700)
    assert inode(first / "closed/g") == inode(second / "closed/g")
    assert (first / "closed/f").stat().st_mode & 0o777 == 0
    assert listed(store, "1")["closed/f"].digest


def test_a_list_has_everything(store: Store) -> None:
    def fill(tree: Path) -> None:
        (tree / "d").mkdir(mode=0o755)
        one_file(name="d/f", mode=0o754)(tree)
        (tree / "link").symlink_to("d/f")
        os.mkfifo(tree / "pipe")
        (tree / os.fsdecode(b"odd \xff name")).write_text("x")

    tree = publish(store, "1", fill)
    found = listed(store, "1")
    assert {path: entry.kind for path, entry in found.items()} == {
        "": "d", "d": "d", "d/f": "f", "link": "l", "pipe": "p", "odd \udcff name": "f",
    }  # fmt: skip
    assert found["link"].target == "d/f"
    entry, info = found["d/f"], (tree / "d/f").stat()
    assert (entry.mode, entry.uid, entry.gid, entry.mtime) == (0o754, info.st_uid, info.st_gid, MOMENT * 10**9)
    record = store.layer(key_of("1"))
    assert (record.files, record.bytes) == (4, measure_tree(tree).bytes)


def test_devices_are_refused(store: Store) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a device")
    with pytest.raises(StoreError, match="is a device"):
        publish(store, "1", lambda tree: os.mknod(tree / "null", 0o20666, os.makedev(1, 3)))
    assert store.layer_keys() == []


def test_directories_keep_their_mtimes(store: Store) -> None:
    def make(work: Path) -> Made:
        (work / "tree/d").mkdir(parents=True)
        one_file(name="d/f")(work / "tree")
        for path in ("tree/d/f", "tree/d", "tree"):
            os.utime(work / path, (MOMENT, MOMENT))
        return Made(work / "tree")

    for name in ("a", "b"):
        store.ensure_layer(key_of(name), parent=None, step={}, make=make)
    tree = store.layer_tree(key_of("b"))
    assert (tree / "d/f").stat().st_nlink == 3
    assert {(tree / path).stat().st_mtime for path in ("", "d", "d/f")} == {MOMENT}


def test_a_damaged_object_is_not_taken_up(store: Store) -> None:
    first = publish(store, "a", one_file())
    (first / "f").write_text("cont")
    second = publish(store, "b", one_file())
    assert (second / "f").read_text() == "content"
    assert inode(publish(store, "c", one_file()) / "f") == inode(second / "f")
