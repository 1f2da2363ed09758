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

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.testing import FakeSandbox
from minisandbox.types import ImageSpec, Mount, Network

OWNER = """
import sys, time
from minisandbox.testing import FakeSandbox
box = FakeSandbox.create()
long = sys.argv[1]
box.exec(f"setsid sleep {long} >/dev/null 2>&1 & sleep {long} >/dev/null 2>&1 &")
process = box.start(f"sleep {long}", lifetime="sandbox")
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
        assert len(list(tmp_path.iterdir())) == 2  # a workdir, and what the image has
    assert list(tmp_path.iterdir()) == []


def test_no_directory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with FakeSandbox.create() as box:
        box.exec("mkdir -p d/e; echo > d/e/f; chmod 500 d").check()
        snapshot = box.snapshot()
        for kid in box.fork(2):
            kid.stop()
        box.reset(snapshot)
        assert len(list(tmp_path.iterdir())) >= 2
    del box, kid, snapshot
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_it_to_its_maker() -> None:
    with FakeSandbox.create() as box:
        child = os.fork()
        if child == 0:
            box.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert box.exec("echo alive").stdout == "alive\n"


def test_what_the_image_holds_at_its_workdir_is_there(tmp_path: Path) -> None:
    for layer, text in (("one", "below"), ("two", "above")):
        (tmp_path / layer / "testbed").mkdir(parents=True)
        (tmp_path / layer / "testbed" / "f").write_text(text)
        (tmp_path / layer / "testbed" / layer).write_text(layer)
    image = ImageSpec("i", (tmp_path / "one", tmp_path / "two"), (("A", "1"),), PurePosixPath("/testbed"))
    with FakeSandbox.create(image) as box:
        assert box.exec("cat f; ls; echo $A").stdout == "abovef\none\ntwo\n1\n"
        assert box.changes() == ()


def test_what_no_fake_can_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        FakeSandbox.create(mounts=[Mount(tmp_path, PurePosixPath("/data"))])
    with pytest.raises(InvalidValue):
        FakeSandbox.create(network=Network.host())
    with pytest.raises(InvalidValue):
        FakeSandbox.create(upper=tmp_path)


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
