"""Convert SWE-smith rows: each patch introduces a bug into a repository at the commit of its profile.

Builds and tests come from the ``swesmith`` package (0.0.9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from minisandbox.errors import NotFound
from minisandbox.spec import PythonRecipe
from minisandbox.tasks import harness
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import AFTERWARDS, sort_commands
from minisandbox.tasks.dialects.environments import chosen_build, of_repository, specified
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Form, Task

# owner__repo.commit8.kind__hash, and swesmith.x86_64.owner_1776_repo.commit8 with or without the registry's user
_ID = re.compile(r"[\w.-]+__[\w.-]+\.[0-9a-f]{8}\.[\w.-]+")
_IMAGE = re.compile(r"(?:[\w.-]+/)?(?:sweb\.eval|swesmith)\.[\w.-]+", re.IGNORECASE)


def fits(row: Mapping[str, object]) -> bool:
    """Return whether a row's image name or id has SWE-smith's format."""
    image = row.get("image_name")
    has_image_name = isinstance(image, str) and "swesmith" in image and _IMAGE.match(image) is not None
    return "environment_setup_commit" not in row and (
        has_image_name or _ID.fullmatch(str(row["instance_id"])) is not None
    )


def convert(row: RowFields, context: LoadContext) -> Task:
    """Convert a row to a task; the pins are in ``REPOSITORY.COMMIT/*.yml``.

    ``base_commit`` defaults to the profile's commit.

    Raises:
        TaskFileError: a field is missing or invalid, or swesmith does not know the repository.
        PatchError: the patch is malformed or unsafe.
        MissingExtra: the ``swesmith`` package is not installed.
    """
    identity = row.text("instance_id")
    try:
        profile = harness.profile(identity, *row.test_lists())
    except NotFound as error:
        hint = "give rows of other repositories `build` and `test` of their own (docs/task-files.md)"
        raise bad_field("instance_id", f"is {identity!r}: {error.what}", hint=hint) from error
    commit = row.text("base_commit", default="") or profile.commit
    repository = profile.repo if commit == profile.commit else profile.mirror
    installed = sort_commands(profile.commands)
    install = (*installed.remaining, *AFTERWARDS.get(profile.repo, ()))
    image = f"swebench/swesmith.x86_64.{profile.name.lower().replace('__', '_1776_')}"

    def pinned(pins: PythonRecipe) -> PythonRecipe:
        pins = replace(pins, python=profile.python)
        return of_repository(pins, repository, commit, install, system=installed.system, utf8=True)

    build = chosen_build(
        "swesmith",
        {**row.row, "image_name": row.row.get("image_name") or image},
        context,
        (profile.name,),
        lambda: specified(profile.python, ["pytest"], []),
        pinned,
    )
    grader = LogGrader(
        " && ".join(sort_commands([profile.test_command]).remaining),
        f"swesmith:{profile.name}",
        reporter="pytest",
        timeout=profile.timeout,
    )
    return row.task(
        build,
        grader,
        form=Form.SWESMITH,
        repo=profile.repo,
        base_commit=commit,
        problem_statement=row.text("problem_statement", default=""),
        test_patch="",
    )
