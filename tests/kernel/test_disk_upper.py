"""Sandboxes that write to the store's disk, as all do where a tmpfs cannot be an overlay's upper (before Linux 6.6)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import FileAccessError, HostError, InvalidValue, SandboxCreationError
from minisandbox.host import reaper, registry
from minisandbox.sandbox import AsyncSandbox, Sandbox, scratch, uppers
from minisandbox.sandbox.controller import current_controller
from minisandbox.store import Store
from minisandbox.types import ImageSpec, Limits
from minisandbox.values import MiB

pytestmark = pytest.mark.kernel

OWNER = """
import sys, time
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.types import ImageSpec
current_controller().launcher.memory_upper = False
image = ImageSpec("base", (Path(sys.argv[1]),))
boxes = [Sandbox.create(image) for _ in range(3)]
for box in boxes:
    box.exec("mkdir -p /testbed/a/b; chmod 0 /testbed/a/b; head -c 5M /dev/zero > /testbed/big").check()
boxes.append(boxes[0].fork()[0])
snapshot = boxes[1].snapshot()
boxes[2].start("while :; do echo x >> /testbed/more; done")
print("ready", flush=True)
time.sleep(600)
"""


DEEP = """
import os
for _ in range(1000):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("file", "wb").write(bytes(9 << 20))
"""


@pytest.fixture(autouse=True)
def disk_upper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every sandbox write to disk, whatever this kernel can do."""
    monkeypatch.setattr(current_controller().launcher, "memory_upper", False)


@pytest.fixture
def layered(spec: ImageSpec, tmp_path: Path) -> ImageSpec:
    """An image with directories of its own, which overlayfs marks where they are removed or replaced."""
    tree = tmp_path / "layer"
    for name in ("kept/deep", "gone/deep", "swapped/deep"):
        (tree / "testbed" / name).mkdir(parents=True)
        (tree / "testbed" / name / "file").write_text(name)
    return ImageSpec("layered", (*spec.layers, tree), workdir=PurePosixPath("/testbed"))


@pytest.fixture
def box(layered: ImageSpec) -> Iterator[Sandbox]:
    with Sandbox.create(layered, limits=Limits(disk="64M")) as made:
        yield made


def owned(pid: int) -> list[Path]:
    """Directories for the writes of a process's sandboxes that are there now."""
    return sorted((Store.open().root / "uppers").glob(f"minisandbox-scratch-{pid}-*"))


def mine() -> list[Path]:
    return owned(os.getpid())


# --- writing, sealing ------------------------------------------------------------------------------------------------


def test_what_is_written_lies_on_disk(box: Sandbox) -> None:
    (place,) = mine()
    assert place.stat().st_mode & 0o777 == 0o700
    box.exec("echo written > file; mkdir -p /opt/x/y").check()
    assert (place / "upper/testbed/file").read_text() == "written\n"
    assert box.info().upper == "disk"
    assert dict(box.info().enforced)["disk"] == "watchdog"
    assert box.exec("stat -c %u:%g file").stdout == "0:0\n"


def test_directories_of_the_image_are_removed_and_replaced(box: Sandbox) -> None:
    box.exec("rm -r gone && mv kept moved && rm -r swapped && mkdir swapped && echo new > swapped/new").check()
    assert box.exec("find . | sort").stdout.split() == [
        ".", "./moved", "./moved/deep", "./moved/deep/file", "./swapped", "./swapped/new",
    ]  # fmt: skip
    changes = {str(change.path): change.kind.value for change in box.changes()}
    assert changes["/testbed/gone"] == "deleted"
    assert changes["/testbed/moved"] == "added"
    assert changes["/testbed/swapped/new"] == "added"


def test_snapshots_forks_and_resets(box: Sandbox) -> None:
    box.exec("rm -r gone; echo one > kept/deep/file").check()
    with box.snapshot() as snapshot:
        box.exec("echo two > kept/deep/file; mkdir gone; rm -r swapped").check()
        kids = box.fork(3)
        try:
            for number, kid in enumerate(kids):
                kid.exec(f"echo kid{number} > kept/deep/file; rm -r gone").check()
            assert [kid.exec("cat kept/deep/file; ls").stdout for kid in kids] == [
                f"kid{number}\nkept\n" for number in range(3)
            ]
        finally:
            for kid in kids:
                kid.stop()
        assert box.exec("cat kept/deep/file; ls").stdout == "two\ngone\nkept\n"
        box.reset(snapshot)
        assert box.exec("cat kept/deep/file; ls").stdout == "one\nkept\nswapped\n"
        with Sandbox.create(snapshot) as other:
            assert other.exec("cat kept/deep/file; ls").stdout == "one\nkept\nswapped\n"
    box.reset()
    assert box.exec("cat kept/deep/file; ls").stdout == "kept/deepgone\nkept\nswapped\n"


def test_the_asynchronous_sandbox_writes_there_too(layered: ImageSpec) -> None:
    async def look() -> str:
        async with await AsyncSandbox.create(layered) as box:
            await box.exec("rm -r gone")
            (kid,) = await box.fork()
            async with kid:
                return (await kid.exec("ls")).stdout

    assert asyncio.run(look()) == "kept\nswapped\n"
    assert mine() == []


# --- Limits.disk -----------------------------------------------------------------------------------------------------


def test_a_command_that_writes_too_much_is_ended(box: Sandbox) -> None:
    slow = "for i in $(seq 1000); do head -c 5M /dev/zero > $i; sleep 0.05; done"
    ended = box.exec(slow, timeout=60)
    assert ended.limits_hit == ("disk",)
    assert ended.exit_code is None
    assert box.usage().disk < 300 * MiB
    assert box.exec("ls | wc -l; cat kept/deep/file").ok, "what lies there can be looked at"
    again = box.exec("while :; do head -c 1M /dev/zero >> 1; sleep 0.05; done", timeout=60)
    assert again.limits_hit == ("disk",)
    assert box.exec("rm [0-9]*; ls").check().limits_hit == (), "and removed"
    box.exec("head -c 40M /dev/zero > room").check()


def test_a_command_that_was_faster_than_the_watchdog_is_named(box: Sandbox) -> None:
    assert box.exec("head -c 200M /dev/zero > big").limits_hit == ("disk",)
    assert box.exec("rm big; echo ok").check().stdout == "ok\n"
    assert box.exec("head -c 10M /dev/zero > small").check().limits_hit == ()


def test_many_small_files_count(box: Sandbox) -> None:
    ended = box.exec("mkdir -p many; cd many; seq 100000 | xargs touch", timeout=120)
    assert ended.limits_hit == ("disk",)


def test_what_nobody_may_read_counts(box: Sandbox) -> None:
    """Nor do depth, names of a file, and a directory that is closed to its owner."""
    box.exec(
        "mkdir -p shut/in; head -c 20M /dev/zero > shut/in/big; ln shut/in/big shut/in/again; chmod 0 shut"
    ).check()
    assert 20 * MiB <= box.usage().disk < 25 * MiB
    box.exec(["python3", "-c", DEEP]).check()
    assert 32 * MiB <= box.usage().disk < 40 * MiB
    with box.snapshot() as snapshot:
        assert 32 * MiB <= sum(tree.disk_usage() for tree in snapshot.trees()) < 40 * MiB


def test_files_that_the_owner_writes_count(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No space left"):
        box.files.write_bytes("big", bytes(80 * MiB))
    box.files.remove("big")
    box.files.write_bytes("big", bytes(30 * MiB))
    (tmp_path / "tree").mkdir()
    for number in range(5):
        (tmp_path / f"tree/{number}").write_bytes(bytes(10 * MiB))
    with pytest.raises(FileAccessError, match="No space left"):
        box.files.upload(tmp_path / "tree", "tree")


def test_sealed_states_count(box: Sandbox) -> None:
    box.exec("head -c 40M /dev/zero > big").check()
    box.snapshot().close()
    assert box.exec("for i in $(seq 100); do head -c 5M /dev/zero > $i; sleep 0.1; done").limits_hit == ("disk",)
    with pytest.raises(InvalidValue, match=r"sealed states hold \d+ bytes of disk, and Limits\.disk is 67108864"):
        box.snapshot()
    box.reset()
    box.exec("head -c 50M /dev/zero > big").check()


def test_a_disk_that_is_nearly_full_makes_no_sandbox(layered: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uppers, "FLOOR", 1 << 60)
    with pytest.raises(HostError, match=r"the store's disk has \d+ MiB free.*image ls --sizes"):
        Sandbox.create(layered)
    assert mine() == []


# --- removal ---------------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        assert len(mine()) == 1
        snapshot = box.snapshot()
        assert len(mine()) == 2
        box.reset(snapshot)
        assert len(mine()) == 2, "what was forgotten is removed at once"
        (kid,) = box.fork()
        snapshot.close()
        assert len(mine()) == 4
    assert len(mine()) == 3, "the fork still shows what lies below it"
    kid.exec("ls; chmod 0 kept").check()
    kid.stop()
    assert mine() == []


def test_a_process_that_ends_with_open_snapshots_leaves_nothing(spec: ImageSpec) -> None:
    code = OWNER.replace("time.sleep(600)", "").replace("while :; do", "for i in 1; do")
    owner = subprocess.Popen([sys.executable, "-c", code, str(spec.layers[0])], stdout=subprocess.DEVNULL)
    assert owner.wait(PATIENCE) == 0
    assert owned(owner.pid) == []


def test_a_fork_leaves_its_parents_directories(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        child = os.fork()
        if child == 0:
            try:
                box.stop()
                uppers.sweep(include_live=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        box.exec("echo ok > file; rm file").check()
        assert len(mine()) == 1


def test_a_sandbox_that_cannot_be_made_leaves_nothing(layered: ImageSpec, tmp_path: Path) -> None:
    missing = ImageSpec("missing", (*layered.layers, tmp_path / "nowhere"))
    with pytest.raises(SandboxCreationError):
        Sandbox.create(missing)
    assert mine() == []


def test_files_of_other_ids_are_removed(layered: ImageSpec) -> None:
    """As an ordinary user these belong to ids of /etc/subuid, and only a user namespace can remove them."""
    if current_controller().launcher.ids == 1:
        pytest.skip("sandboxes have one id here: no newuidmap, or no range in /etc/subuid")
    with Sandbox.create(layered) as box:
        box.exec("mkdir -p his/deep; touch his/deep/file; chmod 700 his; chown -R 1234:1234 his").check()
        assert box.usage().disk > 0
    assert mine() == []


def test_sigkill_of_the_owner_leaves_nothing(spec: ImageSpec) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(spec.layers[0])], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "ready\n"
            assert len(owned(owner.pid)) == 6  # three sandboxes and a fork; what the fork and the snapshot sealed
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    runtime = registry.runtime_directory()

    def is_clean() -> bool:  # as the next owner does, once the sandboxes have ended
        reaper.reap(runtime)
        scratch.reap()
        return not owned(owner.pid)

    until(is_clean)
