"""The original MiniSandbox's custom datasets: SWE-smith's columns, and how to build and test as data.

Its guide has ``instance_id``, ``repo``, ``patch`` (which puts the bug in: undoing it is the fix), ``FAIL_TO_PASS``,
``PASS_TO_PASS``, ``image_name``, ``problem_statement``, ``test_patch``, ``base_commit`` (the instance's branch where it
is missing) and ``python_version`` (3.11 where it is missing), and leaves the commands to a source file to be edited.
"""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.tasks.builds import Build, PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.dialects.pinning import exported, specified
from minisandbox.tasks.dialects.values import commands, full_commit, requirement_lines
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Form, Task

_INSTALL = ("install_cmds", "install_cmd", "custom_install_cmd")
_TEST = ("test_cmd", "custom_test_cmd")
_PYTHON = "3.11"


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row says by such columns how it is built or tested."""
    return "patch" in row and not row.keys().isdisjoint(("python_version", *_INSTALL, *_TEST))


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong.
        PatchError: a patch is malformed or unsafe.
    """
    fields = RowFields(row)
    identity, repo = fields.text("instance_id"), fields.text("repo")
    revision = fields.text("base_commit", default="") or identity
    commit = full_commit(repo, revision, context.repo_mirrors, "base_commit")
    grader = PytestGrader(" && ".join(commands(row, *_TEST)) or "python -m pytest")
    statement = fields.text("problem_statement", default="")
    build = _build(row, repo, commit, context)
    return fields.task(
        build,
        grader,
        repo=repo,
        base_commit=commit,
        problem_statement=statement,
        form=Form.BUGGY,
    )


def _build(row: Mapping[str, object], repo: str, commit: str, context: LoadContext) -> Build:
    fields = RowFields(row)
    image = fields.text("image_name", default="").rpartition("/")[2]
    listed = requirement_lines(row.get("requirements"), "requirements")
    export = exported(context.pins, image) if image else None

    def pinned() -> PythonBuild:
        python = fields.text("python_version", default=_PYTHON)
        packages = export or specified(python, listed or ("pytest",), ())
        return PythonBuild(
            python=python if "python_version" in row else packages.python,
            requirements=packages.requirements,
            complete=packages.complete,
            source=SourceSpec.on_github(repo, commit),
            install=commands(row, *_INSTALL) or ("python -m pip install -e .",),
        )

    return chosen_build("custom", row, context, pinned, exact=True)  # its image may be no more than a name
