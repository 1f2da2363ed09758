"""The oracle: applies the task's reference."""

from __future__ import annotations

from minisandbox.agents.protocol import EXIT_ERROR, AgentResult, perform
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Reference, Task

_TIMEOUT = 120.0


class OracleAgent:
    """Submits the reference. Where the whole pipeline is sound, it resolves every valid task."""

    name = "oracle"

    def run(self, task: Task, box: Sandbox) -> AgentResult:
        """Apply the reference with git.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        step = perform(box, apply_command(task.reference), timeout=_TIMEOUT)
        if step.result.ok:
            return AgentResult((step,))
        detail = f"the reference does not apply: {step.result.stderr.strip()[:500]}"
        return AgentResult((step,), EXIT_ERROR, detail)


def apply_command(reference: Reference) -> str:
    """Return the shell command that applies a reference; it holds the patch, so that it can be replayed as it is."""
    mark = "END_OF_PATCH"
    while mark in reference.patch:
        mark += "_"
    option = "-R " if reference.reverse else ""
    patch = reference.patch if reference.patch.endswith("\n") else reference.patch + "\n"
    return f"git apply {option}--whitespace=nowarn - <<'{mark}'\n{patch}{mark}\n"
