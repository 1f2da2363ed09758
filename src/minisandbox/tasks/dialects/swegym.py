"""SWE-Gym: SWE-bench's columns without ``environment_setup_commit``.

Its harness has specifications of its own, which no package index has. What they come to for the most part is here;
the exported environments of the images (``--pins``) are better where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.dialects.pinning import exported, specified
from minisandbox.tasks.dialects.values import commands
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.languages import check_ids
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

_COLUMNS = {"repo", "instance_id", "base_commit", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"}
_EDITABLE = "python -m pip install -e ."
# interpreter and installation of the repositories that need other ones than the default
_PYTHON = "3.10"
_KNOWN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "getmoto/moto": ("3.12", ("make init",)),
    "python/mypy": ("3.12", ("python -m pip install -r test-requirements.txt", _EDITABLE)),
    "facebookresearch/hydra": ("3.8", ("python -m pip install -r requirements/dev.txt", _EDITABLE)),
    "project-monai/monai": ("3.8", ("python -m pip install -r requirements-dev.txt", _EDITABLE)),
    "modin-project/modin": ("3.9", (_EDITABLE,)),
}
_TEST_TIMEOUT = 1800.0


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has SWE-bench's columns, and not those by which SWE-bench's packages know how to build it."""
    return row.keys() >= _COLUMNS


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or the tests are not pytest's.
        PatchError: a patch is malformed or unsafe.
    """
    fields = RowFields(row)
    lists = fields.test_lists()
    check_ids(lists.FAIL_TO_PASS, "FAIL_TO_PASS")
    identity, repo, commit = fields.text("instance_id"), fields.text("repo"), fields.text("base_commit")
    name, _, number = identity.rpartition("-")
    python, install = _KNOWN.get(repo.lower(), (_PYTHON, (_EDITABLE,)))
    export = exported(context.pins, name, number)

    def pinned() -> PythonBuild:
        packages = export or specified(python, ("pytest", "pytest-xdist"), ())
        return PythonBuild(
            python=packages.python,
            requirements=packages.requirements,
            complete=packages.complete,
            source=SourceSpec.on_github(repo, commit),
            install=commands(row, "install") or install,
        )

    grader = PytestGrader(timeout=_TEST_TIMEOUT)
    build = chosen_build("swegym", row, context, pinned, exact=export is not None)
    return fields.task(build, grader)
