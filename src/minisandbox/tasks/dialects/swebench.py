"""Convert SWE-bench rows: full, Lite, Verified and Multilingual, in the hub's layout or that of swebench 5.

The test commands are those of the ``swebench`` package (4.1.0), with corrections for some that no longer work. A Python
row is built from its exported pins, if there are any. Other rows use the dataset's container images.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.errors import NotFound, TaskFileError
from minisandbox.git import read_committed
from minisandbox.spec import PythonRecipe, included_file, requirement_lines
from minisandbox.tasks import harness
from minisandbox.tasks.builds import github
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import AFTERWARDS, BEFORE_TESTS, sort_commands
from minisandbox.tasks.dialects.environments import (
    OFFICIAL,
    chosen_build,
    listed,
    of_repository,
    requirements_text,
    specified,
)
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

TEST_TIMEOUT = 1800.0
"""Seconds that swebench allows for the tests of an instance (``run_evaluation --timeout``)."""
_ROW_COLUMNS = ("repo", "version", "instance_id", "base_commit", "test_patch")
_PYTHON = re.compile(r"^(?:---|\+\+\+) .*\.pyi?\s*$", re.MULTILINE)
_APPLIED = re.compile(r"^git apply .*<<'(\w+)'\n.*?^\1$\n?", re.MULTILINE | re.DOTALL)
# Commands that the grader replaces, or that only print information.
_DROPPED_LINES = re.compile(r"#!|cd /testbed$|git (?:checkout|config|status|show|diff|-c)(?: |$)|: '>>>>> ")
_SHELL = "set -uxo pipefail"
"""The first line of the benchmark's scripts: the parser for Maven reads the trace of ``-x``."""
_END = ": '>>>>> End Test Output'"


def convert(row: RowFields, context: LoadContext) -> Task:
    """Convert a row to a task; the pins are in ``REPOSITORY/NUMBER/environment.yml``.

    Raises:
        TaskFileError: a field is missing or invalid, or swebench has no specification for the row.
        PatchError: a patch is malformed or unsafe.
        MissingExtra: the ``swebench`` package is not installed.
    """
    repo, version = row.text("repo"), row.text("version")
    try:
        specification = harness.specification(repo, version, row.text("test_patch"))
    except NotFound as error:
        hint = "give the row `build` and `test` of its own (docs/task-files.md)"
        raise bad_field("version", f"is {version!r}: {error.what}", reason=error.reason, hint=hint) from error
    setup_commands = (*sort_commands(specification.before_tests).remaining, *BEFORE_TESTS.get(repo, ()))
    repository, _, issue_number = row.text("instance_id").rpartition("-")
    installed = sort_commands(specification.commands)
    install = (*installed.remaining, *AFTERWARDS.get(repo, ()))
    build = chosen_build(
        "swebench",
        row.row,
        context,
        (repository, issue_number),
        lambda: _specified(row.row, specification, context.repo_mirrors),
        lambda pins: of_repository(pins, repo, row.text("base_commit"), install, system=installed.system, utf8=True),
    )
    grader = LogGrader(
        "; ".join((*setup_commands, specification.test_command)),
        f"swebench:{repo}",
        reporter="pytest" if re.search(r"\b(?:pytest|tox)\b", specification.test_command.split("/")[0]) else "unittest",
        timeout=TEST_TIMEOUT,
    )
    return row.task(build, grader)


def _specified(row: Mapping[str, object], specification: harness.Specification, mirrors: Path | None) -> PythonRecipe:
    identity = row["instance_id"]
    if specification.packages == "environment.yml":
        raise TaskFileError(
            f"nothing says what {identity} is built with",
            field="instance_id",
            reason="its specification leaves that to conda (environment.yml), and there are no pins for it",
            hint="give --pins DIR with the exported environments of the official images, or --environment image",
        )
    from_repository = specification.packages == "requirements.txt"
    needed = (
        _from_repository(row, specification.requirements_files, mirrors)
        if from_repository
        else listed(specification.packages)
    )
    return specified(specification.python, needed, listed(" ".join(map(_quoted, specification.pip_packages))))


def _quoted(requirement: str) -> str:
    return f"'{requirement}'"


def _from_repository(row: Mapping[str, object], files: Sequence[str], mirrors: Path | None) -> list[str]:
    """Return the requirements listed in the repository, at the commit that swebench reads."""
    repo, identity = str(row["repo"]), row["instance_id"]
    commit = str(row.get("environment_setup_commit") or row["base_commit"])
    if mirrors is None:
        raise TaskFileError(
            f"nothing says what {identity} is built with",
            field="instance_id",
            reason=f"its specification leaves that to {' or '.join(files)} in the repository",
            hint="give --pins DIR with the exported environments, or --repo-mirrors DIR with the repository",
        )
    url = github(repo)
    for path in files:
        content = read_committed(mirrors, url, commit, path)
        if content is not None:
            folder = posixpath.dirname(path)
            names = filter(None, map(included_file, requirement_lines(content)))
            paths = {name: posixpath.normpath(posixpath.join(folder, name)) for name in names}
            included = {name: read_committed(mirrors, url, commit, path) or "" for name, path in paths.items()}
            return requirements_text(content, included)
    raise TaskFileError(
        f"{' and '.join(files)} of {identity} cannot be read at {commit[:12]}",
        field="environment_setup_commit",
        reason=f"no repository in {mirrors} has that commit with such a file",
        hint="fetch the repository with its history, or give --pins DIR",
    )


def fits_multilingual(row: Mapping[str, object]) -> bool:
    """Return whether a row's patches change files, but no Python file."""
    patches = f"{row.get('patch')}\n{row.get('test_patch')}"
    return "diff --git" in patches and not _PYTHON.search(patches)


def convert_multilingual(row: RowFields, context: LoadContext) -> Task:
    """Convert a row in another language, with the dataset's own image and the benchmark's rules.

    Raises:
        TaskFileError: a field is missing or invalid, or swebench has no specification for the tests.
        PatchError: a patch is malformed or unsafe.
        MissingExtra: the tests are specified only by the ``swebench`` package, which is not installed.
    """
    build = replace(OFFICIAL["swebench"], environment=()).build(row.row)  # the image contains no conda
    repo = row.text("repo")
    if build is None or context.environment == "pins":
        problem, hint = f"is {repo!r}, which is not in Python", "use --environment image or auto"
        raise bad_field("repo", problem, reason="pins are for rows in Python", hint=hint)
    if "eval_script" in row.row and "log_parser" in row.row:
        rule, parser = row.text("eval_type", default="pass_and_fail"), f"swebench5:{row.text('log_parser')}"
        return row.task(build, LogGrader(tests_of(row.text("eval_script")), parser, rule, timeout=TEST_TIMEOUT))
    try:
        script, rule = harness.evaluation({name: row.text(name) for name in _ROW_COLUMNS})
    except NotFound as error:
        hint = "give the row eval_script and log_parser (swebench 5), or `build` and `test` (docs/task-files.md)"
        raise bad_field("repo", f"is {repo!r}: {error.what}", hint=hint) from error
    command = f"{_SHELL}\n{tests_of(script)}"
    return row.task(build, LogGrader(command, f"swebench:{repo}", rule, timeout=TEST_TIMEOUT))


def tests_of(script: str) -> str:
    """Return the test commands of a SWE-bench evaluation script, without those that apply the test patch.

    Args:
        script: the text of the script.
    """
    lines = _APPLIED.sub("", script).partition(_END)[0].splitlines()
    return "\n".join(line for line in lines if line.strip() and not _DROPPED_LINES.match(line))
