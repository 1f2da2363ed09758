"""How far one driver goes: 64 simulated nodes, 20,000 rollouts, and the real driver with its database.

Everything of the driver is real: its queue, its decisions, the run's database. A node is a timer: a rollout takes
``--seconds``, an image a second; each result has a trajectory of ``--size`` bytes. ``--ray`` adds Ray's own share.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from minisandbox.agents import OracleAgent
from minisandbox.errors import MiniSandboxError
from minisandbox.grade import Verdict
from minisandbox.rollouts import Batch, Setup, Summary
from minisandbox.rollouts.cluster import Driver, Resources
from minisandbox.rollouts.cluster.joining import RayNode, import_ray
from minisandbox.rollouts.cluster.node import Order, Report
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.jobs import Key, Outcome
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.tasks import Form, Task
from minisandbox.trajectories import Timings


class FakeNode:
    """A node whose rollouts only wait."""

    def __init__(self, name: str, sandboxes: int, seconds: float, size: int) -> None:
        self.name, self.capacity = name, sandboxes
        self.resources = Resources(sandboxes, 2)
        self.images: frozenset[str] = frozenset()
        self._seconds, self._trajectory = seconds, random.randbytes(size)
        self._changed = asyncio.Event()
        self._outcomes: list[tuple[Key, Outcome]] = []
        self._built: dict[str, MiniSandboxError | None] = {}
        self.running = 0

    async def exchange(self, order: Order) -> Report:
        """Start timers, and report those that have ended, as :meth:`.Worker.exchange` does."""
        loop = asyncio.get_running_loop()
        for task in order.builds:
            loop.call_later(1.0, self._end_build, task.instance_id)
        for job in order.jobs:
            self.running += 1
            loop.call_later(self._seconds * random.uniform(0.5, 1.5), self._end, job.key)
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._changed.wait()
        await asyncio.sleep(0.05)
        self._changed.clear()
        outcomes, self._outcomes = self._outcomes, []
        built, self._built = self._built, {}
        return Report(tuple(outcomes), built, self.capacity - self.running)

    async def wake(self) -> None:
        """Report at once."""
        self._changed.set()

    async def close(self) -> None:
        """Do nothing."""

    def _end_build(self, name: str) -> None:
        self._built[name] = None
        self._changed.set()

    def _end(self, key: Key) -> None:
        self.running -= 1
        summary = Summary(
            *key, "submitted", Verdict.RESOLVED, "resolved", "", Timings(), reward=1.0, agent="oracle"
        )  # fmt: skip
        self._outcomes.append((key, Packed(summary, b"a patch", self._trajectory)))
        self._changed.set()


class FakeActor:
    """A node whose rollouts only wait, in a process of Ray's."""

    def __init__(self, name: str, sandboxes: int, seconds: float, size: int) -> None:
        self._arguments = (name, sandboxes, seconds, size)
        self._node: FakeNode | None = None

    async def exchange(self, order: Order) -> Report:
        """Call :meth:`FakeNode.exchange`."""
        self._node = self._node or FakeNode(*self._arguments)
        return await self._node.exchange(order)

    async def wake(self) -> None:
        """Call :meth:`FakeNode.wake`."""
        if self._node is not None:
            await self._node.wake()


def ray_nodes(args: argparse.Namespace) -> list[RayNode]:
    """Return simulated nodes in actors of a Ray on this machine."""
    ray = import_ray()
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False,
             object_store_memory=200 << 20)  # fmt: skip
    remote = ray.remote(FakeActor).options(num_cpus=0, max_concurrency=16)
    names = [f"node{number}" for number in range(args.nodes)]
    return [
        RayNode(
            name, Resources(args.sandboxes, 2), args.sandboxes, frozenset(),
            remote.remote(name, args.sandboxes, args.seconds, args.size),
        )
        for name in names
    ]  # fmt: skip


class FakeFinder:
    """Nodes that are present from the start."""

    def __init__(self, nodes: Sequence[FakeNode | RayNode]) -> None:
        self.nodes = {node.name: node for node in nodes}

    async def ids(self) -> set[str]:
        """Return all nodes."""
        return set(self.nodes)

    async def start_worker(self, node_id: str) -> FakeNode | RayNode:
        """Return a node."""
        return self.nodes[node_id]

    async def close(self) -> None:
        """Do nothing."""


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
    driver = Driver(FakeFinder(nodes), setup, notice=print)
    tasks = make_tasks(args.rollouts // args.attempts, args.repositories)
    batch = Batch(tasks, setup, out, attempts=args.attempts, crew=driver)
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
