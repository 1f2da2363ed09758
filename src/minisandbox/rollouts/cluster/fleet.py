"""The driver's part of work on many nodes: which node builds which image, takes it over, and does which rollout.

Work goes to nodes that have its image. What queues there is spread: a node with room takes the image over. An image is
built once, beside others of its repository, whose layers it shares. All of it is decided on one event loop, by what is
known there: no clocks of two nodes are ever compared. A rollout that has ended is kept once, whoever did it first.
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
from minisandbox.rollouts.cluster.trades import Done, Trade
from minisandbox.rollouts.executor import Office
from minisandbox.rollouts.line import Job
from minisandbox.tasks import Task

SILENCE = 30.0
"""Seconds without an answer after which a node's unfinished rollouts are done elsewhere too."""
_BEAT = 2.0
_LOOK = 2.0
_REST = 10.0  # before a node is tried again that did not work
_NOBODY = 300.0  # without any node
_GATHER = 10.0  # until those nodes that are there at first have come
_FETCHES = 3  # times that a node tries to take an image over
_LOOK_AT = 8  # images of a repository, for one that a node has already


@dataclass(eq=False, slots=True)
class _Group:
    """The rollouts of one task, and where its image is."""

    task: Task
    jobs: deque[Job] = field(default_factory=deque)  # those that wait
    key: str = ""  # of the image, once some node has it
    holders: set[_Seat] = field(default_factory=set)
    making: bool = False
    listed: bool = False  # it is among those that are to be made
    refused: Counter[_Seat] = field(default_factory=Counter)  # how often one could not take it over


@dataclass(eq=False, slots=True)
class _Seat:
    """A node, and what it has been given."""

    node: Node
    ahead: int
    jobs: dict[tuple[str, int], Job] = field(default_factory=dict)
    moved: set[tuple[str, int]] = field(default_factory=set)  # of these, what is done elsewhere too
    holds: set[_Group] = field(default_factory=set)
    ready: deque[_Group] = field(default_factory=deque)  # what it holds; some may have nothing left to do
    builds: int = 0
    fetching: bool = False
    sending: int = 0
    robbing: bool = False
    full: bool = False
    quiet: bool = False
    lost: bool = False
    status: Status = field(default_factory=Status)
    report: NodeReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = NodeReport(self.node.name)

    @property
    def room(self) -> int:
        """How many more rollouts it may be given."""
        return 0 if self.quiet or self.lost else self.node.resources.sandboxes + self.ahead - len(self.jobs)


@dataclass(slots=True)
class NodeReport:
    """What a node has done in a batch.

    Attributes:
        name: the node's.
        rollouts: those that it ended first.
        late: those that somebody else had ended before.
        built: images that it made, or found in its store.
        fetched: images that came from other nodes.
        layers: how often each layer came.
        bytes: of contents that came, as files have them.
        wire: the same as they went over the network.
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
    """Nodes that work together: the crew of a batch. Used once, on one event loop.

    Args:
        finder: where nodes come from, now and later.
        trade: what they do; rollouts, as everything here calls it.
        tries: on how many nodes a rollout is tried that loses its node.
        silence: seconds without an answer after which a node's unfinished rollouts are done elsewhere too.
        notice: called with what people should know: a node that has gone, one whose disk is full.
    """

    def __init__(
        self,
        finder: Finder,
        trade: Trade[Done],
        *,
        tries: int = 3,
        silence: float = SILENCE,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._finder, self._trade, self._tries, self._silence = finder, trade, tries, silence
        self._notice = notice or (lambda _: None)
        self._groups: dict[str, _Group] = {}
        self._open: dict[tuple[str, int], _Group] = {}
        self._unmade: dict[str, deque[_Group]] = {}  # by repository
        self._homes: dict[str, set[_Seat]] = {}  # nodes that have layers of a repository, or are making them
        self._waiting: dict[_Group, None] = {}  # groups with an image and rollouts that wait
        self._seats: dict[str, _Seat] = {}
        self._reports: list[NodeReport] = []
        self._idle: set[_Seat] = set()
        self._draining = False
        self._staying = False
        self._begun = False
        self._over = asyncio.Event()
        self._keeping = 0

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """What each node has done, those that are gone included."""
        return tuple(self._reports)

    async def run(self, todo: list[Job], office: Office[Done]) -> None:
        """Do rollouts, until all have ended or those under way have after :meth:`drain`."""
        self._office = office
        self.put(todo)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            everything = tasks.create_task(self._live())
            self._see_whether_over()
            await self._over.wait()
            everything.cancel()

    async def serve(self, office: Office[Done]) -> None:
        """Do what :meth:`put` is given, until :meth:`drain`."""
        self._staying = True
        self._over.clear()  # what came before had ended
        await self.run([], office)

    def put(self, jobs: list[Job]) -> None:
        """Have more rollouts done. No two that are not yet ended have the same key."""
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
        self._wake()

    def forget(self, key: tuple[str, int]) -> None:
        """Drop a rollout: it is not begun, and what comes of it is not kept. One that has ended is left alone."""
        self._open.pop(key, None)
        self._see_whether_over()

    async def _live(self) -> None:
        """All that goes on until it is over, in a group of its own that ends by a cancellation."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._watch())

    def drain(self) -> None:
        """Begin no more rollouts; what has not begun comes back from the nodes."""
        self._draining = True
        for seat in self._seats.values():
            self._spawn(self._take_back(seat, len(seat.jobs)))
        self._see_whether_over()

    async def close(self) -> None:
        """End what works on the nodes."""
        await asyncio.gather(*(seat.node.close() for seat in self._seats.values()), return_exceptions=True)
        await self._finder.close()

    def _spawn(self, work: object) -> None:
        self._tasks.create_task(work)  # type: ignore[arg-type] # a coroutine

    def _see_whether_over(self) -> None:
        under_way = any(seat.jobs.keys() - seat.moved for seat in self._seats.values() if not seat.lost)
        if self._keeping or (self._staying and not self._draining):
            return
        if not self._open or (self._draining and not under_way):
            self._over.set()

    # --- nodes come and go -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Have every node work that is there, also one that comes later."""
        asked: dict[str, float] = {}
        seen = time.monotonic()
        while True:
            try:
                there = await self._finder.ids()
            except NodeLost:  # the cluster's head does not answer now
                there = set()
            now = time.monotonic()
            new = [one for one in there - self._seats.keys() if now >= asked.get(one, 0.0)]
            hired = [self._tasks.create_task(self._hire(one, asked)) for one in new]
            if hired and not self._begun:  # what each has decides who makes what
                await asyncio.wait(hired, timeout=_GATHER)
                self._begun = True
                self._wake()
            seen = now if self._seats else seen
            if now - seen > _NOBODY:
                self._office.end_by(
                    HostError(
                        "no node of the cluster works for this batch",
                        reason=f"none that offers sandboxes answered for {_NOBODY:g} s",
                        hint="minisandbox cluster worker --address HEAD on each; minisandbox cluster status",
                    )
                )
                seen = now
            await asyncio.sleep(_LOOK)

    async def _hire(self, one: str, asked: dict[str, float]) -> None:
        asked[one] = float("inf")
        try:
            node = await self._finder.hire(one)
        except MiniSandboxError as error:
            self._notice(f"a node does not work for this batch: {error}")
            asked[one] = time.monotonic() + _REST
            return
        asked[one] = time.monotonic() + _REST
        seat = _Seat(node, ahead=max(2, node.resources.sandboxes // 8))
        self._seats[one] = seat
        self._reports.append(seat.report)
        self._idle.add(seat)
        self._spawn(self._listen(one, seat))
        for name, group in self._groups.items():
            if node.images.get(name) == group.key:
                self._hold(seat, group)
        self._feed(seat)

    async def _listen(self, one: str, seat: _Seat) -> None:
        """Hear from a node, and tell it that we are there."""
        while not seat.lost:
            call = asyncio.ensure_future(seat.node.beat(len(self._open)))
            try:
                done, _ = await asyncio.wait([call], timeout=self._silence)
                if not done:
                    self._hush(seat)
                seat.status = await call
            except NodeLost:
                self._lose(seat)
                break
            finally:
                call.cancel()
            if seat.quiet:
                seat.quiet = False
                self._notice(f"node {seat.node.name} answers again")
                self._feed(seat)
            await asyncio.sleep(_BEAT)
        del self._seats[one]

    def _hush(self, seat: _Seat) -> None:
        """A node does not answer: what it has not finished is done elsewhere too. Whoever is first counts."""
        seat.quiet = True
        left = [job for key, job in seat.jobs.items() if key in self._open and key not in seat.moved]
        self._notice(f"node {seat.node.name} does not answer; {len(left)} rollouts of it begin anew elsewhere")
        seat.moved.update(job.key for job in left)
        self._requeue(left)

    def _lose(self, seat: _Seat) -> None:
        """A node has gone. Its rollouts, and the images that only it had, are done elsewhere."""
        if seat.lost:
            return
        seat.lost = True
        self._idle.discard(seat)
        for homes in self._homes.values():
            homes.discard(seat)
        left = [job for key, job in seat.jobs.items() if key in self._open and key not in seat.moved]
        self._notice(f"node {seat.node.name} is lost; {len(left)} rollouts of it begin anew elsewhere")
        seat.jobs.clear()
        self._spawn(seat.node.close())  # what is left of it
        for group in seat.holds:
            group.holders.discard(seat)
            if group.jobs:
                self._offer(group)
        for job in left:
            job.moves += 1
            if job.moves >= self._tries:
                error = NodeLost("its node was lost", reason=f"{job.moves} nodes were, one after the other")
                self._spawn(self._give_up([job], error))
        self._requeue([job for job in left if job.moves < self._tries])
        self._see_whether_over()

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def _requeue(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.stage = "queued"
            group = self._open[job.key]
            group.jobs.append(job)
            self._offer(group)
        self._wake()

    def _offer(self, group: _Group) -> None:
        """Let those have it that have its image; where nobody has it any more, it is made again."""
        if group.holders:
            self._waiting[group] = None
            for seat in group.holders:
                seat.ready.append(group)
        elif not group.making and not group.listed:
            self._to_be_made(group)

    def _to_be_made(self, group: _Group) -> None:
        group.key, group.listed = "", True
        self._waiting.pop(group, None)
        self._unmade.setdefault(group.task.repo, deque()).append(group)

    def _hold(self, seat: _Seat, group: _Group) -> None:
        if group.key and not seat.lost:
            group.holders.add(seat)
            seat.holds.add(group)
            seat.ready.append(group)
            self._homes.setdefault(group.task.repo, set()).add(seat)

    def _wake(self) -> None:
        for seat in list(self._idle):
            self._feed(seat)

    def _feed(self, seat: _Seat) -> None:
        """Give a node what it can do; have it get what it could do then."""
        if seat.lost or seat.quiet or self._draining or not self._begun:
            return
        while seat.room > 0 and (job := self._next(seat)) is not None:
            seat.jobs[job.key] = job
            seat.moved.discard(job.key)
            job.stage = "agent"
            self._spawn(self._do(seat, job))
        self._bring(seat)
        if seat.room > 0:
            self._idle.add(seat)
            self._rob(seat)
        else:
            self._idle.discard(seat)

    def _next(self, seat: _Seat) -> Job | None:
        """The next rollout whose image a node has."""
        while seat.ready:
            group = seat.ready[0]
            while group.jobs:
                job = group.jobs.popleft()
                if not group.jobs:
                    self._waiting.pop(group, None)
                if job.key in seat.jobs:  # it was quiet, and is at it still
                    seat.moved.discard(job.key)
                elif job.key in self._open:  # else a late result came in first
                    return job
            seat.ready.popleft()
        return None

    async def _do(self, seat: _Seat, job: Job) -> None:
        try:
            done = await self._trade.do(seat.node, job)
        except NodeLost:
            self._lose(seat)
            return
        except NotFound as error:
            done = None
            self._miss(seat, job, error)
        except MiniSandboxError as error:  # the model's budget, its refusal: no rollout can go on
            self._office.end_by(error)
            done = None
        seat.jobs.pop(job.key, None)
        moved = job.key in seat.moved
        seat.moved.discard(job.key)
        if done is None:
            if job.key in self._open and not moved:
                self._requeue([job])
        elif self._open.pop(job.key, None) is None:
            seat.report.late += 1
        else:
            seat.report.rollouts += 1
            self._keeping += 1
            self._feed(seat)
            await self._office.ended(job, done)
            self._keeping -= 1
            try:
                self._trade.charge(done)
            except BudgetExceeded as error:
                self._office.end_by(error)
            self._see_whether_over()
            return
        self._feed(seat)
        self._see_whether_over()

    def _miss(self, seat: _Seat, job: Job, error: NotFound) -> None:
        """An image has gone from a node's store, which others may collect: it is made or taken over again."""
        group = self._groups[job.task.instance_id]
        if seat in group.holders:
            self._notice(f"node {seat.node.name} has lost an image: {error}")
        group.holders.discard(seat)
        seat.holds.discard(group)
        seat.ready = deque(one for one in seat.ready if one is not group)
        job.moves += 1
        if job.moves >= self._tries:
            self._spawn(self._give_up([job], error))

    def _rob(self, seat: _Seat) -> None:
        """Let a node without work have what another one has not begun."""
        if seat.robbing or seat.builds or seat.fetching or self._waiting or not self._open:
            return
        others = (one for one in self._seats.values() if one is not seat and not one.lost and not one.quiet)
        victim = max(others, key=_not_begun, default=None)
        if victim is not None and (count := _not_begun(victim)) > 0:
            seat.robbing, victim.ahead = True, 0
            self._spawn(self._take_back(victim, min(count, seat.room), seat))

    async def _take_back(self, seat: _Seat, most: int, thief: _Seat | None = None) -> None:
        """Have a node give back what it has not begun; the calls for those return then."""
        try:
            await seat.node.give_back(most)
        except NodeLost:
            self._lose(seat)
        finally:
            if thief is not None:
                thief.robbing = False

    # --- images ------------------------------------------------------------------------------------------------------

    def _bring(self, seat: _Seat) -> None:
        """Have a node make images, and take over one whose rollouts queue elsewhere."""
        if seat.full:
            return
        while seat.builds < seat.node.resources.builds and (seat.room > 0 or self._near()):
            group = self._to_make(seat)
            if group is None:
                break
            group.making = True
            self._homes.setdefault(group.task.repo, set()).add(seat)
            seat.builds += 1
            self._spawn(self._make(seat, group))
        if seat.room > 0 and not seat.fetching:
            for group in self._waiting:
                sources = [one for one in group.holders if not one.quiet]
                if sources and seat not in group.holders and group.refused[seat] < _FETCHES:
                    source = min(sources, key=lambda one: one.sending)
                    self._spawn(self._fetch(seat, group, source))
                    seat.fetching, source.sending = True, source.sending + 1
                    return

    def _near(self) -> bool:
        """Whether few rollouts are left whose images are there: images are not made too far ahead."""
        return len(self._waiting) < 4 * len(self._seats)

    def _to_make(self, seat: _Seat) -> _Group | None:
        """An image that a node is to make: of a repository whose layers it has, or that nobody has begun with."""
        for repo, groups in list(self._unmade.items()):
            while groups and not groups[0].jobs:
                groups.popleft().listed = False
            if not groups:
                del self._unmade[repo]
                continue
            homes = [one for one in self._homes.get(repo, ()) if not one.quiet]
            for group in islice(groups, _LOOK_AT):
                name = group.task.instance_id
                knows = [one for one in self._seats.values() if name in one.node.images and not (one.full or one.quiet)]
                if seat in knows or (not knows and (not homes or seat in homes)):
                    groups.remove(group)
                    group.listed = False
                    return group
        return None

    async def _make(self, seat: _Seat, group: _Group) -> None:
        for job in group.jobs:
            job.stage = "image"
        failure: MiniSandboxError | None = None
        try:
            group.key = await seat.node.build(group.task)
        except NodeLost:
            self._lose(seat)
        except DiskFull as error:
            self._fill(seat, error)
            failure = error if all(one.full for one in self._seats.values()) else None
        except MiniSandboxError as error:
            failure = error
        group.making = False
        seat.builds -= 1
        if failure is not None:
            await self._give_up(_taken(group), failure)
        elif not group.key or seat.lost:
            self._to_be_made(group)
        else:
            self._note_made(seat, group)
        self._feed(seat)
        self._wake()

    def _note_made(self, seat: _Seat, group: _Group) -> None:
        seat.report.built += 1
        for one in self._seats.values():
            if one is seat or one.node.images.get(group.task.instance_id) == group.key:
                self._hold(one, group)
        if group.jobs:
            self._waiting[group] = None
        for job in group.jobs:
            job.stage = "queued"

    async def _fetch(self, seat: _Seat, group: _Group, source: _Seat) -> None:
        try:
            moved = await seat.node.fetch(group.task, source.node)
        except NodeLost:
            self._lose(seat)
        except DiskFull as error:
            self._fill(seat, error)
        except MiniSandboxError as error:  # its source has gone, or what came is damaged: another time, or never
            if not source.lost:
                group.refused[seat] += 1
                self._notice(f"{group.task.instance_id} does not come to node {seat.node.name}: {error}")
        else:
            seat.report.fetched += 1
            seat.report.layers.update(moved.layers)
            seat.report.bytes += moved.bytes
            seat.report.wire += moved.wire
            self._hold(seat, group)
        seat.fetching = False
        source.sending -= 1
        self._feed(seat)

    def _fill(self, seat: _Seat, error: DiskFull) -> None:
        if not seat.full:
            seat.full = True
            self._notice(f"node {seat.node.name} gets no more images: {error}")
            for homes in self._homes.values():
                homes.discard(seat)
        if all(one.full for one in self._seats.values()):  # nobody makes what is not made yet
            groups = [group for groups in self._unmade.values() for group in groups]
            self._unmade.clear()
            for group in groups:
                group.listed = False
            self._spawn(self._give_up([job for group in groups for job in _taken(group)], error))

    async def _give_up(self, jobs: list[Job], error: MiniSandboxError) -> None:
        """Record rollouts that cannot begin."""
        for job in jobs:
            if self._open.pop(job.key, None) is not None:
                self._keeping += 1
                await self._office.ended(job, self._trade.unreached(job, error))
                self._keeping -= 1
        self._see_whether_over()


def _taken(group: _Group) -> list[Job]:
    """The jobs of a group that wait; none of them waits any more."""
    jobs = list(group.jobs)
    group.jobs.clear()
    return jobs


def _not_begun(seat: _Seat) -> int:
    return len(seat.jobs) - seat.node.resources.sandboxes
