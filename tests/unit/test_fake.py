"""The fake sandbox beyond the contract: it ends with its owner, leaves nothing, and refuses what it cannot give."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.sandbox.testing import FakeSandbox
from minisandbox.types import ImageSpec, Mount, Network

OWNER = """
import os, sys, time
from minisandbox.sandbox.testing import FakeSandbox
box = FakeSandbox.create()
box.exec("setsid sleep 297.125 >/dev/null 2>&1 & sleep 297.125 >/dev/null 2>&1 &")
process = box.start("sleep 297.125", lifetime="sandbox")
print(box.info().pid, flush=True)
time.sleep(60)
"""


def descendants_asleep() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if b"sleep\x00297.125" in command:
            found.append(name)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_everything_of_it_ends_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=settings) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        wait_for(lambda: len(descendants_asleep()) == 3)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    wait_for(lambda: not descendants_asleep() and not os.path.exists(f"/proc/{pid}"))
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
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
