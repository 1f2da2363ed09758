"""Very many sandboxes at once, and clocks that jump."""

from __future__ import annotations

import ast
import concurrent.futures
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adversarial.soak import below, mount_table

from minisandbox.host import registry
from minisandbox.launch.kernel import cgroups
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import shut_down
from minisandbox.types import ImageSpec, Limits, Outcome

ROOT = Path(__file__).resolve().parents[2]
# Where the time of day is told to people or written down. Everything that waits asks the monotonic clock.
TIMES_OF_DAY = {
    "cli/image/listing.py", "cli/quickstart.py", "cli/sandbox.py", "host/probes.py", "images/builder.py",
    "images/http_client.py", "images/image.py", "images/oci/prefetch.py", "images/oci/pull.py",
    "images/python/simple_api.py", "images/repair.py", "launch/jobs/changes.py", "models/capture/proxy.py",
    "models/engine/server.py", "models/http.py", "models/openai_responses.py", "rollouts/database.py",
    "rollouts/harbor_job.py", "rollouts/inspect_log.py", "rollouts/state.py", "runs/database.py", "runs/directory.py",
    "sandbox/core.py", "sandbox/engines/core.py", "store/collect.py", "store/disk/staging.py", "store/index.py",
    "store/store.py", "testing.py", "view/pages.py",
}  # fmt: skip
YEAR = 365 * 86400.0


# --- many ------------------------------------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """What the kernel holds for this process, those below it, and its user."""
    mine = below(os.getpid())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(mine),
        "mounts": len(mount_table()),
        "keys": len(Path("/proc/keys").read_text(encoding="ascii", errors="replace").splitlines()),
        "control groups": sum(
            len(os.listdir(directory))
            for name, directory in cgroups.owners(cgroups.find_roots())
            if name == registry.owner_name()
        ),
        "inotify": sum(link.count("inotify") for pid in mine | {os.getpid()} for link in links(pid)),
    }  # fmt: skip


def links(pid: int) -> list[str]:
    """What the descriptors of a process are (proc_pid_fd(5))."""
    try:
        return [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # gone, or not ours to look into
        return []


def settled(like: dict[str, int], seconds: float = 60.0) -> dict[str, int]:
    """What is held, as soon as it is no more than ``like``; at the latest after so many seconds."""
    give_up = time.monotonic() + seconds
    while True:
        now = held()
        if all(now[name] <= like[name] for name in like if name != "keys") or time.monotonic() > give_up:
            return now
        time.sleep(0.1)


@pytest.mark.kernel
@pytest.mark.parametrize("count", [128, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_sandboxes_live_at_once_and_leave_nothing(spec: ImageSpec, count: int) -> None:
    few = Limits(memory="64M", processes=16, disk="16M")
    with Sandbox.create(spec) as first:
        first.exec("true").check()
    before = settled(dict.fromkeys(held(), -1), seconds=2.0)
    boxes: list[Sandbox] = []

    def make(number: int) -> str:
        box = Sandbox.create(spec, limits=few)
        boxes.append(box)
        return box.exec(["echo", str(number)], timeout=300).stdout

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        try:
            assert list(pool.map(make, range(count))) == [f"{number}\n" for number in range(count)]
            assert sum(box.alive for box in boxes) == count
        finally:
            list(pool.map(lambda box: box.stop(), boxes))
    after = settled(before)
    # keys are counted for all that the user runs: a few may be somebody else's, one for each sandbox would be ours
    spare = {"keys": count // 4}
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name] + spare.get(name, 0)}
    assert grown == {}
    shut_down()


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_nothing_waits_by_the_time_of_day() -> None:
    found = set()
    package = ROOT / "src/minisandbox"
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
                found.add(str(path.relative_to(package)))
    assert found - TIMES_OF_DAY == set()


@pytest.mark.kernel
@pytest.mark.parametrize("jump", [YEAR, -YEAR], ids=["forward", "back"])
def test_a_clock_that_jumps_ends_nothing_early_or_late(
    spec: ImageSpec, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    real: Callable[[], float] = time.time
    with Sandbox.create(spec, limits=Limits(lifetime=3600)) as box:
        with box.start("sleep 600") as process:
            monkeypatch.setattr(time, "time", lambda: real() + jump)
            assert box.exec("sleep 0.2; echo done", timeout=60).stdout == "done\n"
            ended = box.exec("sleep 600", timeout=0.5)
            assert ended.outcome is Outcome.TIMEOUT
            assert ended.duration < 60
            process.kill()
        assert box.alive
        with Sandbox.create(spec, limits=Limits(lifetime=3600)) as other:
            assert other.exec("true").ok
            assert other.alive
