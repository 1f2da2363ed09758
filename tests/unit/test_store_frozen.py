"""Frozen layers: blobs until their next use, and never lost on the way there or back."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import fill_disk_at
from tests.unit.store_tools import FILES, add_image, add_layer, end_of, frozen_keys, key_of, on_disk, python, two_images

from minisandbox.errors import DiskFull, StoreError
from minisandbox.store import Made, Store
from minisandbox.store.blobs.freezing import freeze, remove_copies
from minisandbox.store.blobs.layer_blobs import COLD, ensure_blob
from minisandbox.store.blobs.packing import GZIP
from minisandbox.store.collect import collect, remove_images
from minisandbox.store.entries import Entry, read_entries
from minisandbox.store.overview import image_rows, parts
from minisandbox.store.records import BLOBS
from minisandbox.store.sizes import StoreSizes
from minisandbox.store.verify import verify


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def tree_of(store: Store, key: str) -> dict[str, tuple[object, ...]]:
    """Everything that a layer's tree holds, thawed if it must be."""
    with store.hold(key):
        return dict(_looked_at(store.layer_tree(key)))


def _looked_at(tree: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    for path in (tree, *sorted(tree.rglob("*"))):
        info = path.lstat()
        text = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        link = os.readlink(path) if path.is_symlink() else ""
        attributes = [(name, os.getxattr(path, name)) for name in os.listxattr(path)] if not link else []
        yield (
            str(path.relative_to(tree)),
            (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_rdev, text, link, attributes),
        )


def texts(store: Store, key: str) -> dict[str, object]:
    """What the files of a layer hold."""
    return {path: facts[5] for path, facts in tree_of(store, key).items()}


def entries(store: Store, key: str) -> list[Entry]:
    return list(read_entries(store.layer_directory(key)))


def thaw(store: Store, *keys: str) -> None:
    with store.hold(*keys):
        pass


def blobs(store: Store) -> list[Path]:
    return sorted((store.root / "blobs").iterdir())


def clean(store: Store) -> bool:
    """Whether nothing is half made, and everything is what was published."""
    again = Store.open(store.root)
    report = verify(again, full=True)
    return not report.damaged and not report.images and os.listdir(store.root / "staging") == [".gate"]


def test_what_is_frozen_comes_back_as_it_was(store: Store) -> None:
    base, one, two = two_images(store)
    before = {key: tree_of(store, key) for key in (base, one, two)}
    taken = on_disk(store.root)
    done = freeze(store, ["one", "two"])
    assert done.images == ["one", "two"]
    assert set(done.layers) == {base, one, two}
    assert frozen_keys(store) == sorted([base, one, two])
    assert not (store.layer_directory(one) / "tree").exists()
    assert on_disk(store.root) < taken
    assert clean(store)
    assert {key: tree_of(store, key) for key in (base, one, two)} == before
    assert frozen_keys(store) == []
    assert clean(store)
    names = {entry.object_name for key in (one, two) for entry in entries(store, key) if entry.object_name}
    assert all(store.pool.has(name) for name in names)
    a = store.layer_tree(one) / "lib/a.py"
    assert a.samefile(store.layer_tree(two) / "lib/a.py"), "equal files of two layers are one inode again"
    collect(store, grace=0)
    assert blobs(store) == []
    assert on_disk(store.root) <= taken + 3 * 4096


def test_odd_things_come_back(store: Store) -> None:
    def make(work: Path) -> Made:
        tree = work / "tree"
        (tree / "closed").mkdir(parents=True)
        (tree / "closed/secret").write_text("secret")
        (tree / "closed/secret").chmod(0o400)
        os.link(tree / "closed/secret", tree / "closed/again")
        (tree / "twice").write_text("secret")
        (tree / "twice").chmod(0o400)
        os.utime(tree / "twice", ns=(1, (tree / "closed/secret").stat().st_mtime_ns))
        (tree / "unreadable").write_text("nobody")
        (tree / "unreadable").chmod(0)
        (tree / "empty").touch()
        (tree / os.fsdecode(b"name \xff")).write_text("latin")
        (tree / "broken").symlink_to("../../../etc/shadow")
        os.mkfifo(tree / "pipe", 0o640)
        os.mknod(tree / "deleted", stat.S_IFCHR, 0)
        (tree / "setuid").write_text("#!/bin/sh\n")
        (tree / "setuid").chmod(0o4755)
        (tree / "opaque").mkdir()
        try:
            os.setxattr(tree / "opaque", "user.overlay.opaque", b"y")
            os.setxattr(tree / "setuid", "user.note", b"kept")
        except OSError:
            pytest.skip("this file system has no extended attributes")
        (tree / "closed").chmod(0o500)
        return Made(tree)

    store.ensure_layer(key_of("odd"), parent=None, step={"kind": "odd"}, make=make)
    key = key_of("odd")
    add_image(store, "odd", key)
    wanted = entries(store, key)
    assert verify(store, full=True).damaged == ()
    freeze(store, ["odd"])
    assert frozen_keys(store) == [key]
    assert verify(store, full=True).damaged == ()
    thaw(store, key)
    report = verify(store, full=True)
    assert (report.damaged, entries(store, key)) == ((), wanted)
    tree = store.layer_tree(key)
    assert (tree / "closed/again").samefile(tree / "closed/secret")
    assert not (tree / "twice").samefile(tree / "closed/secret"), "programs compare inodes"


def test_only_what_no_other_image_has_is_frozen(store: Store) -> None:
    base, one, two = two_images(store)
    tree = store.layer_tree(two)
    inode = (tree / "lib/a.py").stat().st_ino
    done = freeze(store, ["one"])
    assert done.layers == [one]
    assert not store.is_frozen(base)
    assert (tree / "lib/a.py").stat().st_ino == inode
    remove_images(store, ["two"])
    assert clean(store)
    assert freeze(store, ["one"]).layers == [base], "nobody else has it now"
    assert clean(store)
    assert tree_of(store, one)["lib/a.py"][5] == FILES["lib/a.py"].encode()


def test_a_blob_that_is_there_is_not_made_again(store: Store) -> None:
    _, one, _ = two_images(store)
    freeze(store, ["one", "two"])
    first = {path: path.stat().st_mtime_ns for path in blobs(store)}
    thaw(store, one)
    freeze(store, ["one"])
    assert {path: path.stat().st_mtime_ns for path in blobs(store)} == first
    assert clean(store)


def test_copies_of_blobs_go_and_what_frozen_layers_need_stays(store: Store) -> None:
    """Two layers with the same files have one blob, which one of them needs."""

    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        (work / "tree/a").write_text("same")
        for path in (work / "tree/a", work / "tree"):
            os.utime(path, (5, 5))
        return Made(work / "tree")

    one, two = key_of("one"), key_of("two")
    for key in (one, two):
        store.ensure_layer(key, parent=None, step={"kind": "test"}, make=make)
    add_image(store, "one", one)
    add_image(store, "two", two)
    with store.hold(two):
        copies = [ensure_blob(store.root, two, compression).digest for compression in (GZIP, COLD)]
    freeze(store, ["one"])
    remove_copies(store, "zstd", copies)
    assert [f"sha256:{path.name}" for path in blobs(store)] == [copies[1]]
    with store.hold(two):
        ensure_blob(store.root, two, GZIP)
    collect(store)
    assert len(blobs(store)) == 2, "a copy that was made a moment ago"
    collect(store, grace=0)
    assert len(blobs(store)) == 1
    assert tree_of(store, one)["a"][5] == b"same"


def test_a_layer_in_use_stays(store: Store) -> None:
    base, one, _ = two_images(store)
    with store.hold(one):
        done = freeze(store, ["one", "two"])
        assert done.spared == [one]
        assert not store.is_frozen(one)
    assert one in freeze(store, ["one"]).layers
    assert store.is_frozen(base)


def test_a_dry_run_freezes_nothing(store: Store) -> None:
    two_images(store)
    taken = on_disk(store.root)
    done = freeze(store, ["one", "two"], dry_run=True)
    assert len(done.layers) == 3
    assert done.freed > 0
    assert (frozen_keys(store), on_disk(store.root), blobs(store)) == ([], taken, [])


def test_a_build_finds_a_frozen_layer_and_leaves_it_frozen(store: Store) -> None:
    _, one, _ = two_images(store)
    freeze(store, ["one", "two"])
    two_images(store)
    assert store.is_frozen(one)
    assert os.listdir(store.root / "quarantine") == []


def test_sizes_tell_what_is_frozen(store: Store) -> None:
    two_images(store)
    before = StoreSizes(store, store.images()).total
    done = freeze(store, ["one", "two"])
    sizes = StoreSizes(store, store.images())
    assert sizes.total < before
    assert sizes.blobs == done.blobs == sum(path.stat().st_size for path in blobs(store))
    assert [row.frozen for row in image_rows(store)] == [True, True]
    found = {part.name: part for part in parts(store)}
    assert found["blobs"].bytes >= done.blobs > 0
    assert "objects" not in found


def test_a_collection_freezes_before_it_removes(store: Store) -> None:
    two_images(store)
    size = StoreSizes(store, store.images()).total
    assert collect(store, unused_for=0, grace=0, freeze=True, dry_run=True).frozen == ["one", "two"]
    done = collect(store, budget=size - 1, grace=0, freeze=True)
    assert (done.images, len(done.frozen)) == ([], 1)
    assert done.size < size
    store.pin("one")
    done = collect(store, unused_for=0, grace=0, freeze=True)
    assert "one" not in done.frozen
    done = collect(store, budget=0, grace=0, freeze=True)
    assert done.images == ["two"]
    assert clean(store)


def test_a_blob_goes_with_its_layer(store: Store) -> None:
    two_images(store)
    freeze(store, ["one", "two"])
    assert len(blobs(store)) == 3
    remove_images(store, ["one"])
    assert len(blobs(store)) == 2
    assert clean(store)
    remove_images(store, ["two"])
    assert blobs(store) == []
    assert StoreSizes(store, []).total == 0


def test_a_read_only_store_says_what_to_do(store: Store) -> None:
    _, one, _ = two_images(store)
    freeze(store, ["one", "two"])
    read_only = Store.open(store.root, read_only=True)
    assert verify(read_only, full=True).damaged == ()
    with pytest.raises(StoreError, match="read-only"):
        freeze(read_only, ["one"])
    if os.geteuid() != 0:
        return
    os.chown(store.root / "version", 12345, 12345)  # somebody else's
    with pytest.raises(StoreError, match="is frozen") as caught, read_only.hold(one):
        pass
    assert "image export --private" in str(caught.value.hint)


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0, 9, 20, -1, -40])
def test_a_flipped_byte_of_a_blob_is_found_by_reading(store: Store, where: int) -> None:
    keys = two_images(store)
    before = {key: texts(store, key) for key in keys}
    freeze(store, ["one", "two"])
    for path in blobs(store):
        flip(path, where)
    assert verify(store).damaged == (), "sizes are right"
    report = verify(store, full=True)
    assert {damage.key for damage in report.damaged} == {*keys}
    assert report.images == ("one", "two")
    two_images(store)
    assert {key: texts(store, key) for key in keys} == before
    assert clean(store)
    collect(store, grace=0)
    assert os.listdir(store.root / "quarantine") == []


@pytest.mark.parametrize("where", [20, -40])
def test_a_flipped_byte_of_a_blob_is_found_by_its_next_use(store: Store, where: int) -> None:
    _, one, _ = two_images(store)
    freeze(store, ["one", "two"])
    for path in blobs(store):
        flip(path, where)
    with pytest.raises(StoreError, match="its blob cannot be unpacked") as caught, store.hold(one):
        pass
    assert "build or pull its images again" in str(caught.value.hint)
    assert not store.has_layer(one)
    two_images(store)
    assert tree_of(store, one)["lib/a.py"][5] == FILES["lib/a.py"].encode()


def test_another_layers_blob_is_not_taken_for_a_layers_own(store: Store) -> None:
    """The record names it, its digest is right: the list of files decides."""
    _, one, two = two_images(store)
    freeze(store, ["one", "two"])
    record = (store.layer_directory(two) / BLOBS).read_bytes()
    (store.layer_directory(one) / BLOBS).write_bytes(record)
    with pytest.raises(StoreError, match="are not those of its list"), store.hold(one):
        pass
    assert not store.has_layer(one)
    assert clean(store) or verify(store).images == ("one",)


def test_a_removed_blob_is_found_without_reading(store: Store) -> None:
    two_images(store)
    freeze(store, ["one", "two"])
    blobs(store)[0].unlink()
    (damage,) = verify(store).damaged
    assert "its blob is missing" in damage.problems[0]


def test_a_damaged_layer_is_not_frozen(store: Store) -> None:
    _, one, _ = two_images(store)
    path = store.layer_tree(one) / "lib/one.py"
    info = path.stat()
    flip(path, 5)
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    assert freeze(store, ["one", "two"]).spared == [one]
    assert [damage.key for damage in verify(store, full=True).damaged] == [one]


def test_a_layer_that_lost_a_file_is_not_frozen(store: Store) -> None:
    _, one, _ = two_images(store)
    (store.layer_tree(one) / "lib/one.py").unlink()
    assert freeze(store, ["one"]).spared == [one]
    assert not store.is_frozen(one)


# --- a process that dies, a disk that is full ------------------------------------------------------------------------

FREEZE = """
import sys
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze
print(freeze(Store.open(sys.argv[1]), ["one", "two"]))
"""
THAW = """
import sys
from minisandbox.store import Store
store = Store.open(sys.argv[1])
with store.hold(*store.layer_keys()):
    pass
"""
FREEZING = ("blob-written", "blob-there", "tree-taken")
THAWING = ("thaw-unpacked", "scanned", "object-given", "recorded", "thaw-listed", "thaw-renamed")


@pytest.mark.parametrize("point", FREEZING)
def test_a_killed_freezing_loses_nothing(store: Store, point: str) -> None:
    keys = two_images(store)
    before = {key: tree_of(store, key) for key in keys}
    died = end_of(python(FREEZE, store.root, killed_at=point))
    assert died == -9
    assert clean(store)
    collect(store, grace=0)
    assert clean(store), "a collection took what is needed"
    freeze(store, ["one", "two"])
    assert len(frozen_keys(store)) == 3
    assert clean(store)
    collect(store, grace=0)
    assert [part.name for part in parts(store) if part.name == "objects"] == [], "all of them are in blobs"
    assert {key: tree_of(store, key) for key in keys} == before


@pytest.mark.parametrize("point", THAWING)
def test_a_killed_thawing_loses_nothing(store: Store, point: str) -> None:
    keys = two_images(store)
    before = {key: tree_of(store, key) for key in keys}
    freeze(store, ["one", "two"])
    died = end_of(python(THAW, store.root, killed_at=point))
    assert died == -9
    assert clean(store)
    collect(store, grace=0)
    assert {key: tree_of(store, key) for key in keys} == before
    assert clean(store)
    assert frozen_keys(store) == []


@pytest.mark.parametrize("point", ["thaw-unpacked", "taken", "recorded"])
def test_a_full_disk_leaves_a_layer_frozen(store: Store, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one, _ = two_images(store)
    before = tree_of(store, one)
    freeze(store, ["one", "two"])
    fill_disk_at(point, monkeypatch.setattr)
    with pytest.raises(DiskFull) as caught, store.hold(one):
        pass
    assert caught.value.errno == errno.ENOSPC
    assert store.is_frozen(one)
    assert os.listdir(store.root / "staging") == [".gate"]
    monkeypatch.undo()
    assert tree_of(store, one) == before
    assert clean(store)


def test_a_full_disk_while_freezing_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = two_images(store)
    before = {key: tree_of(store, key) for key in keys}
    fill_disk_at("blob-written", monkeypatch.setattr)
    with pytest.raises(DiskFull):
        freeze(store, ["one", "two"])
    assert blobs(store) == []
    monkeypatch.undo()
    assert clean(store)
    assert {key: tree_of(store, key) for key in keys} == before


def test_several_processes_thaw_it_once(store: Store) -> None:
    keys = two_images(store)
    before = {key: tree_of(store, key) for key in keys}
    freeze(store, ["one", "two"])
    running: list[subprocess.Popen[str]] = [python(THAW, store.root) for _ in range(4)]
    assert [end_of(each) for each in running] == [0, 0, 0, 0]
    assert {key: tree_of(store, key) for key in keys} == before
    assert clean(store)
    assert os.listdir(store.root / "locks") == []


def test_freezing_and_thawing_at_once_lose_nothing(store: Store) -> None:
    keys = two_images(store)
    before = {key: tree_of(store, key) for key in keys}
    running = [python(script, store.root) for _ in range(3) for script in (FREEZE, THAW)]
    for _ in range(5):
        assert {key: tree_of(store, key) for key in keys} == before
        collect(store, grace=0)
    assert [end_of(each) for each in running] == [0] * 6
    assert {key: tree_of(store, key) for key in keys} == before
    assert clean(store)


def test_a_layer_beside_a_frozen_one_shares_what_is_plain(store: Store) -> None:
    _, one, _ = two_images(store)
    freeze(store, ["one"])
    other = add_layer(store, "other", {"lib/again.py": FILES["lib/a.py"]})
    shared = store.layer_tree(other) / "lib/again.py"
    with store.hold(one):
        assert (store.layer_tree(one) / "lib/a.py").samefile(shared)
