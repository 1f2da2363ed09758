"""An agent that writes a text, and the recipe of a command-line agent."""

from __future__ import annotations

from minisandbox.agents import AgentRecipe, Ending, Session
from minisandbox.tasks import Task

TYPIST = AgentRecipe(
    "typist", "1.0", ("typist", "{message}"), npm=("typist@1.0.0",), environment={"OPENAI_API_KEY": "{key}"}
)


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
