"""The fake sandbox beyond the contract: it ends with its owner, leaves nothing, and refuses what it cannot give."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from tests.conformance.contract import a_while
from tests.waiting import PATIENCE, running, running_with, until

from minisandbox.errors import NotFound, Unsupported
from minisandbox.testing import FakeSandbox
from minisandbox.types import Change, ChangeKind, FileType, ImageSpec

OWNER = """
import sys, time
from minisandbox.testing import FakeSandbox
box = FakeSandbox.create()
long = sys.argv[1]
box.exec(f"setsid sleep {long} >/dev/null 2>&1 & sleep {long} >/dev/null 2>&1 &")
process = box.start(f"sleep {long}")
print(box.info().pid, flush=True)
time.sleep(600)
"""


def test_everything_of_it_ends_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**os.environ, "TMPDIR": str(tmp_path)}
    long = a_while()
    asleep = f"sleep\0{long}".encode()
    command = [sys.executable, "-c", OWNER, long]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        until(lambda: len(running_with(asleep)) == 3)
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE)
    until(lambda: not running_with(asleep) and not running(pid))
    assert list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with FakeSandbox.create():  # the next one clears up
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_no_directory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with FakeSandbox.create() as box:
        box.exec("mkdir -p d/e; echo > d/e/f; chmod 500 d").check()
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_it_to_its_maker() -> None:
    with FakeSandbox.create() as box:
        child = os.fork()
        if child == 0:
            box.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert box.exec("echo alive").stdout == "alive\n"


def test_a_fake_has_the_images_variables_and_lists_its_files() -> None:
    with FakeSandbox.create(ImageSpec("i", (), (("A", "1"),)), environment={"B": "2"}) as box:
        assert box.exec("echo $A$B; mkdir d; ln -s none d/link").stdout == "12\n"
        work = PurePosixPath(box.image.workdir)
        assert box.changes() == (
            Change(work / "d", ChangeKind.ADDED, FileType.DIRECTORY),
            Change(work / "d" / "link", ChangeKind.ADDED, FileType.SYMLINK),
        )


@pytest.mark.parametrize("verb", ["snapshot", "fork", "reset"])
def test_a_fake_has_no_copies(verb: str) -> None:
    with FakeSandbox.create() as box:
        with pytest.raises(Unsupported, match="a fake sandbox cannot do this"):
            getattr(box, verb)()
        with pytest.raises(Unsupported):
            box.start("cat", lifetime="sandbox")


def test_fakes_are_not_among_the_real() -> None:
    with FakeSandbox.create() as box:
        assert box.id.startswith("fake-")
        with pytest.raises(NotFound):
            super(FakeSandbox, FakeSandbox).attach(box.id)


def test_one_that_is_dropped_is_said_and_stopped() -> None:
    box = FakeSandbox.create()
    pid = box.info().pid
    with pytest.warns(ResourceWarning, match="never stopped"):
        del box
    until(lambda: not running(pid))
