"""Apply damaged patches with the commands of the official harnesses, and return the result as a clean patch.

The commands run in a sandbox of their own, whose only product is a patch as ``git diff`` writes it. That patch is
screened and graded like any other, so the policy judges what the commands really changed.

Sources: ``GIT_APPLY_CMDS`` in ``swebench/harness/run_evaluation.py`` (4.1.0, 5.0.2) and ``swesmith/constants.py``
(0.0.9). They run in the repository's root. Each gets the prediction's text as a file, without a newline added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisandbox.errors import CommandFailed, FileAccessError, GradingError, SandboxGone
from minisandbox.grade.submission import MAX_SUBMISSION
from minisandbox.grade.workspace import Workspace, run_as_owner
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task
from minisandbox.types import ExecResult, Network

_COMMANDS = ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
_COMMANDS_5 = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
_RESET_5 = "git checkout -- . ; git clean -fd"
"""Run by swebench 5 between two commands; the others leave in place what a failed ``--reject`` changed."""
_IS_APPLIED_5 = "git apply --check --reverse"
_PATCH = "/tmp/patch.diff"  # noqa: S108 - in the sandbox, where the harness has it
_DIFF_TIMEOUT = 120.0
_LIST_IGNORED = "git ls-files -o -i --exclude-standard -z | LC_ALL=C sort -z"
# Copies of whole files, which no test sees, would drown the flags of suspicious lines.
_DROP_LEFTOVERS = "git ls-files -o -z -- '*.orig' '*.rej' | xargs -0 -r rm -f --"
# git diff leaves out new files that git ignores, though the tests see them.
_DIFF_IGNORED = rf"""{_LIST_IGNORED} | LC_ALL=C comm -z -13 /tmp/ignored - | while IFS= read -r -d '' path; do
    git -c core.autocrlf=false diff --no-index --binary --full-index --no-color --no-ext-diff --src-prefix=a/ \
        --dst-prefix=b/ -- /dev/null "$path"
done"""


@dataclass(frozen=True, slots=True)
class Applied:
    """A patch that a harness's command applied.

    Attributes:
        patch: what it changed, as a clean patch.
        command: the command.
    """

    patch: bytes
    command: str


def apply_like_harness(workspace: Workspace, submission: bytes) -> Applied | None:
    """Apply a patch to clean code as the task's official harness does.

    Args:
        workspace: the task's; its sandboxes have the code that the agent got.
        submission: the patch, of any form.

    Returns:
        What was changed, or None if none of the harness's commands applies the patch.

    Raises:
        GradingError: the host, which the image is based on, has no ``patch``.
        MiniSandboxError: the sandbox could not be made.
        CancelledError: the grading was cancelled.
    """
    for _ in range(2):  # a sandbox may end by the host's fault, once
        workspace.cancellation.check()
        try:
            with workspace.box(Network.off()) as box:
                return _apply(box, submission, workspace.task)
        except SandboxGone:
            continue
        except (CommandFailed, FileAccessError):  # the patch broke the repository or left too much
            return None
    return None


def _apply(box: Sandbox, submission: bytes, task: Task) -> Applied | None:
    box.files.write_bytes(_PATCH, submission)
    run_as_owner(box, ["bash", "-c", f"{_LIST_IGNORED} > /tmp/ignored"])
    is_5 = str(getattr(task.grader, "parser", "")).startswith("swebench5:")
    command = _try_5(box) if is_5 else next((name for name in _COMMANDS if _run(box, name).ok), None)
    if command is None:
        return None
    run_as_owner(box, ["bash", "-c", _DROP_LEFTOVERS])
    patch = box.patch(limit=MAX_SUBMISSION, timeout=_DIFF_TIMEOUT)
    ignored = run_as_owner(box, ["bash", "-c", _DIFF_IGNORED])
    return None if ignored.dropped_stdout else Applied(patch + ignored.stdout_bytes, command)


def _try_5(box: Sandbox) -> str | None:
    """Return the first command of swebench 5 that applies the patch, or None."""
    for number, command in enumerate(_COMMANDS_5):
        if number:
            run_as_owner(box, ["bash", "-c", _RESET_5])
        if _run(box, command).ok:
            return command
    return _IS_APPLIED_5 if _run(box, _IS_APPLIED_5).ok else None


def _run(box: Sandbox, command: str) -> ExecResult:
    arguments: Sequence[str] = (*command.split(), _PATCH)
    result = run_as_owner(box, arguments)
    if result.exit_code == 127 and box.image.host_usr:
        raise GradingError(
            f"cannot apply a damaged patch as the benchmark's harness does: there is no {arguments[0]!r}",
            reason="the image is based on the host's /usr, which does not have it",
            hint=f"install it on this machine: apt-get install {arguments[0]}",
        )
    return result
