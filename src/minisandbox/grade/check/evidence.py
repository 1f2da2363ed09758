"""What is known of a task when it is checked, and what a check says of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from minisandbox.errors import MiniSandboxError
from minisandbox.grade.validation import Validation
from minisandbox.grade.verdict import Grade
from minisandbox.tasks import Task


class Severity(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The task gives wrong rewards, or none."""
    WARNING = "warning"
    """The task works; a person should look at it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a check says of a task.

    Attributes:
        what: what is wrong, in a sentence.
        where: the file, the option or the run that it is about; "" where the check's name says it.
        tests: the tests that it is about.
        severity: another severity than the check's own, or None.
    """

    what: str
    where: str = ""
    tests: tuple[str, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a task. Checks of rows see ``task`` and ``twin`` alone.

    Attributes:
        task: the task.
        twin: an earlier task that asks for the same, and why it is the same; "" for none.
        timeout: seconds that a run of its tests may take.
        build_seconds: what all layers of its image took to build.
        failure: why there is no image, or no validation of it; None after a validation.
        validation: its runs and its leaks; None after a failure.
        reordered: a run with the reference and the test files in reverse order; None where there is no other order.
        forged: files that an agent can write, and whose replacement made the verifier pass the untouched code.
    """

    task: Task
    twin: str = ""
    timeout: float = 0.0
    build_seconds: float = 0.0
    failure: MiniSandboxError | None = None
    validation: Validation | None = None
    reordered: Grade | None = None
    forged: tuple[str, ...] = ()

    @property
    def found(self) -> Validation:
        """The runs and the leaks, for checks that need them."""
        assert self.validation is not None
        return self.validation
