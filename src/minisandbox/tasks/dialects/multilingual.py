"""SWE-bench rows in other languages than Python (SWE-bench Multilingual; swebench 5's layout of any of them).

They are built from the data set's own images, and judged by the benchmark's command, parser and rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from minisandbox.errors import NotFound, TaskFileError
from minisandbox.tasks import harness
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.official import OFFICIAL
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

_COLUMNS = {"repo", "instance_id", "base_commit", "version", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"}
_ASKED = ("repo", "version", "instance_id", "base_commit", "test_patch")
_PYTHON = re.compile(r"^(?:---|\+\+\+) .*\.pyi?\s*$", re.MULTILINE)
_APPLIED = re.compile(r"^git apply .*<<'(\w+)'\n.*?^\1$\n?", re.MULTILINE | re.DOTALL)
# what the grader does itself, or what only informs
_LEFT_OUT = re.compile(r"#!|cd /testbed$|git (?:checkout|config|status|show|diff|-c)(?: |$)|: '>>>>> ")
_SHELL = "set -uxo pipefail"
"""The first line of the benchmark's scripts: Maven's parser reads what -x prints."""
_END = ": '>>>>> End Test Output'"


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row is SWE-bench's, and its patches touch no file of Python."""
    patches = f"{row.get('patch')}\n{row.get('test_patch')}"
    return row.keys() >= _COLUMNS and "diff --git" in patches and not _PYTHON.search(patches)


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is tested.
        PatchError: a patch is malformed or unsafe.
        MissingExtra: the row leaves its tests to the ``swebench`` package, which is not installed.
    """
    fields = RowFields(row)
    build = replace(OFFICIAL["swebench"], environment=()).build(row)  # the image's own: there is no conda in it
    if build is None or context.environment == "pins":
        raise TaskFileError(
            f"field 'repo' is {row['repo']!r}, which is not in Python",
            field="repo",
            reason="pins are for rows in Python",
            hint="use --environment image or auto",
        )
    if "eval_script" in row and "log_parser" in row:
        rule = fields.text("eval_type", default="pass_and_fail")
        parser = f"swebench5:{fields.text('log_parser')}"
        return fields.task(build, LogGrader(tests_of(fields.text("eval_script")), parser, rule))
    try:
        script, rule = harness.evaluation({name: fields.text(name) for name in _ASKED})
    except NotFound as error:
        raise TaskFileError(
            f"field 'repo' is {row['repo']!r}: {error.what}",
            field="repo",
            hint="give the row eval_script and log_parser (swebench 5), or `build` and `test` (docs/task-files.md)",
        ) from error
    return fields.task(build, LogGrader(f"{_SHELL}\n{tests_of(script)}", f"swebench:{row['repo']}", rule))


def tests_of(script: str) -> str:
    """Return what runs the tests in one of SWE-bench's evaluation scripts, which also applies the tests' patch.

    Args:
        script: the text of the script.
    """
    lines = _APPLIED.sub("", script).partition(_END)[0].splitlines()
    return "\n".join(line for line in lines if line.strip() and not _LEFT_OUT.match(line))
