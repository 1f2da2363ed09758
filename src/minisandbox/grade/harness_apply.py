"""Apply damaged patches with the commands of the official harnesses, and return the result as a clean patch.

The commands run in a separate sandbox, which yields only a patch in the format of ``git diff``. That patch is screened
and graded like any other, so the policy judges what the commands really changed.

Sources: ``GIT_APPLY_CMDS`` in ``swebench/harness/run_evaluation.py`` (4.1.0, 5.0.2) and ``swesmith/constants.py``
(0.0.9). The commands run in the root of the repository. Each gets a file with the prediction's text, to which no
newline is added.
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
"""swebench 5 runs this between two commands; the other harnesses keep the changes of a failed ``--reject``."""
_IS_APPLIED_5 = "git apply --check --reverse"
_PATCH = "/tmp/patch.diff"  # noqa: S108 - a path inside the sandbox, the same as in the harness
_DIFF_TIMEOUT = 120.0
_LIST_IGNORED = "git ls-files -o -i --exclude-standard -z | LC_ALL=C sort -z"
# Leave out .orig and .rej files: they cannot affect the tests, but their old lines would be flagged as suspicious.
_DROP_LEFTOVERS = "git ls-files -o -z -- '*.orig' '*.rej' | xargs -0 -r rm -f --"
# git diff omits new files that git ignores, although the tests see them.
_DIFF_IGNORED = rf"""{_LIST_IGNORED} | LC_ALL=C comm -z -13 /tmp/ignored - | while IFS= read -r -d '' path; do
    git -c core.autocrlf=false diff --no-index --binary --full-index --no-color --no-ext-diff --src-prefix=a/ \
        --dst-prefix=b/ -- /dev/null "$path"
done"""


@dataclass(frozen=True, slots=True)
class Applied:
    """A damaged patch that a harness's command could apply.

    Attributes:
        patch: the changes, as a clean patch.
        command: the command that applied them.
    """

    patch: bytes
    command: str


def apply_like_harness(workspace: Workspace, submission: bytes) -> Applied | None:
    """Apply a patch to clean code as the task's official harness does.

    Args:
        workspace: the task's workspace; its sandboxes contain the code that the agent got.
        submission: the patch, possibly damaged.

    Returns:
        The changes, or None if none of the harness's commands applies the patch.

    Raises:
        GradingError: the image uses the host's /usr, which has no ``patch``.
        MiniSandboxError: the sandbox could not be created.
        CancelledError: the grading was cancelled.
    """
    for _ in range(2):  # if the sandbox dies, try once more: the host may be at fault
        workspace.cancellation.check()
        try:
            with workspace.box(Network.off()) as box:
                return _apply(box, submission, workspace.task)
        except SandboxGone:
            continue
        except (CommandFailed, FileAccessError):  # the patch broke the repository, or the changes are too large
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
    """Return the first command of swebench 5 that applies the patch, or None if there is none."""
    for index, command in enumerate(_COMMANDS_5):
        if index:
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
