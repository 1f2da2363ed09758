"""Three nodes of Ray on hosts of our own: the results are those of one node, whatever happens to nodes and drivers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import waiting
from tests.cluster import cluster_tools as tools
from tests.cluster.cluster_tools import check_run, clean_hosts, live, make_tasks, rows, said, told
from tests.cluster.hosts import Hosts

# `make test-cluster` has 300, 12 and 3, `make soak-cluster` ten repetitions
ROLLOUTS = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_ROLLOUTS", "16"))
IMAGES = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_IMAGES", "4"))
REPEAT = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_REPEAT", "1"))
PAUSE = float(os.environ.get("MINISANDBOX_TEST_CLUSTER_PAUSE", "4"))
SANDBOXES = 4
ATTEMPTS = ROLLOUTS // IMAGES
DEADLINE = 240.0 + 12.0 * ROLLOUTS  # seconds; for a machine that is slow and busy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cluster")
    make_tasks(found, IMAGES)
    return found


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Hosts]:
    with clean_hosts(place, 3, SANDBOXES) as found:
        yield found


@pytest.fixture(scope="module")
def expected(place: Path, cluster: Hosts) -> dict[str, tuple[object, ...]]:
    """What one node says of each task, in the first host's store: without the cluster."""
    return tools.alone(cluster, place, DEADLINE)


def test_three_nodes_give_the_results_of_one(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with tools.driver(cluster, place, "together", ATTEMPTS) as running:
        assert running.wait(DEADLINE) == 0, (place / "together.err").read_text()
    check_run(place / "together", expected, ATTEMPTS)
    nodes = said(place, "together")[-1]["nodes"]
    with capsys.disabled():
        print(told(nodes))
    assert sum(node["rollouts"] for node in nodes) == ROLLOUTS
    assert sum(node["late"] for node in nodes) == 0
    assert all(node["built"] <= IMAGES for node in nodes)
    if ROLLOUTS >= 48:  # fewer may have ended before the other nodes have built an image
        assert all(node["rollouts"] > 0 for node in nodes)
    waiting.until(lambda: not live())


@pytest.mark.parametrize("number", range(REPEAT))
def test_a_node_killed_one_paused_and_the_driver_killed(
    place: Path,
    cluster: Hosts,
    expected: dict[str, tuple[object, ...]],
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance, run = random.Random(number), f"disturbed{number}"
    victim, paused = cluster.all[2], cluster.all[1]
    with tools.driver(cluster, place, run, ATTEMPTS) as first:
        enough = chance.randint(1, max(1, ROLLOUTS // 3))
        waiting.until(lambda: len(rows(place / run)) >= enough or first.poll() is not None, DEADLINE)
        victim.namespace.signal(signal.SIGKILL)
        paused.namespace.signal(signal.SIGSTOP)
        time.sleep(PAUSE)  # that long, whatever the others do
        paused.namespace.signal(signal.SIGCONT)
        enough = min(len(rows(place / run)) + chance.randint(1, max(1, ROLLOUTS // 3)), ROLLOUTS - 1)
        waiting.until(lambda: len(rows(place / run)) >= enough or first.poll() is not None, DEADLINE)
        first.send_signal(signal.SIGKILL)
        first.wait(60)
    before = rows(place / run)
    assert before
    waiting.until(lambda: not live(), 120)
    cluster.start(2)
    with tools.driver(cluster, place, run, ATTEMPTS) as second:
        assert second.wait(DEADLINE) == 0, (place / f"{run}.err").read_text()
    check_run(place / run, expected, ATTEMPTS)
    after = rows(place / run)
    assert before.items() <= after.items(), "what was finished was done again, or lost"
    assert next(one["summary"] for one in said(place, run) if "summary" in one)["resumed"] == len(before)
    waiting.until(lambda: not live())
    with capsys.disabled():
        print(f"\nrepetition {number}: {len(before)} of {ROLLOUTS} were finished when the driver was killed", end="")
        print(told(said(place, run)[-1]["nodes"]))
    cluster.wait(3)
