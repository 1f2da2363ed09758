"""What an agent is: a name and a loop over one sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task
from minisandbox.types import ExecResult

SUBMITTED = "submitted"
"""The exit status of an agent that ended by itself."""

EXIT_ERROR = "exit_error"
"""The exit status of an agent that could not go on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action of an agent.

    Attributes:
        command: what it ran, as given.
        result: how that ended.
    """

    command: str | tuple[str, ...]
    result: ExecResult


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent's loop ended.

    Attributes:
        steps: what it did, in order.
        exit_status: why it ended, in the field's words: ``submitted``, ``exit_error``, ``exit_cost`` and so on.
        detail: the same in a sentence, where there is more to say.
    """

    steps: tuple[Step, ...] = ()
    exit_status: str = SUBMITTED
    detail: str = ""


class Agent(Protocol):
    """The policy's loop. One agent serves many rollouts, several at once: it keeps no state of a rollout."""

    @property
    def name(self) -> str:
        """What people, logs and trajectories call it."""
        ...

    def run(self, task: Task, box: Sandbox) -> AgentResult:
        """Work on a task until done. The submission is whatever the sandbox's repository then differs by.

        Args:
            task: the task; an honest agent reads its problem statement only.
            box: a sandbox of the task's image, ready.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        ...


def perform(box: Sandbox, command: str | Sequence[str], *, timeout: float | None) -> Step:
    """Run one command in a sandbox and record it; its failure is recorded, too.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    kept = command if isinstance(command, str) else tuple(command)
    return Step(kept, box.exec(kept, timeout=timeout))
