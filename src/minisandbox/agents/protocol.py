"""What an agent is: a name, and a loop over a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisandbox.agents.session import Session
from minisandbox.tasks import Task

SUBMITTED = "submitted"
"""The exit status of an agent that ended by itself."""

EXIT_ERROR = "exit_error"
"""The exit status of an agent that could not go on."""

EXIT_FORMAT = "exit_format"
"""The exit status of an agent whose model did not find back to the format of actions."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an agent's loop ended.

    Attributes:
        exit_status: why, in the field's words: ``submitted``, ``exit_error``, ``exit_format`` and so on.
        detail: the same in a sentence, where there is more to say.
    """

    exit_status: str = SUBMITTED
    detail: str = ""


class Agent(Protocol):
    """The policy's loop. One agent serves many rollouts, several at once: it keeps no state of a rollout."""

    @property
    def name(self) -> str:
        """What people, logs and trajectories call it."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether it asks a model."""
        ...

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task until done. The submission is whatever the sandbox's repository then differs by.

        Args:
            task: the task; an honest agent reads its problem statement only.
            session: the sandbox and the model; what goes through it is recorded.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model did not answer.
        """
        ...
