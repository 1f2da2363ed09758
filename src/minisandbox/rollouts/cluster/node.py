"""Nodes as the driver of a batch sees them: what it asks of them, and what it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.grade.resumable import Job as Check
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.store.results import Result
from minisandbox.tasks import Task


@dataclass(frozen=True, slots=True)
class Resources:
    """What a node offers.

    Attributes:
        sandboxes: rollouts at once.
        builds: images that it builds at once.
        io_budget: bytes of contents in a second that it reads and writes for travelling images; None for no limit.
    """

    sandboxes: int
    builds: int = 1
    io_budget: float | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """An image that came to a node from another one.

    Attributes:
        layers: the keys of the layers that came; the others were there.
        bytes: of contents, as files have them.
        wire: as they went over the network.
    """

    layers: tuple[str, ...]
    bytes: int
    wire: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check.

    Attributes:
        result: its result; None where an earlier one still holds.
    """

    result: Result | None


@dataclass(frozen=True, slots=True)
class Status:
    """How a node is.

    Attributes:
        stages: how many rollouts are where; checks are ``queued`` or in ``grade``.
        images: how many images its store has.
        sending: parts of images that are on their way out.
        came: bytes of contents that have come from other nodes.
        left: how many rollouts its driver has not kept yet, all nodes together.
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    sending: int = 0
    came: int = 0
    left: int = 0


class Node(Protocol):
    """One node. Every call raises :class:`.NodeLost` where the node has gone."""

    name: str
    """What people call it: its address."""
    resources: Resources
    images: Mapping[str, str]
    """Keys of the images that its store had at first, by name."""

    async def build(self, task: Task) -> str:
        """Make a task's image, or find it there; returns its key.

        Raises:
            MiniSandboxError: it cannot be made.
        """

    async def fetch(self, task: Task, source: Node) -> Moved:
        """Take a task's image over from another node.

        Raises:
            MiniSandboxError: it cannot be had.
        """

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None) -> Packed | None:
        """Do a rollout of a task whose image is there; None where it was given back.

        Raises:
            NotFound: its image is not there.
            MiniSandboxError: none of the batch's rollouts can go on.
        """

    async def check(self, task: Task, check: Check, known: str | None) -> Checked | None:
        """Do a check of a task whose image is there; None where it was given back. Raises as :meth:`rollout`."""

    async def give_back(self, most: int) -> None:
        """Give back what has not begun."""

    async def beat(self, left: int) -> Status:
        """Tell that the driver is there, and how much it has to do; hear that the node is."""

    async def close(self) -> None:
        """End what works there."""


class Finder(Protocol):
    """Where nodes come from."""

    async def ids(self) -> set[str]:
        """Return what the nodes are called that are there now."""

    async def hire(self, one: str) -> Node:
        """Have a node work for us.

        Raises:
            MiniSandboxError: it does not.
        """

    async def close(self) -> None:
        """Let go of the cluster."""
