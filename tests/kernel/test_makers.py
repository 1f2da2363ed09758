"""The processes that make sandboxes: what their death costs, and what they leave in what they make."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from minisandbox.errors import SandboxCreationError
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

pytestmark = pytest.mark.kernel


def status(pid: int) -> dict[str, str]:
    rows = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return {name: value.strip() for name, _, value in rows}


def makers(box: Sandbox) -> set[int]:
    """The makers beside the zygote that is the parent of a sandbox's first process."""
    zygote = status(box.info().pid)["PPid"]
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            rows = status(int(name))
            if rows["PPid"] == zygote and rows["Name"] == "minisandbox-mak" and not rows["State"].startswith("Z"):
                found.add(int(name))
    return found


def test_makers_that_are_killed_are_replaced(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        before = makers(box)
        assert len(before) >= 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + 60
        while len(after := makers(box)) < len(before) or after & before:
            assert time.monotonic() < give_up, (before, after)
            time.sleep(0.02)
        with Sandbox.create(spec) as other:
            assert other.exec("echo made").stdout == "made\n"
        assert box.exec("echo alive").stdout == "alive\n"


def test_a_sandbox_is_made_or_its_creation_fails_whenever_makers_die(spec: ImageSpec) -> None:
    results: list[str] = []

    def create() -> None:
        for _ in range(10):
            try:
                with Sandbox.create(spec) as made:
                    results.append(made.exec("echo made").stdout.strip())
            except SandboxCreationError as error:
                results.append("ended while it was made" if "ended while it was made" in str(error) else str(error))

    with Sandbox.create(spec) as box:
        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            for pid in makers(box):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert set(results) <= {"made", "ended while it was made"}
        assert len(results) == 40
        assert box.exec("echo alive").stdout == "alive\n"


def test_a_maker_that_fails_makes_the_next_as_if_nothing_had_been(spec: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(spec) as box:
        for _ in range(3 * len(makers(box))):  # each of them, several times
            with pytest.raises(SandboxCreationError, match="no-such-layer"):
                Sandbox.create(ImageSpec("x", (*spec.layers, tmp_path / "no-such-layer")))
        held = [len(os.listdir(f"/proc/{pid}/fd")) for pid in makers(box)] if os.geteuid() == 0 else []
        for _ in range(2 * len(makers(box))):
            with Sandbox.create(spec) as other:
                assert other.exec("hostname; id -u; ls /testbed | wc -l").stdout.split()[1:] == ["0", "0"]
        assert held == [len(os.listdir(f"/proc/{pid}/fd")) for pid in makers(box)][: len(held)]


def test_nothing_of_a_maker_is_inside(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        assert box.exec("echo /proc/[0-9]*").stdout.split()[:1] == ["/proc/1"]
        ours = status(box.info().pid)
        for pid in makers(box):
            assert os.stat(f"/proc/{pid}").st_uid in (0, os.geteuid())
            assert status(pid)["NSpid"].split()[:1] != ours["NSpid"].split()[:1]
            if os.geteuid() == 0:  # nobody else may look
                for name in ("mnt", "uts", "net", "pid", "user"):
                    assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/{box.info().pid}/ns/{name}")
