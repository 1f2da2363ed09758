"""Sealed states: what snapshots, forks, resets and comparisons promise beyond the contract's cases."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path, PurePosixPath

import pytest
from tests.waiting import PATIENCE, settled, until

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.sandbox.snapshots import MOST_TREES
from minisandbox.types import ChangeKind, ExecResult, FileType, ImageSpec, Limits, Mount
from minisandbox.values import MiB

pytestmark = pytest.mark.kernel

SHARED = 64 * MiB


def changed(box: Sandbox) -> dict[str, str]:
    """What differs from the image, by path."""
    return {str(change.path): change.kind.value for change in box.changes()}


def tmpfs_memory() -> int:
    """Bytes in tmpfs on this machine (proc_meminfo(5))."""
    with open("/proc/meminfo", encoding="ascii") as table:
        return next(int(line.split()[1]) * 1024 for line in table if line.startswith("Shmem:"))


@pytest.fixture
def layered(spec: ImageSpec, tmp_path: Path) -> ImageSpec:
    """An image with something in it to change."""
    tree = tmp_path / "layer"
    for name in ("testbed/kept/deep", "testbed/gone/deep", "testbed/swapped"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text(name)
    (tree / "testbed/link").symlink_to("kept")
    return ImageSpec("layered", (*spec.layers, tree), workdir=PurePosixPath("/testbed"))


# --- comparing -------------------------------------------------------------------------------------------------------


def test_an_untouched_workspace_has_no_changes(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        box.exec("cat kept/deep/file; ls -R /; touch -a kept/deep/file").check()
        assert box.changes() == ()


def test_only_what_differs_is_a_change(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        box.exec("touch kept/deep/file; cp kept/deep/file x; cat x > kept/deep/file; rm x; chmod 700 kept").check()
        assert changed(box) == {"/testbed/kept": "modified"}


def test_deletions_and_replacements_are_named_to_the_last_file(layered: ImageSpec) -> None:
    script = "rm -r gone swapped kept link; mkdir swapped; echo new > swapped/other; ln -s gone link; : > kept"
    with Sandbox.create(layered) as box:
        box.exec(script).check()
        assert changed(box) == {
            "/testbed/gone": "deleted", "/testbed/gone/deep": "deleted", "/testbed/gone/deep/file": "deleted",
            "/testbed/swapped/file": "deleted", "/testbed/swapped/other": "added", "/testbed/link": "modified",
            "/testbed/kept": "modified", "/testbed/kept/deep": "deleted", "/testbed/kept/deep/file": "deleted",
        }  # fmt: skip


def test_changes_add_up_over_snapshots(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        box.exec("echo 1 > added; echo 2 > other; rm -r gone").check()
        box.snapshot()
        box.exec("rm other; mkdir gone; echo back > gone/new; echo more >> added").check()
        box.snapshot()
        box.exec("rm added; printf swapped > swapped/file").check()
        assert changed(box) == {
            "/testbed/gone/new": "added", "/testbed/gone/deep": "deleted", "/testbed/gone/deep/file": "deleted",
            "/testbed/swapped/file": "modified",
        }  # fmt: skip


def test_every_type_of_file_is_named(box: Sandbox) -> None:
    box.exec("cd /testbed; : > f; mkdir d; ln -s /nowhere l; mkfifo p").check()
    box.exec(["python3", "-c", "import socket; socket.socket(1).bind('/testbed/s')"]).check()
    types = {change.path.name: change.type for change in box.changes()}
    expected = {"f": FileType.FILE, "d": FileType.DIRECTORY, "l": FileType.SYMLINK, "p": FileType.FIFO}
    assert types == {**expected, "s": FileType.SOCKET}


def test_names_that_are_no_text_and_very_many_files(box: Sandbox) -> None:
    box.exec("cd /testbed; seq 3000 | xargs touch; touch $'caf\\xe9' $'new\\nline' -- -rf").check()
    paths = [change.path for change in box.changes()]
    assert len(paths) == 3003
    assert paths == sorted(paths)
    assert {"caf\udce9", "new\nline", "-rf"} < {path.name for path in paths}


DEEP = """
import os
os.chdir("/testbed")
for _ in range({depth}):
    os.mkdir("d")
    os.chdir("d")
open("deepest", "w").close()
"""


BETWEEN = """
import os
os.chdir("/testbed")
open("shallow", "w").close()
for _ in range(700):
    os.chdir("d")
open("between", "w").close()
"""


def test_changes_are_found_at_any_depth(layered: ImageSpec) -> None:
    """Over several trees, one of which has less of the depth than the others; and as it is beside a shallow change."""
    with Sandbox.create(layered) as box:
        box.exec(["python3", "-c", DEEP.format(depth=1500)]).check()
        box.snapshot().close()
        box.exec(["python3", "-c", BETWEEN]).check()
        paths = [change.path for change in box.changes()]
        assert len(paths) == 1500 + 3
        assert paths == sorted(paths)
        assert PurePosixPath("/testbed", *["d"] * 1500, "deepest") in paths
        assert PurePosixPath("/testbed", *["d"] * 700, "between") in paths
        assert PurePosixPath("/testbed/shallow") in paths


@pytest.mark.slow
def test_a_path_too_long_for_an_answer_is_an_error_not_a_hang(box: Sandbox) -> None:
    box.exec(["python3", "-c", DEEP.format(depth=9_000)]).check()
    with pytest.raises(FileAccessError, match="characters of paths"):
        box.changes()
    with pytest.raises(FileAccessError, match=r"not done within 0\.001 s"):
        box.changes(timeout=0.001)
    assert box.exec("true").ok


def test_a_process_of_the_workspace_cannot_hide_a_change(box: Sandbox) -> None:
    """Comparing happens elsewhere: what runs inside, a replaced python or find included, takes no part."""
    box.exec(
        "mkdir -p /testbed/bin; for n in find stat python3; do : > /testbed/bin/$n; done; kill -STOP -1 2>/dev/null; :"
    )
    assert "/testbed/bin/find" in changed(box)


def test_what_a_mount_made_is_no_change(spec: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(spec, mounts=(Mount(tmp_path, PurePosixPath("/given")),)) as box:
        assert box.changes() == ()


def test_a_changed_usr_is_compared_where_it_can_be_written(box: Sandbox) -> None:
    if not current_controller().launcher.writable_usr:
        pytest.skip("/usr is read-only here: its file system cannot be idmapped, or this is not root")
    box.exec("touch /usr/local/new; rm /usr/bin/yes; ln -sf /bin/true /usr/bin/tac").check()
    assert changed(box) == {"/usr/bin/tac": "modified", "/usr/bin/yes": "deleted", "/usr/local/new": "added"}
    box.snapshot()
    box.exec("rm /usr/local/new").check()
    assert changed(box) == {"/usr/bin/tac": "modified", "/usr/bin/yes": "deleted"}
    assert ChangeKind.DELETED in {change.kind for change in box.changes()}


# --- sealing ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_forks_share_what_was_written_and_write_apart(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(disk="256M")) as box:
        box.exec(f"head -c {SHARED} /dev/urandom > /testbed/big; echo parent > /tmp/who").check()
        before = settled(tmpfs_memory)
        kids = box.fork(8)
        try:
            for number, kid in enumerate(kids):
                kid.exec(f"echo {number} > /tmp/who; cmp /testbed/big /testbed/big").check()
            assert tmpfs_memory() - before < SHARED / 4
            assert [kid.files.read_text("/tmp/who") for kid in kids] == [f"{number}\n" for number in range(8)]
            assert box.files.read_text("/tmp/who") == "parent\n"
        finally:
            for kid in kids:
                kid.stop()


def test_forks_outlive_their_parent(box: Sandbox) -> None:
    box.exec("echo kept > /testbed/f").check()
    (kid,) = box.fork()
    with kid:
        box.stop()
        assert kid.files.read_text("/testbed/f") == "kept\n"
        (grandchild,) = kid.fork()
        with grandchild:
            assert grandchild.files.read_text("/testbed/f") == "kept\n"


@pytest.fixture
def memory_upper() -> None:
    """Skip what is about a tmpfs where sandboxes write to disk (tests/kernel/test_disk_upper.py has the same of it)."""
    if not current_controller().launcher.memory_upper:
        pytest.skip("sandboxes write to the store's disk here")


@pytest.mark.alone
@pytest.mark.usefixtures("memory_upper")
def test_the_memory_of_a_snapshot_comes_back(spec: ImageSpec) -> None:
    before = settled(tmpfs_memory)
    with Sandbox.create(spec, limits=Limits(disk="256M")) as box:
        box.exec(f"head -c {SHARED} /dev/zero > /testbed/big").check()
        snapshot = box.snapshot()
        box.reset()
        assert tmpfs_memory() - before > SHARED * 3 / 4
        with Sandbox.create(spec):  # after which the next one waits, in a copy of the launcher's mount namespace
            time.sleep(1)
        snapshot.close()
        wait_until_less(before + SHARED // 4)


@pytest.mark.alone
def test_sealed_states_count_to_the_limit_of_the_disk(spec: ImageSpec) -> None:
    """The same file, overwritten before each snapshot: only the last is to be seen, but all are held."""
    before = settled(tmpfs_memory)
    with Sandbox.create(spec, limits=Limits(disk="100M")) as box:
        for _ in range(2):
            box.exec("head -c 40M /dev/urandom > /testbed/big").check()
            box.changes()  # holds the tree of a workspace that is written to, which must not fix its size
            box.exec("head -c 5M /dev/urandom > /testbed/more").check()
            box.snapshot().close()
        full = box.exec("head -c 40M /dev/urandom > /testbed/big")
        assert not full.ok
        assert full.limits_hit == ("disk",)
        with pytest.raises(InvalidValue, match=r"hold 1\d{8} bytes of .*, and Limits\.disk is 104857600.*reset"):
            box.snapshot()
        assert box.exec("test -s /testbed/big").ok  # it goes on as it was
        assert tmpfs_memory() - before < 150 * MiB
        box.reset()
        box.exec("head -c 90M /dev/zero > /testbed/big").check()


def test_what_is_made_over_a_snapshot_has_what_it_leaves(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(disk="64M")) as box:
        box.exec("head -c 40M /dev/zero > /testbed/big").check()
        with box.fork()[0] as fork:
            assert fork.exec("head -c 40M /dev/zero > /testbed/other").limits_hit == ("disk",)
            fork.exec("head -c 20M /dev/zero > /testbed/other").check()
        with box.snapshot() as snapshot:
            with pytest.raises(InvalidValue, match=r"over 2 snapshots.*Limits\.disk is 33554432"):
                Sandbox.create(snapshot, limits=Limits(disk="32M"))
            with Sandbox.create(snapshot, limits=Limits(disk="128M")) as other:
                other.exec("head -c 60M /dev/zero > /testbed/other").check()


def test_empty_files_of_sealed_states_count_to_the_limit_of_the_disk(spec: ImageSpec) -> None:
    """Each takes 1 KB of memory, and every snapshot gave room for as many again."""
    script = "mkdir /tmp/$0; cd /tmp/$0 || exit; seq 10000 | xargs touch"
    with Sandbox.create(spec, limits=Limits(disk="64M")) as box:
        assert box.exec(["bash", "-c", script, "0"]).check().limits_hit == ()
        box.snapshot().close()
        full = box.exec(["bash", "-c", script, "1"])
        if current_controller().launcher.memory_upper:  # on disk commands may be faster than what counts files
            assert "No space left" in full.stderr
            assert full.limits_hit == ("disk",)
        with pytest.raises(InvalidValue, match=r"Limits\.disk is 67108864.*4096 bytes at least.*reset"):
            box.snapshot()
        assert box.exec("rm -r /tmp/1").ok
        box.snapshot().close()
        box.exec("head -c 20M /dev/zero > /testbed/big").check()
        box.reset()
        assert box.exec(["bash", "-c", script, "2"]).ok


def test_few_files_of_sealed_states_leave_the_limit_of_the_disk_as_it_is(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(disk="8M")) as box:
        for number in range(20):
            box.exec(f"echo {number} > /testbed/{number}; touch /tmp/empty{number}").check()
            box.snapshot().close()
        box.exec("head -c 7900K /dev/zero > /testbed/big").check()


@pytest.mark.slow
def test_a_lifetime_goes_on_over_snapshots_and_resets(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(lifetime=6)) as box:
        expires = box.info().expires
        box.snapshot()
        box.reset()
        assert box.info().expires == expires
        (fork,) = box.fork()
        assert (fork.info().expires or 0) > (expires or 0) > 0
        with fork, pytest.raises(SandboxGone, match="lifetime of 6 s is over"):
            box.exec("sleep 600")
        for call in (box.snapshot, box.reset, box.changes):
            with pytest.raises(SandboxGone, match="lifetime of 6 s is over"):
                call()


def wait_until_less(size: int) -> None:
    """The kernel frees a detached mount a moment later (fs/namespace.c, delayed_mntput)."""
    until(lambda: tmpfs_memory() < size)


def test_processes_end_with_a_snapshot_and_the_handle_goes_on(box: Sandbox) -> None:
    box.exec("sleep 100 &").check()
    assert box.exec("pgrep sleep").exit_code == 0
    box.snapshot()
    assert box.exec("pgrep sleep").exit_code == 1


def test_an_exec_under_way_learns_of_a_snapshot(box: Sandbox) -> None:
    started, ended = threading.Event(), threading.Event()
    fates: list[ExecResult | SandboxGone] = []

    def wait() -> None:
        started.set()
        try:
            fates.append(box.exec("sleep 100"))
        except SandboxGone as error:
            fates.append(error)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(PATIENCE)
    box.exec("until pgrep sleep; do :; done").check()
    box.snapshot()
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)
    (fate,) = fates  # reported by SIGKILL or by an error, never by a hang
    assert isinstance(fate, SandboxGone) or fate.signal == signal.SIGKILL


def test_run_and_shm_are_not_part_of_a_snapshot(box: Sandbox) -> None:
    box.exec("touch /run/x /dev/shm/x /tmp/x").check()
    box.snapshot()
    assert box.exec("ls /run/x /dev/shm/x /tmp/x").stdout == "/tmp/x\n"


def test_a_deleted_file_stays_deleted_and_permissions_stay(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        box.exec(
            "rm -r gone; chmod 640 kept/deep/file; setfattr -n user.note -v x kept/deep/file 2>/dev/null; :"
        ).check()
        with box.snapshot() as snapshot, Sandbox.create(snapshot) as other:
            assert other.exec("test ! -e gone; stat -c %a kept/deep/file").stdout == "640\n"
            other.exec("mkdir gone; ls -A gone").check()
            assert other.exec("ls -A gone").stdout == ""


def test_a_reset_goes_where_it_is_told(box: Sandbox) -> None:
    box.exec("echo 1 > /testbed/f").check()
    one = box.snapshot()
    box.exec("echo 2 > /testbed/f").check()
    two = box.snapshot()
    for snapshot, text in ((one, "1\n"), (two, "2\n"), (one, "1\n")):
        box.exec("echo other > /testbed/f").check()
        box.reset(snapshot)
        assert box.files.read_text("/testbed/f") == text
    box.reset()
    assert not box.files.exists("/testbed/f")


def test_a_sandbox_made_from_a_snapshot_resets_to_it(box: Sandbox) -> None:
    box.exec("echo 1 > /testbed/f").check()
    with box.snapshot() as snapshot, Sandbox.create(snapshot) as other:
        other.exec("rm /testbed/f").check()
        other.reset()
        assert other.files.read_text("/testbed/f") == "1\n"


def test_a_closed_snapshot_is_refused(box: Sandbox) -> None:
    snapshot = box.snapshot()
    snapshot.close()
    snapshot.close()
    with pytest.raises(InvalidValue, match="closed"):
        box.reset(snapshot)
    assert box.exec("true").ok


def test_a_snapshot_of_another_image_is_refused(box: Sandbox, layered: ImageSpec) -> None:
    with Sandbox.create(layered) as other, other.snapshot() as snapshot, pytest.raises(InvalidValue, match="of image"):
        box.reset(snapshot)


def test_snapshots_one_over_the_other(box: Sandbox) -> None:
    for number in range(40):
        box.exec(f"echo {number} > /testbed/{number}; rm -f /testbed/{number - 1}").check()
        box.snapshot()
    assert changed(box) == {"/testbed/39": "added"}


@pytest.mark.slow
def test_too_many_snapshots_one_over_the_other_are_refused_with_a_way_out(box: Sandbox) -> None:
    for _ in range(MOST_TREES):
        box.snapshot()
    with pytest.raises(InvalidValue, match="reset"):
        box.snapshot()
    assert box.exec("true").ok


def test_a_build_cannot_be_sealed(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with Sandbox.create(spec, upper=upper) as box, pytest.raises(InvalidValue, match="upper="):
        box.snapshot()


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_nonsense_counts_are_refused_before_anything_ends(box: Sandbox, count: int) -> None:
    box.exec("sleep 100 &").check()
    with pytest.raises(InvalidValue, match="fork"):
        box.fork(count)
    assert box.exec("pgrep sleep").ok


def test_descriptors_come_back(box: Sandbox) -> None:
    box.exec("echo x > /testbed/x").check()
    for kid in box.fork(3):
        kid.stop()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for kid in box.fork(3):
            kid.stop()
        box.reset()
        box.changes()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 15, "one descriptor is left per fork"
