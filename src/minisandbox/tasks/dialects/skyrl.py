"""Convert between tasks and the rows of SkyRL's trainers, which wrap a task's row and its prompt.

A row has ``prompt`` (messages), ``data_source``, ``env_class`` and ``instance``: the task's row in another layout, as
an object or as JSON text. ``tasks export --to skyrl`` writes such rows, and the original MiniSandbox did
(``rl_formatted``). SkyRL passes a row to the generator without its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from minisandbox.tasks.fields import Fields, bad_field
from minisandbox.tasks.task import Task


def inner_row(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return the task's row inside a SkyRL row, without the nulls that columnar storage adds.

    Raises:
        TaskFileError: no column contains a task's row.
    """
    value = Fields(row).table("instance")
    if "instance" in value:
        raise bad_field("instance", "is no row of a task")
    return {key: item for key, item in value.items() if item is not None}


def row_of(task: Task, source: str) -> dict[str, object]:
    """Return the SkyRL row of a task.

    Args:
        task: the task.
        source: the name of the task set in SkyRL's evaluations.
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
