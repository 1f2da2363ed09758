"""What works on a node for a batch that another process keeps: its store, its sandboxes, its model's client.

It knows nothing of Ray: whoever holds it calls it, on one event loop, and ends its process when the driver has gone.
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from minisandbox.errors import MiniSandboxError, NotFound, StoreError
from minisandbox.grade.resumable import Job as Check
from minisandbox.grade.resumable import serve
from minisandbox.images import Image, build, load_image
from minisandbox.images.crossing import PATIENCE, Outgoing, Throttle, take_over
from minisandbox.pool import Threads
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.node import Checked, Moved, Resources, Status
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Executor
from minisandbox.rollouts.line import STAGES, Job
from minisandbox.rollouts.setup import Draw, Setup
from minisandbox.store import ImageRecord, Store
from minisandbox.store.results import Result
from minisandbox.tasks import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How rollouts are done on each node; it travels there.

    Attributes:
        setup_of: makes the setup on a node, given its address: the model's client is opened there.
        starts: sandboxes that are made at once; by the node's CPUs if None.
        gradings: submissions that are graded, or tasks that are checked, at once; by the node's CPUs if None.
        warm: sandboxes that are made ahead.
        tries: how often a rollout is tried at most on a node, where it fails on our side.
        pause: seconds before the second try.
        mirrors: a directory of git repositories, there on each node, that builds look in.
    """

    setup_of: Callable[[str], Setup]
    starts: int | None = None
    gradings: int | None = None
    warm: int = 2
    tries: int = 3
    pause: float = 1.0
    mirrors: Path | None = None

    def budgets(self, resources: Resources) -> Budgets:
        """Return how many of each go on at once on a node."""
        given = {"starts": self.starts, "gradings": self.gradings}
        return Budgets(
            workers=resources.sandboxes,
            builds=resources.builds,
            warm=self.warm,
            **{name: number for name, number in given.items() if number is not None},
        )


class Source(Protocol):
    """Another node's worker, as this one reaches it."""

    def record(self, name: str) -> Awaitable[ImageRecord]:
        """As :meth:`Worker.record`."""

    def send(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> Awaitable[int]:
        """As :meth:`Worker.send`."""

    def read(self, number: int) -> Awaitable[bytes]:
        """As :meth:`Worker.read`."""


class Worker:
    """A node's part in a batch. Made and used on one event loop.

    Args:
        name: the node's address.
        resources: what it offers.
        terms: how rollouts are done.
        store: its store.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms, store: Store) -> None:
        self.name = name
        self._terms, self._store = terms, store
        self._throttle = Throttle(resources.io_budget)
        self._setup = terms.setup_of(name)
        self._executor = Executor(
            self._setup, terms.budgets(resources), image_of=self._build, tries=terms.tries, pause=terms.pause
        )
        self._jobs: dict[tuple[str, int], tuple[Job, asyncio.Future[Packed | None]]] = {}
        self._checkers = Threads(terms.gradings or len(os.sched_getaffinity(0)), "check")
        self._checks: list[Future[Result | None]] = []  # that have not ended
        self._imports = Threads(1, "import")  # one at a time: what the first brings the next one has
        self._exports = Threads(8, "export")
        self._sending: dict[int, tuple[Outgoing, float]] = {}
        self._sent = self._came = 0
        self._left = 0
        self._serving = asyncio.ensure_future(self._executor.serve(self))

    # --- for the driver ----------------------------------------------------------------------------------------------

    def known(self) -> dict[str, str]:
        """Return the keys of the images in its store, by name."""
        return {image.name: image.key for image in self._store.images()}

    async def build(self, task: Task) -> str:
        """Make a task's image, or find it; returns its key.

        Raises:
            MiniSandboxError: it cannot be made.
        """
        return (await self._executor.image(task)).key

    async def fetch(self, name: str, where: str, source: Source) -> Moved:
        """Take an image over from another node.

        Args:
            name: the image.
            where: what errors call the node.
            source: the node.

        Raises:
            MiniSandboxError: it cannot be had.
        """
        peer = _Peer(where, source, asyncio.get_running_loop())
        try:
            done = await self._imports.run(take_over, self._store, name, peer, self._throttle)
        except TimeoutError as error:  # DiskFull is no such thing
            raise StoreError(
                f"{where} sent nothing for {PATIENCE:g} s",
                reason="it hangs, or the network does",
                hint="it is tried again",
            ) from error
        self._came += done.bytes
        return Moved(done.layers, done.bytes, peer.wire)

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
        """Do a rollout; None where it was given back before it began.

        Args:
            task: the task, whose image is there.
            attempt: which rollout of it.
            waited: seconds that it waited elsewhere.
            draw: how its answers are drawn, where that is its own.

        Raises:
            NotFound: its image is not there.
        """
        job = Job(task, attempt, time.monotonic() - waited, draw=draw)
        job.image = self._image(task)
        future: asyncio.Future[Packed | None] = asyncio.get_running_loop().create_future()
        self._jobs[job.key] = (job, future)
        self._executor.put([job])
        try:
            return await future
        finally:
            del self._jobs[job.key]

    async def check(self, task: Task, check: Check, known: str | None) -> Checked | None:
        """Do a check; None where it was given back before it began.

        Args:
            task: the task, whose image is there.
            check: what there is to do.
            known: the fingerprint of an earlier result.

        Raises:
            NotFound: its image is not there.
        """
        image = self._image(task)
        future = self._checkers.submit(serve, check, lambda _: image, known)
        self._checks.append(future)
        try:
            return Checked(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            return None
        finally:
            self._checks.remove(future)

    def give_back(self, most: int) -> None:
        """Give back what has not begun, the last ones first."""
        for job in self._executor.withdraw(most):
            _settle(self._jobs[job.key][1], None)
        for future in [one for one in reversed(self._checks) if not one.running()][:most]:
            future.cancel()

    def beat(self, left: int) -> Status:
        """Hear from the driver; returns how the node is.

        Args:
            left: how many rollouts the driver has not kept yet, all nodes together.
        """
        self._left = left
        return self.status()

    def status(self) -> Status:
        """Return how the node is."""
        if self._serving.done():
            self._serving.result()  # it raises: nothing else ends it
        now = time.monotonic()
        late = [number for number, (_, since) in self._sending.items() if now - since > PATIENCE]
        for number in late:
            del self._sending[number]
        counts = Counter(job.stage for job, _ in self._jobs.values())
        counts.update("grade" if one.running() else "queued" for one in self._checks)
        stages = {stage: counts[stage] for stage in STAGES}
        return Status(stages, sum(1 for _ in self._store.image_names()), len(self._sending), self._came, self._left)

    async def close(self) -> None:
        """End what is under way."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await self._executor.close()
        if self._setup.model is not None:
            await self._setup.model.close()

    # --- for its executor --------------------------------------------------------------------------------------------

    async def ended(self, job: Job, packed: Packed) -> None:
        """Hand a rollout to whoever waits for it; one that failed because its image was removed is to be done again."""
        future = self._jobs[job.key][1]
        if packed.summary.failed_in and not future.done():
            try:
                self._image(job.task)
            except NotFound as error:
                future.set_exception(error)
        _settle(future, packed)

    def end_by(self, error: Exception) -> None:
        """Tell the driver that no rollout can go on: by one that waits for it."""
        for _, future in self._jobs.values():
            if not future.done():
                future.set_exception(error)
                return

    def _image(self, task: Task) -> Image:
        return load_image(self._store, task.instance_id)  # each time: another process may have removed it

    def _build(self, task: Task) -> Image:
        try:
            return build(task.recipe(), store=self._store, name=task.instance_id, mirrors=self._terms.mirrors)
        except MiniSandboxError as error:
            raise error.about(task.instance_id) from None

    # --- for other nodes ---------------------------------------------------------------------------------------------

    def record(self, name: str) -> ImageRecord:
        """Return the record of an image."""
        return self._store.image(name)

    def send(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> int:
        """Begin to send a part of an image; returns the number that :meth:`read` wants."""
        self._sent += 1
        chosen = None if contents is None else frozenset(contents)
        outgoing = Outgoing(self._store, name, frozenset(keys), chosen, self._throttle)
        self._sending[self._sent] = (outgoing, time.monotonic())
        return self._sent

    async def read(self, number: int) -> bytes:
        """Return the next chunk of what is being sent; none at the end.

        Raises:
            MiniSandboxError: it cannot be read here.
        """
        if number not in self._sending:
            raise StoreError(f"node {self.name} does not send that any more", hint="it is tried again")
        outgoing, _ = self._sending[number]
        self._sending[number] = (outgoing, time.monotonic())
        try:
            chunk = await self._exports.run(outgoing.read)
        except (queue.Empty, OSError) as error:  # DiskFull is not among what reading raises
            self._sending.pop(number, None)
            raise StoreError(
                f"node {self.name} cannot send it", reason=str(error) or "its disk is slow", hint="it is tried again"
            ) from error
        if not chunk:
            self._sending.pop(number, None)
        return chunk


def _settle(future: asyncio.Future[Packed | None], value: Packed | None) -> None:
    if not future.done():
        future.set_result(value)


class _Peer:
    """Another node, asked by a thread."""

    def __init__(self, where: str, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.where = where
        self.wire = 0
        self._source, self._loop = source, loop

    def record(self, name: str) -> ImageRecord:
        return self._wait(self._source.record(name))

    def stream(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> Iterator[bytes]:
        number = self._wait(self._source.send(name, keys, contents))
        coming = self._ask(self._source.read(number))
        while chunk := coming.result(PATIENCE):
            coming = self._ask(self._source.read(number))  # it comes while this one is written
            self.wire += len(chunk)
            yield chunk

    def _wait(self, what: Awaitable[T]) -> T:
        return self._ask(what).result(PATIENCE)

    def _ask(self, what: Awaitable[T]) -> Future[T]:
        async def ask() -> T:
            return await what

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)
