"""Attacks on the controller by way of what it asks a workspace: answers without end, that fail, or that come late."""

from __future__ import annotations

import errno

import pytest
from tests.waiting import PATIENCE

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel

DEEP = """
import os, sys
depth, files = int(sys.argv[1]), int(sys.argv[2])
os.mkdir("/tmp/deep")
os.chdir("/tmp/deep")
for _ in range(depth):
    os.mkdir("x" * 250)
    os.chdir("x" * 250)
for number in range(files):
    open(str(number), "w").close()
"""


def test_long_paths_of_many_changes_come_in_frames_that_are_taken(box: Sandbox) -> None:
    box.exec(["python3", "-c", DEEP, "100", "1000"])
    assert len(box.changes()) == 1000 + 100 + 1


def test_changes_whose_paths_take_gigabytes_are_an_error(box: Sandbox) -> None:
    box.exec(["python3", "-c", DEEP, "180", "4000"])
    with pytest.raises(FileAccessError) as caught:
        box.changes()
    assert caught.value.errno == errno.EFBIG


CHURN = """
import contextlib, os
os.mkdir("/tmp/churn")
os.chdir("/tmp/churn")
print("ready", flush=True)
while True:
    for act in (lambda: os.makedirs("d/e/f"), lambda: os.removedirs("d/e/f"), lambda: os.mkfifo("d"),
                lambda: os.unlink("d"), lambda: os.symlink("/etc", "d"), lambda: os.unlink("d")):
        os.chdir("/tmp/churn") if os.path.isdir("/tmp/churn") else os.makedirs("/tmp/churn")
        with contextlib.suppress(OSError):
            act()
"""


@pytest.mark.slow
def test_changes_of_a_workspace_at_work_are_told(box: Sandbox) -> None:
    box.files.write_text("/root/kept", "")
    with box.start(["python3", "-c", CHURN]) as process:
        next(process.events())
        for _ in range(100):
            assert any(str(change.path) == "/root/kept" for change in box.changes())


def test_a_long_target_of_many_names_does_not_fill_the_controllers_memory(box: Sandbox) -> None:
    script = """
import os
os.mkdir("/tmp/names")
os.chdir("/tmp/names")
os.symlink("x" * 4000, "0")
for number in range(1, 20000):
    os.link("0", str(number), follow_symlinks=False)
"""
    box.exec(["python3", "-c", script])
    with pytest.raises(FileAccessError) as caught:
        box.files.list("/tmp/names")
    assert caught.value.errno == errno.EFBIG


def test_a_patch_that_grows_meanwhile_does_not_fill_the_controllers_memory(box: Sandbox) -> None:
    git = "git -c user.name=a -c user.email=a@b"
    box.exec(f"mkdir /repo && cd /repo && git init -q && {git} commit -q --allow-empty -m x && echo 1 > file")
    grow = 'while :; do for p in /tmp/patch.*/patch; do if [ -s "$p" ]; then truncate -s 60G "$p"; fi; done; done'
    with box.start(grow), pytest.raises(FileAccessError) as caught:
        patch_again_and_again(box)
    assert caught.value.errno == errno.EFBIG


def patch_again_and_again(box: Sandbox) -> None:
    for _ in range(100):  # whoever interferes has to be in time once
        box.patch("/repo", base="HEAD")


@pytest.mark.parametrize(
    "row",
    ["bob:x:\u00b2:1:::", f"bob:x:{'9' * 5000}:1:::", "bob:x:1:\u0664:::", "bob:x:0:0::/a\0b:"],
    ids=["superscript", "long", "other digits", "nul"],
)
def test_a_user_table_of_nonsense_is_not_a_killed_command(box: Sandbox, row: str) -> None:
    box.files.write_text("/etc/passwd", f"{row}\n")
    with pytest.raises(InvalidValue):
        box.exec("true", user="bob")


def test_a_shell_outlives_reports_of_nonsense(box: Sandbox) -> None:
    with box.shell() as shell:
        forged = r"printf '1\0/tmp\0%05000d\0' 7 >&201; printf 'ready\0/%09000000d\0\0' 7 >&201; echo done"
        result = shell.run(forged, timeout=PATIENCE)
        assert result.stdout == "done\n"
        assert len(str(shell.run("true", timeout=PATIENCE).cwd)) < 4096


ORPHANS = """
import os, signal, time
parent = os.getppid()
for _ in range(1500):
    if os.fork() == 0:
        signal.pause()
os.kill(parent, signal.SIGKILL)
signal.pause()
"""


def test_thousands_of_orphans_hold_no_other_command(spec: ImageSpec) -> None:
    """Pid 1 ends what a killed worker leaves; it looked for more after each of them."""
    with Sandbox.create(spec, limits=Limits(processes=2000)) as box:
        box.exec(["python3", "-c", ORPHANS], timeout=PATIENCE)
        assert box.exec("true", timeout=PATIENCE).ok


TERMINALS = """
import os
count = 0
try:
    while True:
        os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
        count += 1
except OSError as error:
    print(count, error.errno)
"""


def test_one_sandbox_does_not_take_all_terminals_of_the_machine(box: Sandbox) -> None:
    count, number = map(int, box.exec(["python3", "-c", TERMINALS]).stdout.split())
    assert (count <= 256, number) == (True, errno.ENOSPC)
