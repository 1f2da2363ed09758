"""Copy a host directory into a sandbox, with a commit to compare changes with."""

from __future__ import annotations

from pathlib import Path

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox

_SECONDS = 300.0
# commits the copy, uncommitted changes included, without touching the branch or the index;
# the .git of a worktree or submodule is a file that points to a host directory, and useless here;
# submodules and nested repositories become files: the commit would lack their uncommitted changes
_BASE = r"""
set -e
[ ! -f .git ] || rm .git
[ -d .git ] || git init -q
export GIT_INDEX_FILE=.git/minisandbox-index
git add -A >&2
while git ls-files -s -z | sed -zn 's/^160000 [^\t]*\t//p' > .git/gitlinks; [ -s .git/gitlinks ]; do
    git update-index --force-remove -z --stdin < .git/gitlinks
    sed -z 's|$|/.git|' .git/gitlinks | xargs -0 rm -rf --
    git add -A >&2
done
git -c user.name=minisandbox -c user.email=minisandbox@localhost commit-tree -m 'as it was copied' "$(git write-tree)"
rm "$GIT_INDEX_FILE" .git/gitlinks
"""


def copy_in(box: Sandbox, directory: Path) -> str:
    """Copy a host directory into a sandbox's workdir.

    Args:
        box: the sandbox.
        directory: the directory; its ``.git`` is copied too.

    Returns:
        The commit of the copied state inside the sandbox, for :meth:`.Sandbox.patch`.

    Raises:
        InvalidValue: the path is not a directory.
        FileAccessError: the directory does not fit into the sandbox.
        CommandFailed: git failed.
    """
    if not directory.is_dir():
        raise InvalidValue(f"workspace {directory} is not a directory", hint="give a directory of this machine")
    try:
        box.files.upload(directory, box.image.workdir)
    except FileAccessError as error:
        error.hint = error.hint or "environments and caches count too: remove them, or raise environment.limits.disk"
        raise error.about(str(directory)) from None
    result = box.exec(_BASE, timeout=_SECONDS)
    result.check()
    return result.stdout.strip()
