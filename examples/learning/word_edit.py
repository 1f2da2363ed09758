"""The word-edit agent: lets small models repair one-word bugs (:mod:`.mutations`)."""

from __future__ import annotations

from functools import lru_cache

from examples.learning.mutations import Function, WordEdit, apply_edit, find_function, function_of, in_place

from minisandbox.agents.session import EXIT_ERROR, EXIT_FORMAT, Ending, Session
from minisandbox.errors import FileAccessError
from minisandbox.models import Message
from minisandbox.tasks import Task
from minisandbox.types import MiB

SUBMIT = "submit"
PASS, FAIL, ERROR = "pass", "fail", "error"
"""The observations: the tests pass, the tests fail, or the response is not an applicable edit."""

_LARGEST_SOURCE = MiB
_TIMEOUT = 60.0


class WordEditAgent:
    """Shows the model a function with line numbers, and accepts only ``OLD -> NEW LINE`` or ``submit``.

    Each edit applies to the original function. After it the visible tests run, and their outcome is the observation.
    If the step limit leaves no further turn, the tests are skipped: the edit is the submission, and a rollout is one
    response long.
    """

    name = "word-edit"
    needs_model = True

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task about a function named in its problem statement.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model gave no usable response.
        """
        function = function_of(task.problem_statement)
        module = None if function is None else await _Module.read(*function, session)
        if module is None:
            return Ending(EXIT_ERROR, "the problem statement names no readable function")
        session.say(Message("user", module.function.view))
        while True:
            text = (await session.ask()).message.content.strip()
            if text == SUBMIT:
                return Ending()
            is_applied = await module.edit(WordEdit.parse(text))
            if session.left().get("steps", 1) <= 0:
                return Ending() if is_applied else Ending(EXIT_FORMAT, f"not an edit of the function: {text[:80]!r}")
            session.say(Message("user", await self._run_tests(task, session) if is_applied else ERROR))

    async def _run_tests(self, task: Task, session: Session) -> str:
        result = await session.perform(task.grader.command, timeout=min(task.grader.timeout, _TIMEOUT))
        return PASS if result.ok else FAIL


class _Module:
    """A module in the sandbox, and its function to repair."""

    def __init__(self, session: Session, path: str, lines: list[str], function: Function) -> None:
        self.function = function
        self._session, self._path, self._lines = session, path, lines
        self._edited_row: int | None = None

    @classmethod
    async def read(cls, file: str, name: str, session: Session) -> _Module | None:
        """Read a module through the sandbox; return None if it has no such function."""
        path = str(session.box.image.workdir / file)
        try:
            source = (await session.box.files.read_bytes(path, limit=_LARGEST_SOURCE)).decode()
        except (FileAccessError, UnicodeDecodeError):
            return None
        function = _find_function(source, file, name)
        return None if function is None else cls(session, path, source.split("\n"), function)

    async def edit(self, edit: WordEdit | None) -> bool:
        """Replace the previous edit by this one; return False if it is not applicable."""
        lines = None if edit is None else apply_edit(self.function.lines, edit)
        if edit is None or lines is None:
            return False
        row = self.function.rows[edit.line - 1]
        edited_row = self._edited_row
        undo = [] if edited_row is None else [_sed_command(edited_row, self._lines[edited_row - 1])]
        script = [*undo, _sed_command(row, in_place(self._lines[row - 1], lines[edit.line - 1]))]
        self._edited_row = row
        return (await self._session.perform(["sed", "-i", ";".join(script), self._path], timeout=_TIMEOUT)).ok


def _sed_command(row: int, text: str) -> str:
    """Return the sed command that replaces a line."""
    for character in "\\/&":
        text = text.replace(character, f"\\{character}")
    return f"{row}s/^.*$/{text}/"


@lru_cache(maxsize=256)
def _find_function(source: str, file: str, name: str) -> Function | None:
    """Find a function in a module; cached because all rollouts of a group read the same module."""
    return find_function(source, file, name)
