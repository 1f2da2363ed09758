"""The driver's interface to the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from minisandbox.pool import Job as Check
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.store.results import Result
from minisandbox.tasks import Task


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a node offers.

    Attributes:
        sandboxes: rollouts at once.
        builds: image builds at once.
        io_budget: bytes per second that it reads and writes for image transfers; None for no limit.
    """

    sandboxes: int
    builds: int = 1
    io_budget: float | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """An image fetched from another node.

    Attributes:
        layers: keys of the transferred layers; the node had the others.
        bytes: uncompressed bytes.
        wire: bytes sent over the network.
    """

    layers: tuple[str, ...]
    bytes: int
    wire: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a check.

    Attributes:
        result: the result; None if an earlier one is still valid.
    """

    result: Result | None


@dataclass(frozen=True, slots=True)
class Status:
    """A node's status.

    Attributes:
        stages: number of rollouts by stage; checks are ``queued`` or in ``grade``.
        images: number of images in its store.
        sending: image transfers to other nodes in progress.
        came: uncompressed bytes received from other nodes.
        left: rollouts that the driver has not stored yet, on all nodes.
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    sending: int = 0
    came: int = 0
    left: int = 0


class Node(Protocol):
    """One node. Every call raises :class:`.NodeLost` if the node is lost."""

    name: str
    """The node's address."""
    resources: Resources
    images: Mapping[str, str]
    """Keys of the images in its store at the start, by name."""

    async def build(self, task: Task) -> str:
        """Build a task's image, or find it in the store, and return its key.

        Raises:
            MiniSandboxError: the build failed.
        """

    async def fetch(self, task: Task, source: Node) -> Moved:
        """Fetch a task's image from another node.

        Raises:
            MiniSandboxError: the transfer failed.
        """

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None) -> Packed | None:
        """Run a rollout of a task whose image is present; None if the node returned it unstarted.

        Raises:
            NotFound: the image is missing.
            MiniSandboxError: none of the batch's rollouts can succeed.
        """

    async def check(self, task: Task, check: Check[Task], known: str | None) -> Checked | None:
        """Run a check of a task whose image is present; None if returned unstarted. Raises as :meth:`rollout`."""

    async def return_jobs(self, most: int) -> None:
        """Have the node return up to ``most`` jobs that it has not started."""

    async def heartbeat(self, left: int) -> Status:
        """Report the driver's number of pending rollouts, and return the node's status."""

    async def close(self) -> None:
        """Stop the node's worker."""


class Finder(Protocol):
    """Finds nodes, and starts workers on them."""

    async def ids(self) -> set[str]:
        """Return the ids of the nodes that are present now."""

    async def start_worker(self, one: str) -> Node:
        """Start a worker on a node.

        Raises:
            MiniSandboxError: the worker does not start.
        """

    async def close(self) -> None:
        """Leave the cluster."""
