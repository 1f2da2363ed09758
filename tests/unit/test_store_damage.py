"""Damage is found, put aside and made good by the next use; a process may die, and a disk be full, anywhere."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults import fill_disk_at
from tests.unit.store_tools import (
    FILES,
    add_image,
    add_layer,
    end_of,
    key_of,
    names_below,
    own_modules,
    python,
    two_images,
)

from minisandbox.errors import DiskFull, NotFound, StoreError
from minisandbox.store import Store, entries
from minisandbox.store.collect import collect
from minisandbox.store.entries import NAME, read_entries
from minisandbox.store.verify import VerifyEvent, verify


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def flip(path: Path) -> None:
    """Change a byte, and nothing else that one could see without reading it."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    mode = stat.S_IMODE(before.st_mode)
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(mode)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def swap_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("lib/b.py")


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


QUICK: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("truncated", "lib/a.py", lambda path: os.truncate(path, 10), "size is 10, was 3000"),
    ("longer", "lib/a.py", grow, "size is 3001"),
    ("deleted", "lib/a.py", Path.unlink, "is missing"),
    ("mode", "lib/a.py", lambda path: path.chmod(0o777), "mode is 777, was 644"),
    ("mtime", "lib/empty.py", lambda path: os.utime(path, (1, 1)), "mtime is 1000000000, was"),
    ("extra", "lib/new.py", Path.touch, "is not in the list"),
    ("link", "link", swap_link, "target is"),
    ("type", "lib/b.py", become_directory, "is of another type"),
    ("directory", "lib", lambda path: path.chmod(0o700), "mode is 700, was"),
    ("tree", "", shutil.rmtree, "has gone"),
]


@pytest.mark.parametrize(("name", "path", "damage", "said"), QUICK, ids=[row[0] for row in QUICK])
def test_quick_verification_finds(
    store: Store, name: str, path: str, damage: Callable[[Path], object], said: str
) -> None:
    base, one, two = two_images(store)
    # its own file system objects: damage to a shared inode would be damage to both
    alone = add_layer(store, "alone", {key: f"{text}#" if text else "" for key, text in FILES.items()}, parent=base)
    damage(store.layer_tree(alone) / path.replace("3000", "3001") if path else store.layer_tree(alone))
    report = verify(store)
    assert [found.key for found in report.damaged] == [alone]
    wanted = said.replace("3000", "3001") if name == "truncated" else said.replace("3001", "3002")
    assert wanted in " ".join(report.damaged[0].problems)
    assert not store.has_layer(alone)
    assert (store.root / report.damaged[0].quarantined).is_dir()
    assert store.has_layer(one)
    assert store.has_layer(two)
    assert add_layer(store, "alone", parent=base) == alone
    assert verify(store, full=True).damaged == ()


def test_a_wrong_owner_is_found(store: Store) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    key = add_layer(store, "a")
    os.chown(store.layer_tree(key) / "lib/a.py", 1000, 1000)
    problems = verify(store).damaged[0].problems
    assert problems == ("lib/a.py: uid is 1000, was 0", "lib/a.py: gid is 1000, was 0")


def test_a_flipped_byte_is_found_by_reading(store: Store) -> None:
    _, one, two = two_images(store)
    flip(store.layer_tree(one) / "lib/a.py")  # the same inode in both
    assert verify(store).damaged == ()
    report = verify(store, full=True)
    assert {found.key for found in report.damaged} == {one, two}
    assert all(found.problems == ("lib/a.py: has other content",) for found in report.damaged)
    assert report.images == ("one", "two")
    with pytest.raises(NotFound, match="not in the store"):
        store.layer_tree(one)
    two_images(store)
    assert verify(store, full=True).damaged == ()
    text = (store.layer_tree(one) / "lib/a.py").read_text()
    assert text == FILES["lib/a.py"], "a damaged object was taken up again"


def test_a_damaged_object_that_no_layer_has_is_not_taken_up(store: Store) -> None:
    key = add_layer(store, "a", {"f": "content"})
    entry = next(entry for entry in read_entries(store.layer_directory(key)) if entry.path == "f")
    store.remove_unused_layer(key)
    flip(store.pool.path(entry.object_name))
    verify(store, full=True)
    add_layer(store, "a", {"f": "content"})
    assert (store.layer_tree(key) / "f").read_text() == "content"


def test_a_deleted_object_is_put_back(store: Store) -> None:
    key = add_layer(store, "a", {"f": "content"})
    entry = next(entry for entry in read_entries(store.layer_directory(key)) if entry.path == "f")
    store.pool.path(entry.object_name).unlink()
    assert verify(store, full=True).damaged == ()
    assert store.pool.path(entry.object_name).samefile(store.layer_tree(key) / "f")


@pytest.mark.parametrize("what", ["layer.json", NAME])
@pytest.mark.parametrize("how", ["truncated", "garbage"])
def test_a_damaged_record_is_found(store: Store, what: str, how: str) -> None:
    _, one, _ = two_images(store)
    path = store.layer_directory(one) / what
    path.write_bytes(path.read_bytes()[:40] if how == "truncated" else b"garbage")
    report = verify(store)
    assert [found.key for found in report.damaged] == [one]
    assert "damaged" in report.damaged[0].problems[0]


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize(("length", "reason"), [(100, "Expecting value"), (101, "more than a list can have")])
def test_a_line_of_a_list_has_a_maximum_length(
    store: Store, monkeypatch: pytest.MonkeyPatch, end: bytes, length: int, reason: str
) -> None:
    monkeypatch.setattr(entries, "_LONGEST", 100)
    monkeypatch.setattr(entries, "_BUFFER", 64)
    layer = store.layer_directory(add_layer(store, "a"))
    (layer / NAME).write_bytes(gzip.compress(b'{"format": 1}\n' + b"x" * (length - len(end)) + end))
    with pytest.raises(StoreError) as caught:
        list(read_entries(layer))
    assert reason in str(caught.value)


def test_a_layer_with_a_damaged_record_is_made_again_by_its_next_use(store: Store) -> None:
    key = add_layer(store, "a")
    (store.layer_directory(key) / "layer.json").write_text("{")
    add_layer(store, "a")
    assert store.layer(key).step["name"] == "a"
    assert len(os.listdir(store.root / "quarantine")) == 1


def test_a_layer_that_lost_its_record_is_made_again(store: Store) -> None:
    key = add_layer(store, "a")
    (store.layer_directory(key) / "layer.json").unlink()
    add_layer(store, "a")
    assert (store.layer_tree(key) / "lib/a.py").exists()
    (store.layer_directory(key) / "layer.json").unlink()
    assert verify(store).damaged[0].problems == ("its record is missing",)
    assert os.listdir(store.root / "layers") == []


def test_a_damaged_image_record_is_put_aside(store: Store) -> None:
    two_images(store)
    (store.root / "images/one.json").write_text("{")
    assert verify(store).images == ("one",)
    assert store.image_names() == ["two"]
    assert [name.startswith("one.json.") for name in os.listdir(store.root / "quarantine")] == [True]


def test_an_image_with_a_missing_layer_is_named(store: Store) -> None:
    base, *_ = two_images(store)
    store.remove_unused_layer(base)
    assert verify(store).images == ("one", "two")


def test_a_layer_without_its_list_is_damaged(store: Store) -> None:
    key = add_layer(store, "a")
    (store.layer_directory(key) / NAME).unlink()
    (damage,) = verify(store).damaged
    assert "the list of its files is missing" in damage.problems


def test_one_image_is_verified_alone_and_progress_is_told(store: Store) -> None:
    base, one, two = two_images(store)
    (store.layer_tree(two) / "extra").touch()
    told: list[VerifyEvent] = []
    assert verify(store, keys=[base, one], progress=told.append).damaged == ()
    assert [(event.done, event.total, event.key) for event in told] == [(1, 2, base), (2, 2, one)]
    with pytest.raises(NotFound):
        verify(store, keys=["0" * 64])


def test_an_interrupted_verification_keeps_what_it_found(store: Store) -> None:
    two_images(store)
    for key in store.layer_keys():
        (store.layer_tree(key) / "extra").touch()

    def interrupt(event: VerifyEvent) -> None:
        if event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(store, progress=interrupt)
    assert len(os.listdir(store.root / "quarantine")) == 2
    assert len(verify(store).damaged) == 1


def test_a_damaged_layer_in_use_goes_into_quarantine_and_stays_there(store: Store) -> None:
    _, one, _ = two_images(store)
    with store.hold(one):
        (store.layer_tree(one) / "extra").touch()
        report = verify(store)
        assert not store.has_layer(one)
        collect(store, grace=0)
        place = store.root / report.damaged[0].quarantined
        assert (place / "tree/extra").exists(), "somebody has it mounted"
    collect(store, grace=0)
    assert not place.exists()


# --- a process that dies ---------------------------------------------------------------------------------------------

POINTS = ("moved", "scanned", "object-taken", "taken", "recorded", "object-given", "before-rename", "renamed")
PUBLISH = """
    import sys
    from minisandbox.store import Store
    from tests.unit.store_tools import add_layer
    add_layer(Store.open(sys.argv[1]), "two")
"""


@pytest.mark.parametrize("point", POINTS)
def test_a_publisher_may_die_anywhere(store: Store, point: str) -> None:
    add_layer(store, "one", {"other": "other", "lib/a.py": FILES["lib/a.py"]})
    assert end_of(python(PUBLISH, store.root, killed_at=point)) == -9
    again = Store.open(store.root)
    assert again.has_layer(key_of("two")) is (point == "renamed")
    assert verify(again, full=True).damaged == ()
    add_layer(again, "two")
    assert verify(again, full=True).damaged == ()
    assert (again.layer_tree(key_of("two")) / "lib/b.py").read_text() == FILES["lib/b.py"]
    add_image(again, "all", key_of("one"), key_of("two"))
    collect(again, grace=0)
    assert {path.lstat().st_nlink > 1 for shard in again.pool.shards() for path in shard.iterdir()} == {True}
    assert os.listdir(again.root / "staging") == [".gate"]
    assert os.listdir(again.root / "locks") == []


@pytest.mark.parametrize("point", POINTS[:-1])
def test_a_publisher_may_find_the_disk_full_anywhere(store: Store, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_layer(store, "one", {"lib/a.py": FILES["lib/a.py"]})
    before = names_below(store.root / "layers")
    fill_disk_at(point, monkeypatch.setattr)
    with pytest.raises(DiskFull, match="the disk is full") as caught:
        add_layer(store, "two")
    assert "MINISANDBOX_STORE" in str(caught.value.hint)
    monkeypatch.undo()
    assert names_below(store.root / "layers") == before
    assert os.listdir(store.root / "staging") == [".gate"]
    add_layer(store, "two")
    assert verify(store, full=True).damaged == ()


COLLECT = """
    import sys
    from minisandbox.store import Store
    from minisandbox.store.collect import remove_images
    remove_images(Store.open(sys.argv[1]), ["one"])
"""


def test_a_collector_may_die(store: Store) -> None:
    _, one, two = two_images(store)
    assert end_of(python(COLLECT, store.root, killed_at="layer-removed")) == -9
    again = Store.open(store.root)
    assert (again.has_layer(one), again.has_layer(two)) == (False, True)
    assert verify(again, full=True).damaged == ()
    collect(again, grace=0)
    assert os.listdir(again.root / "staging") == [".gate"]


# --- places ----------------------------------------------------------------------------------------------------------

IN_A_NAMESPACE = """
import os, subprocess, sys
from pathlib import Path
from minisandbox.errors import MiniSandboxError
from minisandbox.store import Store
from minisandbox.store.collect import collect, remove_images
from minisandbox.store.verify import verify
from tests.unit.store_tools import FILES, add_image, add_layer, two_images
place = Path(sys.argv[1])
def mount(*words):
    subprocess.run(["mount", *words], check=True)
def fails(what, call):
    try:
        call()
    except MiniSandboxError as error:
        print(what, type(error).__name__, "|", error.what, "|", error.reason, "|", error.hint)
    else:
        print(what, "went well")
"""


def namespaced(tmp_path: Path, script: str) -> str:
    """Run a script where it may mount things; return what it prints."""
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, flags, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare(1) cannot make a mount namespace here")
    command = [unshare, flags, sys.executable, "-c", IN_A_NAMESPACE + textwrap.dedent(script), str(tmp_path)]
    environment = {**os.environ, **own_modules()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.kernel
def test_on_overlayfs_there_is_no_store(tmp_path: Path) -> None:
    output = namespaced(
        tmp_path,
        """
        for name in ("disk", "merged"):
            (place / name).mkdir()
        mount("-t", "tmpfs", "tmpfs", str(place / "disk"))
        for name in ("lower", "upper", "work"):
            (place / "disk" / name).mkdir()
        options = ",".join(f"{name}dir={place}/disk/{name}" for name in ("lower", "upper", "work"))
        mount("-t", "overlay", "-o", options + ",userxattr", "overlay", str(place / "merged"))
        fails("open", lambda: Store.open(place / "merged/store"))
        """,
    )
    assert output.startswith("open StoreError |")
    assert "lies on overlayfs" in output
    assert "another overlay" in output
    assert "MINISANDBOX_STORE" in output


@pytest.mark.kernel
def test_a_read_only_store_can_be_run_from_and_says_why_it_cannot_be_changed(tmp_path: Path) -> None:
    output = namespaced(
        tmp_path,
        """
        base, one, two = two_images(Store.open(place / "store"))
        (place / "ro").mkdir()
        mount("--bind", str(place / "store"), str(place / "ro"))
        mount("-o", "remount,bind,ro", str(place / "ro"))
        store = Store.open(place / "ro")
        print(store.writable, [image.name for image in store.images()], store.layer_tree(one).is_dir())
        print(add_layer(store, "one") == one, verify(store, full=True).damaged)
        with store.hold(base, one):
            print(Store.open(place / "store").remove_unused_layer(one))
        fails("build", lambda: add_layer(store, "new"))
        fails("record", lambda: add_image(store, "new", base))
        fails("collect", lambda: collect(store))
        fails("remove", lambda: remove_images(store, ["one"]))
        fails("pin", lambda: store.pin("one"))
        """,
    )
    lines = output.splitlines()
    assert lines[:3] == ["False ['one', 'two'] True", "True ()", "False"]
    assert [line.split()[0] for line in lines[3:]] == ["build", "record", "collect", "remove", "pin"]
    for line in lines[3:]:
        assert "StoreError" in line
        assert "read-only" in line
        assert "image import" in line


@pytest.mark.kernel
def test_a_full_disk_can_be_collected(tmp_path: Path) -> None:
    output = namespaced(
        tmp_path,
        """
        (place / "disk").mkdir()
        mount("-t", "tmpfs", "-o", "size=2m,nr_inodes=400", "tmpfs", str(place / "disk"))
        store = Store.open(place / "disk/store")
        base, one, two = two_images(store)
        fails("publish", lambda: add_layer(store, "large", {"large": "x" * (4 << 20)}))
        count = 0
        try:
            while True:
                (place / f"disk/fill{count}").write_bytes(bytes(4096))
                count += 1
        except OSError as error:
            print("full", error.errno)
        fails("again", lambda: add_layer(store, "more", {f"f{n}": "x" * 9000 for n in range(400)}))
        done = remove_images(store, ["one"])
        print(done.layers == [one], verify(store, full=True).damaged, os.listdir(store.root / "staging"))
        print(len(collect(store, budget=0, grace=0).images))
        add_layer(store, "more", {"f": "x" * 9000})
        """,
    )
    lines = output.splitlines()
    assert lines[0].startswith("publish DiskFull |")
    assert lines[1] == "full 28"
    assert lines[2].startswith("again DiskFull |")
    assert lines[3:] == ["True () ['.gate']", "1"]


def test_somebody_elses_store_is_opened_for_reading(store: Store) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a store away")
    _, one, _ = two_images(store)
    os.chown(store.root / "version", 1000, 1000)
    other = Store.open(store.root)
    assert not other.writable
    assert other.layer_tree(one).is_dir()
    with pytest.raises(StoreError, match="read-only"):
        other.remove_image("one")


def test_there_must_be_a_store_to_read(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        Store.open(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()
