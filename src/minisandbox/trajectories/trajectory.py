"""Trajectory: the durable record of one rollout, and its file format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Grade, Reason
from minisandbox.trajectories.codec import from_json, to_json

VERSION = 2
"""Of the file format. A change that an older reader would misread makes it the next number."""

_FORMAT = "minisandbox-trajectory"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One action of an agent and what came of it.

    Attributes:
        command: what it ran: a shell command, or arguments.
        outcome: ``exited``, ``signaled`` or ``timeout``.
        exit_code: its exit status, or None.
        signal: the signal that ended it, or None.
        stdout: what was kept of its output.
        stderr: the same of its errors.
        dropped_stdout: bytes of stdout that were not kept.
        dropped_stderr: bytes of stderr that were not kept.
        duration: seconds it took.
    """

    command: str | tuple[str, ...]
    outcome: str
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    dropped_stdout: int
    dropped_stderr: int
    duration: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a rollout's time went, in seconds; 0.0 for a phase that was not reached.

    Attributes:
        sandbox_ready: from asking for the sandbox to its being ready.
        agent: the agent's loop.
        patch: taking the submission.
        grade: grading it.
        total: all of the rollout.
    """

    sandbox_ready: float = 0.0
    agent: float = 0.0
    patch: float = 0.0
    grade: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What kept a rollout from being finished; never a statement about the agent's work.

    Attributes:
        phase: ``image``, ``sandbox``, ``agent``, ``patch`` or ``grade``.
        kind: the error's class.
        detail: its message.
    """

    phase: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The durable record of one rollout.

    Attributes:
        instance_id: the task's id.
        attempt: which rollout of this task it is, from 0.
        agent: the agent's name.
        image: the name of the image it ran in.
        image_key: the hash of everything that made that image; empty where there was none.
        started: when, as UTC in ISO 8601.
        minisandbox: the version that made it.
        exit_status: why the agent ended, in the field's words.
        detail: the same in a sentence, where there is more to say.
        steps: what the agent did.
        submission: its patch, or None where none could be taken.
        grade: the verdict, or None where grading was not reached.
        failure: what kept the rollout from being finished, or None.
        timings: where the time went.
    """

    instance_id: str
    attempt: int
    agent: str
    image: str
    image_key: str
    started: str
    minisandbox: str
    exit_status: str
    detail: str
    steps: tuple[StepRecord, ...]
    submission: bytes | None
    grade: Grade | None
    failure: Failure | None
    timings: Timings

    @property
    def finished(self) -> bool:
        """Whether there is a verdict about the agent's work: resolved or not. What we failed at is done again."""
        return self.grade is not None and self.grade.resolved is not None

    def to_text(self) -> str:
        """Return the file's text: one JSON object in ASCII."""
        body = to_json(self)
        assert isinstance(body, dict)
        return json.dumps({"format": _FORMAT, "version": VERSION, **body}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_text(cls, text: str, *, name: str = "the trajectory") -> Trajectory:
        """Read a file's text.

        Args:
            text: what :meth:`to_text` returned, in this or in an earlier version.
            name: what errors call it.

        Raises:
            TrajectoryError: it is not a trajectory, damaged, of a newer version, or has unknown fields.
        """
        body = _body(text, name)
        if body.pop("format", None) != _FORMAT:
            raise TrajectoryError(f"{name} is not a trajectory", hint=f'its "format" would be "{_FORMAT}"')
        version = body.pop("version", None)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise TrajectoryError(f"{name} has the version {version!r}", reason="it is damaged")
        if version > VERSION:
            raise TrajectoryError(
                f"{name} has version {version}; this MiniSandbox reads up to {VERSION}",
                reason="a newer MiniSandbox wrote it",
                hint="update MiniSandbox",
            )
        if version == 1:
            _name_verdict(body)
        return from_json(cls, body, place=name)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a file.

        Raises:
            TrajectoryError: as :meth:`from_text` raises it.
            OSError: it cannot be opened.
        """
        return cls.from_text(path.read_bytes().decode("utf-8", "replace"), name=str(path))


def _body(text: str, name: str) -> dict[str, object]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{name} is not JSON", reason=f"it is damaged: {error}") from error
    if not isinstance(body, dict):
        raise TrajectoryError(f"{name} is not a trajectory", reason="it is not a JSON object")
    return body


def _name_verdict(body: dict[str, object]) -> None:
    """Bring a body of version 1 up to date: it knew three verdicts, and flags without details."""
    grade = body.get("grade")
    if not isinstance(grade, dict):
        return
    reason = grade.get("reason")
    if grade.get("verdict") in ("unresolved", "failed_to_grade") and reason in tuple(Reason):
        grade["verdict"] = str(Reason(reason).verdict)
    flags = grade.get("flags")
    for flag in flags if isinstance(flags, list) else ():
        if isinstance(flag, dict):
            flag.setdefault("detail", "")
