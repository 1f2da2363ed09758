"""An agent of two turns, which writes the model's answers to a file in the sandbox."""

from __future__ import annotations

from minisandbox.agents import Ending, Session
from minisandbox.models import Message
from minisandbox.tasks import Task


class FileAgent:
    """Writes the first answer to ``answer.txt``, shows its size, and replaces it by the second answer."""

    name = "file"
    needs_model = True

    async def run(self, task: Task, session: Session) -> Ending:
        """Ask twice."""
        session.say(Message("user", task.problem_statement))
        for last in (False, True):
            text = (await session.ask()).message.content
            await session.perform(["tee", "answer.txt"], timeout=60, stdin=text)
            if not last:
                session.say(Message("user", f"The file has {len(text)} characters now. Write the whole answer again."))
        return Ending()
