"""SWE-bench Pro: SWE-bench's columns, the tests in lower case, and an image with the repository at /app.

A row has ``dockerhub_tag``, ``fail_to_pass`` and ``pass_to_pass`` (lists as text), ``requirements`` and ``interface``
(which the agent gets too) and ``selected_test_files_to_run``. How its image was made is published nowhere.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from minisandbox.errors import TaskFileError
from minisandbox.tasks.builds import PythonBuild
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.languages import check_ids
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

_COLUMNS = {"dockerhub_tag", "fail_to_pass", "pass_to_pass", "base_commit", "patch", "test_patch"}
_TEST_TIMEOUT = 3600.0


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row names a tag, and its tests in lower case."""
    return row.keys() >= _COLUMNS


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, the tests are not pytest's, or the row is to be built from pins.
        PatchError: a patch is malformed or unsafe.
    """
    lists = {name.upper(): _list(row, name) for name in ("fail_to_pass", "pass_to_pass")}
    fields = RowFields({**row, **lists})
    check_ids(lists["FAIL_TO_PASS"], "fail_to_pass")
    build = chosen_build("swebench-pro", row, context, _no_pins, exact=False)
    told = [fields.text("problem_statement")]
    for title, name in (("Requirements", "requirements"), ("New interfaces introduced", "interface")):
        if text := fields.text(name, default="").strip():
            told.append(f"{title}:\n{text}")
    return fields.task(build, PytestGrader(timeout=_TEST_TIMEOUT), problem_statement="\n\n".join(told))


def _list(row: Mapping[str, object], name: str) -> list[str]:
    value = row[name]
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise TaskFileError(f"field {name!r} is no list", field=name, reason=str(error)) from None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TaskFileError(f"field {name!r} is not a list of strings", field=name)
    return value


def _no_pins() -> PythonBuild:
    raise TaskFileError(
        "nothing but its image says what a row of SWE-bench Pro is built with",
        field="dockerhub_tag",
        hint="build it from its image: --environment image",
    )
