"""The driver of many nodes, with simulated nodes: who does what, and what happens when nodes fail."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass

import pytest
from benchmarks.cluster_scaling import make_tasks

from minisandbox.agents import OracleAgent
from minisandbox.errors import BuildError, DiskFull, HostError, MiniSandboxError, ModelRefused, NodeLost
from minisandbox.grade import Verdict
from minisandbox.rollouts import ClusterChecks, Setup, Summary
from minisandbox.rollouts.cluster import Cluster, Driver, Resources, driver
from minisandbox.rollouts.cluster.node import Order, Report
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.jobs import Job, Key, Outcome
from minisandbox.rollouts.submitting import JobThread
from minisandbox.runs import Job as Check
from minisandbox.runs import run_job
from minisandbox.tasks import Task
from minisandbox.trajectories import Timings

SETUP = Setup(agent=OracleAgent())
DEADLINE = 60.0


class FakeNode:
    """A node whose rollouts end after a moment."""

    def __init__(self, name: str, sandboxes: int = 4, seconds: float = 0.01) -> None:
        self.name, self.resources, self.capacity = name, Resources(sandboxes, 1), sandboxes
        self.images: frozenset[str] = frozenset()
        self.seconds = seconds
        self.failed_in = ""
        self.did: list[Key] = []
        self.begun: list[Key] = []
        self.dropped: list[Key] = []
        self.built: list[str] = []
        self.present: set[str] = set()
        self.gone = asyncio.Event()
        self.paused = False
        self.refuse: MiniSandboxError | None = None
        self.fault: MiniSandboxError | None = None
        self._changed = asyncio.Event()
        self._running = 0
        self._outcomes: list[tuple[Key, Outcome]] = []
        self._builds: dict[str, MiniSandboxError | None] = {}

    async def exchange(self, order: Order) -> Report:
        assert order.remaining >= 0
        self.dropped += order.drop
        loop = asyncio.get_running_loop()
        for task in order.builds:
            loop.call_later(0.01, self._end_build, task.instance_id)
        for job in order.jobs:
            assert job.task.instance_id in self.present | self.images, "a job came before its image"
            self._running += 1
            assert self._running <= self.capacity, "more jobs than the node has room for"
            self.start(job)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await self._changed.wait()
        while self.paused:
            await asyncio.sleep(0.01)
        if self.gone.is_set():
            raise NodeLost(f"node {self.name} is lost")
        self._changed.clear()
        outcomes, self._outcomes = self._outcomes, []
        built, self._builds = self._builds, {}
        return Report(tuple(outcomes), built, self.capacity - self._running, self.fault)

    def start(self, job: Job) -> None:
        self.begun.append(job.key)
        asyncio.get_running_loop().call_later(self.seconds, self._end, job.key)

    def _end(self, key: Key) -> None:
        self._running -= 1
        self.did.append(key)
        self._outcomes.append((key, record(*key, self.failed_in)))
        self._changed.set()

    def _end_build(self, name: str) -> None:
        if self.refuse is None:
            self.built.append(name)
            self.present.add(name)
        self._builds[name] = self.refuse
        self._changed.set()

    async def wake(self) -> None:
        self._changed.set()

    async def close(self) -> None:
        self.gone.set()
        self._changed.set()


def record(name: str, attempt: int, failed_in: str = "") -> Packed:
    reward = None if failed_in else 1.0
    summary = Summary(
        name, attempt, "submitted", Verdict.RESOLVED, "", "", Timings(), reward=reward, failed_in=failed_in
    )
    return Packed(summary, b"", b"")


class Register:
    """The owner of rollouts, which also finds nodes."""

    def __init__(self, *nodes: FakeNode) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.kept: Counter[Key] = Counter()
        self.failed: dict[Key, str] = {}
        self.said: list[str] = []
        self.error: Exception | None = None

    async def ended(self, job: Job, outcome: Outcome) -> None:
        assert isinstance(outcome, Packed)
        await asyncio.sleep(0)
        self.kept[job.key] += 1
        if outcome.summary.failed_in:
            self.failed[job.key] = outcome.summary.failed_in

    def stop_with(self, error: Exception) -> None:
        self.error = error

    async def ids(self) -> set[str]:
        return {name for name, node in self.nodes.items() if not node.gone.is_set()}

    async def start_worker(self, node_id: str) -> FakeNode:
        return self.nodes[node_id]

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK", "_REST"):
        monkeypatch.setattr(driver, name, 0.02)


def carry_out(
    register: Register,
    tasks: list[Task],
    attempts: int = 4,
    meanwhile: Callable[[Driver], object] | None = None,
    silence: float = 30.0,
) -> Driver:
    """Run a driver until its batch has ended, and check that each rollout was kept once."""
    jobs = [Job(task, attempt) for task in tasks for attempt in range(attempts)]
    crew = Driver(register, SETUP, silence=silence, notice=register.said.append)

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


def test_a_lost_node_loses_no_rollout() -> None:
    nodes = [FakeNode(f"n{number}", seconds=0.1) for number in range(3)]
    register, tasks = Register(*nodes), make_tasks(6, 3)
    carry_out(register, tasks, attempts=10, meanwhile=lambda _: nodes[0].gone.set())
    assert register.kept.keys() == everything(tasks, 10)
    assert not register.failed
    assert any("n0 is lost" in said for said in register.said)


def test_a_node_that_comes_back_is_used() -> None:
    node = FakeNode("only", seconds=0.1)
    register, tasks = Register(node), make_tasks(2, 1)

    def replace_it(_: Driver) -> None:
        node.gone.set()
        register.nodes["later"] = FakeNode("later")

    carry_out(register, tasks, attempts=20, meanwhile=replace_it)
    assert register.kept.keys() == everything(tasks, 20)
    assert register.nodes["later"].did


def test_a_silent_node_is_not_waited_for_and_its_late_results_are_dropped() -> None:
    slow, quick = FakeNode("slow", seconds=0.6), FakeNode("quick", seconds=0.15)
    register, tasks = Register(slow, quick), make_tasks(4, 4)

    def pause(_: Driver) -> None:
        slow.paused = True
        asyncio.get_running_loop().call_later(1.0, setattr, slow, "paused", False)

    crew = carry_out(register, tasks, attempts=20, meanwhile=pause, silence=0.1)
    assert register.kept.keys() == everything(tasks, 20)
    assert any("does not answer" in said for said in register.said)
    assert sum(one.rollouts for one in crew.reports) == 80


def test_a_full_disk_gets_no_more_images() -> None:
    full, fine = FakeNode("full"), FakeNode("fine", seconds=0.05)
    full.refuse = DiskFull("no space")
    register, tasks = Register(full, fine), make_tasks(6, 6)
    carry_out(register, tasks)
    assert register.kept.keys() == everything(tasks)
    assert not register.failed
    assert len([said for said in register.said if "no more images" in said]) == 1


def test_where_every_disk_is_full_nothing_waits_for_ever() -> None:
    nodes = [FakeNode(f"n{number}") for number in range(2)]
    for node in nodes:
        node.refuse = DiskFull("no space")
    register, tasks = Register(*nodes), make_tasks(6, 2)
    carry_out(register, tasks, attempts=2)
    assert register.failed == dict.fromkeys(everything(tasks, 2), "image")


def test_an_image_that_cannot_be_made_ends_its_rollouts_alone() -> None:
    node = FakeNode("only")
    node.refuse = BuildError("it does not build")
    register, tasks = Register(node), make_tasks(3, 1)
    carry_out(register, tasks, attempts=2)
    assert register.failed == dict.fromkeys(everything(tasks, 2), "image")


def test_who_has_nothing_to_do_takes_what_others_have_not_begun() -> None:
    slow, idle = FakeNode("slow", sandboxes=2, seconds=1.0), FakeNode("idle", sandboxes=2, seconds=0.01)
    tasks = make_tasks(2, 2)
    carry_out(Register(slow, idle), tasks, attempts=6)
    assert len(slow.did) <= 4


def test_draining_ends_with_what_is_under_way() -> None:
    node = FakeNode("only", sandboxes=2, seconds=0.5)
    register, tasks = Register(node), make_tasks(2, 1)
    carry_out(register, tasks, attempts=20, meanwhile=lambda crew: crew.drain())
    assert len(node.did) == len(register.kept) <= 4


def test_all_nodes_work_and_each_builds_an_image_once() -> None:
    nodes = [FakeNode(f"n{number}", seconds=0.05) for number in range(3)]
    register, tasks = Register(*nodes), make_tasks(6, 2)
    crew = carry_out(register, tasks, attempts=10)
    assert register.kept.keys() == everything(tasks, 10)
    assert all(max(Counter(node.built).values()) == 1 for node in nodes)
    assert {name for node in nodes for name in node.built} == {task.instance_id for task in tasks}
    assert all(node.did for node in nodes)
    assert sum(report.rollouts for report in crew.reports) == 60
    assert sum(report.built for report in crew.reports) == sum(len(node.built) for node in nodes)


def test_rollouts_run_where_their_image_is() -> None:
    empty, full = FakeNode("empty", seconds=0.05), FakeNode("full", seconds=0.05)
    tasks = make_tasks(4, 1)
    full.images = frozenset(task.instance_id for task in tasks)
    carry_out(Register(empty, full), tasks, attempts=1)
    assert not empty.built
    assert not full.built
    assert len(full.did) == 4


def test_a_repository_stays_on_the_node_with_its_layers() -> None:
    nodes = [FakeNode(f"n{number}", sandboxes=1, seconds=0.02) for number in range(2)]
    tasks = make_tasks(8, 2)
    carry_out(Register(*nodes), tasks, attempts=2)
    repos = {task.instance_id: task.repo for task in tasks}
    assert nodes[0].built
    assert nodes[1].built
    first = [{repos[name] for name in node.built[:2]} for node in nodes]
    assert first[0] != first[1]
    assert all(len(names) == 1 for names in first)


def test_a_rollout_that_loses_every_node_is_given_up() -> None:
    register = Register()
    lost = 0

    class Fatal(FakeNode):
        def start(self, job: Job) -> None:
            nonlocal lost
            lost += 1
            register.nodes[f"n{lost}"] = Fatal(f"n{lost}")
            self.gone.set()

    register.nodes["n0"] = Fatal("n0")
    carry_out(register, make_tasks(1, 1), attempts=1)
    assert register.failed == {("scale-0", 0): "sandbox"}
    assert lost == 3


def test_an_infrastructure_error_is_retried_once_on_another_node() -> None:
    broken, sound = FakeNode("broken"), FakeNode("sound", seconds=0.05)
    broken.failed_in = "sandbox"
    register, tasks = Register(broken, sound), make_tasks(4, 2)
    carry_out(register, tasks)
    assert register.kept.keys() == everything(tasks)
    assert not register.failed
    assert set(broken.did) <= set(sound.did)
    assert max(Counter(broken.did).values()) == 1


def test_an_error_on_all_nodes_is_kept_after_one_retry() -> None:
    nodes = [FakeNode(f"n{number}") for number in range(3)]
    for node in nodes:
        node.failed_in = "grade"
    register, tasks = Register(*nodes), make_tasks(2, 1)
    carry_out(register, tasks, attempts=2)
    assert register.failed == dict.fromkeys(everything(tasks, 2), "grade")
    assert set(Counter(key for node in nodes for key in node.did).values()) == {2}
    assert all(max(Counter(node.did).values(), default=1) == 1 for node in nodes)


def test_a_build_that_fails_on_one_node_is_retried_on_another() -> None:
    broken, sound = FakeNode("broken"), FakeNode("sound", seconds=0.05)
    broken.refuse = BuildError("the mirror is missing here")
    register, tasks = Register(broken, sound), make_tasks(4, 2)
    carry_out(register, tasks)
    assert register.kept.keys() == everything(tasks)
    assert not register.failed
    assert not broken.did
    assert len([said for said in register.said if "broken cannot build" in said and "mirror" in said]) == 1


def test_a_rollout_that_nobody_waits_for_is_dropped_on_its_node() -> None:
    node = FakeNode("only", sandboxes=2, seconds=0.5)
    register, (task,) = Register(node), make_tasks(1, 1)
    jobs = [Job(task, attempt) for attempt in range(6)]
    crew = Driver(register, SETUP)

    async def run() -> None:
        async with asyncio.timeout(DEADLINE):
            running = asyncio.ensure_future(crew.run(jobs, register))
            while len(node.begun) < 2:
                await asyncio.sleep(0.01)
            for job in (jobs[0], jobs[5]):
                crew.forget(job)
            await running

    asyncio.run(run())
    assert register.kept.keys() == {job.key for job in jobs[1:5]}
    assert node.dropped == [jobs[0].key]
    assert jobs[5].key not in node.begun


def test_a_thread_runs_what_is_submitted_from_any_thread() -> None:
    nodes = [FakeNode("n0", sandboxes=2), FakeNode("n1", sandboxes=2)]
    register = Register(*nodes)
    with closing(JobThread(Driver(register, SETUP, notice=register.said.append))) as thread:

        def attempts(futures: list[Future[Outcome]]) -> set[Key]:
            packed = [future.result(DEADLINE) for future in futures]
            assert all(isinstance(one, Packed) for one in packed)
            return {(one.summary.instance_id, one.summary.attempt) for one in packed if isinstance(one, Packed)}

        for attempt in range(3):  # tasks whose images are built come again
            futures = [thread.submit(Job(task, attempt)) for task in make_tasks(4, 2)]
            assert attempts(futures) == {(f"scale-{number}", attempt) for number in range(4)}
        nodes[0].gone.set()
        assert len(attempts([thread.submit(Job(task, 3)) for task in make_tasks(8, 2)])) == 8
        nodes[1].paused = True
        assert thread.submit(Job(make_tasks(1, 1)[0], 4)).cancel()
        nodes[1].paused = False
        assert attempts([thread.submit(Job(make_tasks(1, 1)[0], 5))]) == {("scale-0", 5)}
    assert all(max(Counter(node.built).values()) == 1 for node in nodes)
    with pytest.raises(HostError, match="closed"):
        thread.submit(Job(make_tasks(1, 1)[0], 6))


def test_a_fault_of_all_rollouts_reaches_who_waits() -> None:
    class Refused(FakeNode):
        def start(self, job: Job) -> None:
            self.fault = ModelRefused("no such model")

    register = Register(Refused("only"))
    with closing(JobThread(Driver(register, SETUP))) as thread:
        future = thread.submit(Job(make_tasks(1, 1)[0], 0))
        with pytest.raises(ModelRefused, match="no such model"):
            future.result(DEADLINE)


def test_checks_run_on_nodes_and_unchanged_ones_are_skipped() -> None:
    class Checking(FakeNode):
        def start(self, job: Job) -> None:
            assert job.check is not None
            self._outcomes.append((job.key, run_job(job.check, lambda _: FakeImage(), job.earlier)))  # type: ignore[arg-type, return-value] # has all that is read
            self._running -= 1
            self._changed.set()

    class FakeImage:
        key = "k"

    @dataclass(frozen=True, slots=True)
    class Length:
        letters: int
        seconds: float = 0.0
        finished: bool = True

    class FakeCluster(Cluster):
        def check(self) -> None:
            pass

        def crew(self, setup: Setup, *_args: object, **_options: object) -> Driver:
            return Driver(Register(Checking("n0"), Checking("n1")), setup)

    tasks = make_tasks(3, 1)

    def check(number: int, task: Task) -> Check[Task]:
        return Check(task.instance_id, lambda key: f"{key} 1", lambda _: Length(number), lambda *_: Length(-1), task)

    checks = [check(number, task) for number, task in enumerate(tasks)]
    found = dict(ClusterChecks(FakeCluster())(checks, {tasks[0].instance_id: "k 1", tasks[1].instance_id: "old"}))
    assert {name: result and result.body["letters"] for name, result in found.items()} == {
        "scale-0": None, "scale-1": 1, "scale-2": 2,
    }  # fmt: skip


def test_a_job_is_sent_with_how_long_it_has_waited() -> None:
    job = Job(make_tasks(1, 1)[0], 3, since=time.monotonic() - 100.0, dropped=True, retried=True)
    copy = pickle.loads(pickle.dumps(job))
    assert copy.key == job.key
    assert (copy.dropped, copy.retried, copy.stage) == (False, False, "queued")
    assert 0.0 <= copy.since - job.since < 60.0
