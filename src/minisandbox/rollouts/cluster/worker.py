"""The worker on a node: runs rollouts and checks with its own store, sandboxes and model client.

It does not depend on Ray: its holder calls it on one event loop, and ends its process when the driver is gone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from minisandbox.errors import MiniSandboxError, NotFound, StoreError
from minisandbox.images import Image, build, load_image
from minisandbox.pool import Job as Check
from minisandbox.pool import Threads, run_job
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.node import Checked, Moved, Resources, Status
from minisandbox.rollouts.cluster.transfer import (
    PATIENCE,
    Peer,
    Source,
    Throttle,
    blob_of,
    copy_of,
    fetch_image,
    read_part,
)
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.executor import Executor
from minisandbox.rollouts.jobs import STAGES, Job
from minisandbox.rollouts.setup import Draw, Setup
from minisandbox.store import Store
from minisandbox.store.blobs.kept import LayerBlob
from minisandbox.store.results import Result
from minisandbox.tasks import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of a worker, sent to each node.

    Attributes:
        setup_of: makes the setup, given the node's address; this opens the model's client there.
        starts: sandboxes created at once; by the node's CPUs if None.
        gradings: submissions graded, or tasks checked, at once; by the node's CPUs if None.
        warm: sandboxes created ahead.
        tries: most tries of a rollout on a node, repeated after infrastructure errors.
        pause: seconds before the second try.
        mirrors: a directory of git repositories, present on each node, that builds use.
    """

    setup_of: Callable[[str], Setup]
    starts: int | None = None
    gradings: int | None = None
    warm: int = 2
    tries: int = 3
    pause: float = 1.0
    mirrors: Path | None = None

    def budgets(self, resources: Resources) -> Budgets:
        """Return a node's concurrency limits."""
        given = {"starts": self.starts, "gradings": self.gradings}
        return Budgets(
            workers=resources.sandboxes,
            builds=resources.builds,
            warm=self.warm,
            **{name: number for name, number in given.items() if number is not None},
        )


class Worker:
    """A node's part in a batch. Created and used on one event loop.

    Args:
        name: the node's address.
        resources: the node's resources.
        terms: the worker's options.
        store: the node's store.
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
        self._checks: list[Future[Result | None]] = []  # pending ones
        self._imports = Threads(1, "import")  # one at a time: images share layers
        self._exports = Threads(8, "export")
        self._sending = self._came = self._left = 0
        self._serving = asyncio.ensure_future(self._executor.serve(self))

    # --- calls of the driver -----------------------------------------------------------------------------------------

    def known(self) -> dict[str, str]:
        """Return the keys of the images in the store, by name."""
        return {image.name: image.key for image in self._store.images()}

    async def build(self, task: Task) -> str:
        """Build a task's image, or find it in the store, and return its key.

        Raises:
            MiniSandboxError: the build failed.
        """
        return (await self._executor.image(task)).key

    async def fetch(self, name: str, where: str, source: Source) -> Moved:
        """Fetch an image from another node.

        Args:
            name: the image's name.
            where: the other node's name in error messages.
            source: the other node.

        Raises:
            MiniSandboxError: the transfer failed.
        """
        peer = Peer(where, source, self._throttle, asyncio.get_running_loop())
        try:
            made = await self._imports.run(fetch_image, self._store, name, peer)
        except TimeoutError as error:  # DiskFull is not one
            raise StoreError(
                f"{where} sent nothing for {PATIENCE:g} s", reason="it or the network hangs", hint="it is retried"
            ) from error
        size = sum(record.bytes for record in made)
        self._came += size
        return Moved(tuple(record.key for record in made), size, peer.wire)

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None = None) -> Packed | None:
        """Run a rollout; return None if it was given back unstarted.

        Args:
            task: the task, whose image is present.
            attempt: which rollout of the task it is.
            waited: seconds that it waited at the driver.
            draw: sampling of this rollout alone, if any.

        Raises:
            NotFound: the image is missing.
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

    async def check(self, task: Task, check: Check[Task], known: str | None) -> Checked | None:
        """Run a check; return None if it was given back unstarted.

        Args:
            task: the task, whose image is present.
            check: the check.
            known: the fingerprint of an earlier result.

        Raises:
            NotFound: the image is missing.
        """
        image = self._image(task)
        future = self._checkers.submit(run_job, check, lambda _: image, known)
        self._checks.append(future)
        try:
            return Checked(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            return None
        finally:
            self._checks.remove(future)

    def return_jobs(self, most: int) -> None:
        """Return up to ``most`` jobs that have not started to the driver, from the end of the queue."""
        for job in self._executor.withdraw(most):
            _settle(self._jobs[job.key][1], None)
        for future in [one for one in reversed(self._checks) if not one.running()][:most]:
            future.cancel()

    def heartbeat(self, left: int) -> Status:
        """Note the driver's heartbeat, and return the node's status.

        Args:
            left: rollouts that the driver has not stored yet, on all nodes.
        """
        self._left = left
        return self.status()

    def status(self) -> Status:
        """Return the node's status."""
        if self._serving.done():
            self._serving.result()  # raises its error: nothing else ends it
        counts = Counter(job.stage for job, _ in self._jobs.values())
        counts.update("grade" if one.running() else "queued" for one in self._checks)
        stages = {stage: counts[stage] for stage in STAGES}
        return Status(stages, sum(1 for _ in self._store.image_names()), self._sending, self._came, self._left)

    async def close(self) -> None:
        """Stop all running work."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await self._executor.close()
        if self._setup.model is not None:
            await self._setup.model.close()

    # --- calls of the executor ---------------------------------------------------------------------------------------

    async def ended(self, job: Job, packed: Packed) -> None:
        """Pass a rollout to its caller, or NotFound if it failed because its image was removed."""
        future = self._jobs[job.key][1]
        if packed.summary.failed_in and not future.done():
            try:
                self._image(job.task)
            except NotFound as error:
                future.set_exception(error)
        _settle(future, packed)

    def stop_with(self, error: Exception) -> None:
        """Report to the driver, through one pending call, that no rollout can succeed."""
        for _, future in self._jobs.values():
            if not future.done():
                future.set_exception(error)
                return

    def _image(self, task: Task) -> Image:
        return load_image(self._store, task.instance_id)  # not cached: another process may have removed it

    def _build(self, task: Task) -> Image:
        try:
            return build(task.recipe(), store=self._store, name=task.instance_id, mirrors=self._terms.mirrors)
        except MiniSandboxError as error:
            raise error.about(task.instance_id) from None

    # --- calls of other nodes ----------------------------------------------------------------------------------------

    async def copy(self, name: str) -> bytes:
        """Return the records of an image."""
        return await self._sent(copy_of, self._store, name)

    async def blob(self, key: str) -> LayerBlob:
        """Return a layer's blob, made if it is not there."""
        return await self._sent(blob_of, self._store, key)

    async def read(self, digest: str, offset: int) -> bytes:
        """Return a part of a blob; empty at its end."""
        return await self._sent(read_part, self._store, digest, offset, self._throttle)

    async def _sent(self, make: Callable[..., T], *values: object) -> T:
        self._sending += 1
        try:
            return await self._exports.run(make, *values)
        finally:
            self._sending -= 1


def _settle(future: asyncio.Future[Packed | None], value: Packed | None) -> None:
    if not future.done():
        future.set_result(value)
