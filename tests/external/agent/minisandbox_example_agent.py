"""An agent: write a text that an option names."""

from __future__ import annotations

from minisandbox.agents import Ending, Session
from minisandbox.tasks import Task


class Writer:
    """Write ``text`` (``--agent-option text=...``) to the file answer.txt."""

    name = "writer"
    needs_model = False

    def __init__(self, text: str = "") -> None:
        self.text = text

    async def run(self, task: Task, session: Session) -> Ending:
        """Solve a task."""
        await session.perform(["sh", "-c", 'echo "$1" > answer.txt', "sh", self.text], timeout=30)
        return Ending()
