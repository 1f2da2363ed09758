"""The driver's scheduler: which node builds, fetches or holds which image, and runs which rollout.

Nodes that hold an image run its rollouts; while rollouts queue, nodes with free slots fetch the image too. An image is
built once, on a node that has layers of its repository. All decisions are made on one event loop from its own state,
and clocks of two nodes are never compared. The first result of a rollout counts; later ones are discarded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from minisandbox.errors import BudgetExceeded, DiskFull, HostError, MiniSandboxError, NodeLost, NotFound
from minisandbox.rollouts.cluster.node import Finder, Node, Status
from minisandbox.rollouts.cluster.workloads import Done, Workload
from minisandbox.rollouts.executor import JobOwner
from minisandbox.rollouts.jobs import Job
from minisandbox.tasks import Task

SILENCE = 30.0
"""Seconds without an answer after which other nodes repeat a node's unfinished rollouts."""
_HEARTBEAT = 2.0
_LOOK = 2.0
_REST = 10.0  # seconds before a node that failed to start is tried again
_NO_NODES = 300.0  # seconds without any node until the batch fails
_JOINING = 10.0  # seconds to wait for the nodes that are present at the start
_FETCHES = 3  # tries of a node to fetch an image
_LOOK_AT = 8  # images of a repository to check for one that a node has already


@dataclass(eq=False, slots=True)
class _Group:
    """The rollouts of one task, and the nodes with its image."""

    task: Task
    jobs: deque[Job] = field(default_factory=deque)  # waiting ones
    key: str = ""  # of the image, once a node has it
    holders: set[_Member] = field(default_factory=set)
    making: bool = False
    listed: bool = False  # its image is queued for building
    refused: Counter[_Member] = field(default_factory=Counter)  # failed fetches by node


@dataclass(eq=False, slots=True)
class _Member:
    """A node's assignments and state."""

    node: Node
    ahead: int
    jobs: dict[tuple[str, int], Job] = field(default_factory=dict)
    moved: set[tuple[str, int]] = field(default_factory=set)  # of these, jobs that other nodes repeat
    holds: set[_Group] = field(default_factory=set)
    ready: deque[_Group] = field(default_factory=deque)  # groups whose image it holds; some may have no jobs left
    builds: int = 0
    fetching: bool = False
    sending: int = 0
    stealing: bool = False
    full: bool = False
    silent: bool = False
    lost: bool = False
    status: Status = field(default_factory=Status)
    report: NodeReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = NodeReport(self.node.name)

    @property
    def room(self) -> int:
        """The number of rollouts that it can take now."""
        return 0 if self.silent or self.lost else self.node.resources.sandboxes + self.ahead - len(self.jobs)


@dataclass(slots=True)
class NodeReport:
    """A node's part in a batch.

    Attributes:
        name: the node's name.
        rollouts: results that were the first of their rollout.
        late: results that came after another node's.
        built: images built, or found in its store.
        fetched: images fetched from other nodes.
        layers: number of transfers per layer.
        bytes: uncompressed bytes received.
        wire: bytes received over the network.
    """

    name: str
    rollouts: int = 0
    late: int = 0
    built: int = 0
    fetched: int = 0
    layers: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    wire: int = 0


class Fleet(Generic[Done]):
    """Schedules rollouts over nodes, as the crew of a batch. Used once, on one event loop.

    Args:
        finder: lists nodes and starts workers on them.
        workload: the kind of work; called rollouts throughout this module.
        tries: number of lost nodes after which a rollout fails.
        silence: seconds without an answer after which other nodes repeat a node's unfinished rollouts.
        notice: called with messages for people: a node is lost, or its disk is full.
    """

    def __init__(
        self,
        finder: Finder,
        workload: Workload[Done],
        *,
        tries: int = 3,
        silence: float = SILENCE,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._finder, self._workload, self._tries, self._silence = finder, workload, tries, silence
        self._notice = notice or (lambda _: None)
        self._groups: dict[str, _Group] = {}
        self._open: dict[tuple[str, int], _Group] = {}
        self._unmade: dict[str, deque[_Group]] = {}  # by repository
        self._homes: dict[str, set[_Member]] = {}  # nodes with layers of a repository, or building some
        self._waiting: dict[_Group, None] = {}  # groups with an image and waiting rollouts
        self._nodes: dict[str, _Member] = {}
        self._reports: list[NodeReport] = []
        self._idle: set[_Member] = set()
        self._draining = False
        self._staying = False
        self._begun = False
        self._over = asyncio.Event()
        self._keeping = 0

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost ones."""
        return tuple(self._reports)

    async def run(self, todo: list[Job], owner: JobOwner[Done]) -> None:
        """Run rollouts until all have ended, or until running ones have ended after :meth:`drain`."""
        self._owner = owner
        self.put(todo)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            everything = tasks.create_task(self._live())
            self._check_finished()
            await self._over.wait()
            everything.cancel()

    async def serve(self, owner: JobOwner[Done]) -> None:
        """Run rollouts given to :meth:`put`, until :meth:`drain`."""
        self._staying = True
        self._over.clear()  # an earlier call has ended
        await self.run([], owner)

    def put(self, jobs: list[Job]) -> None:
        """Add rollouts. Their keys must differ from those of pending ones."""
        for job in jobs:
            name = job.task.instance_id
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = _Group(job.task)
                self._to_be_made(group)
            group.jobs.append(job)
            self._open[job.key] = group
            if len(group.jobs) == 1:
                self._offer(group)
        self._assign_idle()

    def forget(self, key: tuple[str, int]) -> None:
        """Drop a rollout: it does not start, and its result is discarded. Ended ones are left alone."""
        self._open.pop(key, None)
        self._check_finished()

    async def _live(self) -> None:
        """Run all background tasks in their own group, which ends by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._watch())

    def drain(self) -> None:
        """Start no more rollouts; nodes return those that have not started."""
        self._draining = True
        for member in self._nodes.values():
            self._spawn(self._recall(member, len(member.jobs)))
        self._check_finished()

    async def close(self) -> None:
        """Stop the workers on the nodes."""
        await asyncio.gather(*(member.node.close() for member in self._nodes.values()), return_exceptions=True)
        await self._finder.close()

    def _spawn(self, work: object) -> None:
        self._tasks.create_task(work)  # type: ignore[arg-type] # a coroutine

    def _check_finished(self) -> None:
        under_way = any(member.jobs.keys() - member.moved for member in self._nodes.values() if not member.lost)
        if self._keeping or (self._staying and not self._draining):
            return
        if not self._open or (self._draining and not under_way):
            self._over.set()

    # --- nodes come and go -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start workers on all nodes, including those that join later."""
        asked: dict[str, float] = {}
        seen = time.monotonic()
        while True:
            try:
                there = await self._finder.ids()
            except NodeLost:  # the cluster's head does not answer at the moment
                there = set()
            now = time.monotonic()
            new = [one for one in there - self._nodes.keys() if now >= asked.get(one, 0.0)]
            started = [self._tasks.create_task(self._start_worker(one, asked)) for one in new]
            if started and not self._begun:  # the images on each node decide who builds what
                await asyncio.wait(started, timeout=_JOINING)
                self._begun = True
                self._assign_idle()
            seen = now if self._nodes else seen
            if now - seen > _NO_NODES:
                self._owner.stop_with(
                    HostError(
                        "no node of the cluster works for this batch",
                        reason=f"no node that offers sandboxes answered for {_NO_NODES:g} s",
                        hint="minisandbox cluster worker --address HEAD on each node; minisandbox cluster status",
                    )
                )
                seen = now
            await asyncio.sleep(_LOOK)

    async def _start_worker(self, one: str, asked: dict[str, float]) -> None:
        asked[one] = float("inf")
        try:
            node = await self._finder.start_worker(one)
        except MiniSandboxError as error:
            self._notice(f"a node does not work for this batch: {error}")
            asked[one] = time.monotonic() + _REST
            return
        asked[one] = time.monotonic() + _REST
        member = _Member(node, ahead=max(2, node.resources.sandboxes // 8))
        self._nodes[one] = member
        self._reports.append(member.report)
        self._idle.add(member)
        self._spawn(self._listen(one, member))
        for name, group in self._groups.items():
            if node.images.get(name) == group.key:
                self._add_holder(member, group)
        self._assign(member)

    async def _listen(self, one: str, member: _Member) -> None:
        """Exchange heartbeats with a node."""
        while not member.lost:
            call = asyncio.ensure_future(member.node.heartbeat(len(self._open)))
            try:
                done, _ = await asyncio.wait([call], timeout=self._silence)
                if not done:
                    self._mark_silent(member)
                member.status = await call
            except NodeLost:
                self._mark_lost(member)
                break
            finally:
                call.cancel()
            if member.silent:
                member.silent = False
                self._notice(f"node {member.node.name} answers again")
                self._assign(member)
            await asyncio.sleep(_HEARTBEAT)
        del self._nodes[one]

    def _mark_silent(self, member: _Member) -> None:
        """Have other nodes repeat the unfinished rollouts of a silent node. The first result counts."""
        member.silent = True
        left = [job for key, job in member.jobs.items() if key in self._open and key not in member.moved]
        self._notice(f"node {member.node.name} does not answer; its {len(left)} rollouts restart elsewhere")
        member.moved.update(job.key for job in left)
        self._requeue(left)

    def _mark_lost(self, member: _Member) -> None:
        """Move a lost node's rollouts, and the images that only it had, to other nodes."""
        if member.lost:
            return
        member.lost = True
        self._idle.discard(member)
        for homes in self._homes.values():
            homes.discard(member)
        left = [job for key, job in member.jobs.items() if key in self._open and key not in member.moved]
        self._notice(f"node {member.node.name} is lost; its {len(left)} rollouts restart elsewhere")
        member.jobs.clear()
        self._spawn(member.node.close())  # in case its worker still runs
        for group in member.holds:
            group.holders.discard(member)
            if group.jobs:
                self._offer(group)
        for job in left:
            job.moves += 1
            if job.moves >= self._tries:
                error = NodeLost("its node was lost", reason=f"it lost {job.moves} nodes one after the other")
                self._spawn(self._give_up([job], error))
        self._requeue([job for job in left if job.moves < self._tries])
        self._check_finished()

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _requeue(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.stage = "queued"
            group = self._open[job.key]
            group.jobs.append(job)
            self._offer(group)
        self._assign_idle()

    def _offer(self, group: _Group) -> None:
        """Offer a group to the nodes with its image; queue the image for building if there is no such node."""
        if group.holders:
            self._waiting[group] = None
            for member in group.holders:
                member.ready.append(group)
        elif not group.making and not group.listed:
            self._to_be_made(group)

    def _to_be_made(self, group: _Group) -> None:
        group.key, group.listed = "", True
        self._waiting.pop(group, None)
        self._unmade.setdefault(group.task.repo, deque()).append(group)

    def _add_holder(self, member: _Member, group: _Group) -> None:
        if group.key and not member.lost:
            group.holders.add(member)
            member.holds.add(group)
            member.ready.append(group)
            self._homes.setdefault(group.task.repo, set()).add(member)

    def _assign_idle(self) -> None:
        for member in list(self._idle):
            self._assign(member)

    def _assign(self, member: _Member) -> None:
        """Give a node all rollouts that it can run, and let it build, fetch or steal more."""
        if member.lost or member.silent or self._draining or not self._begun:
            return
        while member.room > 0 and (job := self._next(member)) is not None:
            member.jobs[job.key] = job
            member.moved.discard(job.key)
            job.stage = "agent"
            self._spawn(self._do(member, job))
        self._provide_images(member)
        if member.room > 0:
            self._idle.add(member)
            self._steal(member)
        else:
            self._idle.discard(member)

    def _next(self, member: _Member) -> Job | None:
        """Return the next rollout whose image a node has."""
        while member.ready:
            group = member.ready[0]
            while group.jobs:
                job = group.jobs.popleft()
                if not group.jobs:
                    self._waiting.pop(group, None)
                if job.key in member.jobs:  # the node was silent, and still runs it
                    member.moved.discard(job.key)
                elif job.key in self._open:  # else a late result has arrived
                    return job
            member.ready.popleft()
        return None

    async def _do(self, member: _Member, job: Job) -> None:
        try:
            done = await self._workload.do(member.node, job)
        except NodeLost:
            self._mark_lost(member)
            return
        except NotFound as error:
            done = None
            self._image_missing(member, job, error)
        except MiniSandboxError as error:  # the model's budget or refusal: no rollout can succeed
            self._owner.stop_with(error)
            done = None
        member.jobs.pop(job.key, None)
        moved = job.key in member.moved
        member.moved.discard(job.key)
        if done is None:
            if job.key in self._open and not moved:
                self._requeue([job])
        elif self._open.pop(job.key, None) is None:
            member.report.late += 1
        else:
            member.report.rollouts += 1
            self._keeping += 1
            self._assign(member)
            await self._owner.ended(job, done)
            self._keeping -= 1
            try:
                self._workload.charge(done)
            except BudgetExceeded as error:
                self._owner.stop_with(error)
            self._check_finished()
            return
        self._assign(member)
        self._check_finished()

    def _image_missing(self, member: _Member, job: Job, error: NotFound) -> None:
        """Handle an image removed from a node's store, by garbage collection for example: build or fetch it again."""
        group = self._groups[job.task.instance_id]
        if member in group.holders:
            self._notice(f"node {member.node.name} has lost an image: {error}")
        group.holders.discard(member)
        member.holds.discard(group)
        member.ready = deque(one for one in member.ready if one is not group)
        job.moves += 1
        if job.moves >= self._tries:
            self._spawn(self._give_up([job], error))

    def _steal(self, member: _Member) -> None:
        """Let an idle node take rollouts that another one has not started."""
        if member.stealing or member.builds or member.fetching or self._waiting or not self._open:
            return
        others = (one for one in self._nodes.values() if one is not member and not one.lost and not one.silent)
        victim = max(others, key=_not_begun, default=None)
        if victim is not None and (count := _not_begun(victim)) > 0:
            member.stealing, victim.ahead = True, 0
            self._spawn(self._recall(victim, min(count, member.room), member))

    async def _recall(self, member: _Member, most: int, thief: _Member | None = None) -> None:
        """Have a node return rollouts that it has not started; their calls then return None."""
        try:
            await member.node.return_jobs(most)
        except NodeLost:
            self._mark_lost(member)
        finally:
            if thief is not None:
                thief.stealing = False

    # --- images ------------------------------------------------------------------------------------------------------

    def _provide_images(self, member: _Member) -> None:
        """Have a node build images, and fetch one whose rollouts queue elsewhere."""
        if member.full:
            return
        while member.builds < member.node.resources.builds and (member.room > 0 or self._images_wanted()):
            group = self._to_make(member)
            if group is None:
                break
            group.making = True
            self._homes.setdefault(group.task.repo, set()).add(member)
            member.builds += 1
            self._spawn(self._make(member, group))
        if member.room > 0 and not member.fetching:
            for group in self._waiting:
                sources = [one for one in group.holders if not one.silent]
                if sources and member not in group.holders and group.refused[member] < _FETCHES:
                    source = min(sources, key=lambda one: one.sending)
                    self._spawn(self._fetch(member, group, source))
                    member.fetching, source.sending = True, source.sending + 1
                    return

    def _images_wanted(self) -> bool:
        """Return whether few rollouts with an image are left: images are not built too far ahead."""
        return len(self._waiting) < 4 * len(self._nodes)

    def _to_make(self, member: _Member) -> _Group | None:
        """Return an image for a node to build: of a repository whose layers it has, or that is not started yet."""
        for repo, groups in list(self._unmade.items()):
            while groups and not groups[0].jobs:
                groups.popleft().listed = False
            if not groups:
                del self._unmade[repo]
                continue
            homes = [one for one in self._homes.get(repo, ()) if not one.silent]
            for group in islice(groups, _LOOK_AT):
                name = group.task.instance_id
                have = [one for one in self._nodes.values() if name in one.node.images and not (one.full or one.silent)]
                if member in have or (not have and (not homes or member in homes)):
                    groups.remove(group)
                    group.listed = False
                    return group
        return None

    async def _make(self, member: _Member, group: _Group) -> None:
        for job in group.jobs:
            job.stage = "image"
        failure: MiniSandboxError | None = None
        try:
            group.key = await member.node.build(group.task)
        except NodeLost:
            self._mark_lost(member)
        except DiskFull as error:
            self._mark_full(member, error)
            failure = error if all(one.full for one in self._nodes.values()) else None
        except MiniSandboxError as error:
            failure = error
        group.making = False
        member.builds -= 1
        if failure is not None:
            await self._give_up(_take_all(group), failure)
        elif not group.key or member.lost:
            self._to_be_made(group)
        else:
            self._note_made(member, group)
        self._assign(member)
        self._assign_idle()

    def _note_made(self, member: _Member, group: _Group) -> None:
        member.report.built += 1
        for one in self._nodes.values():
            if one is member or one.node.images.get(group.task.instance_id) == group.key:
                self._add_holder(one, group)
        if group.jobs:
            self._waiting[group] = None
        for job in group.jobs:
            job.stage = "queued"

    async def _fetch(self, member: _Member, group: _Group, source: _Member) -> None:
        try:
            moved = await member.node.fetch(group.task, source.node)
        except NodeLost:
            self._mark_lost(member)
        except DiskFull as error:
            self._mark_full(member, error)
        except MiniSandboxError as error:  # the source is lost, or the data damaged: retry later, or give up
            if not source.lost:
                group.refused[member] += 1
                self._notice(f"node {member.node.name} cannot fetch {group.task.instance_id}: {error}")
        else:
            member.report.fetched += 1
            member.report.layers.update(moved.layers)
            member.report.bytes += moved.bytes
            member.report.wire += moved.wire
            self._add_holder(member, group)
        member.fetching = False
        source.sending -= 1
        self._assign(member)

    def _mark_full(self, member: _Member, error: DiskFull) -> None:
        if not member.full:
            member.full = True
            self._notice(f"node {member.node.name} takes no more images: {error}")
            for homes in self._homes.values():
                homes.discard(member)
        if all(one.full for one in self._nodes.values()):  # no node can build the remaining images
            groups = [group for groups in self._unmade.values() for group in groups]
            self._unmade.clear()
            for group in groups:
                group.listed = False
            self._spawn(self._give_up([job for group in groups for job in _take_all(group)], error))

    async def _give_up(self, jobs: list[Job], error: MiniSandboxError) -> None:
        """Record rollouts that cannot start."""
        for job in jobs:
            if self._open.pop(job.key, None) is not None:
                self._keeping += 1
                await self._owner.ended(job, self._workload.unreached(job, error))
                self._keeping -= 1
        self._check_finished()


def _take_all(group: _Group) -> list[Job]:
    """Remove and return all waiting jobs of a group."""
    jobs = list(group.jobs)
    group.jobs.clear()
    return jobs


def _not_begun(member: _Member) -> int:
    return len(member.jobs) - member.node.resources.sandboxes
