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
from minisandbox.rollouts.cluster.node import Order, Report, Resources
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.executor import JobOwner
from minisandbox.rollouts.jobs import Job, Key, Outcome
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


class _FinishedError(Exception):
    """All jobs have ended; cancels the background tasks."""


@dataclass(eq=False, slots=True)
class _Group:
    """A task, its waiting jobs, and the nodes that have or build its image.

    ``members`` maps each node to whether its image is ready, and ``failures`` each node to the error of a failed build.
    """

    task: Task
    jobs: deque[_Entry] = field(default_factory=deque)
    members: dict[_Member, bool] = field(default_factory=dict)
    failures: dict[_Member, MiniSandboxError] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Entry:
    """An unfinished job.

    Attributes:
        job: the job.
        group: the group of the job's task.
        member: the node that is responsible for the job; None while the job waits.
        avoid: the node on which the job has failed.
        losses: the number of nodes that the job lost.
    """

    job: Job
    group: _Group
    member: _Member | None = None
    avoid: _Member | None = None
    losses: int = 0


@dataclass(eq=False, slots=True)
class _Member:
    """A node, its jobs and its state.

    Attributes:
        free: the number of jobs that the node can start now.
        jobs: jobs that were sent to the node and have not ended there.
        repos: repositories whose layers the node has or is building.
        ready: groups whose image the node has; some may have no waiting jobs.
        building: the number of images that the node is building.
        drop: keys of cancelled jobs, for the next order.
        idle: whether the node had free capacity left after its last order.
        full: the error if the node's disk is full.
        silent: whether the node does not respond.
        lost: whether the node is gone.
    """

    node: Node
    report: NodeReport
    free: int = 0
    jobs: dict[Key, _Entry] = field(default_factory=dict)
    repos: set[str] = field(default_factory=set)
    ready: dict[_Group, None] = field(default_factory=dict)
    building: int = 0
    drop: list[Key] = field(default_factory=list)
    idle: bool = False
    full: DiskFull | None = None
    silent: bool = False
    lost: bool = False

    def can_build(self, group: _Group) -> bool:
        """Return whether the node may build the image of a group."""
        return not (self.full or self.silent or self.lost or self in group.failures)


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
        self._waiting: dict[_Group, None] = {}  # groups with waiting jobs, in order
        self._open: dict[Key, _Entry] = {}
        self._members: dict[str, _Member] = {}
        self._reports: list[NodeReport] = []
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
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._spawn(self._watch())
                self._check_finished()
                await self._over.wait()
                raise _FinishedError
        except* _FinishedError:
            pass

    async def serve(self, owner: JobOwner) -> None:
        """Run the jobs given to :meth:`put`, until :meth:`drain`."""
        self._staying = True
        await self.run([], owner)

    def put(self, jobs: list[Job]) -> None:
        """Add jobs. Their keys must differ from the keys of pending jobs."""
        entries = [_Entry(job, self._groups.setdefault(job.task.instance_id, _Group(job.task))) for job in jobs]
        self._open.update((entry.job.key, entry) for entry in entries)
        self._queue(entries)

    def forget(self, job: Job) -> None:
        """Drop a job: do not start it, and discard its result."""
        if (entry := self._open.pop(job.key, None)) is not None:
            if entry.member is not None:
                entry.member.drop.append(job.key)
                entry.member.jobs.pop(job.key, None)
            self._check_finished()

    def drain(self) -> None:
        """Start no more jobs."""
        self._draining = True
        self._check_finished()

    async def close(self) -> None:
        """Stop the workers on the nodes."""
        await asyncio.gather(*(member.node.close() for member in self._members.values()), return_exceptions=True)
        await self._finder.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _check_finished(self) -> None:
        if self._storing or (self._staying and not self._draining):
            return
        if not self._open or (self._draining and all(entry.member is None for entry in self._open.values())):
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
                self._spawn(self._join(node_id, next_try))
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
                    member.silent = True
                    self._restart_jobs(member, "does not answer")
                report = await call
            except NodeLost:
                member.lost = True
                for group in self._groups.values():
                    group.members.pop(member, None)
                self._restart_jobs(member, "is lost")
                self._spawn(member.node.close())  # the worker may still be running
                break
            finally:
                call.cancel()
            if member.silent:
                member.silent = False
                self._notice(f"node {member.node.name} answers again")
            self._read(member, report)
        del self._members[node_id]
        self._give_up_hopeless()

    def _restart_jobs(self, member: _Member, fault: str) -> None:
        """Have other nodes repeat a node's unfinished jobs; a job that loses three nodes ends without a verdict.

        The first result of a job counts, so it does not matter whether a silent node is dead.
        """
        entries = [entry for entry in member.jobs.values() if entry.member is member]
        self._notice(f"node {member.node.name} {fault}; its {len(entries)} rollouts restart elsewhere")
        for entry in entries:
            entry.losses += 1 if member.lost else 0
            if entry.losses >= _MOST_LOST:
                reason = f"it lost {entry.losses} nodes one after the other"
                self._give_up([entry], NodeLost("its node was lost", reason=reason))
        self._queue([entry for entry in entries if entry.losses < _MOST_LOST])
        self._check_finished()

    # --- orders ------------------------------------------------------------------------------------------------------

    def _queue(self, entries: Iterable[_Entry]) -> None:
        """Queue jobs until nodes can run them."""
        for entry in entries:
            entry.member, entry.job.stage = None, "queued"
            entry.group.jobs.append(entry)
            self._waiting[entry.group] = None
            for member, is_ready in entry.group.members.items():
                if is_ready:
                    member.ready[entry.group] = None
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
        builds: list[Task] = []
        if self._begun and not self._draining:
            while member.free > 0 and (entry := self._next_job(member)) is not None:
                member.free -= 1
                member.jobs[entry.job.key] = entry
                entry.job.stage = "agent"
                jobs.append(entry.job)
            while member.building < member.node.resources.builds and (group := self._next_build(member)) is not None:
                member.building += 1
                member.repos.add(group.task.repo)
                builds.append(group.task)
        member.idle = member.free > 0 or member.building < member.node.resources.builds
        drop, member.drop = tuple(member.drop), []
        return Order(tuple(builds), tuple(jobs), drop, len(self._open))

    def _next_job(self, member: _Member) -> _Entry | None:
        """Take the next job for which a node has the image, and make the node responsible for this job."""
        for group in list(member.ready):
            while group.jobs:
                entry = group.jobs[0]
                is_open = self._open.get(entry.job.key) is entry  # otherwise, it has a result by now, or was dropped
                if is_open and entry.avoid is member and self._others(member, group):
                    break
                self._take_first(group)
                if is_open:
                    entry.member = member
                    if entry.job.key not in member.jobs:  # otherwise, the node was silent and still runs the job
                        return entry
            else:
                del member.ready[group]
        return None

    def _take_first(self, group: _Group) -> None:
        group.jobs.popleft()
        if not group.jobs:
            self._waiting.pop(group, None)

    def _next_build(self, member: _Member) -> _Group | None:
        """Choose the next image for a node to build, preferably of a repository whose layers the node has."""
        if member.full or (member.free <= 0 and len(member.ready) >= _BUILD_AHEAD):
            return None
        unbuilt = (group for group in self._waiting if not group.members and member not in group.failures)
        if groups := list(islice(unbuilt, _LOOK_AT)):
            repos = {repo for other in self._members.values() for repo in other.repos}
            group = max(groups, key=lambda group: (group.task.repo in member.repos, group.task.repo not in repos))
        elif member.free > 0 and (groups := self._waiting_for_others(member)):
            group = max(groups, key=lambda group: len(group.jobs))
        else:
            return None
        group.members[member] = False
        for entry in group.jobs:
            entry.job.stage = "image"
        return group

    def _waiting_for_others(self, member: _Member) -> list[_Group]:
        """Return the groups whose jobs wait for other nodes that have their image and cannot start them now."""
        shared = [group for group in self._waiting if group.members]
        others = {other for group in shared for other in group.members if not other.silent} - {member}
        is_overloaded = sum(len(group.jobs) for group in shared) > sum(other.free for other in others)
        return [
            group for group in shared
            if not (member in group.members or member in group.failures)
            and (is_overloaded or group.members.keys() <= {group.jobs[0].avoid})
        ]  # fmt: skip

    def _others(self, member: _Member, group: _Group) -> bool:
        """Return whether another node can run a group's jobs."""
        return any(
            other is not member and not other.silent and (group.members.get(other) or other.can_build(group))
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
        entry = self._open.get(key)
        if entry is None:
            member.report.late += 1
            return
        retry = _failed_on_node(outcome) and entry.avoid is None and not self._draining
        if retry and self._others(member, entry.group):
            entry.avoid = member
            self._queue([entry])
            return
        member.report.rollouts += 1
        self._end(entry, outcome)
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
        if not isinstance(error, DiskFull):
            if not any(member in other.failures for other in self._groups.values()):
                self._notice(f"node {member.node.name} cannot build {group.task.instance_id!r}: {error}")
            group.failures[member] = error
        elif not member.full:
            member.full = error
            self._notice(f"node {member.node.name} takes no more images: {error}")
        self._give_up_hopeless()
        self._wake()

    def _note_image(self, member: _Member, group: _Group) -> None:
        """Record that a node has the image of a group, so that it can run the group's jobs."""
        group.members[member] = True
        member.repos.add(group.task.repo)
        if group.jobs:
            member.ready[group] = None
        for entry in group.jobs:
            entry.job.stage = "queued"

    def _give_up_hopeless(self) -> None:
        """End the jobs of images that failed on two nodes, or that no remaining node can build."""
        if not self._members:  # wait, because nodes may come back
            return
        members = self._members.values()
        for group in [group for group in self._waiting if not group.members]:
            errors = [*filter(None, (member.full for member in members)), *group.failures.values()]
            if errors and (len(group.failures) > 1 or not any(member.can_build(group) for member in members)):
                entries, group.jobs = group.jobs, deque()
                del self._waiting[group]
                self._give_up(entries, errors[-1])

    def _give_up(self, entries: Iterable[_Entry], error: MiniSandboxError) -> None:
        """End jobs that cannot run, with an error as their outcome."""
        for entry in entries:
            if self._open.get(entry.job.key) is entry:
                self._end(entry, self._unreached(entry.job, error))

    def _unreached(self, job: Job, error: MiniSandboxError) -> Outcome:
        if job.check is not None:

            def no_image(_: Task) -> NoReturn:
                raise error

            return run_job(job.check, no_image, None)
        waited, phase = {"queued": time.monotonic() - job.since}, "sandbox" if isinstance(error, NodeLost) else "image"
        return pack(unreached(job.task, self._setup, job.attempt, error, waited=waited, phase=phase))

    def _end(self, entry: _Entry, outcome: Outcome) -> None:
        """Pass the first result of a job to its owner."""
        del self._open[entry.job.key]
        self._storing += 1
        self._spawn(self._store(entry.job, outcome))

    async def _store(self, job: Job, outcome: Outcome) -> None:
        await self._owner.ended(job, outcome)
        self._storing -= 1
        self._check_finished()


def _failed_on_node(outcome: Outcome) -> bool:
    """Return whether the cause of a job's failure may affect only its node."""
    if isinstance(outcome, Packed):
        return outcome.summary.failed_in in _NODE_PHASES
    return outcome is not None and not outcome.final
