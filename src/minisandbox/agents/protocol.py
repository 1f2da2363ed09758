"""The interface of agents: a name, and a loop over a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisandbox.agents.session import Session
from minisandbox.tasks import Task

SUBMITTED = "submitted"
"""The exit status of an agent that ended normally."""

EXIT_ERROR = "exit_error"
"""The exit status of an agent that could not continue."""

EXIT_FORMAT = "exit_format"
"""The exit status of an agent whose model wrote too many malformed actions in a row."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an agent's loop.

    Attributes:
        exit_status: the reason, in SWE-agent's terms: ``submitted``, ``exit_error``, ``exit_format`` and so on.
        detail: an explanation, if there is more to say.
    """

    exit_status: str = SUBMITTED
    detail: str = ""


class Agent(Protocol):
    """An agent: the loop around a policy. One instance serves many concurrent rollouts, and keeps no state of them."""

    @property
    def name(self) -> str:
        """Its name in logs and trajectories."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether it uses a model."""
        ...

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task until done. The submission is the changes in the sandbox's repository.

        Args:
            task: the task; an honest agent reads only its problem statement.
            session: the sandbox and the model; everything done through it is recorded.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model gave no usable response.
        """
        ...
