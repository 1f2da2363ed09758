"""A copy of a host directory in a sandbox, and what its changes are compared with."""

from __future__ import annotations

from pathlib import Path

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox

_SECONDS = 300.0
# A commit of what was copied, also of what its owner had not committed; the branch and the index stay as they were.
# The .git of a worktree or submodule is a file that names a directory of the host: of no use here.
_BASE = r"""
set -e
[ ! -f .git ] || rm .git
[ -d .git ] || git init -q
export GIT_INDEX_FILE=.git/minisandbox-index
git add -A >&2
git -c user.name=minisandbox -c user.email=minisandbox@localhost commit-tree -m 'as it was copied' "$(git write-tree)"
rm "$GIT_INDEX_FILE"
"""


def copy_in(box: Sandbox, directory: Path) -> str:
    """Copy a host directory into a sandbox's workdir.

    Args:
        box: the sandbox.
        directory: what to copy; its ``.git`` comes along.

    Returns:
        The commit, inside, that :meth:`.Sandbox.patch` can compare with: the directory as it was copied.

    Raises:
        InvalidValue: it is no directory.
        FileAccessError: it does not fit in.
        CommandFailed: git refuses it.
    """
    if not directory.is_dir():
        raise InvalidValue(f"workspace {directory}: no directory", hint="give a directory of this machine")
    try:
        box.files.upload(directory, box.image.workdir)
    except FileAccessError as error:
        error.hint = error.hint or "environments and caches in it count too; environment.limits.disk says how much fits"
        raise error.about(str(directory)) from None
    made = box.exec(_BASE, timeout=_SECONDS)
    made.check()
    return made.stdout.strip()
