"""What must not add up over many sandboxes, and what the dead must not keep."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from tests import waiting
from tests.adversarial.soak import below, mount_table

from minisandbox.errors import SandboxGone
from minisandbox.host import registry
from minisandbox.launch.kernel import cgroups
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel

CYCLES = 40
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"


def holdings() -> dict[str, int]:
    """What this process and all below it hold of things that run out."""
    mine = below(os.getpid())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(mine),
        "descriptors below": sum(count(f"/proc/{pid}/fd") for pid in mine - {os.getpid()}),
        "mounts": len(mount_table()),
        "shared memory": count("/dev/shm"),
        "segments": len(Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()),
        "control groups": sum(
            count(directory)
            for name, directory in cgroups.owners(cgroups.find_roots())
            if name == registry.owner_name()
        ),
        "records": count(registry.runtime_directory() / "owners" / registry.owner_name()),
    }  # fmt: skip


def count(directory: str | Path) -> int:
    try:
        return len(os.listdir(directory))
    except OSError:  # not ours to look into, or gone
        return 0


def settled() -> dict[str, int]:
    """The holdings, once what is ending has ended."""
    return waiting.settled(holdings)


def cycle(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        box.exec("sleep 60 & echo x > /dev/shm/x; ipcmk -M 4096 > /dev/null; true")
        box.files.write_text("/testbed/f", "x")
        box.shell().close()
        with box.start("cat") as process:
            process.write("x")


@pytest.mark.slow
def test_nothing_adds_up_over_many_sandboxes(spec: ImageSpec) -> None:
    for _ in range(3):  # what is made once and kept
        cycle(spec)
    before = settled()
    for _ in range(CYCLES):
        cycle(spec)
    after = settled()
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name] + 2}
    assert grown == {}


def test_an_owner_whose_pid_belongs_to_somebody_else_now_is_dead() -> None:
    runtime = registry.runtime_directory()
    stale = runtime / "owners" / f"{os.getpid()}-1"  # alive, but started at another time
    stale.mkdir(parents=True)
    record = {
        "id": "box-stale",
        "owner": os.getpid(),
        "image": "x",
        "created": 0.0,
        "pid": os.getpid(),
        "network": "off",
    }
    (stale / "box-stale.json").write_text(json.dumps(record), encoding="utf-8")
    assert "box-stale" not in [info.id for info in live_sandboxes()]
    assert not stale.exists()


def test_a_bomb_that_goes_on_keeps_nobody_from_asking_and_stopping(spec: ImageSpec) -> None:
    box = Sandbox.create(spec, limits=Limits(processes=64))
    bomb = box.start(["python3", "-c", BOMB])
    waiting.until(lambda: box.usage().cpu > 0.2)  # it is at work
    try:
        box.exec("true", timeout=5)  # it may be refused, or time out; it says so
    except SandboxGone:
        assert not box.alive
    began = time.monotonic()
    box.stop()
    assert time.monotonic() - began < waiting.PATIENCE
    bomb.close()
