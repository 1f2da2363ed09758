"""What a case of the contract is, and what it may use. Nothing here knows pytest or an implementation.

A case is a short coroutine function that is written once, against the names of the asynchronous sandbox. It takes
``box``, a fresh sandbox, or ``make``, a :class:`World` that makes sandboxes, or both; it passes when it returns.
An implementation is held to the contract by running every case of :func:`cases` whose needs it has::

    for one in cases():
        if one.needs <= what_i_have:
            await asyncio.wait_for(one.run(MyWorld()), one.deadline)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox
    from minisandbox.sandbox.snapshots import Snapshot
    from minisandbox.types import ImageSpec, Limits, Mount, SandboxInfo

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Steps = Coroutine[Any, Any, T]

NEEDS: Mapping[str, str] = {
    "kernel": "isolation by the kernel: an own root directory, own processes, own network, limits",
    "range": "a range of user ids inside (user=, chown)",
    "one id": "a sandbox that has one user id only",
    "terminal": "pseudo-terminals that it can make",
    "layers": "images whose layers hold files",
    "snapshots": "snapshots, forks and resets",
    "attach": "lists with labels, handles in other processes, processes that outlive their handle",
    "cancel": "calls that can be cancelled: the case is a task of asyncio",
}
DEADLINE = 120.0
"""Seconds that a case usually has; those that do a lot ask for more."""
TOPICS = (
    "commands", "environment", "output", "timeouts", "background", "stdin", "prompts", "users", "processes",
    "lifetimes", "terminals", "shells", "wedges", "files", "trees", "patches", "changes", "snapshots", "management",
    "errors", "ending", "cancellation",
)  # fmt: skip


class World(Protocol):
    """What a case stands on; each implementation has its own."""

    directory: Path
    """An empty host directory that is removed after the case."""

    async def __call__(
        self,
        image: ImageSpec | Snapshot | None = None,
        *,
        limits: Limits | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        lifetime: float | None = None,
    ) -> AsyncSandbox:
        """A new sandbox over the image (the smallest one if None); it is stopped after the case."""

    def image(self, environment: Mapping[str, str] | None = None, tree: Path | None = None) -> ImageSpec:
        """The smallest image, with variables of its own, and a copy of a host directory as its workdir."""

    async def attach(self, sandbox: str) -> AsyncSandbox:
        """A handle on a live sandbox, by its id."""

    async def live(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        """The live sandboxes of this user."""

    async def pause(self, seconds: float) -> None:
        """Let time pass."""

    async def together(self, *steps: Steps[T]) -> list[T]:
        """Carry several coroutines out at once; raises the first error when all have ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that the contract promises.

    Attributes:
        name: unique; topic and function.
        title: the promise in words.
        needs: what an implementation must have for the promise to make sense; keys of :data:`NEEDS`.
        deadline: seconds within which the case ends, on a busy machine.
        body: the coroutine function.
    """

    name: str
    title: str
    needs: frozenset[str]
    deadline: float
    body: Callable[..., Steps[None]] = field(repr=False)

    async def run(self, make: World) -> None:
        """Carry the case out. Raises AssertionError, or whatever else went wrong."""
        wanted = inspect.signature(self.body).parameters
        given: dict[str, object] = {"make": make} if "make" in wanted else {}
        if "box" in wanted:
            given["box"] = await make()
        await self.body(**given)


_CASES: dict[str, Case] = {}
Body = TypeVar("Body", bound=Callable[..., Steps[None]])


def case(title: str, *, needs: str | Sequence[str] = (), deadline: float = DEADLINE) -> Callable[[Body], Body]:
    """Put a coroutine function on the list of cases.

    Args:
        title: the promise in words.
        needs: one or more keys of :data:`NEEDS`.
        deadline: seconds within which it ends.
    """
    wanted = frozenset([needs] if isinstance(needs, str) else needs)
    assert wanted <= NEEDS.keys(), f"{title}: unknown needs {wanted - NEEDS.keys()}"

    def register(body: Body) -> Body:
        topic = body.__module__.rpartition("_")[2]
        name = f"{topic}-{body.__name__.removeprefix('case_')}"
        assert _CASES.get(name) is None or _CASES[name].body.__code__ == body.__code__, f"two cases {name}"
        _CASES[name] = Case(name, title, wanted, deadline, body)
        return body

    return register


def cases() -> tuple[Case, ...]:
    """Every case of the contract, in the order of the files."""
    package = __name__.rpartition(".")[0]
    for topic in TOPICS:
        importlib.import_module(f"{package}.cases_{topic}" if package else f"cases_{topic}")
    return tuple(_CASES.values())


# --- what cases say often --------------------------------------------------------------------------------------------


class Caught(list[E]):
    """The error that a ``raises`` block caught."""

    @property
    def value(self) -> E:
        """The error."""
        return self[0]


@contextlib.contextmanager
def raises(kind: type[E] | tuple[type[E], ...], text: str = "") -> Iterator[Caught[E]]:
    """A block that must end in an error of this kind whose message has ``text`` in it."""
    caught: Caught[E] = Caught()
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind} was raised"
    assert text in str(caught.value), f"{text!r} is not in {caught.value}"


async def until(make: World, condition: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    """Wait for a condition that comes true by itself."""
    give_up = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < give_up, f"not so after {seconds} s"
        await make.pause(0.02)


LOOK = """
import os, sys
words, seen = os.environ["WORDS"].encode(), 0
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        state = open(f"/proc/{name}/stat", "rb").read().rpartition(b")")[2].split()[0]
        command = open(f"/proc/{name}/cmdline", "rb").read().replace(b"\\0", b" ")
    except OSError:
        continue
    seen += words in command and state not in (b"Z", b"X")
print(seen)
"""


async def count(box: AsyncSandbox, words: str) -> int:
    """How many processes of the sandbox are alive whose command line has ``words`` in it."""
    return int((await box.exec(["python3", "-S", "-c", LOOK], env={"WORDS": words}, timeout=60)).check().stdout)


async def runs(box: AsyncSandbox, words: str) -> bool:
    """Whether a process whose command line has ``words`` in it is alive in the sandbox."""
    return await count(box, words) > 0


async def ended(make: World, box: AsyncSandbox, words: str, seconds: float = 60.0) -> None:
    """Wait until no process whose command line has ``words`` in it is alive in the sandbox."""

    async def gone() -> bool:
        return not await runs(box, words)

    await until(make, gone, seconds)


def a_while() -> str:
    """Seconds to sleep, far longer than any case, that no other process sleeps: a name for a process."""
    return f"{300 + secrets.randbelow(10**9) / 10**9:.9f}"
