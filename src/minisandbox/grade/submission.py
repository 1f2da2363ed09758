"""Screen submissions: decide from the text of a patch which of its files are applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minisandbox.errors import PatchError
from minisandbox.grade.policy import Policy
from minisandbox.grade.verdict import Flag
from minisandbox.patches import parse_patch
from minisandbox.tasks import Solution, Task
from minisandbox.values import MiB

MAX_SUBMISSION = 10 * MiB
"""Maximum size of a submission in bytes."""


@dataclass(frozen=True, slots=True)
class CodePatch:
    """A patch to apply to clean code.

    Attributes:
        patch: a unified diff; empty if nothing changes.
        reverse: whether the patch is applied in reverse.
        leave_out: files of the patch that are not applied.
        only: the files that the patch may change; None, for a task's own patch, allows all.
        links: the changed files that become symbolic links, with their targets.
        sources: the old path of each file in the patch, in order; empty if ``only`` is None.
        flags: one flag for each file that is left out.
        script: a task's own script, which makes the change instead of a patch; or None.
    """

    patch: bytes = b""
    reverse: bool = False
    leave_out: tuple[str, ...] = ()
    only: frozenset[str] | None = None
    links: Mapping[str, bytes] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    script: Solution | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to apply."""
        return not self.patch.strip() or (self.only is not None and not self.only)


def reference_change(task: Task) -> CodePatch:
    """Return the change that the task's reference makes."""
    reference = task.reference
    patch = reference.patch.encode("utf-8", "surrogateescape")
    return CodePatch(patch, reverse=reference.reverse, script=reference.script)


def screen(submission: bytes, policy: Policy) -> CodePatch:
    """Decide which files of a submission are applied.

    Args:
        submission: an agent's patch.
        policy: the task's protected paths.

    Returns:
        The patch without the protected files, each of which has a flag.

    Raises:
        PatchError: the patch is too large, malformed, blank or unsafe.
    """
    if len(submission) > MAX_SUBMISSION:
        raise PatchError(
            f"the submission has {len(submission)} bytes, more than {MAX_SUBMISSION}",
            reason="it holds build products or data",
            hint="leave generated files out of the repository, or name them in .git/info/exclude",
        )
    changes = parse_patch(submission, name="the submission")
    if submission and not changes:
        raise PatchError("the submission is blank", reason="only an empty one stands for no change")
    if any("\0" in change.path + change.old_path for change in changes):
        raise PatchError("a path in the submission has a NUL character", reason="the patch was edited by hand")
    kinds = {change.path: kind for change in changes if (kind := policy.why_protected(change)) is not None}
    return CodePatch(
        submission,
        leave_out=tuple(kinds),
        only=frozenset(change.path for change in changes) - kinds.keys(),
        links={change.path: change.link for change in changes if change.link is not None and change.path not in kinds},
        sources=tuple(change.old_path for change in changes),
        flags=tuple(Flag(kind, path) for path, kind in kinds.items()),
    )
