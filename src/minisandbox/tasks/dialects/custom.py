"""The original MiniSandbox's custom datasets: SWE-smith's columns, and how to build and test as data.

Its guide has ``instance_id``, ``repo``, ``patch`` (which puts the bug in: undoing it is the fix), ``FAIL_TO_PASS``,
``PASS_TO_PASS``, ``image_name``, ``problem_statement``, ``test_patch``, ``base_commit`` (the instance's branch where it
is missing) and ``python_version`` (3.11 where it is missing), and leaves the commands to a source file to be edited.
"""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.patches import reversed_patch
from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.revisions import full_commit
from minisandbox.tasks.dialects.values import commands, requirement_lines
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.pinning import exported, specified
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
        PatchError: a patch is malformed or unsafe, or cannot be turned round.
    """
    fields = RowFields(row)
    lists = fields.test_lists()
    identity, repo = fields.text("instance_id"), fields.text("repo")
    revision = fields.text("base_commit", default="") or identity
    commit = full_commit(repo, revision, context.repo_mirrors, "base_commit")
    return Task(
        instance_id=identity,
        repo=repo,
        base_commit=commit,
        version=fields.text("version", default=""),
        form=Form.SWEBENCH,
        problem_statement=fields.text("problem_statement", default=""),
        patch=reversed_patch(fields.text("patch"), name="field 'patch'"),
        test_patch=fields.text("test_patch", default=""),
        FAIL_TO_PASS=lists.FAIL_TO_PASS,
        PASS_TO_PASS=lists.PASS_TO_PASS,
        build=_build(row, repo, commit, context),
        grader=PytestGrader(" && ".join(commands(row, *_TEST)) or "python -m pytest"),
    )


def _build(row: Mapping[str, object], repo: str, commit: str, context: LoadContext) -> PythonBuild:
    fields = RowFields(row)
    image = fields.text("image_name", default="").rpartition("/")[2]
    python = fields.text("python_version", default=_PYTHON)
    listed = requirement_lines(row.get("requirements"), "requirements")
    pinned = (exported(context.pins, image) if image else None) or specified(python, listed or ("pytest",), ())
    return PythonBuild(
        python=python if "python_version" in row else pinned.python,
        requirements=pinned.requirements,
        complete=pinned.complete,
        source=SourceSpec.on_github(repo, commit),
        install=commands(row, *_INSTALL) or ("python -m pip install -e .",),
    )
