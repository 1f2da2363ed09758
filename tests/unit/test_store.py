"""The store: made once, published whole, refused with a reason."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import DiskFull, InvalidValue, NotFound, StoreError
from minisandbox.store import ImageRecord, LayerRecord, Made, Store, canonical_json, default_root, step_key
from minisandbox.store.collect import collect
from minisandbox.store.disk.durable import write_atomic

KEY = step_key(None, {"kind": "test"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _make(work: Path) -> Made:
    tree = work / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"x" * 5000)
    os.link(tree / "file", tree / "same")
    return Made(tree, {"why": "test"})


def _python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _staged(store: Store) -> list[str]:
    return [name for name in os.listdir(store.root / "staging") if not name.startswith(".")]


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.juicefs"])
def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    Store.open(tmp_path / "store")
    monkeypatch.setattr("minisandbox.store.disk.paths.file_system", lambda _: kind)
    with pytest.raises(StoreError, match=f"lies on {kind}, a network file system") as caught:
        Store.open(tmp_path / "store")
    assert "$TMPDIR" in str(caught.value)
    assert not Store.open(tmp_path / "store", read_only=True).writable


def test_default_root_follows_the_environment() -> None:
    assert default_root({"MINISANDBOX_STORE": "/a/b"}) == Path("/a/b")
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/minisandbox")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/minisandbox"
    assert default_root({"MINISANDBOX_STORE": "rel"}).is_absolute()


def test_keys_are_canonical_and_chained() -> None:
    assert canonical_json({"b": 1, "a": ["é"]}) == b'{"a":["\\u00e9"],"b":1}'
    assert step_key(None, {"a": 1, "b": 2}) == step_key(None, {"b": 2, "a": 1})
    assert step_key(KEY, {"a": 1}) != step_key(None, {"a": 1})


def test_open_makes_the_layout_private_and_is_repeatable(store: Store) -> None:
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert (store.root / "version").read_text() == "2\n"
    assert Store.open(store.root) == store


def test_open_refuses_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match="is not a store") as caught:
        Store.open(tmp_path)
    assert caught.value.hint
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_open_refuses_a_later_version(store: Store) -> None:
    (store.root / "version").write_text("3\n")
    with pytest.raises(StoreError, match="version '3'"):
        Store.open(store.root)


def test_open_refuses_an_earlier_version_and_says_what_to_do(store: Store) -> None:
    (store.root / "version").write_text("1\n")
    for read_only in (False, True):
        with pytest.raises(StoreError, match="was made by an earlier MiniSandbox") as caught:
            Store.open(store.root, read_only=read_only)
        assert f"rm -r {store.root}" in str(caught.value.hint)


def test_what_a_killed_writer_left_is_removed(store: Store) -> None:
    old, young = store.root / "images/.x.json.0123456789ab", store.root / "logs/.y.log.0123456789ab"
    for path in (old, young):
        path.write_text("half", encoding="ascii")
    os.utime(old, (0, 0))
    assert collect(store).leftovers == ["1 unfinished files of dead processes"]
    assert not old.exists()
    assert young.exists(), "its writer may be at work"


def test_an_empty_disk_of_its_own_will_do(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert Store.open(tmp_path).images() == []


def test_an_interrupted_write_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(store.root / "images/x.json", b"x")
    assert os.listdir(store.root / "images") == []


def test_a_lock_that_cannot_be_made_is_said(store: Store) -> None:
    shutil.rmtree(store.root / "locks")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError, match="lock"), store.lock("x"):
        raise AssertionError("nothing is locked")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_open_names_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot open the store"):
        Store.open(tmp_path / "file")


def test_a_layer_is_made_once_and_measured(store: Store) -> None:
    record, made = store.ensure_layer(KEY, parent=None, step={"kind": "test"}, make=_make)
    assert made
    assert (record.files, record.parent, record.step) == (2, None, {"kind": "test"})
    assert record.facts == {"why": "test"}
    assert 8192 <= record.bytes <= 16384  # one inode of two names, and two directory entries' blocks
    assert store.layer_tree(KEY) == store.root / "layers" / KEY / "tree"
    again, made = store.ensure_layer(KEY, parent=None, step={}, make=lambda _: pytest.fail("made twice"))
    assert not made
    assert again == record
    assert list(store.layers()) == [record]
    assert _staged(store) == []
    assert os.listdir(store.root / "locks") == []


def test_a_failed_make_publishes_nothing(store: Store) -> None:
    def fail(work: Path) -> Made:
        _make(work)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.ensure_layer(KEY, parent=None, step={}, make=fail)
    assert not store.has_layer(KEY)
    assert _staged(store) == []
    with pytest.raises(NotFound):
        store.layer_tree(KEY)


def test_threads_share_one_make(store: Store) -> None:
    makers: list[str] = []
    waited: set[str] = set()

    def slow(work: Path) -> Made:
        makers.append(threading.current_thread().name)
        until(lambda: len(waited) == 3)
        return _make(work)

    def want() -> None:
        store.ensure_layer(
            KEY, parent=None, step={}, make=slow, on_wait=lambda: waited.add(threading.current_thread().name)
        )

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(makers) == 1
    assert len(waited) == 3


PROCESS = """
    import sys, time
    from pathlib import Path
    from minisandbox.store import Made, Store
    store = Store.open(sys.argv[1])
    def make(work):
        with open(sys.argv[3], "a") as log:
            log.write("made\\n")
        (work / "tree").mkdir()
        time.sleep(float(sys.argv[4]))
        return Made(work / "tree")
    print("ready", flush=True)
    print(store.ensure_layer(sys.argv[2], parent=None, step={}, make=make)[1])
"""


def test_processes_share_one_make(store: Store, tmp_path: Path) -> None:
    running = [_python(PROCESS, store.root, KEY, tmp_path / "log", 0.3) for _ in range(3)]
    outputs = [process.communicate(timeout=PATIENCE)[0].split() for process in running]
    assert sorted(outputs) == [["ready", "False"], ["ready", "False"], ["ready", "True"]]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_killed_maker_leaves_nothing_that_lasts(store: Store, tmp_path: Path) -> None:
    maker = _python(PROCESS, store.root, KEY, tmp_path / "log", 600)
    until((tmp_path / "log").exists)
    Store.open(store.root)
    assert len(_staged(store)) == 1, "a live maker's directory was taken"
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=PATIENCE)
    Store.open(store.root)
    assert _staged(store) == []
    assert not store.has_layer(KEY)
    assert store.ensure_layer(KEY, parent=None, step={}, make=_make)[1]


def test_images_are_recorded_and_listed(store: Store) -> None:
    record = ImageRecord("a.b-1", KEY, (KEY,), (("PATH", "/bin"),), "/testbed", None, "", 1.5, {"python": "3.11.7"})
    store.put_image(record)
    assert store.image("a.b-1") == record
    assert store.images() == [record]
    with pytest.raises(NotFound, match="'other'"):
        store.image("other")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".x", "x\n", "x" * 300, "a b"])
def test_names_cannot_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(InvalidValue):
        store.image(name)


@pytest.mark.parametrize("key", ["", "..", "A" * 64, "0" * 63, "../" + "0" * 61])
def test_keys_cannot_leave_the_store(store: Store, key: str) -> None:
    with pytest.raises(InvalidValue):
        store.has_layer(key)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format":1}', '{"format":1,"name":3}'])
def test_damaged_records_are_said(store: Store, text: str) -> None:
    (store.root / "images" / "x.json").write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        store.image("x")


def test_records_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_text('{"format": 9}')
    with pytest.raises(StoreError, match="format 9"):
        LayerRecord.read(tmp_path, "r")


def test_remove_layer(store: Store) -> None:
    store.ensure_layer(KEY, parent=None, step={}, make=_make)
    assert store.remove_unused_layer(KEY)
    assert not store.remove_unused_layer(KEY)
    assert not store.has_layer(KEY)
    assert _staged(store) == []


FULL = """
    import subprocess, sys
    from minisandbox.errors import DiskFull
    from minisandbox.store import Made, Store
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", sys.argv[1]], check=True)
    store = Store.open(sys.argv[1] + "/store")
    def make(work):
        (work / "tree").mkdir()
        (work / "tree" / "big").write_bytes(bytes(1 << 20))
        return Made(work / "tree")
    try:
        store.ensure_layer("0" * 64, parent=None, step={}, make=make)
    except DiskFull as error:
        print(error.exit_code, error.errno, not store.has_layer("0" * 64),
              [p.name for p in (store.root / "staging").iterdir() if p.name != ".gate"])
"""


@pytest.mark.kernel
def test_a_full_disk_is_said_and_cleaned(tmp_path: Path) -> None:
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, flags, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare(1) cannot make a mount namespace here")
    command = [unshare, flags, sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.stdout.strip() == f"{DiskFull.exit_code} 28 True []", result.stderr
