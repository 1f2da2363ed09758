"""The empty agent: does nothing. Its rollouts measure everything else."""

from __future__ import annotations

from minisandbox.agents.protocol import AgentResult
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task


class EmptyAgent:
    """Submits the repository as it found it."""

    name = "empty"

    def run(self, task: Task, box: Sandbox) -> AgentResult:
        """Return at once."""
        del task, box
        return AgentResult()
