"""SWE-rebench (Nebius): SWE-bench's columns, ``install_config`` and the exact ``requirements`` of each row."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import sort_commands
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.dialects.pinning import specified
from minisandbox.tasks.dialects.values import commands, object_of, requirement_lines
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.languages import not_python
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

_TEST_TIMEOUT = 1800.0


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has its installation with it."""
    return row.keys() >= {"install_config", "base_commit", "patch", "FAIL_TO_PASS"}


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or the row is not for Python.
        PatchError: a patch is malformed or unsafe.
    """
    fields = RowFields(row)
    config = object_of(row, "install_config")
    repo, commit = fields.text("repo"), fields.text("base_commit")
    python = str(config.get("python") or "")
    if not python:
        raise not_python("install_config", "has no 'python'")
    listed = requirement_lines(row.get("requirements"), "requirements")

    def pinned() -> PythonBuild:
        found = sort_commands([*commands(config, "pre_install"), *commands(config, "install")])
        packages = requirement_lines(config.get("pip_packages"), "install_config.pip_packages")
        pins = specified(python, listed or ("pytest",), () if listed else packages)
        return PythonBuild(
            python=python,
            requirements=pins.requirements,
            overrides=pins.overrides,
            source=SourceSpec.on_github(repo, commit),
            install=found.kept,
            system=found.system,
        )

    grader = PytestGrader(" && ".join(commands(config, "test_cmd")) or "python -m pytest", _TEST_TIMEOUT)
    build = chosen_build("swe-rebench", row, context, pinned, exact=bool(listed))
    return fields.task(build, grader)
