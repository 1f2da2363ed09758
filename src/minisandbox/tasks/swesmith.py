"""SWE-smith rows: the patch is a bug, put into a repository that is otherwise at a commit of its profile.

How a row is built and tested is what the ``swesmith`` package says (version 0.0.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import NotFound, TaskFileError
from minisandbox.tasks import harness
from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.corrections import AFTERWARDS, sort_commands
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.pinning import exported, specified
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Form, Task


def task_from_swesmith(row: Mapping[str, object], *, pins: Path | None = None) -> Task:
    """Make a task of a SWE-smith row.

    Args:
        row: the row; columns that are not needed are ignored. Without ``base_commit`` the profile's commit is taken.
        pins: a directory with the exported environments of the official images (``REPOSITORY.COMMIT/*.yml``).

    Returns:
        The task.

    Raises:
        TaskFileError: a field is missing or wrong, or swesmith does not know the repository.
        PatchError: the patch is malformed.
        MissingExtra: the ``swesmith`` package is not installed.
    """
    fields = RowFields(row)
    lists = fields.test_lists()
    identity = fields.text("instance_id")
    try:
        profile = harness.profile(identity, lists.FAIL_TO_PASS, lists.PASS_TO_PASS)
    except NotFound as error:
        raise TaskFileError(
            f"field 'instance_id' is {identity!r}: {error.what}",
            field="instance_id",
            hint="give rows of other repositories `build` and `test` of their own (docs/task-files.md)",
        ) from error
    commands = sort_commands(profile.commands)
    pinned = exported(pins, profile.name) or specified(profile.python, ["pytest"], [])
    commit = fields.text("base_commit", default="") or profile.commit
    repository = profile.repo if commit == profile.commit else profile.mirror
    return Task(
        instance_id=identity,
        repo=profile.repo,
        base_commit=commit,
        form=Form.SWESMITH,
        problem_statement=fields.text("problem_statement", default=""),
        patch=fields.text("patch"),
        test_patch="",
        FAIL_TO_PASS=lists.FAIL_TO_PASS,
        PASS_TO_PASS=lists.PASS_TO_PASS,
        build=PythonBuild(
            python=profile.python,
            requirements=pinned.requirements,
            complete=pinned.complete,
            source=SourceSpec.on_github(repository, commit),
            install=(*commands.kept, *AFTERWARDS.get(profile.repo, ())),
            environment=(("LANG", "C.UTF-8"), ("LC_ALL", "C.UTF-8")),
            system=commands.system,
        ),
        grader=LogGrader(
            " && ".join(sort_commands([profile.test_command]).kept),
            f"swesmith:{profile.name}",
            reporter="pytest",
            timeout=profile.timeout,
        ),
    )
