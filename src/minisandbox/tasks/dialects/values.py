"""Values of other datasets' columns: text, lists and objects, each also as JSON in a string; and commits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import TaskFileError
from minisandbox.tasks.builds import github

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def commands(row: Mapping[str, object], *names: str) -> tuple[str, ...]:
    """Return the shell commands of the first column that has any: a string, or a list of strings.

    Args:
        row: the row, or an object in it.
        names: the columns.

    Raises:
        TaskFileError: it holds something else.
    """
    for name in names:
        value = row.get(name)
        if value is None or value in ("", []):
            continue
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise _wrong(name, "is neither a command nor a list of commands", "give a string, or a list of strings")
        return tuple(item for item in items if item.strip())
    return ()


def object_of(row: Mapping[str, object], name: str) -> dict[str, object]:
    """Return an object, which may be JSON in a string.

    Args:
        row: the row.
        name: the column.

    Raises:
        TaskFileError: it is missing, or holds something else.
    """
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TaskFileError(f"field {name!r} is a string that is not JSON", field=name, reason=str(error)) from None
    if not isinstance(value, dict):
        raise _wrong(name, "is missing" if value is None else "is not an object", "give an object, or JSON of one")
    return value


def requirement_lines(value: object, name: str) -> tuple[str, ...]:
    """Return requirements: a list, or the text of a requirements file, of which comments and options are left out.

    Args:
        value: the column's value; None for none.
        name: the column.

    Raises:
        TaskFileError: it is something else.
    """
    lines = value.splitlines() if isinstance(value, str) else [] if value is None else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise _wrong(name, "holds no requirements", "give a list of strings, or the text of a requirements file")
    plain = (line.partition(" #")[0].strip() for line in lines)
    return tuple(dict.fromkeys(line for line in plain if line and not line.startswith(("#", "-"))))


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
        from minisandbox.images.sources.mirrors import find_commit  # noqa: PLC0415 - reading task files must not load the sandbox

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


def _wrong(name: str, problem: str, hint: str) -> TaskFileError:
    return TaskFileError(f"field {name!r} {problem}", field=name, hint=hint)
