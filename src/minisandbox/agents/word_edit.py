"""The word-edit agent: for small models, that repair bugs of one word (:mod:`minisandbox.tasks.mutations`)."""

from __future__ import annotations

from functools import lru_cache

from minisandbox.agents.protocol import EXIT_ERROR, EXIT_FORMAT, Ending
from minisandbox.agents.session import Session
from minisandbox.errors import FileAccessError
from minisandbox.models import Message
from minisandbox.tasks import Task
from minisandbox.tasks.mutations import Function, WordEdit, apply_edit, find_function, in_place, place_of
from minisandbox.types import MiB

SUBMIT = "submit"
PASS, FAIL, ERROR = "pass", "fail", "error"
"""What the model is answered: the tests pass, they do not, or what it wrote cannot be done."""

_LARGEST_SOURCE = MiB
_TIMEOUT = 60.0


class WordEditAgent:
    """Shows the model a function, line by line, and takes ``OLD -> NEW LINE`` or ``submit``; nothing else is an action.

    Each edit is of the function as it was found. After it the tests that the agent can see are run, and their fate is
    the answer. Where the limit of steps leaves the model no further turn they are not: then its first edit is what it
    submits, and a rollout is one answer long.
    """

    name = "word-edit"
    needs_model = True

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task whose problem statement names a function.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model did not answer.
        """
        place = place_of(task.problem_statement)
        module = None if place is None else await _Module.read(*place, session)
        if module is None:
            return Ending(EXIT_ERROR, "the problem statement names no function that can be shown")
        session.say(Message("user", module.function.view))
        while True:
            text = (await session.ask()).message.content.strip()
            if text == SUBMIT:
                return Ending()
            done = await module.edit(WordEdit.parse(text))
            if session.left().get("steps", 1) <= 0:
                return Ending() if done else Ending(EXIT_FORMAT, f"this is no edit of the function: {text[:80]!r}")
            session.say(Message("user", await self._tested(task, session) if done else ERROR))

    async def _tested(self, task: Task, session: Session) -> str:
        result = await session.perform(task.test_command, timeout=min(task.test_timeout, _TIMEOUT))
        return PASS if result.ok else FAIL


class _Module:
    """A module inside, and the function of it that is repaired."""

    def __init__(self, session: Session, path: str, lines: list[str], function: Function) -> None:
        self.function = function
        self._session, self._path, self._lines = session, path, lines
        self._changed: int | None = None

    @classmethod
    async def read(cls, file: str, name: str, session: Session) -> _Module | None:
        """Read it by the sandbox's verbs; None where there is no such function."""
        path = str(session.box.image.workdir / file)
        try:
            source = (await session.box.files.read_bytes(path, limit=_LARGEST_SOURCE)).decode()
        except (FileAccessError, UnicodeDecodeError):
            return None
        function = _found(source, file, name)
        return None if function is None else cls(session, path, source.split("\n"), function)

    async def edit(self, edit: WordEdit | None) -> bool:
        """Take back the edit before this one and make it; False where it is none."""
        lines = None if edit is None else apply_edit(self.function.lines, edit)
        if edit is None or lines is None:
            return False
        row = self.function.rows[edit.line - 1]
        undo = [] if self._changed is None else [_exchange(self._changed, self._lines[self._changed - 1])]
        script = [*undo, _exchange(row, in_place(self._lines[row - 1], lines[edit.line - 1]))]
        self._changed = row
        return (await self._session.perform(["sed", "-i", ";".join(script), self._path], timeout=_TIMEOUT)).ok


def _exchange(row: int, text: str) -> str:
    """The command of sed that makes a line another one."""
    for special in "\\/&":
        text = text.replace(special, f"\\{special}")
    return f"{row}s/^.*$/{text}/"


@lru_cache(maxsize=256)
def _found(source: str, file: str, name: str) -> Function | None:
    """The rollouts of a group read one module: it is parsed once."""
    return find_function(source, file, name)
