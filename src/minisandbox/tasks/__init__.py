"""Tasks: dataset rows, how to build and test them, and the files they are read from."""

from minisandbox.tasks.jsonl import read_tasks
from minisandbox.tasks.rows import build_spec, task_from_row
from minisandbox.tasks.task import BuildSpec, Form, Reference, SourceSpec, Task, file_of
from minisandbox.tasks.taskset import TaskSet, bundled_sets

__all__ = [
    "BuildSpec",
    "Form",
    "Reference",
    "SourceSpec",
    "Task",
    "TaskSet",
    "build_spec",
    "bundled_sets",
    "file_of",
    "read_tasks",
    "task_from_row",
]
