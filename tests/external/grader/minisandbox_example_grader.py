"""A grader: compare what a command prints with the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisandbox import ExecResult, Sandbox
from minisandbox.tasks import ScriptGrader


@dataclass(frozen=True, slots=True)
class AnswerGrader(ScriptGrader):
    """Judge the output of ``command``.

    Attributes:
        answer: the expected output; a further key of a row's ``test``.
    """

    kind: ClassVar[str] = "answer"

    answer: str = ""

    def reward(self, box: Sandbox, result: ExecResult) -> float:
        """Return the reward of a submission; 1 resolves the task."""
        return float(result.stdout.strip() == self.answer)
