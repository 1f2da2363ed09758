"""The exception tree. Each class has the exit code with which the command line ends on it.

A message has three parts: what failed and on what; the likely reason; what to do next. They are kept as fields,
so that a program can read them and the command line can lay them out.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from minisandbox.types import ExecResult


# control characters, and those that turn the direction of writing round
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Take out control characters: data must not steer the terminal that shows it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class MiniSandboxError(Exception):
    """Base of everything that this package raises on purpose.

    Args:
        what: what failed, and on what (file, line, id, path).
        reason: the likely cause.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, reason: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.hint = hint

    def about(self, subject: str) -> Self:
        """Put a file or an id before the message, where it does not say so itself; returns this very error."""
        if subject not in self.what:
            self.what = f"{subject}: {self.what}"
        return self

    def __str__(self) -> str:
        parts = [self.what]
        if self.reason:
            parts.append(f"likely reason: {self.reason}")
        if self.hint:
            parts.append(f"what to do: {self.hint}")
        return clean("; ".join(parts))  # what code inside printed or named is in it


# --- what the user gave (3 to 9) -------------------------------------------------------------------------------------


class InvalidValue(MiniSandboxError, ValueError):
    """An argument or option has a value that cannot be used."""

    exit_code = 3


class TaskFileError(MiniSandboxError, ValueError):
    """A task file cannot be read: bad line, missing or unknown field, wrong type, duplicate id, empty file.

    Attributes:
        path: the file, or None.
        line: the line, from 1; the row's number where a file has no lines; None where it is about the whole.
        field: the row's field that is wrong, or None.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        path: Path | None = None,
        line: int | None = None,
        field: str | None = None,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.path = path
        self.line = line
        self.field = field


class PatchError(MiniSandboxError, ValueError):
    """A patch is malformed, unsafe (absolute path, ``..``, symlink, NUL byte) or does not apply."""

    exit_code = 5


class NotFound(MiniSandboxError, LookupError):
    """A task, image or sandbox of that name does not exist."""

    exit_code = 6


# --- what this machine allows (10 to 19) -----------------------------------------------------------------------------


class HostError(MiniSandboxError):
    """This machine lacks something that was asked for; ``minisandbox doctor`` says more."""

    exit_code = 10


class SandboxCreationError(HostError, OSError):
    """The kernel refused a step of making a sandbox.

    Attributes:
        operation: the step that failed, as the plan describes it.
        errno: the kernel's error number, or None.
    """

    exit_code = 11

    def __init__(
        self,
        what: str,
        *,
        operation: str = "",
        errno: int | None = None,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.operation = operation
        self.errno = errno


class SandboxGone(MiniSandboxError):
    """The sandbox has ended: stopped, or its processes were killed from outside."""

    exit_code = 12


class ProgramNotFound(HostError, LookupError):
    """A program that images are built with (git, uv, patchelf) is not installed."""

    exit_code = 15


class FileAccessError(MiniSandboxError, OSError):
    """A file verb failed inside the sandbox.

    Attributes:
        path: the path inside.
        errno: the kernel's error number, or None.
    """

    exit_code = 13

    def __init__(
        self, what: str, *, path: str = "", errno: int | None = None, reason: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.path = path
        self.errno = errno


class CommandFailed(MiniSandboxError):
    """A command that had to succeed did not (``ExecResult.check``).

    Attributes:
        result: the command's whole result.
    """

    exit_code = 14

    def __init__(self, result: ExecResult, *, hint: str | None = None) -> None:
        command = result.command if isinstance(result.command, str) else " ".join(result.command)
        tail = (result.stderr or result.stdout).strip()[-2000:]
        super().__init__(f"command {command[:200]!r}: {result.fate}", reason=tail or None, hint=hint)
        self.result = result


class OwnerOnly(MiniSandboxError):
    """Only the process that owns the sandbox can do this (snapshot, fork, reset, changes, refusals)."""

    exit_code = 16


class MissingExtra(MiniSandboxError, ImportError):
    """A package of an optional extra is not installed."""

    exit_code = 18


class PackageError(MiniSandboxError):
    """Another package (TRL, vLLM, Ray, an agent of your own) raised an exception."""

    exit_code = 19


class WaitTimeout(MiniSandboxError, TimeoutError):
    """A process had not ended when its waiter's time was over; it runs on."""

    exit_code = 17


# --- images and the store (20 to 29) ---------------------------------------------------------------------------------


class StoreError(MiniSandboxError):
    """The store cannot be used or is damaged."""

    exit_code = 20


class DiskFull(StoreError, OSError):
    """The disk (or a quota) is full; what was finished before is kept."""

    exit_code = 21


class InterpreterNotFound(MiniSandboxError, LookupError):
    """No interpreter here satisfies the request."""

    exit_code = 22


class SourceError(MiniSandboxError):
    """A repository source cannot be had: no such version, wrong hash, no such commit, unreachable."""

    exit_code = 23


class BuildError(MiniSandboxError):
    """A build step failed; nothing of it was published.

    Attributes:
        step: the step's name.
        log: the file that holds the step's whole output, or None.
    """

    exit_code = 24

    def __init__(
        self,
        what: str,
        *,
        step: str = "",
        log: Path | None = None,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.step = step
        self.log = log


class UnfitTree(StoreError):
    """A tree that no layer can be made of: it costs too much to read, or a path in it is too long."""

    exit_code = 25


class IndexUnavailable(MiniSandboxError):
    """A build step failed, and the package index did not give it what it lists; another try may succeed."""

    exit_code = 26


# --- grading and rollouts (30 to 39) ---------------------------------------------------------------------------------


class GradingError(MiniSandboxError):
    """We could not grade; never a verdict about the submission."""

    exit_code = 30


class TrajectoryError(MiniSandboxError, ValueError):
    """A trajectory cannot be read: not one, damaged, of a newer version, or with fields that nobody knows."""

    exit_code = 31


class RunError(MiniSandboxError):
    """A run directory cannot be used: another process writes to it, or it belongs to another run."""

    exit_code = 32


class PredictionError(MiniSandboxError, ValueError):
    """Predictions cannot be read: no such file, not JSON, an entry that names no task, or two for the same."""

    exit_code = 33


class HarnessError(MiniSandboxError):
    """A benchmark's own code (``swebench``, ``swesmith``) could not say how a task is built, or what a log says."""

    exit_code = 34


# --- models (40 to 49) -----------------------------------------------------------------------------------------------


class ModelError(MiniSandboxError):
    """A model did not answer; never a statement about the agent's work."""

    exit_code = 40


class ModelUnavailable(ModelError):
    """No answer came, however often it was asked for: time-outs, lost connections, 429, 5xx."""

    exit_code = 41


class BadAnswer(ModelError):
    """What came is no answer: no JSON, no choice, tokens that do not fit their log-probabilities."""

    exit_code = 42


class ModelRefused(ModelError):
    """The server refuses the request whoever asks how often: a wrong key, an unknown model, an option it lacks.

    Attributes:
        every_request: whether any other one would be refused as well (a wrong key), as far as its answer says.
    """

    exit_code = 43
    every_request = True


class ContextExceeded(ModelError):
    """The conversation is longer than the model reads. It ends an agent, as its own doing."""

    exit_code = 44


class BudgetExceeded(ModelError):
    """What the answer would cost is no longer there: of the rollout, which ends, or of the whole run, which stops."""

    exit_code = 45


# --- training (50 to 59) ---------------------------------------------------------------------------------------------


class TrainingError(MiniSandboxError):
    """Training cannot begin or go on: rows that cannot be trained on, a run of another configuration, no rollouts."""

    exit_code = 50


class TokenMismatch(TrainingError):
    """What is trained on is not what was sampled: the trainer's log-probabilities are not the sampler's.

    Attributes:
        rollout: whose row it is; empty where all rows of a step are compared together.
        position: the index of the token that differs most; -1 for all rows together.
        excess: the difference, over the one that is allowed.
    """

    exit_code = 51

    def __init__(
        self,
        what: str,
        *,
        rollout: str = "",
        position: int = -1,
        excess: float = math.inf,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.rollout = rollout
        self.position = position
        self.excess = excess


# --- clusters (60) ----------------------------------------------------------------------------------------------------


class NodeLost(MiniSandboxError):
    """A node of a cluster has gone, or what worked for us there has; what it had not finished is done elsewhere."""

    exit_code = 60
