"""Three nodes of Ray on hosts of our own: the results are those of one node, whatever happens to nodes and drivers."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import waiting
from tests.cluster.hosts import Command, Hosts, hosts, missing
from tests.kernel.grading.conftest import BUG, FILES, vendor_pytest

from minisandbox.rollouts import RunReader
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import BuildSpec, Form, SourceSpec, Task

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.once,
    pytest.mark.alone,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

# `make test-cluster` has 300, 12 and 3, `make soak-cluster` ten repetitions
ROLLOUTS = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_ROLLOUTS", "16"))
IMAGES = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_IMAGES", "4"))
REPEAT = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_REPEAT", "1"))
PAUSE = float(os.environ.get("MINISANDBOX_TEST_CLUSTER_PAUSE", "4"))
SANDBOXES = 4
LABEL = "calc__cluster"
DEADLINE = 240.0 + 12.0 * ROLLOUTS  # seconds; for a machine that is slow and busy


def make_tasks(place: Path) -> None:
    """Tasks of one repository whose sources differ; what is replayed resolves every second one."""
    tasks = []
    for number in range(IMAGES):
        root = place / f"calc{number}"
        for name, text in {**FILES, "number.txt": str(number)}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        vendor_pytest(root / "vendor")
        task = Task(
            instance_id=f"{LABEL}-{number}",
            repo="example/calc",
            base_commit="",
            problem_statement="add() is wrong",
            patch=BUG,
            test_patch="",
            FAIL_TO_PASS=("tests/test_add.py::test_add",),
            PASS_TO_PASS=("tests/test_add.py::test_zero",),
            form=Form.SWESMITH,
            build=BuildSpec(
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                source=SourceSpec("local", (("path", str(root)),)),
                environment=(("PYTHONPATH", "/testbed/vendor"),),
            ),
            test_timeout=120.0,
        )
        tasks.append(task if number % 2 == 0 else replace(task, patch=BUG.replace("a - b", "a * b")))
    (place / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))
    (place / "commands.json").write_text(json.dumps(["sleep 0.3", "sed -i 's/a - b/a + b/' calc/core.py"]))


def command(place: Path, run: str, attempts: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "minisandbox", "rollout", str(place / "tasks.jsonl"), "--agent", "replay",
        "--recording", str(place / "commands.json"), "--n", str(attempts), "-o", str(place / run), "--json", *more,
    ]  # fmt: skip


def results(run: Path) -> dict[tuple[str, int], tuple[object, ...]]:
    """What a run says about each rollout."""
    with RunReader(run) as reader:
        patches = {(name, attempt): patch for name, attempt, patch in reader.patches()}
        return {
            (one.instance_id, one.attempt): (
                one.exit_status,
                one.verdict,
                one.reward,
                patches[one.instance_id, one.attempt],
            )
            for one in reader.summaries()
        }


def rows(run: Path) -> dict[tuple[str, int], str]:
    """The finished rows of a run that another process writes."""
    if not (run / "rollouts.sqlite").exists():
        return {}
    with closing(sqlite3.connect(run / "rollouts.sqlite", timeout=60)) as database:
        try:
            found = database.execute(
                "SELECT instance_id, attempt, ended || hex(trajectory) FROM rollouts WHERE reward NOT NULL"
            ).fetchall()
        except sqlite3.OperationalError:  # it has no table yet
            return {}
    return {(name, attempt): row for name, attempt, row in found}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cluster")
    make_tasks(found)
    return found


@pytest.fixture(scope="module")
def links() -> str:
    """What this machine's network is before there are hosts."""
    return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def cluster(place: Path, links: str) -> Iterator[Hosts]:
    assert links
    with hosts(place, 3, SANDBOXES) as found:
        yield found
        inodes = {host.namespace.inode for host in found.all}
    assert not [pid for pid in _processes() if _network(pid) in inodes], "a host is left behind"
    assert links == subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    assert not found.temp.exists()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _network(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


@pytest.fixture(scope="module")
def expected(place: Path, cluster: Hosts) -> dict[str, tuple[object, ...]]:
    """What one node says of each task, in the first host's store: without the cluster."""
    with cluster.all[0].popen(*command(place, "alone", 1), out=subprocess.PIPE, err=subprocess.PIPE) as alone:
        _, err = alone.communicate(timeout=DEADLINE)
    assert alone.returncode == 0, err
    found = {name: one for (name, _), one in results(place / "alone").items()}
    assert {one[2] for one in found.values()} == {0.0, 1.0}
    return found


def driver(cluster: Hosts, place: Path, run: str) -> Command:
    words = command(place, run, ROLLOUTS // IMAGES, "--cluster", cluster.head)
    with (place / f"{run}.out").open("w") as out, (place / f"{run}.err").open("w") as err:  # pipes fill up
        return cluster.all[0].popen(*words, out=out, err=err)


def said(place: Path, run: str) -> list[dict[str, Any]]:
    """What the last driver of a run printed."""
    return [json.loads(line) for line in (place / f"{run}.out").read_text().splitlines()]


def check_run(place: Path, run: str, expected: dict[str, tuple[object, ...]]) -> None:
    wanted = {(name, attempt): one for name, one in expected.items() for attempt in range(ROLLOUTS // IMAGES)}
    assert results(place / run) == wanted


def live() -> list[str]:
    return [box.id for box in Sandbox.list() if box.image.startswith(LABEL)]


def test_three_nodes_say_what_one_does_and_each_layer_crosses_once(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with driver(cluster, place, "together") as running:
        assert running.wait(DEADLINE) == 0, (place / "together.err").read_text()
    check_run(place, "together", expected)
    nodes = said(place, "together")[-1]["nodes"]
    with capsys.disabled():
        for node in nodes:
            print(
                f"\n{node['name']}: {node['rollouts']} rollouts, {node['built']} images made or found, "
                f"{node['fetched']} came: {len(node['layers'])} layers, {node['bytes']} B, {node['wire']} on the wire",
                end="",
            )
    assert sum(node["rollouts"] for node in nodes) == ROLLOUTS
    assert sum(node["built"] for node in nodes) == IMAGES
    assert all(count == 1 for node in nodes for count in node["layers"].values()), nodes
    assert sum(node["fetched"] for node in nodes) > 0
    assert all(0 < node["wire"] < node["bytes"] for node in nodes if node["fetched"])
    waiting.until(lambda: not live())


@pytest.mark.parametrize("number", range(REPEAT))
def test_a_node_killed_one_paused_and_the_driver_killed(
    place: Path, cluster: Hosts, expected: dict[str, tuple[object, ...]], number: int
) -> None:
    chance, run = random.Random(number), f"disturbed{number}"
    victim, paused = cluster.all[2], cluster.all[1]
    with driver(cluster, place, run) as first:
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
    with driver(cluster, place, run) as second:
        assert second.wait(DEADLINE) == 0, (place / f"{run}.err").read_text()
    check_run(place, run, expected)
    after = rows(place / run)
    assert before.items() <= after.items(), "what was finished was done again, or lost"
    assert next(one["summary"] for one in said(place, run) if "summary" in one)["resumed"] == len(before)
    waiting.until(lambda: not live())
    cluster.wait(3)
