"""What is in use stays, who collects takes the rest: leases, uses, collection, removal."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.unit.store_tools import add_image, add_layer, key_of, names_below, on_disk, python, two_images

from minisandbox.errors import NotFound, StoreError
from minisandbox.store import FailureRecord, Store, leases
from minisandbox.store.collect import Usage, collect, remove_images
from minisandbox.store.leases import Holder, Lease, in_use, layer_of, stamp, use_of
from minisandbox.store.sizes import StoreSizes

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def used(store: Store, key: str, ago: float) -> None:
    """Say that a layer was last used so many seconds ago."""
    layer = store.layer_directory(key)
    stamp(layer, count=True)
    moment = time.time() - ago
    os.utime(layer / "used", (moment, moment))
    record = (layer / "layer.json").read_text()
    (layer / "layer.json").write_text(record.replace(f'"created": {store.layer(key).created}', f'"created": {moment}'))


def age(store: Store, name: str, ago: float) -> None:
    """Say that an image and its own layer were last used so many seconds ago."""
    path = store.root / "images" / f"{name}.json"
    made = store.image(name).created
    path.write_text(path.read_text().replace(f'"created": {made}', f'"created": {time.time() - ago}'))
    for key in store.image(name).layers:
        used(store, key, ago)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_held_layer_is_not_removed(store: Store) -> None:
    key = add_layer(store, "a")
    with store.hold(key):
        assert in_use(store.layer_directory(key))
        assert not store.remove_unused_layer(key)
        assert store.layer_tree(key).is_dir()
    assert not in_use(store.layer_directory(key))
    assert store.remove_unused_layer(key)
    assert not store.has_layer(key)


def test_what_a_build_asks_for_is_held_from_the_first_moment(store: Store) -> None:
    with store.hold() as hold:
        for _ in range(2):  # made, then found
            key, layer = add_layer(store, "a", hold=hold), store.layer_directory(key_of("a"))
            assert in_use(layer)
            assert collect(store, grace=0).spared == [key]
    assert collect(store, grace=0).layers == [key]


def test_a_layer_is_held_as_often_as_it_was_taken(store: Store) -> None:
    layer = store.layer_directory(add_layer(store, "a"))
    before = len(os.listdir("/proc/self/fd"))
    holder = Holder()
    first, second = Lease(holder), Lease(holder)
    first.add([layer, layer])
    second.add([layer])
    assert len(os.listdir("/proc/self/fd")) == before + 1, "one descriptor for a layer"
    first.release()
    first.release()
    assert in_use(layer)
    del second
    assert not in_use(layer)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lease_is_collected_while_another_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection comes where it likes, while the holder's lock is held too."""
    first, second = (store.layer_directory(add_layer(store, name)) for name in "ab")
    holder = Holder()
    abandoned = Lease(holder)
    abandoned.add([first])
    cycle: list[object] = [abandoned]
    cycle.append(cycle)
    open_shared = leases._open_shared

    def collect_first(layer: Path) -> int:
        gc.collect()
        return open_shared(layer)

    monkeypatch.setattr(leases, "_open_shared", collect_first)
    del abandoned, cycle
    lease = Lease(holder)
    taking = threading.Thread(target=lease.add, args=([second],), daemon=True)
    taking.start()
    taking.join(60)
    assert not taking.is_alive()
    assert (in_use(first), in_use(second)) == (False, True)


def test_what_has_gone_cannot_be_held(store: Store) -> None:
    key = add_layer(store, "a")
    with pytest.raises(NotFound, match="is not in the store"), store.hold(key, "0" * 64):
        raise AssertionError("nothing is held")
    assert not in_use(store.layer_directory(key))


HOLDER = """
    import sys, time
    from minisandbox.store import Store
    with Store.open(sys.argv[1]).hold(sys.argv[2]):
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_lease_ends_with_its_process(store: Store) -> None:
    base, one, _ = two_images(store)
    process = python(HOLDER, store.root, one)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    done = remove_images(store, ["one"])
    assert (done.images, done.layers, done.spared) == (["one"], [], [one])
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    done = collect(store, grace=0)
    assert done.layers == [one]
    assert store.has_layer(base)


def test_the_layer_of_a_path(store: Store) -> None:
    tree = store.layer_tree(add_layer(store, "a"))
    assert layer_of(tree) == layer_of(tree / "lib/a.py") == tree.parent
    assert layer_of(store.root) is None
    assert layer_of(Path("/layers/x/tree")) is None


def test_uses_are_counted(store: Store) -> None:
    layer = store.layer_directory(add_layer(store, "a"))
    assert use_of(layer, 5.0).count == 0
    assert use_of(layer, 5.0).last == 5.0
    for count in (True, True, False):
        stamp(layer, count=count)
    assert use_of(layer, 5.0).count == 2
    assert time.time() - use_of(layer, 5.0).last < HOUR


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_what_the_disk_says(store: Store) -> None:
    two_images(store)
    sizes = StoreSizes(store, store.images())
    lists = sum((store.layer_directory(key) / "files.gz").stat().st_size for key in sizes.layers)
    trees = [path for key in sizes.layers for path in store.layer_tree(key).rglob("*")]
    directories = sum(path.stat().st_blocks * 512 for path in trees if path.is_dir())
    alone = [path.lstat() for path in trees if not path.is_dir() and path.lstat().st_nlink == 1]
    data = on_disk(store.root / "objects") + sum(info.st_blocks * 512 for info in alone)
    roots = sum(store.layer_tree(key).stat().st_blocks * 512 for key in sizes.layers)
    assert sizes.total == data + directories + roots + lists
    one = sizes.image("one")
    assert one.unique == sizes.freed(sizes.only_of(["one"]))
    assert 0 < one.unique < one.shared
    assert sizes.freed(sizes.layers) == sizes.total
    assert sizes.uses[key_of("base")] == 2


# --- collection ------------------------------------------------------------------------------------------------------


def test_nothing_young_or_of_an_image_is_collected(store: Store) -> None:
    two_images(store)
    young = add_layer(store, "unfinished", {"x": "x"})
    done = collect(store)
    assert (done.images, done.layers, done.spared) == ([], [], [young])
    assert collect(store, grace=0).layers == [young]
    assert StoreSizes(store, store.images()).missing == {}


def test_collecting_frees_what_it_says(store: Store) -> None:
    two_images(store)
    sizes = StoreSizes(store, store.images())
    before = sizes.total
    promised = remove_images(store, ["one"], dry_run=True)
    assert store.image_names() == ["one", "two"]
    done = remove_images(store, ["one"])
    assert promised.freed == done.freed == sizes.image("one").unique
    assert done.layers == promised.layers == [key_of("one")]
    assert done.size == before - done.freed == StoreSizes(store, store.images()).total
    assert done.orphans == 1, "the one file that only it had"
    done = remove_images(store, ["two"])
    assert done.size == 0
    assert [name for name in names_below(store.root) if name != "version"] == []


def test_the_least_recently_used_image_goes_first(store: Store) -> None:
    for number, name in enumerate(("a", "b", "c", "pinned", "kept")):
        add_image(store, name, add_layer(store, name, {name: name * 9000}))
        age(store, name, HOUR * (100 - number))
    used(store, key_of("a"), HOUR)
    store.pin("pinned")
    size = StoreSizes(store, store.images()).total
    done = collect(store, budget=size - 1, keep=["kept"], grace=60)
    assert done.images == ["b"]
    assert collect(store, budget=1, keep=["kept"], grace=60, dry_run=True).images == ["c", "a"]
    assert collect(store, budget=1, keep=["kept"], grace=60).images == ["c", "a"]
    assert store.image_names() == ["kept", "pinned"]
    store.unpin("pinned")
    assert collect(store, unused_for=HOUR * 97.5, grace=60).images == []
    assert collect(store, unused_for=HOUR * 96.5, grace=60).images == ["pinned"]


def test_images_in_use_or_just_used_stay(store: Store) -> None:
    two_images(store)
    for name in ("one", "two"):
        age(store, name, 10 * HOUR)
    for layer in store.image("two").layers:
        used(store, layer, 60)
    assert Usage(store).of(store.image("two")).last > Usage(store).of(store.image("one")).last
    with store.hold(*store.image("one").layers):
        assert collect(store, budget=1).images == []
    assert collect(store, budget=1).images == ["one"]
    assert store.image_names() == ["two"]


def test_a_common_layer_on_top_does_not_hide_which_image_is_used(store: Store) -> None:
    """Every container image has the same layer of mount points on top."""
    top = add_layer(store, "top", {"etc/x": "x"})
    for name in ("a", "b"):
        add_image(store, name, add_layer(store, name, {name: name * 9000}), top)
        age(store, name, 10 * HOUR)
    for layer in store.image("a").layers:
        stamp(store.layer_directory(layer), count=True)
    uses = {name: Usage(store).of(store.image(name)) for name in ("a", "b")}
    assert (uses["a"].count, uses["b"].count) == (2, 1)
    assert uses["a"].last - uses["b"].last > HOUR
    with store.hold(*store.image("b").layers):
        assert [Usage(store).is_now(store.image(name)) for name in ("a", "b")] == [False, True]
    assert collect(store, unused_for=HOUR, grace=60).images == ["b"]


def test_what_a_build_found_just_now_is_fresh(store: Store) -> None:
    key = add_layer(store, "a")
    used(store, key, 10 * HOUR)
    add_layer(store, "a")
    assert collect(store).spared == [key]


def test_leftovers_are_removed(store: Store) -> None:
    key = add_layer(store, "a")
    add_image(store, "a", key)
    (store.root / "locks/dead.lock").touch()
    (store.root / f"logs/{'1' * 64}.log").write_text("x" * 100)
    (store.root / f"logs/{key}.log").write_text("kept")
    (store.root / "staging/dead.1").mkdir()
    store.quarantine(add_layer(store, "bad", {"bad": "bad"}))
    with store.lock("alive"):
        said = collect(store, grace=0, dry_run=True).leftovers
        assert len(said) == 3
        done = collect(store, grace=0)
        assert os.listdir(store.root / "locks") == ["alive.lock"]
    assert len(done.leftovers) == 4
    assert done.orphans == 1
    assert os.listdir(store.root / "logs") == [f"{key}.log"]
    for part in ("quarantine", "locks"):
        assert os.listdir(store.root / part) == []
    assert os.listdir(store.root / "staging") == [".gate"]


def test_what_pulls_left_is_removed(store: Store) -> None:
    keys = [letter * 64 for letter in "abcd"]
    downloads = store.root / "downloads"
    for name, hours in ((f"{keys[0]}.part", 2), (f"{keys[0]}.blob", 24 * 8), (f"{keys[1]}.part", 0),
                        (f"{keys[1]}.blob", 24 * 6), (keys[2], 24 * 99), (f"{keys[3]}.part", 2)):  # fmt: skip
        (downloads / name).write_text("x")
        os.utime(downloads / name, (time.time() - hours * 3600,) * 2)
    left = sorted([f"{keys[1]}.blob", f"{keys[1]}.part", f"{keys[3]}.part", keys[2]])
    with store.lock(f"download-{keys[3]}"):
        assert collect(store, dry_run=True).leftovers
        assert len(os.listdir(downloads)) == 6
        collect(store)
        assert sorted(os.listdir(downloads)) == left
    collect(store)
    assert sorted(os.listdir(downloads)) == [name for name in left if name[0] != "d"]


def test_a_damaged_image_record_stops_the_collection(store: Store) -> None:
    two_images(store)
    (store.root / "images/one.json").write_text("{")
    with pytest.raises(StoreError, match="damaged") as caught:
        collect(store, grace=0)
    assert "verify" in str(caught.value.hint)
    assert len(store.layer_keys()) == 3


def test_failed_builds_keep_their_layers_until_they_are_removed(store: Store) -> None:
    base, *_ = two_images(store)
    made = add_layer(store, "made", {"made": "made"}, parent=base)
    failed = FailureRecord("three", "install", "3" * 64, (base, made), (), "/testbed", time.time(), "exit status 1")
    store.put_failure(failed)
    (store.root / f"logs/{'3' * 64}.log").write_text("log")
    assert store.failures() == [failed] == [store.failure("three")]
    assert collect(store, grace=0).layers == []
    assert (store.root / f"logs/{'3' * 64}.log").exists()
    assert remove_images(store, [], failures=["three"], dry_run=True).layers == [made]
    done = remove_images(store, [], failures=["three"])
    assert done.layers == [made]
    assert store.has_layer(base)
    assert store.failures() == []
    assert os.listdir(store.root / "logs") == []
    with pytest.raises(NotFound, match="no failed build"):
        store.failure("three")


def test_a_built_image_has_not_failed(store: Store) -> None:
    key = add_layer(store, "a")
    store.put_failure(FailureRecord("a", "install", "3" * 64, (key,), (), "/testbed", 1.0))
    add_image(store, "a", key)
    assert store.failures() == []


def test_removing_says_what_it_does_not_know(store: Store) -> None:
    two_images(store)
    with pytest.raises(NotFound, match="'three'"):
        remove_images(store, ["one", "three"])
    assert store.image_names() == ["one", "two"]
    with pytest.raises(NotFound, match="'three'"):
        store.pin("three")


def test_a_moved_store_is_the_same_store(store: Store, tmp_path: Path) -> None:
    base, one, _ = two_images(store)
    shutil.move(store.root, tmp_path / "elsewhere")
    moved = Store.open(tmp_path / "elsewhere")
    assert moved.layer_tree(one).is_dir()
    assert StoreSizes(moved, moved.images()).missing == {}
    assert remove_images(moved, ["one", "two"]).size == 0
    assert not moved.has_layer(base)
