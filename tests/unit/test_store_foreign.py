"""A store that belongs to somebody else: whatever lies in it, reading it ends, and with errors of our own."""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.store_tools import add_image, add_layer, key_of, own_modules

from minisandbox.errors import MiniSandboxError, StoreError
from minisandbox.images import export_images
from minisandbox.reading import read_regular
from minisandbox.store import Store, leases, records
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.disk.reading import read_below
from minisandbox.store.entries import NAME, Entry, encode
from minisandbox.store.overview import ImageStatus, image_rows
from minisandbox.store.verify import verify

LAYER = f"layers/{key_of('one')}"
FILES = {"lib/a.py": "a = 1\n" * 500, "own": "own\n"}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End a test that waits for something."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The other store: one image of one layer."""
    store = Store.open(tmp_path / "theirs")
    add_image(store, "one", add_layer(store, "one", FILES))
    return store


def export(store: Store) -> None:
    """Read all of the other store's images."""
    theirs = Store.open(store.root, read_only=True)
    export_images(theirs, theirs.image_names(), store.root.parent / "out.tar", private=True)


def pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def zeros(path: Path) -> None:
    remove(path)
    path.symlink_to("/dev/zero")


def moved(path: Path) -> None:
    """The same content, but behind a link."""
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def loop(path: Path) -> None:
    remove(path)
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    remove(path)
    path.mkdir()


def sparse(path: Path) -> None:
    remove(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)


def bomb(path: Path) -> None:
    """A line of 4 GiB in 4 MiB: zeros, one member after the other."""
    member = gzip.compress(bytes(1 << 24))
    path.write_bytes(gzip.compress(b'{"format":1}\n') + member * 256)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


HOSTILE: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "images/one.json"),
    (zeros, "images/one.json"),
    (moved, "images/one.json"),
    (loop, "images/one.json"),
    (folder, "images/one.json"),
    (sparse, "images/one.json"),
    (moved, "images"),
    (pipe, f"{LAYER}/layer.json"),
    (moved, f"{LAYER}/layer.json"),
    (sparse, f"{LAYER}/layer.json"),
    (pipe, f"{LAYER}/{NAME}"),
    (zeros, f"{LAYER}/{NAME}"),
    (loop, f"{LAYER}/{NAME}"),
    (sparse, f"{LAYER}/{NAME}"),
    (bomb, f"{LAYER}/{NAME}"),
    (moved, f"{LAYER}/tree"),
    (pipe, f"{LAYER}/tree"),
    (pipe, f"{LAYER}/tree/own"),
    (zeros, f"{LAYER}/tree/own"),
    (moved, f"{LAYER}/tree/own"),
    (moved, f"{LAYER}/tree/lib"),
    (moved, LAYER),
    (moved, "layers"),
    (pipe, "layers"),
    (moved, "version"),
    (sparse, "version"),
]  # fmt: skip
NAMES = [f"{what.__name__} for {name.replace(LAYER, 'layer')}" for what, name in HOSTILE]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Nothing of what is read is kept: Python's own memory stays below 64 MiB."""
    tracemalloc.start(1)
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("change", "name"), HOSTILE, ids=NAMES)
def test_an_export_ends(store: Store, change: Callable[[Path], None], name: str) -> None:
    change(store.root / name)
    with pytest.raises(MiniSandboxError):
        export(store)
    assert os.listdir(store.root.parent) == ["theirs"]


@pytest.mark.parametrize("change", [pipe, zeros, moved, loop, sparse])
@pytest.mark.parametrize("what", ["blob", "record"])
def test_blobs_of_frozen_layers(store: Store, what: str, change: Callable[[Path], None]) -> None:
    key = add_layer(store, "two", {**FILES, "two": "two" * 100})
    add_image(store, "two", key)
    freeze(store, ["two"])
    assert store.is_frozen(key)
    (damaged,) = (store.root / "blobs").iterdir() if what == "blob" else [store.layer_directory(key) / records.BLOBS]
    change(damaged)
    with pytest.raises(StoreError):
        export(store)


@pytest.mark.parametrize(("change", "name"), HOSTILE, ids=NAMES)
def test_listing_and_verifying_end(store: Store, change: Callable[[Path], None], name: str) -> None:
    change(store.root / name)
    for look in (image_rows, lambda other: verify(other, full=True)):
        try:
            theirs = Store.open(store.root, read_only=True)
            found = look(theirs)
        except MiniSandboxError:
            continue
        assert found
    assert os.path.lexists(store.root / name)  # nothing was put into quarantine


def test_a_lock_that_is_never_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_TIMEOUT", 0.1)
    fd = os.open(store.root / LAYER, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="still locked after"):
            export(store)
    finally:
        os.close(fd)


def test_the_command_says_what_is_wrong(store: Store) -> None:
    pipe(store.root / "images/one.json")
    done = subprocess.run(
        [sys.executable, "-m", "minisandbox", "image", "export", "one", str(store.root.parent / "out.tar")],
        env={**os.environ, **own_modules(), "MINISANDBOX_STORE": str(store.root)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == StoreError.exit_code
    assert "images/one.json is not a file that can be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("a")
    assert read_below(tmp_path / "link", "b", 10) == b"x" * 10  # how the store itself is reached is its user's choice
    assert read_regular(tmp_path / "link/b", 10) == b"x" * 10
    with pytest.raises(StoreError, match="too large"):
        read_below(tmp_path, "a/b", 9)
    with pytest.raises(StoreError, match="too large"):
        read_regular(tmp_path / "a/b", 9)
    with pytest.raises(FileNotFoundError, match="a/c"):
        read_below(tmp_path, "a/c", 9)
    for name in ("../b", "link/b", "a", "a/b\0"):
        with pytest.raises(StoreError):
            read_below(tmp_path, name, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", "1" + "0" * 400),
        ("created", "NaN"),
        ("created", "Infinity"),
        ("created", "-1"),
        ("created", '"1"'),
        ("created", "true"),
        ("name", "1"),
        ("workdir", "null"),
        ("layers", '"abc"'),
        ("environment", '[["A"]]'),
        ("notes", '{"a": 1}'),
    ],
)
def test_values_that_a_record_cannot_have(store: Store, field: str, value: str) -> None:
    path = store.root / "images/one.json"
    path.write_text("{" + f'"{field}": {value}, ' + path.read_text().replace(f'"{field}":', '"other":').lstrip("{"))
    with pytest.raises(StoreError, match="is damaged"):
        export(store)
    assert [row.status for row in image_rows(store)] == [ImageStatus.BROKEN]


@pytest.mark.parametrize("field", ["path", "target"])
def test_half_of_a_surrogate_pair_in_a_list(store: Store, field: str) -> None:
    entry = dataclasses.replace(Entry("x", "l", 0o777, 0, 0, 0, target="x"), **{field: "\ud800"})  # type: ignore[arg-type] # both are texts
    path = store.root / LAYER / NAME
    whole = gzip.decompress(path.read_bytes()) + encode(entry)
    path.unlink()
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(StoreError, match="half of a surrogate pair"):
        export(store)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_no_store_is_made_where_others_may_write(tmp_path: Path, mode: int) -> None:
    """They could put a link in the place of a part of it, and have what that leads to removed."""
    place = tmp_path / "a place"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(StoreError, match="others may write to the directory") as caught:
        Store.open(place)
    assert caught.value.hint == f"chmod go-w '{place}'"
    assert list(place.iterdir()) == []
    place.chmod(0o755)
    Store.open(place)
    place.chmod(mode)
    with pytest.raises(StoreError, match="others may write to the directory"):
        Store.open(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_no_store_is_made_in_a_directory_of_another_user(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o755)
    os.chown(place, 12345, 12345)
    with pytest.raises(StoreError, match=r"belongs to another user \(uid 12345\)"):
        Store.open(place)
    assert list(place.iterdir()) == []
