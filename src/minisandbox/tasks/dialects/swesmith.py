"""SWE-smith rows: the patch is a bug, put into a repository that is otherwise at a commit of its profile.

How a row is built and tested is what the ``swesmith`` package says (version 0.0.9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from minisandbox.errors import NotFound, TaskFileError
from minisandbox.tasks import harness
from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import AFTERWARDS, sort_commands
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.dialects.pinning import exported, specified
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Form, Task

# owner__repo.commit8.kind__hash, and swesmith.x86_64.owner_1776_repo.commit8 with or without a registry's user
_ID = re.compile(r"[\w.-]+__[\w.-]+\.[0-9a-f]{8}\.[\w.-]+")
_IMAGE = re.compile(r"(?:[\w.-]+/)?(?:sweb\.eval|swesmith)\.[\w.-]+", re.IGNORECASE)


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has an image, or an id, as SWE-smith calls them."""
    if not row.keys() >= {"instance_id", "patch", "FAIL_TO_PASS"} or "environment_setup_commit" in row:
        return False
    image = row.get("image_name")
    return _ID.fullmatch(str(row["instance_id"])) is not None or (
        isinstance(image, str) and "swesmith" in image and _IMAGE.match(image) is not None
    )


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row. Without ``base_commit`` the profile's is taken; pins are ``REPOSITORY.COMMIT/*.yml``.

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
    export = exported(context.pins, profile.name)
    commit = fields.text("base_commit", default="") or profile.commit
    repository = profile.repo if commit == profile.commit else profile.mirror

    def pinned() -> PythonBuild:
        commands = sort_commands(profile.commands)
        packages = export or specified(profile.python, ["pytest"], [])
        return PythonBuild(
            python=profile.python,
            requirements=packages.requirements,
            complete=packages.complete,
            source=SourceSpec.on_github(repository, commit),
            install=(*commands.kept, *AFTERWARDS.get(profile.repo, ())),
            environment=(("LANG", "C.UTF-8"), ("LC_ALL", "C.UTF-8")),
            system=commands.system,
        )

    image = f"swebench/swesmith.x86_64.{profile.name.lower().replace('__', '_1776_')}"
    named = {**row, "image_name": row.get("image_name") or image}
    grader = LogGrader(
        " && ".join(sort_commands([profile.test_command]).kept),
        f"swesmith:{profile.name}",
        reporter="pytest",
        timeout=profile.timeout,
    )
    statement = fields.text("problem_statement", default="")
    build = chosen_build("swesmith", named, context, pinned, exact=export is not None)
    return fields.task(
        build,
        grader,
        form=Form.SWESMITH,
        repo=profile.repo,
        base_commit=commit,
        problem_statement=statement,
        test_patch="",
    )
