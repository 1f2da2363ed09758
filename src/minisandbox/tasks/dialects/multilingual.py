"""SWE-bench rows in other languages than Python (SWE-bench Multilingual; swebench 5's layout of any of them).

They are built from the data set's own images, and judged by the benchmark's command, parser and rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from minisandbox.errors import NotFound
from minisandbox.tasks import harness
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.environments import OFFICIAL
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

_ASKED = ("repo", "version", "instance_id", "base_commit", "test_patch")
_PYTHON = re.compile(r"^(?:---|\+\+\+) .*\.pyi?\s*$", re.MULTILINE)
_APPLIED = re.compile(r"^git apply .*<<'(\w+)'\n.*?^\1$\n?", re.MULTILINE | re.DOTALL)
# what the grader does itself, or what only informs
_LEFT_OUT = re.compile(r"#!|cd /testbed$|git (?:checkout|config|status|show|diff|-c)(?: |$)|: '>>>>> ")
_SHELL = "set -uxo pipefail"
"""The first line of the benchmark's scripts: Maven's parser reads what -x prints."""
_END = ": '>>>>> End Test Output'"


def fits(row: Mapping[str, object]) -> bool:
    """Whether the patches of a row touch no file of Python."""
    patches = f"{row.get('patch')}\n{row.get('test_patch')}"
    return "diff --git" in patches and not _PYTHON.search(patches)


def convert(row: RowFields, context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is tested.
        PatchError: a patch is malformed or unsafe.
        MissingExtra: the row leaves its tests to the ``swebench`` package, which is not installed.
    """
    build = replace(OFFICIAL["swebench"], environment=()).build(row.row)  # the image's own: there is no conda in it
    repo = row.text("repo")
    if build is None or context.environment == "pins":
        what, hint = f"is {repo!r}, which is not in Python", "use --environment image or auto"
        raise bad_field("repo", what, reason="pins are for rows in Python", hint=hint)
    if "eval_script" in row.row and "log_parser" in row.row:
        rule, parser = row.text("eval_type", default="pass_and_fail"), f"swebench5:{row.text('log_parser')}"
        return row.task(build, LogGrader(tests_of(row.text("eval_script")), parser, rule))
    try:
        script, rule = harness.evaluation({name: row.text(name) for name in _ASKED})
    except NotFound as error:
        hint = "give the row eval_script and log_parser (swebench 5), or `build` and `test` (docs/task-files.md)"
        raise bad_field("repo", f"is {repo!r}: {error.what}", hint=hint) from error
    return row.task(build, LogGrader(f"{_SHELL}\n{tests_of(script)}", f"swebench:{repo}", rule))


def tests_of(script: str) -> str:
    """Return what runs the tests in one of SWE-bench's evaluation scripts, which also applies the tests' patch.

    Args:
        script: the text of the script.
    """
    lines = _APPLIED.sub("", script).partition(_END)[0].splitlines()
    return "\n".join(line for line in lines if line.strip() and not _LEFT_OUT.match(line))
