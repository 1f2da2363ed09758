"""What the cases are run on: the two colours of the sandbox, and the fake.

A case is a coroutine. For a synchronous handle a thin proxy makes awaitables of its methods, and the coroutine is
stepped without an event loop: whatever it awaits has a value when it is first asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tests.conformance.contract import Case, Steps

from minisandbox.errors import SandboxGone
from minisandbox.sandbox import AsyncSandbox, Files, Process, Sandbox, Shell
from minisandbox.testing import AsyncFakeSandbox, FakeSandbox
from minisandbox.types import ImageSpec, SandboxInfo

if TYPE_CHECKING:
    from minisandbox.sandbox.snapshots import Snapshot

T = TypeVar("T")
WORKDIR = PurePosixPath("/testbed")
PATIENCE = 60.0
"""Seconds that a case which is over its deadline is given to end, once its sandboxes have been stopped."""


class LateError(AssertionError):
    """A case was not over at its deadline."""


# --- synchronous handles ---------------------------------------------------------------------------------------------


class Awaitable:
    """A synchronous handle with the face of an asynchronous one."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> object:
        """A property as it is; a method as a function that is carried out when awaited."""
        value = getattr(self._target, name)
        if not callable(value):
            return awaitable(value)
        if name == "events":
            return lambda: Events(value())

        async def call(*words: object, **options: object) -> object:
            return awaitable(value(*words, **options))

        return call

    async def __aenter__(self) -> object:
        """Enter the handle's block."""
        return awaitable(cast("Any", self._target).__enter__())

    async def __aexit__(self, *error: object) -> None:
        """Leave it."""
        cast("Any", self._target).__exit__(*error)


class Events:
    """An iterator with the face of an asynchronous one."""

    def __init__(self, events: Iterator[object]) -> None:
        self._events = events

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> object:
        """The next event."""
        for event in self._events:
            return event
        raise StopAsyncIteration


def awaitable(value: object) -> object:
    """Put the asynchronous face on handles, also on those in a list."""
    if isinstance(value, Sandbox | Files | Process | Shell):
        return Awaitable(value)
    if isinstance(value, list):
        return [awaitable(one) for one in value]
    return value


def step(steps: Steps[T]) -> T:
    """Carry out a coroutine that never has to wait for a loop."""
    try:
        steps.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    steps.close()
    raise AssertionError("the case waits for something that no synchronous handle has")


def in_thread(work: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """Begin something in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, future


def derived(spec: ImageSpec, environment: Mapping[str, str] | None, tree: Path | None, directory: Path) -> ImageSpec:
    """An image with variables of its own, and a layer that holds a copy of ``tree`` at the workdir."""
    layers = spec.layers
    if tree is not None:
        layer = directory / f"layer-{secrets.token_hex(4)}"
        shutil.copytree(tree, layer / spec.workdir.relative_to("/"), symlinks=True)
        directory.chmod(0o755)
        layers = (*layers, layer)
    return replace(spec, environment=tuple((environment or {}).items()), layers=layers)


# --- worlds ----------------------------------------------------------------------------------------------------------


class SyncWorld:
    """Cases on a synchronous handle."""

    def __init__(self, kind: type[Sandbox], spec: ImageSpec, directory: Path) -> None:
        self.directory = directory
        self._kind = kind
        self._spec = spec
        self._boxes: list[Sandbox] = []

    async def __call__(self, image: ImageSpec | Snapshot | None = None, **options: Any) -> Any:
        box = self._kind.create(image or self._spec, **options)
        self._boxes.append(box)
        return Awaitable(box)

    def image(self, environment: Mapping[str, str] | None = None, tree: Path | None = None) -> ImageSpec:
        return derived(self._spec, environment, tree, self.directory)

    async def attach(self, sandbox: str) -> Any:
        box = self._kind.attach(sandbox)
        self._boxes.append(box)
        return Awaitable(box)

    async def live(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        return self._kind.list(labels=labels)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def together(self, *steps: Steps[T]) -> list[T]:
        begun = [in_thread(lambda one=one: step(one)) for one in steps]  # type: ignore[misc]
        for thread, _ in begun:
            thread.join()
        return [future.result() for _, future in begun]

    def close(self) -> None:
        for box in reversed(self._boxes):
            with contextlib.suppress(SandboxGone):
                box.stop()

    def hold_to(self, case: Case) -> None:
        thread, future = in_thread(lambda: step(case.run(self)))
        try:
            thread.join(case.deadline)
            late = stack_of(thread) if thread.is_alive() else ""
        finally:
            self.close()
        if late:
            thread.join(PATIENCE)
            raise LateError(f"not over after {case.deadline} s; it was here:\n{late}")
        future.result()


class AsyncWorld:
    """Cases on an asynchronous handle."""

    def __init__(self, kind: type[AsyncSandbox], spec: ImageSpec, directory: Path) -> None:
        self.directory = directory
        self._kind = kind
        self._spec = spec
        self._boxes: list[AsyncSandbox] = []

    async def __call__(self, image: ImageSpec | Snapshot | None = None, **options: Any) -> AsyncSandbox:
        box = await self._kind.create(image or self._spec, **options)
        self._boxes.append(box)
        return box

    def image(self, environment: Mapping[str, str] | None = None, tree: Path | None = None) -> ImageSpec:
        return derived(self._spec, environment, tree, self.directory)

    async def attach(self, sandbox: str) -> AsyncSandbox:
        box = await self._kind.attach(sandbox)
        self._boxes.append(box)
        return box

    async def live(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        return await self._kind.list(labels=labels)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def together(self, *steps: Steps[T]) -> list[T]:
        results = await asyncio.gather(*steps, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return cast("list[T]", results)

    async def close(self) -> None:
        for box in reversed(self._boxes):
            with contextlib.suppress(SandboxGone):
                await box.stop()

    def hold_to(self, case: Case) -> None:
        asyncio.run(self._hold_to(case))

    async def _hold_to(self, case: Case) -> None:
        task = asyncio.create_task(case.run(self))
        try:
            done, _ = await asyncio.wait([task], timeout=case.deadline)
            if not done:
                where = "".join(traceback.format_list(traceback.StackSummary.extract(frames_of(task))))
                task.cancel()
                await asyncio.wait([task], timeout=PATIENCE)
                raise LateError(f"not over after {case.deadline} s; it was here:\n{where}")
            task.result()
        finally:
            await self.close()


def stack_of(thread: threading.Thread) -> str:
    """Where a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended meanwhile)"


def frames_of(task: asyncio.Task[None]) -> Iterator[tuple[Any, int]]:
    """Where a task waits: its own coroutine and those that it awaits."""
    waiting: Any = task.get_coro()
    while waiting is not None and (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        waiting = waiting.cr_await


# --- implementations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Implementation:
    """Something that is held to the contract.

    Attributes:
        name: what the tests call it.
        has: which needs of cases it always has.
        real: whether it makes sandboxes by the kernel.
        world: makes what the cases stand on.
        engine: the container engine that makes them, or "".
    """

    name: str
    has: frozenset[str]
    real: bool
    world: Callable[[ImageSpec, Path], SyncWorld | AsyncWorld]
    engine: str = ""


# Where an ordinary user may not open the host's own, a fake has none; a sandbox has its own always.
TERMINALS = {"terminal"} if os.access("/dev/pts/ptmx", os.R_OK | os.W_OK) else set()
SANDBOX = {"kernel", "terminal", "layers", "snapshots", "attach"}

CONTAINERS = frozenset(SANDBOX | {"range"})
NOT_IN_CONTAINERS = {
    "commands-exit_statuses": "256 commands: an engine needs more than the deadline",
    "commands-many_in_sequence": "hundreds of commands: an engine needs more than the deadline",
    "commands-fifty_at_once": "50 clients at once: an engine needs more than the deadline",
    "files-odd_names": "hundreds of file verbs: an engine needs more than the deadline",
    "files-full_disk": "engines do not enforce Limits.disk",
    "management-attach": "containers are not listed and cannot be attached to",
    "management-attach_and_stop": "containers are not listed and cannot be attached to",
    "management-attach_settings": "containers are not listed and cannot be attached to",
    "management-attached_end": "containers are not listed and cannot be attached to",
    "management-usage": "usage() counts the worker, and no disk",
    "management-idle_usage": "usage() counts the worker, and no disk",
    "management-list": "containers are not listed and cannot be attached to",
    "snapshots-owner_only": "containers are not listed and cannot be attached to",
    "snapshots-during_a_command": "engines take no snapshots",
}
"""Cases that an engine's containers do not pass, and why; those that raise Unsupported are not named."""

IMPLEMENTATIONS = (
    Implementation("sync", frozenset(SANDBOX), True, partial(SyncWorld, Sandbox)),
    Implementation("async", frozenset(SANDBOX | {"cancel"}), True, partial(AsyncWorld, AsyncSandbox)),
    Implementation("fake", frozenset(TERMINALS), False, partial(SyncWorld, FakeSandbox)),
    Implementation("async-fake", frozenset(TERMINALS | {"cancel"}), False, partial(AsyncWorld, AsyncFakeSandbox)),
    Implementation("podman", CONTAINERS, True, partial(SyncWorld, Sandbox), "podman"),
    Implementation("docker", CONTAINERS, True, partial(SyncWorld, Sandbox), "docker"),
)
