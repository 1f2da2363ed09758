"""Baseline agents without a model: the oracle submits the reference, the empty agent submits no change."""

from __future__ import annotations

from minisandbox.agents.session import EXIT_ERROR, Ending, Session
from minisandbox.tasks import Reference, Task

_TIMEOUT = 120.0


class OracleAgent:
    """Submit the reference. If the pipeline is sound, this resolves every valid task."""

    name = "oracle"
    needs_model = False

    async def run(self, task: Task, session: Session) -> Ending:
        """Apply the reference patch with git, or run the solution script and ignore its exit status.

        Raises:
            LimitReached: the rollout's time limit is reached.
            SandboxGone: the sandbox has ended.
        """
        if (script := task.reference.script) is not None:
            await session.box.files.upload(script.files, script.files_at)
            await session.perform(script.shell, timeout=script.timeout)
            return Ending()
        result = await session.perform(apply_command(task.reference), timeout=_TIMEOUT)
        if result.ok:
            return Ending()
        return Ending(EXIT_ERROR, f"the reference does not apply: {result.stderr.strip()[:500]}")


def apply_command(reference: Reference) -> str:
    """Return a shell command that applies a reference; the command contains the patch, so that it can be replayed."""
    mark = "END_OF_PATCH"
    while mark in reference.patch:
        mark += "_"
    option = "-R " if reference.reverse else ""
    patch = reference.patch if reference.patch.endswith("\n") else reference.patch + "\n"
    return f"git apply {option}--whitespace=nowarn - <<'{mark}'\n{patch}{mark}\n"


class EmptyAgent:
    """Submit the unchanged repository."""

    name = "empty"
    needs_model = False

    async def run(self, task: Task, session: Session) -> Ending:
        """Return without any change."""
        del task, session
        return Ending()
