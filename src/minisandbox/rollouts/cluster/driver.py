"""Schedule jobs and image builds over the nodes of a cluster.

Each node reports its finished jobs and how many more jobs it can start, and then receives new jobs. A job runs on a
node that has its task's image. A node with free capacity builds the image of another task, or an image whose jobs wait
for busy nodes. All decisions are made on one event loop, and clocks of different nodes are never compared. The first
result of a job counts, and later results are discarded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn, Protocol

from minisandbox.errors import BudgetExceeded, DiskFull, HostError, MiniSandboxError, NodeLost
from minisandbox.models import Budget
from minisandbox.rollouts.cluster.node import Assignment, Order, Report, Resources
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.executor import JobOwner
from minisandbox.rollouts.jobs import Checked, Job, Key, Outcome
from minisandbox.rollouts.rollout import unreached
from minisandbox.rollouts.setup import Setup
from minisandbox.runs import run_job
from minisandbox.tasks import Task

SILENCE = 30.0
"""Seconds without a response after which other nodes repeat a node's unfinished jobs."""
_MOST_LOST = 3
"""The number of lost nodes after which a job ends without a verdict."""
_LOOK = 2.0
"""Seconds between two searches for new nodes."""
_REST = 10.0
"""Seconds until a failed start of a worker on a node is tried again."""
_NO_NODES = 300.0
"""Seconds without a usable node after which the batch fails."""
_JOINING = 10.0
"""Maximum seconds to wait for workers to start on the nodes that are present when the batch starts."""
_LOOK_AT = 256
"""Maximum tasks to compare when choosing the next image to build."""
_BUILD_AHEAD = 4
"""If a busy node has the images of this many tasks with waiting jobs, it builds no further images."""
_NODE_PHASES = ("sandbox", "patch", "grade")
"""Phases in which an infrastructure error may affect only one node, so the rollout is repeated on another node."""


class Node(Protocol):
    """A connection to a node. Each method raises :class:`.NodeLost` if the node is lost."""

    name: str
    """The node's address."""
    resources: Resources
    capacity: int
    """Maximum concurrent jobs."""
    images: frozenset[str]
    """Names of the images in the node's store when the worker started."""

    async def exchange(self, order: Order) -> Report:
        """Send an order to the node, and return the node's report (:meth:`.Worker.exchange`)."""

    async def wake(self) -> None:
        """Make a pending :meth:`exchange` return at once (:meth:`.Worker.wake`)."""

    async def close(self) -> None:
        """Stop the node's work."""


class Finder(Protocol):
    """Lists the nodes of a cluster, and starts workers on them."""

    async def ids(self) -> set[str]:
        """Return the ids of the nodes that are present now."""

    async def start_worker(self, node_id: str) -> Node:
        """Start a worker on a node.

        Raises:
            MiniSandboxError: the worker does not start.
        """

    async def close(self) -> None:
        """Leave the cluster."""


@dataclass(slots=True)
class NodeReport:
    """Counts of a node's work in a batch.

    Attributes:
        name: the node's name.
        rollouts: results that were the first for their job.
        late: discarded results of jobs that had already ended or were dropped.
        built: images built for the batch.
    """

    name: str
    rollouts: int = 0
    late: int = 0
    built: int = 0


@dataclass(eq=False, slots=True)
class _Group:
    """A task, its waiting jobs, and the nodes that have or build its image.

    ``members`` maps each node to whether its image is ready, and ``failures`` each node to the error of a failed build.
    """

    task: Task
    jobs: deque[Job] = field(default_factory=deque)
    members: dict[_Member, bool] = field(default_factory=dict)
    failures: dict[_Member, MiniSandboxError] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.task.instance_id


@dataclass(eq=False, slots=True)
class _Member:
    """A node, its jobs and its state.

    Attributes:
        free: the number of jobs that the node can start now.
        known: ids of the tasks that were sent to the node.
        repos: repositories whose layers the node has or is building.
        ready: groups whose image the node has; some may have no waiting jobs.
        building: the number of images that the node is building.
        drop: keys of cancelled jobs, for the next order.
        idle: whether the node had free capacity left after its last order.
        full: whether the node's disk is full.
        silent: whether the node does not respond.
    """

    node: Node
    report: NodeReport
    free: int = 0
    jobs: dict[Key, Job] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    repos: set[str] = field(default_factory=set)
    ready: deque[_Group] = field(default_factory=deque)
    building: int = 0
    drop: list[Key] = field(default_factory=list)
    idle: bool = False
    full: bool = False
    silent: bool = False
    lost: bool = False


class Driver:
    """Schedules jobs over nodes, as a :class:`.Crew`. Use each driver once, on one event loop.

    Args:
        finder: lists nodes and starts workers on them.
        setup: the agent, its model, and limits, for the records of rollouts that cannot start.
        budget: the model's budget, for all nodes together.
        silence: seconds without a response after which other nodes repeat a node's unfinished jobs.
        notice: called with messages for the user: a node is lost, or its disk is full.
    """

    def __init__(
        self,
        finder: Finder,
        setup: Setup,
        *,
        budget: Budget | None = None,
        silence: float = SILENCE,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._finder, self._setup, self._budget, self._silence = finder, setup, budget, silence
        self._notice = notice or (lambda _: None)
        self._groups: dict[str, _Group] = {}
        # groups with waiting jobs, whose image no node has or is building
        self._fresh: dict[_Group, None] = {}
        # groups with waiting jobs, whose image at least one node has or is building
        self._shared: dict[_Group, None] = {}
        # by key: unfinished jobs, the nodes responsible for them, how many nodes they lost, and where they failed
        self._open: dict[Key, Job] = {}
        self._responsible: dict[Key, _Member] = {}
        self._losses: dict[Key, int] = {}
        self._avoid: dict[Key, _Member] = {}
        self._members: dict[str, _Member] = {}
        self._reports: list[NodeReport] = []
        self._full_disks: list[DiskFull] = []
        self._draining = self._staying = self._begun = False
        self._storing = 0
        self._over = asyncio.Event()

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost nodes."""
        return tuple(self._reports)

    async def run(self, todo: list[Job], owner: JobOwner) -> None:
        """Run jobs until all have ended, or until running jobs have ended after :meth:`drain`."""
        self._owner = owner
        self.put(todo)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            living = tasks.create_task(self._live())
            self._check_finished()
            await self._over.wait()
            living.cancel()

    async def serve(self, owner: JobOwner) -> None:
        """Run the jobs given to :meth:`put`, until :meth:`drain`."""
        self._staying = True
        await self.run([], owner)

    def put(self, jobs: list[Job]) -> None:
        """Add jobs. Their keys must differ from the keys of pending jobs."""
        for job in jobs:
            self._groups.setdefault(job.task.instance_id, _Group(job.task))
            self._open[job.key] = job
        self._queue(jobs)

    def forget(self, job: Job) -> None:
        """Drop a job: do not start it, and discard its result."""
        job.dropped = True
        if self._open.pop(job.key, None) is not None:
            if (member := self._responsible.pop(job.key, None)) is not None:
                member.drop.append(job.key)
            self._check_finished()

    def drain(self) -> None:
        """Start no more jobs."""
        self._draining = True
        self._check_finished()

    async def close(self) -> None:
        """Stop the workers on the nodes."""
        await asyncio.gather(*(member.node.close() for member in self._members.values()), return_exceptions=True)
        await self._finder.close()

    async def _live(self) -> None:
        """Run all background tasks in a separate task group, which :meth:`run` cancels at the end."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._watch())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.create_task(work)

    def _check_finished(self) -> None:
        if self._storing or (self._staying and not self._draining):
            return
        if not self._open or (self._draining and not self._responsible):
            self._over.set()

    # --- nodes that join and leave -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start workers on all nodes, including those that join later."""
        next_try: dict[str, float] = {}
        last_seen = time.monotonic()
        while True:
            try:
                present = await self._finder.ids()
            except NodeLost:  # the cluster's head does not respond at the moment
                present = set()
            now = time.monotonic()
            joining = [
                self._tasks.create_task(self._join(node_id, next_try))
                for node_id in present - self._members.keys()
                if now >= next_try.get(node_id, 0.0)
            ]
            # wait for the nodes that are present, because their images decide which node runs which job
            if joining and not self._begun:
                await asyncio.wait(joining, timeout=_JOINING)
                self._begun = True
                self._wake()
            last_seen = now if self._members else last_seen
            if now - last_seen > _NO_NODES:
                self._owner.stop_with(
                    HostError(
                        "no node of the cluster works for this batch",
                        reason=f"no node that offers sandboxes answered for {_NO_NODES:g} s",
                        hint="minisandbox cluster worker --address HEAD on each node; minisandbox cluster status",
                    )
                )
                last_seen = now
            await asyncio.sleep(_LOOK)

    async def _join(self, node_id: str, next_try: dict[str, float]) -> None:
        next_try[node_id] = float("inf")
        try:
            node = await self._finder.start_worker(node_id)
        except MiniSandboxError as error:
            self._notice(f"a node does not work for this batch: {error}")
            return
        finally:
            next_try[node_id] = time.monotonic() + _REST
        member = self._members[node_id] = _Member(node, NodeReport(node.name), node.capacity)
        self._reports.append(member.report)
        for name in node.images & self._groups.keys():
            self._note_image(member, self._groups[name])
        self._spawn(self._lead(node_id, member))

    async def _lead(self, node_id: str, member: _Member) -> None:
        """Exchange orders and reports with a node until the node is lost."""
        while not member.lost:
            call = asyncio.ensure_future(member.node.exchange(self._order(member)))
            try:
                if not (await asyncio.wait([call], timeout=self._silence))[0]:
                    self._mark_silent(member)
                report = await call
            except NodeLost:
                self._mark_lost(member)
                break
            finally:
                call.cancel()
            if member.silent:
                member.silent = False
                self._notice(f"node {member.node.name} answers again")
            self._read(member, report)
        del self._members[node_id]
        self._give_up_hopeless()

    def _mark_silent(self, member: _Member) -> None:
        """Have other nodes repeat the unfinished jobs of a silent node. The first result counts."""
        member.silent = True
        jobs = self._unfinished(member)
        self._notice(f"node {member.node.name} does not answer; its {len(jobs)} rollouts restart elsewhere")
        self._queue(jobs)

    def _mark_lost(self, member: _Member) -> None:
        """Move a lost node's jobs to other nodes; a job that loses three nodes ends without a verdict."""
        member.lost = True
        jobs = self._unfinished(member)
        self._notice(f"node {member.node.name} is lost; its {len(jobs)} rollouts restart elsewhere")
        self._spawn(member.node.close())  # the worker may still be running
        for group in self._groups.values():
            if group.members.pop(member, None) is not None and not group.members and group in self._shared:
                del self._shared[group]
                self._fresh[group] = None
        for job in jobs:
            losses = self._losses[job.key] = self._losses.get(job.key, 0) + 1
            if losses >= _MOST_LOST:
                error = NodeLost("its node was lost", reason=f"it lost {losses} nodes one after the other")
                self._give_up([job], error)
        self._queue([job for job in jobs if job.key in self._open])
        self._check_finished()

    def _unfinished(self, member: _Member) -> list[Job]:
        """Return the unfinished jobs that a node is responsible for, and end this responsibility."""
        jobs = [job for key, job in member.jobs.items() if self._responsible.get(key) is member]
        for job in jobs:
            del self._responsible[job.key]
        return jobs

    # --- orders ------------------------------------------------------------------------------------------------------

    def _queue(self, jobs: Iterable[Job]) -> None:
        """Queue jobs until nodes can run them."""
        for job in jobs:
            job.stage = "queued"
            group = self._groups[job.task.instance_id]
            if not group.jobs:
                for member, is_ready in group.members.items():
                    if is_ready:
                        member.ready.append(group)
            group.jobs.append(job)
            (self._shared if group.members else self._fresh)[group] = None
        self._wake()

    def _wake(self) -> None:
        """Make idle nodes report at once, so that they receive new jobs."""
        for member in self._members.values():
            if member.idle and self._begun:
                member.idle = False
                self._spawn(self._wake_member(member))

    async def _wake_member(self, member: _Member) -> None:
        with suppress(NodeLost):  # the pending exchange reports the loss
            await member.node.wake()

    def _order(self, member: _Member) -> Order:
        """Return a node's next order, with as many jobs and builds as the node can start."""
        jobs: list[Job] = []
        builds: list[_Group] = []
        if self._begun and not self._draining:
            while member.free > 0 and (job := self._next_job(member)) is not None:
                member.free -= 1
                member.jobs[job.key] = job
                job.stage = "agent"
                jobs.append(job)
            while member.building < member.node.resources.builds and (group := self._next_build(member)) is not None:
                member.building += 1
                member.repos.add(group.task.repo)
                builds.append(group)
        member.idle = member.free > 0 or member.building < member.node.resources.builds
        tasks = {group.name: group.task for group in builds} | {job.task.instance_id: job.task for job in jobs}
        unknown = tuple(task for name, task in tasks.items() if name not in member.known)
        member.known.update(tasks)
        drop, member.drop = tuple(member.drop), []
        return Order(
            unknown, tuple(group.name for group in builds), tuple(map(_assignment, jobs)), drop, len(self._open)
        )

    def _next_job(self, member: _Member) -> Job | None:
        """Take the next job for which a node has the image, and make the node responsible for this job."""
        for _ in range(len(member.ready)):
            group = member.ready[0]
            while group.jobs:
                job = group.jobs[0]
                if job.key in self._open and self._avoid.get(job.key) is member and self._others(member, group):
                    break
                self._take_first(group)
                if job.key not in self._open:  # the job has a result by now, or was dropped
                    continue
                self._responsible[job.key] = member
                if job.key not in member.jobs:  # otherwise, the node was silent and still runs the job
                    return job
            if group.jobs:
                member.ready.rotate(-1)
            else:
                member.ready.popleft()
        return None

    def _take_first(self, group: _Group) -> None:
        group.jobs.popleft()
        if not group.jobs:
            self._fresh.pop(group, None)
            self._shared.pop(group, None)

    def _next_build(self, member: _Member) -> _Group | None:
        """Choose the next image for a node to build, preferably of a repository whose layers the node has."""
        if member.full or (member.free <= 0 and len(member.ready) >= _BUILD_AHEAD):
            return None
        fresh = [group for group in islice(self._fresh, _LOOK_AT) if member not in group.failures]
        if fresh:
            repos = {repo for other in self._members.values() for repo in other.repos}
            group = max(
                fresh, key=lambda group: (group.task.repo in member.repos, group.task.repo not in repos)
            )  # of equal groups, max() returns the earliest
            del self._fresh[group]
            self._shared[group] = None
        elif member.free > 0:
            overloaded = self._overloaded(member)
            waiting = [group for group in self._shared if self._needs(member, group, overloaded)]
            if not waiting:
                return None
            group = max(waiting, key=lambda group: len(group.jobs))
            # other nodes serve this group last, so that its jobs wait for this node
            for other in group.members:
                if group in other.ready:
                    other.ready.remove(group)
                    other.ready.append(group)
        else:
            return None
        group.members[member] = False
        for job in group.jobs:
            job.stage = "image"
        return group

    def _needs(self, member: _Member, group: _Group, overloaded: bool) -> bool:
        """Return whether a node should build an image that other nodes have, because its jobs wait for them."""
        if member in group.members or member in group.failures:
            return False
        return overloaded or group.members.keys() <= {self._avoid.get(group.jobs[0].key)}

    def _overloaded(self, member: _Member) -> bool:
        """Return whether more jobs wait than the other nodes that have their images can start."""
        others = {other for group in self._shared for other in group.members if not other.silent} - {member}
        return sum(len(group.jobs) for group in self._shared) > sum(other.free for other in others)

    def _others(self, member: _Member, group: _Group) -> bool:
        """Return whether another node can run a group's jobs."""
        return any(
            other is not member and not other.silent and (group.members.get(other) or _can_build(other, group))
            for other in self._members.values()
        )

    # --- reports -----------------------------------------------------------------------------------------------------

    def _read(self, member: _Member, report: Report) -> None:
        member.free = report.free
        for key, outcome in report.outcomes:
            self._note_outcome(member, key, outcome)
        for name, error in report.built.items():
            member.building -= 1
            self._note_build(member, self._groups[name], error)
        if report.fault is not None:
            self._owner.stop_with(report.fault)
        self._check_finished()

    def _note_outcome(self, member: _Member, key: Key, outcome: Outcome) -> None:
        member.jobs.pop(key, None)
        job = self._open.get(key)
        if job is None:
            member.report.late += 1
            return
        retry = _failed_on_node(outcome) and not job.retried and not self._draining
        if retry and self._others(member, self._groups[job.task.instance_id]):
            job.retried = True
            self._avoid[key] = member
            self._responsible.pop(key, None)
            self._queue([job])
            return
        member.report.rollouts += 1
        self._end(job, outcome)
        if self._budget is not None and isinstance(outcome, Packed):
            usage = outcome.summary.usage
            try:
                self._budget.charge(usage.prompt + usage.completion, outcome.summary.cost)
                self._budget.check()
            except BudgetExceeded as error:
                self._owner.stop_with(error)

    def _note_build(self, member: _Member, group: _Group, error: MiniSandboxError | None) -> None:
        if error is None:
            member.report.built += 1
            self._note_image(member, group)
            return
        group.members.pop(member, None)
        if isinstance(error, DiskFull):
            if not member.full:
                self._notice(f"node {member.node.name} takes no more images: {error}")
            member.full = True
            self._full_disks.append(error)
        else:
            group.failures[member] = error
        if group.jobs and not group.members:
            self._shared.pop(group, None)
            self._fresh[group] = None
        self._give_up_hopeless()
        self._wake()

    def _note_image(self, member: _Member, group: _Group) -> None:
        """Record that a node has the image of a group, so that it can run the group's jobs."""
        group.members[member] = True
        member.repos.add(group.task.repo)
        if group.jobs:
            self._fresh.pop(group, None)
            self._shared[group] = None
            member.ready.append(group)
        for job in group.jobs:
            job.stage = "queued"

    def _give_up_hopeless(self) -> None:
        """End the jobs of images that failed on two nodes, or that no remaining node can build."""
        if not self._members:  # wait, because nodes may come back
            return
        for group in list(self._fresh):
            errors = [*self._full_disks[:1], *group.failures.values()]
            buildable = any(_can_build(member, group) for member in self._members.values())
            if errors and (len(group.failures) > 1 or not buildable):
                jobs = list(group.jobs)
                group.jobs.clear()
                del self._fresh[group]
                self._give_up(jobs, errors[-1])

    def _give_up(self, jobs: Iterable[Job], error: MiniSandboxError) -> None:
        """End jobs that cannot run, with an error as their outcome."""
        for job in jobs:
            if job.key in self._open:
                self._end(job, self._unreached(job, error))

    def _unreached(self, job: Job, error: MiniSandboxError) -> Outcome:
        if job.check is not None:

            def no_image(_: Task) -> NoReturn:
                raise error

            return Checked(run_job(job.check, no_image, None))
        waited, phase = {"queued": time.monotonic() - job.since}, "sandbox" if isinstance(error, NodeLost) else "image"
        return pack(unreached(job.task, self._setup, job.attempt, error, waited=waited, phase=phase))

    def _end(self, job: Job, outcome: Outcome) -> None:
        """Pass the first result of a job to its owner."""
        for table in (self._open, self._responsible, self._losses, self._avoid):
            table.pop(job.key, None)
        self._storing += 1
        self._spawn(self._store(job, outcome))

    async def _store(self, job: Job, outcome: Outcome) -> None:
        await self._owner.ended(job, outcome)
        self._storing -= 1
        self._check_finished()


def _can_build(member: _Member, group: _Group) -> bool:
    return not (member.full or member.silent or member.lost or member in group.failures)


def _failed_on_node(outcome: Outcome) -> bool:
    """Return whether the cause of a job's failure may affect only its node."""
    if isinstance(outcome, Packed):
        return outcome.summary.failed_in in _NODE_PHASES
    return outcome.result is not None and not outcome.result.final


def _assignment(job: Job) -> Assignment:
    waited = time.monotonic() - job.since
    return Assignment(job.task.instance_id, job.attempt, waited, job.draw, job.check, job.earlier)
