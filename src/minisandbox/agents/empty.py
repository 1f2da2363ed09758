"""The empty agent does nothing: its rollouts measure the time of everything else."""

from __future__ import annotations

from minisandbox.agents.protocol import Ending
from minisandbox.agents.session import Session
from minisandbox.tasks import Task


class EmptyAgent:
    """Submits the unchanged repository."""

    name = "empty"
    needs_model = False

    async def run(self, task: Task, session: Session) -> Ending:
        """Return at once."""
        del task, session
        return Ending()
