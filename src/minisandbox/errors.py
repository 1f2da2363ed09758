"""Define all exceptions of this package, and the command line's exit status for each.

A message has three parts, which are also fields: what failed and on what, the likely reason, and what to do.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Protocol, Self

    class _CommandResult(Protocol):
        """The fields of :class:`.ExecResult` that describe a failure; ``types`` cannot be imported here (a cycle)."""

        @property
        def command(self) -> str | tuple[str, ...]: ...
        @property
        def exit_code(self) -> int | None: ...
        @property
        def signal(self) -> int | None: ...
        @property
        def stdout(self) -> str: ...
        @property
        def stderr(self) -> str: ...
        @property
        def outcome(self) -> object: ...
        @property
        def duration(self) -> float: ...
        @property
        def fate(self) -> str: ...


# Control characters, line separators and bidirectional overrides.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Replace control characters, so that untrusted text cannot control the terminal."""
    return text if text.isprintable() else _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class MiniSandboxError(Exception):
    """Base class of all errors that this package raises deliberately.

    Args:
        what: what failed, and on what (file, line, id, path).
        reason: the likely cause.
        hint: what the user can do.
    """

    exit_code = 1

    def __init__(self, what: str, *, reason: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.hint = hint

    def about(self, subject: str) -> Self:
        """Prefix the message with a file or an id unless it already contains it; return self."""
        if subject not in self.what:
            self.what = f"{subject}: {self.what}"
        return self

    def __copy__(self) -> Self:
        duplicate = type(self).__new__(type(self), *self.args)
        duplicate.__dict__.update(self.__dict__)
        return duplicate

    def __str__(self) -> str:
        parts = [self.what]
        if self.reason:
            parts.append(f"likely reason: {self.reason}")
        if self.hint:
            parts.append(f"what to do: {self.hint}")
        return clean("; ".join(parts))  # the message may quote output and file names from a sandbox


# --- user input (3 to 9) ---------------------------------------------------------------------------------------------


class InvalidValue(MiniSandboxError, ValueError):
    """An argument or option has a value that cannot be used."""

    exit_code = 3


class TaskFileError(MiniSandboxError, ValueError):
    """A task file cannot be read: bad line, missing or unknown field, wrong type, duplicate id, empty file.

    Attributes:
        path: the file, or None.
        line: the line, from 1, or the row's number in a file without lines; None if the error concerns the whole file.
        field: the row's invalid field, or None.
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
    """A patch is malformed, unsafe (absolute path, ``..``, submodule, NUL byte) or does not apply."""

    exit_code = 5


class NotFound(MiniSandboxError, LookupError):
    """A task, image or sandbox of that name does not exist."""

    exit_code = 6


class Unsupported(MiniSandboxError):
    """The chosen backend lacks the feature: a container engine cannot take a snapshot, for example."""

    exit_code = 8


class DockerfileError(MiniSandboxError, ValueError):
    """A Dockerfile is malformed, names a missing file, or uses an unsupported feature.

    Attributes:
        line: the line of the instruction, from 1; None if the error concerns the whole file.
    """

    exit_code = 7

    def __init__(
        self, what: str, *, line: int | None = None, reason: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what if line is None else f"line {line}: {what}", reason=reason, hint=hint)
        self.line = line


# --- this machine (10 to 19) -----------------------------------------------------------------------------------------


class HostError(MiniSandboxError):
    """This machine lacks a requested feature; ``minisandbox doctor`` shows details."""

    exit_code = 10


class SandboxCreationError(HostError, OSError):
    """A step of creating a sandbox failed, usually a system call.

    Attributes:
        operation: the step that failed, as described in the launch plan.
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
    """A program needed to build images (git, uv, patchelf) is not installed."""

    exit_code = 15


class FileAccessError(MiniSandboxError, OSError):
    """A file operation failed inside the sandbox.

    Attributes:
        path: the path in the sandbox.
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
    """A command that had to succeed failed (``ExecResult.check``).

    Attributes:
        result: the command's :class:`.ExecResult`.
    """

    exit_code = 14

    def __init__(self, result: _CommandResult, *, hint: str | None = None) -> None:
        command = result.command if isinstance(result.command, str) else " ".join(result.command)
        tail = (result.stderr or result.stdout).strip()[-2000:]
        super().__init__(f"command {command[:200]!r}: {result.fate}", reason=tail or None, hint=hint)
        self.result = result


class OwnerOnly(MiniSandboxError):
    """The operation (snapshot, fork, reset, changes, refusals) needs the process that owns the sandbox."""

    exit_code = 16


class MissingExtra(MiniSandboxError, ImportError):
    """A package of an optional extra is not installed."""

    exit_code = 18


class PackageError(MiniSandboxError):
    """Another package (TRL, vLLM, Ray, a user's agent) raised an exception."""

    exit_code = 19


class WaitTimeout(MiniSandboxError, TimeoutError):
    """A process was still running when the time limit of a wait passed; it keeps running."""

    exit_code = 17


# --- images and the store (20 to 29) ---------------------------------------------------------------------------------


class StoreError(MiniSandboxError):
    """The store cannot be used or is damaged."""

    exit_code = 20


class DiskFull(StoreError, OSError):
    """The disk (or a quota) is full; finished work is kept."""

    exit_code = 21


class InterpreterNotFound(MiniSandboxError, LookupError):
    """No available interpreter satisfies the request."""

    exit_code = 22


class SourceError(MiniSandboxError):
    """A repository source is unavailable: no such version or commit, wrong hash, unreachable server."""

    exit_code = 23


class BuildError(MiniSandboxError):
    """A build step failed and published nothing.

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
    """A directory tree cannot become a layer: it is too expensive to read, or a path in it is too long."""

    exit_code = 25


class IndexUnavailable(MiniSandboxError):
    """A build step failed because the package index did not deliver a file that it lists; a retry may succeed."""

    exit_code = 26


class RegistryError(MiniSandboxError):
    """A pull from or push to a registry failed: unreachable, access denied, rate limit, malformed response.

    Attributes:
        transient: whether a retry may succeed.
        wait: seconds to wait before a retry, if the registry limits requests; otherwise None.
    """

    exit_code = 27
    transient = False

    def __init__(
        self, what: str, *, wait: float | None = None, reason: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, reason=reason, hint=hint)
        self.wait = wait


class ImageRefused(MiniSandboxError):
    """A container image is malformed or hostile; nothing of the refused part was published."""

    exit_code = 28


# --- grading and rollouts (30 to 39) ---------------------------------------------------------------------------------


class GradingError(MiniSandboxError):
    """Grading failed for an infrastructure reason; never a verdict about the submission."""

    exit_code = 30


class TrajectoryError(MiniSandboxError, ValueError):
    """A trajectory cannot be read: not a trajectory, damaged, of a newer version, or with unknown fields."""

    exit_code = 31


class RunError(MiniSandboxError):
    """A run directory cannot be used: another process writes to it, or it belongs to another run."""

    exit_code = 32


class PredictionError(MiniSandboxError, ValueError):
    """Predictions cannot be read: no such file, not JSON, an entry without a task, or two for the same task."""

    exit_code = 33


class HarnessError(MiniSandboxError):
    """A benchmark's own code (``swebench``, ``swesmith``) could not supply a build specification or parse a log."""

    exit_code = 34


# --- models (40 to 49) -----------------------------------------------------------------------------------------------


class ModelError(MiniSandboxError):
    """A model gave no usable response; never a verdict about the agent's work."""

    exit_code = 40


class ModelUnavailable(ModelError):
    """All retries failed: timeouts, lost connections, status 429 or 5xx."""

    exit_code = 41


class BadAnswer(ModelError):
    """The response is malformed: not JSON, no choice, tokens and log-probabilities of different lengths."""

    exit_code = 42


class ModelRefused(ModelError):
    """The server rejects the request, and a retry cannot help: a wrong key, an unknown model or option.

    Attributes:
        every_request: whether the response suggests that all other requests are rejected too (a wrong key).
    """

    exit_code = 43
    every_request = True


class ContextExceeded(ModelError):
    """The conversation exceeds the model's context. It ends the agent and counts as the agent's own failure."""

    exit_code = 44


class BudgetExceeded(ModelError):
    """The next response would exceed the budget of the rollout, which ends, or of the run, which stops."""

    exit_code = 45


# --- training (50 to 59) ---------------------------------------------------------------------------------------------


class TrainingError(MiniSandboxError):
    """Training cannot start or continue: unusable rows, a run of another configuration, no rollouts."""

    exit_code = 50


class TokenMismatch(TrainingError):
    """The trainer's log-probabilities differ from the sampler's, so it would not train on the sampled tokens.

    Attributes:
        rollout: the rollout of the row; "" if all rows of a step are compared together.
        position: the index of the token that differs most; -1 for all rows together.
        excess: the difference divided by the tolerance.
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
    """A cluster node, or our worker on it, was lost; its unfinished work is rescheduled on other nodes."""

    exit_code = 60
