"""A dialect: rows with the columns exercise, question and answer."""

from __future__ import annotations

from minisandbox.tasks import Dialect, LoadContext, RowFields, Task, task_from_own_row


def convert(row: RowFields, context: LoadContext) -> Task:
    """Make a task of a row: MiniSandbox's own layout checks every field."""
    own = {
        "instance_id": row.text("exercise"),
        "repo": "example/exercises",
        "form": "swebench",
        "problem_statement": row.text("question"),
        "patch": "",
        "test_patch": "",
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "build": {"source": {"local": {"path": "exercises"}}},
        "test": {"grader": "answer", "command": "cat answer.txt", "answer": row.text("answer")},
    }
    return task_from_own_row(own, context)


EXERCISES = Dialect(convert, ("exercise question answer",))
