"""What happens to nodes: a full disk, a clock of its own, slowness, the end of what works there."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import waiting
from tests.cluster import cluster_tools as tools
from tests.cluster.cluster_tools import check_run, clean_hosts, live, make_tasks, rows, said, told
from tests.cluster.hosts import Host, Hosts

DEADLINE = 900.0
ATTEMPTS = 12
IMAGES = 3
_AN_HOUR_AHEAD = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + 3600.0
time.time_ns = lambda: _time_ns() + 3600 * 10**9
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("faults")
    make_tasks(found, IMAGES)
    return found


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Hosts]:
    """The second node's clock is an hour ahead; the third one's store has 24 MiB: an image does not fit."""
    clock = place / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(_AN_HOUR_AHEAD)
    path = os.pathsep.join(filter(None, (str(clock), os.environ.get("PYTHONPATH", ""))))
    with clean_hosts(place, 3, 2, extra={1: {"PYTHONPATH": path}}, disks={2: 24 << 20}) as found:
        yield found


@pytest.fixture(scope="module")
def expected(place: Path, cluster: Hosts) -> dict[str, tuple[object, ...]]:
    return tools.alone(cluster, place, DEADLINE)


def test_a_full_disk_and_clocks_apart(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = cluster.all[1].popen(sys.executable, "-c", "import time; print(time.time())", out=-1)
    here = cluster.all[0].popen(sys.executable, "-c", "import time; print(time.time())", out=-1)
    assert float(ahead.communicate()[0]) - float(here.communicate()[0]) > 3000
    with tools.driver(cluster, place, "run", ATTEMPTS) as running:
        assert running.wait(DEADLINE) == 0, (place / "run.err").read_text()
    check_run(place / "run", expected, ATTEMPTS)
    nodes = {node["name"]: node for node in said(place, "run")[-1]["nodes"]}
    with capsys.disabled():
        print(told(list(nodes.values())))
    full = cluster.all[2].address
    assert f"node {full} takes no more images" in (place / "run.err").read_text()
    assert nodes[full]["rollouts"] == 0
    assert nodes[cluster.all[1].address]["rollouts"] > 0
    waiting.until(lambda: not live())


def test_a_slow_node_holds_nobody_up(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with slowed(cluster.all[1]), tools.driver(cluster, place, "slow", ATTEMPTS) as running:
        assert running.wait(DEADLINE) == 0, (place / "slow.err").read_text()
    check_run(place / "slow", expected, ATTEMPTS)
    with capsys.disabled():
        print(told(said(place, "slow")[-1]["nodes"]))
    waiting.until(lambda: not live())


@contextmanager
def slowed(host: Host) -> Iterator[None]:
    """Let a host's processes run for a quarter of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.wait(0.1):
            host.namespace.signal(signal.SIGSTOP)
            over.wait(0.3)
            host.namespace.signal(signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        host.namespace.signal(signal.SIGCONT)


def test_what_works_on_a_node_is_killed(place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]]) -> None:
    with tools.driver(cluster, place, "killed", ATTEMPTS) as running:
        waiting.until(lambda: len(rows(place / "killed")) >= 3 or running.poll() is not None, DEADLINE)
        (actor,) = actors(cluster.all[1])
        os.kill(actor, signal.SIGKILL)
        assert running.wait(DEADLINE) == 0, (place / "killed.err").read_text()
    check_run(place / "killed", expected, ATTEMPTS)
    assert f"node {cluster.all[1].address} is lost" in (place / "killed.err").read_text()
    waiting.until(lambda: not live())


def actors(host: Host) -> list[int]:
    """What works for a driver on a host."""

    def name(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return ""

    return [pid for pid in host.namespace.processes() if name(pid).startswith("ray::NodeActor")]


def test_an_image_that_was_removed_from_a_store_meanwhile_is_made_again(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]]
) -> None:
    with tools.driver(cluster, place, "removed", ATTEMPTS) as running:
        waiting.until(lambda: bool(rows(place / "removed")) or running.poll() is not None, DEADLINE)
        words = (sys.executable, "-m", "minisandbox", "image", "rm", *expected)
        with cluster.all[1].popen(*words, out=-1, err=-1) as removing:  # those that are in use are refused
            removing.communicate(timeout=DEADLINE)
        assert running.wait(DEADLINE) == 0, (place / "removed.err").read_text()
    check_run(place / "removed", expected, ATTEMPTS)
    waiting.until(lambda: not live())
