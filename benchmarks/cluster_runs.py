"""300 rollouts on three Ray nodes of this machine, compared with three separate runs of 100 at the same time.

The agents sleep ``--seconds`` in real sandboxes; each tenth then repairs the code, so that rewards differ. Prints the
times, the driver's CPU per rollout, and whether the results are equal. The time of joining, in which Ray imports its
client and serializers, is printed apart: it does not depend on the number of rollouts. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.cluster_tools import make_tasks, results

from minisandbox.agents import Ending, Session
from minisandbox.images import Image, build
from minisandbox.rollouts import Batch, Budgets, Setup
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.cluster.joining import SANDBOXES, import_ray
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet

NODES = 3


class Sleeper:
    """An agent that sleeps, and sometimes repairs the code.

    Args:
        seconds: how long it sleeps.
    """

    name = "sleeper"
    needs_model = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, task: Task, session: Session) -> Ending:  # noqa: ARG002 - the protocol's
        """Sleep in the sandbox."""
        await session.box.exec(f"sleep {self._seconds}", timeout=self._seconds + 120)
        if session.attempt % 10 == 0:
            await session.box.exec("sed -i 's/a - b/a + b/' calc/core.py")
        return Ending("submitted")


def image_of(task: Task) -> Image:
    """Build a task's image, or find it in the store."""
    return build(task.recipe(), store=Store.open(), name=task.instance_id)


def run(tasks: Sequence[Task], args: argparse.Namespace, out: Path, cluster: Cluster | None = None) -> dict[str, float]:
    """Run 100 rollouts of each task; return the seconds, and the CPU seconds of this process for them and to join."""
    setup, budgets = Setup(agent=Sleeper(args.seconds)), Budgets(workers=args.sandboxes, gradings=1)
    cpu = time.process_time()
    crew = None if cluster is None else cluster.crew(setup, budgets)
    if crew is not None:
        import_ray().put(None)  # Ray imports its serializers with the first message
    batch = Batch(
        tasks, setup, out, image_of=None if crew else image_of, attempts=args.rollouts // NODES, budgets=budgets,
        crew=crew,
    )  # fmt: skip
    began, joined = time.monotonic(), time.process_time()
    asyncio.run(batch.run())
    return {"seconds": time.monotonic() - began, "cpu": time.process_time() - joined, "joining": joined - cpu}


def separate(place: Path, args: argparse.Namespace) -> float:
    """Run three batches at once, each in a process of its own; return the seconds of the slowest."""
    words = (sys.executable, "-m", __spec__.name, "--seconds", str(args.seconds), "--rollouts", str(args.rollouts),
             "--sandboxes", str(args.sandboxes))  # fmt: skip
    processes = [
        subprocess.Popen((*words, "--place", str(place), "--only", str(number)), stdout=subprocess.PIPE, text=True)
        for number in range(NODES)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return max(float(json.loads(output)["seconds"]) for output in outputs)


def together(tasks: Sequence[Task], place: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run one batch on three Ray nodes."""
    os.environ.update(RAY_worker_niceness="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0",
                      RAY_enable_worker_prestart="0")  # fmt: skip
    from ray.cluster_utils import Cluster as Nodes  # noqa: PLC0415 - an extra

    options = {"resources": {SANDBOXES: args.sandboxes}, "num_cpus": 1, "object_store_memory": 100 << 20}
    nodes = Nodes(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            nodes.add_node(**options)
        nodes.wait_for_nodes()
        cluster = Cluster(address=nodes.address, notice=print)
        numbers = run(tasks, args, place / "together", cluster)
        print(", ".join(f"{report.rollouts} rollouts and {report.built} builds" for report in cluster.reports))
        return numbers
    finally:
        nodes.shutdown()


def main() -> None:
    """Read the command line, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long an agent sleeps")
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--sandboxes", type=int, default=25, help="sandboxes of each node")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        tasks = list(TaskSet.load(str(args.place / "tasks.jsonl"), allow_local_sources=True))
        print(json.dumps(run(tasks[args.only : args.only + 1], args, args.place / f"alone{args.only}")))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["MINISANDBOX_STORE"] = str(place / "store")
        tasks = make_tasks(place, NODES)
        for task in tasks:
            image_of(task)
        alone = separate(place, args)
        one = together(tasks, place, args)
        expected = {key: row for number in range(NODES) for key, row in results(place / f"alone{number}").items()}
        rewards = [row[2] for row in expected.values()]
        same = results(place / "together") == expected
        print(
            f"{NODES} separate runs: {alone:.1f} s; {args.rollouts} rollouts on {NODES} nodes: {one['seconds']:.1f} s"
        )
        print(
            f"ratio {one['seconds'] / alone:.2f}; driver CPU {1000 * one['cpu'] / args.rollouts:.2f} ms per rollout, "
            f"and {one['joining']:.2f} s once to join"
        )
        print(f"results {'equal' if same else 'DIFFER'}: {rewards.count(1.0)} resolved, {rewards.count(0.0)} not")


if __name__ == "__main__":
    main()
