"""The replay agent, which runs the commands of a list or of another agent's recording."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.agents.edits import edit_of
from minisandbox.agents.session import Ending, Session
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.tasks import Task


@dataclass(frozen=True, slots=True)
class InShell:
    """A command that runs in the session's shell, which keeps its state between commands.

    Attributes:
        script: the shell code.
    """

    script: str


Command = str | tuple[str, ...] | InShell


class ReplayAgent:
    """Run recorded commands one after the other; continue after a failed command.

    Args:
        commands: the commands for tasks that are not in ``per_task``; None makes such a task an error.
        per_task: commands by instance id.
        timeout: time limit of each command in seconds.
    """

    name = "replay"
    needs_model = False

    def __init__(
        self,
        commands: Sequence[Command] | None = None,
        *,
        per_task: Mapping[str, Sequence[Command]] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._commands = None if commands is None else tuple(commands)
        self._per_task = {name: tuple(task_commands) for name, task_commands in (per_task or {}).items()}
        self._timeout = timeout

    @classmethod
    def load(cls, path: Path, *, timeout: float = 300.0) -> ReplayAgent:
        """Load a recording.

        Args:
            path: a JSON file with a list of commands (strings, or lists of arguments); a trajectory; or a directory
                of trajectories or of a run. With a directory, each task replays its own first attempt.
            timeout: time limit of each command in seconds.

        Raises:
            InvalidValue: the recording cannot be read, or has none of these forms.
        """
        if path.is_dir():
            path = path / "trajectories" if (path / "trajectories").is_dir() else path
            files = sorted(path.glob("*.json"), reverse=True)  # the first attempt comes last and wins
            return cls(per_task=dict(_recorded(file) for file in files), timeout=timeout)
        document = _read(path)
        if isinstance(document, dict):
            return cls(per_task=dict([_recorded(path)]), timeout=timeout)
        return cls(_commands(document, path), timeout=timeout)

    async def run(self, task: Task, session: Session) -> Ending:
        """Run the commands.

        Raises:
            NotFound: there is no recording for this task.
            LimitReached: the rollout's time limit is reached.
            SandboxGone: the sandbox has ended.
        """
        commands = self._per_task.get(task.instance_id, self._commands)
        if commands is None:
            names = ", ".join(sorted(self._per_task)[:3]) or "none"
            raise NotFound(f"there is no recording for {task.instance_id!r}", hint=f"recorded are {names}")
        try:
            for command in commands:
                await play(command, session, timeout=self._timeout)
        finally:
            await session.close()
        return Ending()


async def play(command: Command, session: Session, *, timeout: float) -> None:
    """Run a recorded command or edit.

    Args:
        command: the command.
        session: runs and records it.
        timeout: time limit in seconds.
    """
    edit = edit_of(command)
    if edit is not None:
        await session.edit(edit)
    elif isinstance(command, InShell):
        await session.perform(command.script, timeout=timeout, stateful=True)
    else:
        await session.perform(command, timeout=timeout)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(
            f"{path}: {error.strerror}", hint="give a JSON file or a directory of trajectories"
        ) from error
    except ValueError as error:
        raise InvalidValue(f"{path} is not JSON", reason=str(error)) from error


def _recorded(path: Path) -> tuple[str, tuple[Command, ...]]:
    """Read only the task id and the commands of a trajectory file; its full schema belongs to ``trajectories``."""
    document = _read(path)
    steps, task = (document.get("steps"), document.get("instance_id")) if isinstance(document, dict) else (None, None)
    if not isinstance(steps, list) or not isinstance(task, str) or not all(isinstance(step, dict) for step in steps):
        raise InvalidValue(f"{path} is not a trajectory", hint='a list of commands is fine too: ["ls", "make"]')
    commands = _commands([step.get("command") for step in steps], path)
    return task, tuple(
        InShell(command) if step.get("stateful") is True and isinstance(command, str) else command
        for command, step in zip(commands, steps, strict=True)
    )


def _commands(entries: object, path: Path) -> tuple[Command, ...]:
    if not isinstance(entries, list):
        raise InvalidValue(f"{path} is neither a list of commands nor a trajectory", hint='for instance ["ls", "make"]')
    return tuple(_command(entry, f"{path}: command {number}") for number, entry in enumerate(entries, start=1))


def _command(entry: object, subject: str) -> Command:
    if isinstance(entry, str) and "\0" not in entry:
        return entry
    if not isinstance(entry, list) or not entry or any(not isinstance(part, str) or "\0" in part for part in entry):
        raise InvalidValue(f"{subject} is neither a string nor a list of strings", hint="without NUL characters")
    return tuple(entry)
