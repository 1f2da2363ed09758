"""Commands in real sandboxes, beyond the contract: tests/conformance/cases_*.py hold what every sandbox promises."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.types import ImageSpec, Limits, Outcome

pytestmark = pytest.mark.kernel


def test_home_is_roots(box: Sandbox) -> None:
    assert box.exec("echo $HOME").stdout == "/root\n"


def test_an_idle_sandbox_is_one_process_and_wakes_up(box: Sandbox) -> None:
    threads = [threading.Thread(target=box.exec, args=("sleep 0.1",)) for _ in range(4)]
    for _ in range(2):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads = [threading.Thread(target=box.exec, args=("sleep 0.1",)) for _ in range(4)]
        pid = next(record.pid for record in live_sandboxes() if record.id == box.id)
        children = Path(f"/proc/{pid}/task/{pid}/children")
        until(lambda children=children: not children.read_text(encoding="ascii"))  # type: ignore[misc] # a worker's patience is a second
    assert box.exec("echo awake", timeout=PATIENCE).stdout == "awake\n"


def test_limits_hold_for_every_command(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(processes=40, open_files=64, file_size="1M", disk="8M")) as box:
        assert box.exec("ulimit -Hn; ulimit -Hc").stdout.split() == ["64", "0"]
        bomb = box.exec("for i in $(seq 100); do sleep 2 & done; true", timeout=30)
        assert "Resource temporarily unavailable" in bomb.stderr
        refused = box.exec(["true"])
        assert refused.exit_code in (0, 126)
        until(lambda: box.exec(["true"]).ok)
        assert box.exec("head -c 2M /dev/zero > /tmp/big").exit_code != 0
        full = box.exec("for i in 1 2 3 4 5 6 7 8 9 10; do head -c 1000000 /dev/zero > /testbed/$i || exit 9; done")
        assert full.exit_code == 9
        assert "No space left" in full.stderr


@pytest.mark.parametrize("number", ["STOP", "KILL"])
def test_a_worker_that_is_attacked_from_inside_loses_its_command_and_nothing_else(box: Sandbox, number: str) -> None:
    script = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    time.sleep(300)
os.kill(os.getppid(), signal.SIG{number})
time.sleep(300)
"""
    result = box.exec(["python3", "-c", script], timeout=PATIENCE)
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, 9)
    assert box.exec("echo after", timeout=PATIENCE).stdout == "after\n"
    until(lambda: "time.sleep" not in box.exec("ps -eo args").stdout)
