"""What tests of clusters share: a task set whose replay resolves every second task, drivers, and what a run says."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import waiting
from tests.cluster.hosts import Command, Hosts, hosts
from tests.kernel.grading.conftest import BUG, FILES
from tests.vendored import vendor_pytest

from minisandbox.rollouts import RunReader
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.tasks import Form, PytestGrader, Task

LABEL = "calc__cluster"
ROOT = Path(__file__).resolve().parents[2]

Results = dict[tuple[str, int], tuple[object, ...]]


def make_tasks(place: Path, images: int) -> list[Task]:
    """Tasks of one repository whose sources differ, in ``tasks.jsonl``; what is replayed resolves every second one."""
    tasks = []
    for number in range(images):
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
            build=PythonRecipe(
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                source=LocalSource(root),
                environment=(("PYTHONPATH", "/testbed/vendor"),),
            ),
            grader=PytestGrader(timeout=120.0),
        )
        tasks.append(task if number % 2 == 0 else replace(task, patch=BUG.replace("a - b", "a * b")))
    (place / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))
    (place / "commands.json").write_text(json.dumps(["sleep 4", "sed -i 's/a - b/a + b/' calc/core.py"]))
    return tasks


def command(place: Path, run: str, attempts: int, *more: str) -> list[str]:
    """A rollout of all tasks, by replay."""
    return [
        sys.executable, "-m", "minisandbox", "rollout", str(place / "tasks.jsonl"), "--agent", "replay",
        "--recording", str(place / "commands.json"), "--n", str(attempts), "-o", str(place / run), "--json", *more,
    ]  # fmt: skip


def driver(cluster: Hosts, place: Path, run: str, attempts: int) -> Command:
    """Begin such a rollout on a cluster's first host."""
    return begin(cluster, place, run, *command(place, run, attempts, "--cluster", cluster.head))


def begin(cluster: Hosts, place: Path, run: str, *words: str) -> Command:
    """Begin a command on a cluster's first host; what it prints is in ``RUN.out`` and ``RUN.err``: pipes fill up."""
    with (place / f"{run}.out").open("w") as out, (place / f"{run}.err").open("w") as err:
        return cluster.all[0].popen(*words, out=out, err=err)


def alone(cluster: Hosts, place: Path, patience: float) -> dict[str, tuple[object, ...]]:
    """What one node says of each task: in the first host's store, without the cluster."""
    with begin(cluster, place, "alone", *command(place, "alone", 1)) as running:
        assert running.wait(patience) == 0, (place / "alone.err").read_text()
    found = {name: one for (name, _), one in results(place / "alone").items()}
    assert {one[2] for one in found.values()} == {0.0, 1.0}
    return found


def results(run: Path) -> Results:
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


def check_run(run: Path, expected: dict[str, tuple[object, ...]], attempts: int) -> None:
    """A run's results are those of one node."""
    assert results(run) == {(name, attempt): one for name, one in expected.items() for attempt in range(attempts)}


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


def said(place: Path, run: str) -> list[dict[str, Any]]:
    """What the last driver of a run printed."""
    return [json.loads(line) for line in (place / f"{run}.out").read_text().splitlines()]


def told(nodes: list[dict[str, Any]]) -> str:
    """What each node did, as tests print it."""
    return "".join(
        f"\n{node['name']}: {node['rollouts']} rollouts, {node['late']} late, {node['built']} images built"
        for node in nodes
    )


def live() -> list[str]:
    """Sandboxes of these tests."""
    return [box.id for box in Sandbox.list() if box.image.startswith(LABEL)]


@contextmanager
def clean_hosts(place: Path, count: int, sandboxes: int, **more: Any) -> Iterator[Hosts]:
    """As :func:`.hosts`; nothing is left of them: no process, no link, no mount, no directory, no sandbox."""
    links = _links()
    inside: list[tuple[int, str]] = []
    with hosts(place, count, sandboxes, **more) as found:
        try:
            yield found
        finally:
            inside += [(pid, _began(pid)) for host in found.all for pid in host.namespace.processes()]
    # numbers of processes and of namespaces come again
    waiting.until(lambda: not [pid for pid, began in inside if began and _began(pid) == began and waiting.running(pid)])
    assert links == _links()
    mounts = Path("/proc/self/mounts").read_text()
    assert str(found.temp) not in mounts
    assert not any(str(host.store) in mounts for host in found.all)
    assert not found.temp.exists()
    assert not live()


def _links() -> str:
    return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout


def _began(pid: int) -> str:
    """When a process began, in ticks; empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
