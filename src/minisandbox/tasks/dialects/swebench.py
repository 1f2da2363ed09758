"""SWE-bench: the hub's layout, and that of the swebench 5 package."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.swebench import task_from_swebench
from minisandbox.tasks.task import Task

_COMMON = {"repo", "instance_id", "base_commit", "patch", "test_patch", "FAIL_TO_PASS"}
_OLD = {"version", "environment_setup_commit"}
_NEW = {"eval_script", "log_parser"}


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has the columns of either layout."""
    return row.keys() >= _COMMON and (row.keys() >= _OLD or row.keys() >= _NEW)


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is built.
        PatchError: a patch is malformed or unsafe.
    """
    return task_from_swebench(row, pins=context.pins, mirrors=context.repo_mirrors)
