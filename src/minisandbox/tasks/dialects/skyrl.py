"""Rows of SkyRL's trainers: a prompt and its task.

A row has ``prompt`` (messages), ``data_source``, ``env_class`` and ``instance``: the task's own row in another layout,
as an object or as its JSON. ``tasks export --to skyrl`` writes such rows, and so did the original MiniSandbox
(``rl_formatted``). A generator gets them without the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.tasks.fields import Fields, bad_field
from minisandbox.tasks.task import Task


def inner_row(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return the task's row inside a SkyRL row, without the null fields of columnar storage.

    Raises:
        TaskFileError: no column contains a task's row.
    """
    value = Fields(row).table("instance")
    if "instance" in value:
        raise bad_field("instance", "is no row of a task")
    return {key: one for key, one in value.items() if one is not None}


def row_of(task: Task, source: str) -> dict[str, object]:
    """Return a task as a SkyRL row.

    Args:
        task: the task.
        source: the name of its set in SkyRL's evaluations.
    """
    prompt = [{"role": "user", "content": task.problem_statement}]
    instance = json.dumps(task.to_row(), ensure_ascii=False)
    return {
        "data_source": source,
        "prompt": prompt,
        "env_class": "minisandbox",
        "instance_id": task.instance_id,
        "instance": instance,
    }
