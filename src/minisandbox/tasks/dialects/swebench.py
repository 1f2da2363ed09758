"""SWE-bench rows (full, Lite, Verified; the hub's layout and that of swebench 5).

How a row is built and tested is what the ``swebench`` package says (4.1.0), corrected where that no longer works.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisandbox.errors import NotFound, TaskFileError
from minisandbox.tasks import harness
from minisandbox.tasks.builds import github
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.corrections import AFTERWARDS, BEFORE_TESTS, sort_commands
from minisandbox.tasks.dialects.environments import Pinned, chosen_build, listed, requirements_text, specified
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import Task

TEST_TIMEOUT = 1800.0
"""Seconds that swebench gives the tests of an instance (``run_evaluation --timeout``)."""


def convert(row: RowFields, context: LoadContext) -> Task:
    """Make a task of a row. Pins are ``REPOSITORY/NUMBER/environment.yml``.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is built.
        PatchError: a patch is malformed.
        MissingExtra: the ``swebench`` package is not installed.
    """
    repo, version = row.text("repo"), row.text("version")
    try:
        said = harness.specification(repo, version, row.text("test_patch"))
    except NotFound as error:
        hint = "give the row `build` and `test` of its own (docs/task-files.md)"
        raise bad_field("version", f"is {version!r}: {error.what}", reason=error.reason, hint=hint) from error
    before = (*sort_commands(said.before_tests).kept, *BEFORE_TESTS.get(repo, ()))
    repository, _, number = row.text("instance_id").rpartition("-")
    installed = sort_commands(said.commands)
    install = (*installed.kept, *AFTERWARDS.get(repo, ()))
    build = chosen_build(
        "swebench",
        row.row,
        context,
        (repository, number),
        lambda: _specified(row.row, said, context.repo_mirrors),
        lambda pins: pins.build(repo, row.text("base_commit"), install, system=installed.system, utf8=True),
    )
    grader = LogGrader(
        "; ".join((*before, said.test_command)),
        f"swebench:{repo}",
        reporter="pytest" if re.search(r"\b(?:pytest|tox)\b", said.test_command.split("/")[0]) else "unittest",
        timeout=TEST_TIMEOUT,
    )
    return row.task(build, grader)


def _specified(row: Mapping[str, object], said: harness.Specification, mirrors: Path | None) -> Pinned:
    identity = row["instance_id"]
    if said.packages == "environment.yml":
        raise TaskFileError(
            f"nothing says what {identity} is built with",
            field="instance_id",
            reason="its specification leaves that to conda (environment.yml), and there are no pins for it",
            hint="give --pins DIR with the exported environments of the official images, or --environment image",
        )
    from_repository = said.packages == "requirements.txt"
    needed = _from_repository(row, said.requirements_files, mirrors) if from_repository else listed(said.packages)
    return specified(said.python, needed, listed(" ".join(map(_quoted, said.pip_packages))))


def _quoted(requirement: str) -> str:
    return f"'{requirement}'"


def _from_repository(row: Mapping[str, object], files: Sequence[str], mirrors: Path | None) -> list[str]:
    """The requirements that the repository itself lists, at the commit that swebench reads them from."""
    from minisandbox.images.sources.mirrors import read_committed  # noqa: PLC0415 - reading task files must not load the sandbox

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
        text = read_committed(mirrors, url, commit, path)
        if text is not None:
            folder = posixpath.dirname(path)
            names = re.findall(r"^(?:-r|--requirement)[ =]?\s*(\S+)", text, re.MULTILINE)
            places = {name: posixpath.normpath(posixpath.join(folder, name)) for name in names}
            found = {name: read_committed(mirrors, url, commit, place) or "" for name, place in places.items()}
            return requirements_text(text, found)
    raise TaskFileError(
        f"{' and '.join(files)} of {identity} cannot be read at {commit[:12]}",
        field="environment_setup_commit",
        reason=f"no repository in {mirrors} has that commit with such a file",
        hint="fetch the repository with its history, or give --pins DIR",
    )
