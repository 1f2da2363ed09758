"""How far one driver goes: 64 nodes that only pretend, 20,000 rollouts, and the real driver with its database.

Everything of the driver is real: its queue, its decisions, the run's database. A node is a timer: a rollout takes as
long as ``--seconds`` says, an image a second to make and half a second to take over; each result has a trajectory of
the size that is asked for. Ray's own share is measured apart (docs/scaling.md).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.agents import OracleAgent
from minisandbox.grade import Verdict
from minisandbox.rollouts import Batch, Setup, Summary
from minisandbox.rollouts.cluster import Fleet, Resources
from minisandbox.rollouts.cluster.node import Moved, Node, Status
from minisandbox.rollouts.cluster.on_ray import RayNode, import_ray
from minisandbox.rollouts.cluster.workloads import RolloutWorkload
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.tasks import Form, Task
from minisandbox.trajectories import Timings


class FakeNode:
    """A node that only waits."""

    def __init__(self, name: str, sandboxes: int, seconds: float, size: int) -> None:
        self.name, self.resources = name, Resources(sandboxes, 2)
        self.images: dict[str, str] = {}
        self._seconds, self._trajectory = seconds, random.randbytes(size)
        self._room = asyncio.Semaphore(sandboxes)
        self.running = 0

    async def build(self, task: Task) -> str:
        """Pretend to make an image."""
        await asyncio.sleep(1.0)
        return f"key of {task.instance_id}"

    async def fetch(self, task: Task, source: Node) -> Moved:  # noqa: ARG002 - a node has it
        """Pretend to take one over."""
        await asyncio.sleep(0.5)
        return Moved((task.instance_id,), 1 << 20, 1 << 18)

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None) -> Packed:  # noqa: ARG002 - the same
        """Wait, and return a record."""
        async with self._room:
            self.running += 1
            await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
            self.running -= 1
        summary = Summary(
            task.instance_id,
            attempt,
            "submitted",
            Verdict.RESOLVED,
            "resolved",
            "",
            Timings(),
            reward=1.0,
            agent="oracle",
        )
        return Packed(summary, b"a patch", self._trajectory)

    async def return_jobs(self, most: int) -> None:
        """Nothing waits here."""

    async def heartbeat(self, left: int) -> Status:  # noqa: ARG002 - nobody asks
        """Be there."""
        return Status()

    async def close(self) -> None:
        """Nothing is to be ended."""


class FakeActor:
    """A node that only waits, in a process of Ray's."""

    def __init__(self, name: str, sandboxes: int, seconds: float, size: int) -> None:
        self._made = (name, sandboxes, seconds, size)
        self._node: FakeNode | None = None

    async def call(self, method: str, *values: object) -> tuple[bool, object]:
        """As the real actor's."""
        self._node = self._node or FakeNode(*self._made)
        if method in ("fetch", "heartbeat"):
            return True, Moved((str(values[0]),), 1 << 20, 1 << 18) if method == "fetch" else Status()
        return True, await getattr(self._node, method)(*values)


def ray_nodes(args: argparse.Namespace) -> list[RayNode]:
    """Nodes of a Ray on this machine, which pretend behind real calls."""
    ray = import_ray()
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False,
             object_store_memory=200 << 20)  # fmt: skip
    kind = ray.remote(FakeActor).options(num_cpus=0, max_concurrency=4 * args.sandboxes)
    made = (f"node{number}" for number in range(args.nodes))
    return [
        RayNode(name, Resources(args.sandboxes, 2), {}, kind.remote(name, args.sandboxes, args.seconds, args.size))
        for name in made
    ]


class FakeFinder:
    """Nodes that are there from the beginning."""

    def __init__(self, nodes: Sequence[FakeNode | RayNode]) -> None:
        self.nodes = {node.name: node for node in nodes}

    async def ids(self) -> set[str]:
        """Return all nodes."""
        return set(self.nodes)

    async def start_worker(self, one: str) -> FakeNode | RayNode:
        """Return one."""
        return self.nodes[one]

    async def close(self) -> None:
        """Nothing is to be ended."""


def make_tasks(count: int, repositories: int) -> list[Task]:
    """Tasks of some repositories, each with lists of tests as real ones have them."""
    first = Task(
        instance_id="scale-0",
        repo="example/0",
        base_commit="",
        problem_statement="It is slow.",
        patch="diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n",
        test_patch="",
        FAIL_TO_PASS=("tests/test_f.py::test_f",),
        PASS_TO_PASS=tuple(f"tests/test_f.py::test_{number}" for number in range(100)),
        form=Form.SWESMITH,
        build=PythonRecipe(python="3.11", source=LocalSource(Path("/nowhere"))),
    )
    return [
        replace(first, instance_id=f"scale-{number}", repo=f"example/{number % repositories}")
        for number in range(count)
    ]


async def measure(args: argparse.Namespace, out: Path) -> None:
    """Run the batch and print what it took."""
    nodes: Sequence[FakeNode | RayNode] = (
        ray_nodes(args)
        if args.ray
        else [FakeNode(f"node{number}", args.sandboxes, args.seconds, args.size) for number in range(args.nodes)]
    )
    setup = Setup(agent=OracleAgent())
    fleet = Fleet(FakeFinder(nodes), RolloutWorkload(setup), notice=print)  # type: ignore[arg-type] # it has what a node has
    tasks = make_tasks(args.rollouts // args.attempts, args.repositories)
    batch = Batch(tasks, setup, out, attempts=args.attempts, crew=fleet)
    most = full = 0
    lag = 0.0

    async def look() -> None:
        nonlocal most, full, lag
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            lag = max(lag, time.monotonic() - before - 0.1)
            now = sum(getattr(node, "running", 0) for node in nodes)
            most = max(most, now)
            full += now >= args.nodes * args.sandboxes

    looking = asyncio.ensure_future(look())
    cpu, wall = time.process_time(), time.monotonic()
    found = await batch.run()
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    looking.cancel()
    each = cpu / len(found)
    room = args.nodes * args.sandboxes
    print(f"{len(found)} rollouts of {args.seconds:g} s on {args.nodes} nodes with {room} sandboxes: {wall:.0f} s")
    in_use = "" if args.ray else f"most at once {most}, all in use for {full / 10:.0f} s; "
    print(f"{in_use}the event loop was late by {lag:.2f} s at most")
    print(f"CPU of the driver: {cpu:.1f} s, {1000 * each:.2f} ms for each rollout (with the nodes' timers)")
    print(f"one CPU ends {1 / each:.0f} rollouts a second: {1 / each * 300:.0f} at once where each takes 5 minutes")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("nodes", 64), ("sandboxes", 128), ("rollouts", 20_000), ("attempts", 8), ("repositories", 128),
        ("size", 20_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ray", action="store_true", help="reach the nodes through Ray, on this machine")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(measure(args, Path(place, "run")))


if __name__ == "__main__":
    main()
