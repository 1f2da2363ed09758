"""Commits that a row names by something else: a branch, or the commit after it."""

from __future__ import annotations

import re
from pathlib import Path

from minisandbox.errors import TaskFileError
from minisandbox.tasks.builds import github

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def full_commit(repo: str, revision: str, mirrors: Path | None, field: str) -> str:
    """Return the full commit that a row names.

    Args:
        repo: ``owner/name``.
        revision: a commit, ``COMMIT^`` or a branch.
        mirrors: git repositories to look in, or None.
        field: the column that names it.

    Raises:
        TaskFileError: it is no full commit, and no repository says which one it is.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    if mirrors is not None:
        from minisandbox.images.mirrors import find_commit  # noqa: PLC0415 - reading task files must not load the sandbox

        found = find_commit(mirrors, github(repo), revision)
        if found is not None:
            return found
    where = "no repository is given to look in" if mirrors is None else f"no repository in {mirrors} knows it"
    raise TaskFileError(
        f"field {field!r} is {revision!r}, which is not a full commit",
        field=field,
        reason=where,
        hint=f"give --repo-mirrors DIR with a clone of {repo}, or the full commit in the row",
    )
