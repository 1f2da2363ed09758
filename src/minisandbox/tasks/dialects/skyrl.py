"""Rows of SkyRL's trainers: a prompt, and the task that it is of.

A row has ``prompt`` (messages), ``data_source``, ``env_class`` and ``instance``: the task's own row in another layout,
as an object or as its JSON. ``tasks export --to skyrl`` writes such rows, and so did the original MiniSandbox
(``rl_formatted``). A generator gets them without the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.errors import TaskFileError
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.task import Task


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has another one in it."""
    return "instance" in row and not row.keys().isdisjoint(("prompt", "data_source"))


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing, unknown, or has a value that cannot be used.
        PatchError: a patch is malformed or unsafe.
    """
    from minisandbox.tasks.dialects import convert as by_columns  # noqa: PLC0415 - this is one of those

    return by_columns(inner_row(row), context)


def inner_row(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return the row in a row, without the gaps that columns of objects have.

    Raises:
        TaskFileError: no column has it.
    """
    value = row.get("instance")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TaskFileError("field 'instance' is no JSON", field="instance", reason=str(error)) from None
    if not isinstance(value, Mapping) or matches(value):
        raise TaskFileError("field 'instance' is no row of a task", field="instance")
    return {key: one for key, one in value.items() if one is not None}


def row_of(task: Task, source: str) -> dict[str, object]:
    """Return a task as such a row.

    Args:
        task: it.
        source: what SkyRL's evaluations call its set.
    """
    prompt = [{"role": "user", "content": task.problem_statement}]
    own = json.dumps(task.to_row(), ensure_ascii=False)
    return {
        "data_source": source,
        "prompt": prompt,
        "env_class": "minisandbox",
        "instance_id": task.instance_id,
        "instance": own,
    }
