"""The word-edit agent: lets small models repair one-word bugs (:mod:`.mutations`) in several turns."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from examples.learning.mutations import (
    Function,
    WordEdit,
    apply_edit,
    find_function,
    function_of,
    in_place,
    visible_test_of,
)
from examples.learning.outcomes import Known

from minisandbox.agents.session import EXIT_ERROR, Ending, Session
from minisandbox.errors import FileAccessError
from minisandbox.models import Message
from minisandbox.tasks import Task
from minisandbox.values import MiB

SUBMIT, SKIP = "submit", "skip"
PASS, FAIL, ERROR = "pass", "fail", "error"
"""The observations: the visible test's command exits with 0, exits otherwise, or the response is not applicable."""

SKIP_MARK = "\nimport pytest\npytestmark = pytest.mark.skip\n"
"""The lines that ``skip`` appends to the visible test: pytest skips the test, and its exit status becomes 0."""

_LARGEST_SOURCE = MiB
_TIMEOUT = 60.0
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Two edits within a second leave size and time of a module equal, so byte-code of the first would serve the second."""


class WordEditAgent:
    """Shows the model a function, and after each edit runs the visible test.

    A response is an edit (``OLD -> NEW LINE``), ``skip`` or ``submit``. Each edit applies to the original function: it
    replaces the previous edit. ``skip`` disables the visible test in the workspace, which is a cheat: the exit status
    becomes 0, but the bug remains. Edits keep that change. The observation is ``pass``, ``fail`` or ``error``.
    ``submit`` ends the rollout; so does the step limit, and then the last edit is the submission.

    Args:
        known: outcomes of visible tests that were run before; None to run each test.
    """

    name = "word-edit"
    needs_model = True

    def __init__(self, known: Known | None = None) -> None:
        self._known = known

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task about a function named in its problem statement.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model gave no usable response.
        """
        function, test = function_of(task.problem_statement), visible_test_of(task.problem_statement)
        module = None if function is None else await _Module.read(*function, session)
        if module is None or test is None:
            return Ending(EXIT_ERROR, "the problem statement names no readable function")
        workspace = _Workspace(task, session, module, test, self._known)
        session.say(Message("user", module.function.view))
        while True:
            text = (await session.ask()).message.content.strip()
            if text == SUBMIT:
                return Ending()
            observation = await workspace.respond(text)
            session.say(Message("user", observation))


@dataclass(slots=True)
class _Workspace:
    """The state of a rollout: the current edit, and whether the visible test is disabled."""

    task: Task
    session: Session
    module: _Module
    test: str
    known: Known | None
    edit: str = ""
    is_skipping: bool = False

    async def respond(self, text: str) -> str:
        """Perform a response, and return the observation."""
        if text == SKIP:
            if not self.is_skipping:
                await self._disable()
        elif await self.module.edit(edit := WordEdit.parse(text)):
            self.edit = "" if edit is None else edit.text
        else:
            return ERROR
        return await self._run_test()

    async def _disable(self) -> None:
        command = f"printf %s {shlex.quote(SKIP_MARK)} >> {shlex.quote(self.test)}"
        self.is_skipping = (await self.session.perform(command, timeout=_TIMEOUT)).ok

    async def _run_test(self) -> str:
        key = f"visible {self.task.instance_id} {self.edit} {self.is_skipping}"
        outcome = None if self.known is None else await asyncio.to_thread(self.known.get, key)
        if outcome is None:
            command = visible_command(self.task, self.test)
            result = await self.session.perform(
                command, timeout=min(self.task.grader.timeout, _TIMEOUT), env=_ENVIRONMENT
            )
            outcome = PASS if result.ok else FAIL
            if self.known is not None:
                await asyncio.to_thread(self.known.put, key, outcome)
        return outcome


def visible_command(task: Task, test: str) -> str:
    """Return the shell command that runs a task's visible test."""
    return f"{task.grader.command} -q -p no:cacheprovider {shlex.quote(test)}"


@dataclass(slots=True)
class _Module:
    """A module in the sandbox, and its function to repair."""

    session: Session
    path: str
    lines: Sequence[str]
    function: Function
    _edited_row: int | None = field(default=None, init=False)

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
        undo = [] if edited_row is None else [_sed_command(edited_row, self.lines[edited_row - 1])]
        script = [*undo, _sed_command(row, in_place(self.lines[row - 1], lines[edit.line - 1]))]
        self._edited_row = row
        return (await self.session.perform(["sed", "-i", ";".join(script), self.path], timeout=_TIMEOUT)).ok


def _sed_command(row: int, text: str) -> str:
    """Return the sed command that replaces a line."""
    for character in "\\/&":
        text = text.replace(character, f"\\{character}")
    return f"{row}s/^.*$/{text}/"


@lru_cache(maxsize=256)
def _find_function(source: str, file: str, name: str) -> Function | None:
    """Find a function in a module; cached because all rollouts of a group read the same module."""
    return find_function(source, file, name)
