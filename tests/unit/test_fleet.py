"""The driver of many nodes, with nodes that only pretend: who does what, and what happens when nodes go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from benchmarks.cluster_scaling import make_tasks

from minisandbox.agents import OracleAgent
from minisandbox.errors import (
    BuildError,
    DiskFull,
    HostError,
    MiniSandboxError,
    ModelRefused,
    NodeLost,
    NotFound,
    StoreError,
)
from minisandbox.grade import Verdict
from minisandbox.rollouts import Setup, Summary
from minisandbox.rollouts.cluster import Fleet, Resources, fleet
from minisandbox.rollouts.cluster.node import Moved, Node, Status
from minisandbox.rollouts.cluster.submit import FleetThread
from minisandbox.rollouts.cluster.workloads import RolloutWorkload
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.jobs import Job, JobQueue
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.trajectories import Timings

SETUP = Setup(agent=OracleAgent())
DEADLINE = 60.0


class Pretender:
    """A node whose rollouts end when they are let go, or after a moment."""

    def __init__(self, name: str, sandboxes: int = 4, seconds: float = 0.01) -> None:
        self.name, self.resources = name, Resources(sandboxes, 1)
        self.images: dict[str, str] = {}
        self.seconds = seconds
        self.did: list[tuple[str, int]] = []
        self.built: list[str] = []
        self.fetched: list[str] = []
        self.waiting: list[asyncio.Event] = []
        self.begun = 0
        self.gone = asyncio.Event()
        self.paused = False
        self.refuse: MiniSandboxError | None = None

    async def build(self, task: Task) -> str:
        await self._alive()
        if self.refuse is not None:
            raise self.refuse
        self.built.append(task.instance_id)
        return f"key of {task.instance_id}"

    async def fetch(self, task: Task, source: Node) -> Moved:
        await self._alive()
        if self.refuse is not None:
            raise self.refuse
        assert task.instance_id in (*source.built, *source.fetched)  # type: ignore[attr-defined] # one of these
        self.fetched.append(task.instance_id)
        return Moved((task.instance_id,), 10, 5)

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
        assert waited >= 0
        if self.begun >= self.resources.sandboxes:
            back = asyncio.Event()
            self.waiting.append(back)
            while self.begun >= self.resources.sandboxes:
                await self._alive()
                if back.is_set():
                    return None
            self.waiting.remove(back)
        self.begun += 1
        await self._alive(self.seconds)
        self.begun -= 1
        self.did.append((task.instance_id, attempt))
        return record(task.instance_id, attempt)

    async def return_jobs(self, most: int) -> None:
        for event in self.waiting[-most:]:
            event.set()

    async def heartbeat(self, left: int) -> Status:
        assert left >= 0
        await self._alive()
        return Status()

    async def close(self) -> None:
        self.gone.set()

    async def _alive(self, seconds: float = 0.01) -> None:
        await asyncio.sleep(seconds)
        while self.paused:
            await asyncio.sleep(0.01)
        if self.gone.is_set():
            raise NodeLost(f"node {self.name} is lost")


def record(name: str, attempt: int) -> Packed:
    summary = Summary(name, attempt, "submitted", Verdict.RESOLVED, "", "", Timings(), reward=1.0)
    return Packed(summary, b"", b"")


class Register:
    """Whoever keeps rollouts, and finds nodes."""

    def __init__(self, *nodes: Pretender) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.kept: Counter[tuple[str, int]] = Counter()
        self.failed: dict[tuple[str, int], str] = {}
        self.said: list[str] = []
        self.error: Exception | None = None

    async def ended(self, job: Job, packed: Packed) -> None:
        await asyncio.sleep(0)
        self.kept[job.key] += 1
        if packed.summary.failed_in:
            self.failed[job.key] = packed.summary.failed_in

    def stop_with(self, error: Exception) -> None:
        self.error = error

    async def ids(self) -> set[str]:
        return {name for name, node in self.nodes.items() if not node.gone.is_set()}

    async def start_worker(self, one: str) -> Pretender:
        return self.nodes[one]

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEARTBEAT", "_LOOK", "_REST"):
        monkeypatch.setattr(fleet, name, 0.02)


def carry_out(
    register: Register,
    tasks: list[Task],
    attempts: int = 4,
    meanwhile: Callable[[Fleet[Packed]], object] | None = None,
    silence: float = 30.0,
) -> Fleet[Packed]:
    """Run a fleet to its end, and see that each rollout was kept once."""
    jobs = [Job(task, attempt) for task in tasks for attempt in range(attempts)]
    crew = Fleet(register, RolloutWorkload(SETUP), silence=silence, notice=register.said.append)  # type: ignore[arg-type] # as a finder is

    async def run() -> None:
        async with asyncio.timeout(DEADLINE):
            running = asyncio.ensure_future(crew.run(jobs, register))
            if meanwhile is not None:
                await asyncio.sleep(0.3)
                meanwhile(crew)
            await running

    asyncio.run(run())
    assert set(register.kept.values()) <= {1}, "one was kept twice"
    return crew


def everything(tasks: list[Task], attempts: int = 4) -> set[tuple[str, int]]:
    return {(task.instance_id, attempt) for task in tasks for attempt in range(attempts)}


def test_images_are_made_once_and_travel() -> None:
    nodes = [Pretender(f"n{number}", seconds=0.05) for number in range(3)]
    register, tasks = Register(*nodes), make_tasks(6, 2)
    crew = carry_out(register, tasks, attempts=10)
    assert register.kept.keys() == everything(tasks, 10)
    assert Counter(name for node in nodes for name in node.built) == {task.instance_id: 1 for task in tasks}
    assert all(max(Counter(node.fetched).values(), default=0) <= 1 for node in nodes)
    assert sum(bool(node.did) for node in nodes) == 3, "all had something to do"
    assert sum(one.rollouts for one in crew.reports) == 60
    assert sum(one.bytes for one in crew.reports) == 10 * sum(len(node.fetched) for node in nodes)


def test_what_nodes_have_is_not_made_elsewhere() -> None:
    one, two = Pretender("one"), Pretender("two")
    tasks = make_tasks(4, 1)
    two.images = {task.instance_id: f"key of {task.instance_id}" for task in tasks}
    carry_out(Register(one, two), tasks, attempts=1)
    assert not one.built
    assert len(two.built) == 4


def test_a_lost_node_loses_no_rollout() -> None:
    nodes = [Pretender(f"n{number}", seconds=0.1) for number in range(3)]
    register, tasks = Register(*nodes), make_tasks(6, 3)
    carry_out(register, tasks, attempts=10, meanwhile=lambda _: nodes[0].gone.set())
    assert register.kept.keys() == everything(tasks, 10)
    assert not register.failed
    assert any("n0 is lost" in said for said in register.said)


def test_a_node_that_comes_back_is_used() -> None:
    node = Pretender("only", seconds=0.1)
    register, tasks = Register(node), make_tasks(2, 1)

    def replace_it(_: Fleet[Packed]) -> None:
        node.gone.set()
        register.nodes["later"] = Pretender("later")

    carry_out(register, tasks, attempts=20, meanwhile=replace_it)
    assert register.kept.keys() == everything(tasks, 20)
    assert register.nodes["later"].did


def test_a_silent_node_is_not_waited_for_and_its_late_results_are_dropped() -> None:
    slow, quick = Pretender("slow", seconds=0.6), Pretender("quick", seconds=0.15)
    register, tasks = Register(slow, quick), make_tasks(4, 4)

    def pause(_: Fleet[Packed]) -> None:
        slow.paused = True
        asyncio.get_running_loop().call_later(1.0, setattr, slow, "paused", False)

    crew = carry_out(register, tasks, attempts=20, meanwhile=pause, silence=0.1)
    assert register.kept.keys() == everything(tasks, 20)
    assert any("does not answer" in said for said in register.said)
    assert sum(one.rollouts for one in crew.reports) == 80


def test_a_full_disk_gets_no_more_images() -> None:
    full, fine = Pretender("full"), Pretender("fine", seconds=0.05)
    full.refuse = DiskFull("no space")
    register, tasks = Register(full, fine), make_tasks(6, 6)
    carry_out(register, tasks)
    assert register.kept.keys() == everything(tasks)
    assert not register.failed
    assert len([said for said in register.said if "no more images" in said]) == 1


def test_where_every_disk_is_full_nothing_waits_for_ever() -> None:
    nodes = [Pretender(f"n{number}") for number in range(2)]
    for node in nodes:
        node.refuse = DiskFull("no space")
    register, tasks = Register(*nodes), make_tasks(6, 2)
    carry_out(register, tasks, attempts=2)
    assert register.failed == dict.fromkeys(everything(tasks, 2), "image")


def test_an_image_that_was_collected_meanwhile_is_made_again() -> None:
    class Forgetful(Pretender):
        async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
            if len(self.built) == 1:
                raise NotFound("no such image")
            return await super().rollout(task, attempt, waited, draw)

    node = Forgetful("only")
    register, tasks = Register(node), make_tasks(1, 1)
    carry_out(register, tasks, attempts=2)
    assert register.kept.keys() == everything(tasks, 2)
    assert not register.failed
    assert len(node.built) >= 2
    assert any("has lost an image" in said for said in register.said)


def test_an_image_that_cannot_be_made_ends_its_rollouts_alone() -> None:
    node = Pretender("only")
    node.refuse = BuildError("it does not build")
    register, tasks = Register(node), make_tasks(3, 1)
    carry_out(register, tasks, attempts=2)
    assert register.failed == dict.fromkeys(everything(tasks, 2), "image")


def test_an_image_that_does_not_travel_is_used_where_it_is() -> None:
    one, two = Pretender("one", seconds=0.05), Pretender("two")
    two.refuse = StoreError("damaged")
    register = Register(one, two)
    tasks = [replace(task, repo="same") for task in make_tasks(1, 1)]
    carry_out(register, tasks, attempts=30)
    assert register.kept.keys() == everything(tasks, 30)


def test_a_rollout_that_loses_every_node_is_given_up() -> None:
    register = Register()
    lost = 0

    class Fatal(Pretender):
        async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
            nonlocal lost
            lost += 1
            register.nodes[f"n{lost}"] = Fatal(f"n{lost}")
            self.gone.set()
            raise NodeLost("it ended")

    register.nodes["n0"] = Fatal("n0")
    carry_out(register, make_tasks(1, 1), attempts=1)
    assert register.failed == {("scale-0", 0): "sandbox"}
    assert lost == 3


def test_who_has_nothing_to_do_takes_what_others_have_not_begun() -> None:
    slow, idle = Pretender("slow", sandboxes=2, seconds=1.0), Pretender("idle", sandboxes=2, seconds=0.01)
    tasks = make_tasks(2, 2)
    carry_out(Register(slow, idle), tasks, attempts=6)
    assert len(slow.did) <= 4


def test_draining_ends_with_what_is_under_way() -> None:
    node = Pretender("only", sandboxes=2, seconds=0.5)
    register, tasks = Register(node), make_tasks(2, 1)
    carry_out(register, tasks, attempts=20, meanwhile=lambda crew: crew.drain())
    assert len(node.did) == len(register.kept) <= 4


def test_a_desk_has_done_what_it_is_asked_from_any_thread() -> None:
    nodes = [Pretender("n0", sandboxes=2), Pretender("n1", sandboxes=2)]
    register = Register(*nodes)
    with FleetThread(Fleet(register, RolloutWorkload(SETUP), notice=register.said.append)) as thread:  # type: ignore[arg-type] # as a finder is
        for attempt in range(3):  # a task whose image is there comes again
            futures = [thread.submit(Job(task, attempt)) for task in make_tasks(4, 2)]
            assert {one.result(DEADLINE).summary.instance_id for one in futures} == {f"scale-{n}" for n in range(4)}
        nodes[0].gone.set()
        futures = [thread.submit(Job(task, 3)) for task in make_tasks(8, 2)]
        assert all(one.result(DEADLINE).summary.attempt == 3 for one in futures)
        nodes[1].paused = True
        waiting = thread.submit(Job(make_tasks(1, 1)[0], 4))
        assert waiting.cancel()
        nodes[1].paused = False
        assert thread.submit(Job(make_tasks(1, 1)[0], 5)).result(DEADLINE).summary.attempt == 5
    assert Counter(name for node in nodes for name in node.built).most_common(1)[0][1] <= 2
    with pytest.raises(HostError, match="no longer in use"):
        thread.submit(Job(make_tasks(1, 1)[0], 6))


def test_a_desk_tells_why_nothing_goes_on() -> None:
    class Refused(Pretender):
        async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
            raise ModelRefused("no such model")

    register = Register(Refused("only"))
    with FleetThread(Fleet(register, RolloutWorkload(SETUP))) as thread:  # type: ignore[arg-type] # as a finder is
        future = thread.submit(Job(make_tasks(1, 1)[0], 0))
        with pytest.raises(ModelRefused, match="no such model"):
            future.result(DEADLINE)


def test_what_is_withdrawn_from_a_line_ends_nobody_who_waits() -> None:
    async def run() -> None:
        queue, (task,) = JobQueue(10), make_tasks(1, 1)
        queue.put([Job(task, 0), Job(task, 1)])
        assert [job.attempt for job in queue.withdraw(1)] == [1]
        first = await queue.take()
        waiting = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0.05)
        assert first is not None
        assert not waiting.done()
        queue.put([Job(task, 2)])
        second = await waiting
        assert second is not None
        assert second.attempt == 2
        queue.end()
        assert await queue.take() is None

    asyncio.run(run())
