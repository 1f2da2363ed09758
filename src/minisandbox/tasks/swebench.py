"""SWE-bench rows (full, Lite, Verified; the hub's layout and that of swebench 5).

How a row is built and tested is what the ``swebench`` package says (4.1.0), corrected where that no longer works.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisandbox.errors import TaskFileError
from minisandbox.tasks import harness
from minisandbox.tasks.corrections import sort_commands
from minisandbox.tasks.pinning import Pinned, exported, listed, requirements_text, specified
from minisandbox.tasks.rows import RowFields
from minisandbox.tasks.task import BuildSpec, Form, SourceSpec, Task

TEST_TIMEOUT = 1800.0
"""Seconds that swebench gives the tests of an instance (``run_evaluation --timeout``)."""


def task_from_swebench(row: Mapping[str, object], *, pins: Path | None = None, mirrors: Path | None = None) -> Task:
    """Make a task of a SWE-bench row.

    Args:
        row: the row; columns that are not needed are ignored.
        pins: a directory with the exported environments of the official images (``REPOSITORY/NUMBER/environment.yml``).
        mirrors: a directory of git repositories: where a specification leaves its requirements to the repository.

    Returns:
        The task.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is built.
        PatchError: a patch is malformed.
        MissingExtra: the ``swebench`` package is not installed.
    """
    fields = RowFields(row)
    lists = fields.test_lists()
    repo, version, commit = fields.text("repo"), fields.text("version"), fields.text("base_commit")
    found = harness.specifications([row])[0]
    specification = found["specification"]
    if specification is None:
        known = ", ".join(found["versions"]) or "none"
        raise TaskFileError(
            f"field 'version' is {version!r}",
            field="version",
            reason=f"swebench has no specification for this version of {repo} (known: {known})",
            hint="give the row `build` and `test` of its own (docs/task-files.md)",
        )
    commands = sort_commands([*specification.get("pre_install", ()), specification.get("install", "")])
    evaluation = sort_commands(list(specification.get("eval_commands", ())))
    pinned = _pinned(row, specification, found, pins, mirrors)
    test_command = specification["test_cmd"]
    last = test_command if isinstance(test_command, str) else test_command[-1]
    return Task(
        instance_id=fields.text("instance_id"),
        repo=repo,
        base_commit=commit,
        version=version,
        form=Form.SWEBENCH,
        problem_statement=fields.text("problem_statement"),
        patch=fields.text("patch"),
        test_patch=fields.text("test_patch"),
        FAIL_TO_PASS=lists.FAIL_TO_PASS,
        PASS_TO_PASS=lists.PASS_TO_PASS,
        build=BuildSpec(
            python=pinned.python,
            requirements=pinned.requirements,
            complete=pinned.complete,
            overrides=pinned.overrides,
            source=SourceSpec("git", (("url", f"https://github.com/{repo}"), ("commit", commit))),
            install=commands.kept,
            environment=(("LANG", "C.UTF-8"), ("LC_ALL", "C.UTF-8")),
            system=commands.system,
        ),
        test_command="; ".join((*evaluation.kept, " ".join((last, *found["directives"])))),
        test_timeout=TEST_TIMEOUT,
        test_runner="pytest" if re.search(r"\b(?:pytest|tox)\b", last) else "log",
        test_parser=f"swebench:{repo}",
    )


def _pinned(
    row: Mapping[str, object],
    specification: Mapping[str, Any],
    found: Mapping[str, Any],
    pins: Path | None,
    mirrors: Path | None,
) -> Pinned:
    identity = str(row["instance_id"])
    repository, _, number = identity.rpartition("-")
    export = exported(pins, repository, number)
    if export is not None:
        return export
    packages = specification.get("packages", "")
    if packages == "requirements.txt":
        needed = _from_repository(row, found["requirements_files"], mirrors)
    elif packages == "environment.yml":
        raise TaskFileError(
            f"nothing says what {identity} is built with",
            field="instance_id",
            reason="its specification leaves that to conda (environment.yml), and there are no pins for it",
            hint="give --pins DIR with the exported environments of the official images",
        )
    else:
        needed = listed(packages)
    return specified(
        specification["python"], needed, listed(" ".join(map(_quoted, specification.get("pip_packages", ()))))
    )


def _quoted(requirement: str) -> str:
    return f"'{requirement}'"


def _from_repository(row: Mapping[str, object], files: list[str], mirrors: Path | None) -> list[str]:
    """The requirements that the repository itself lists, at the commit that swebench reads them from."""
    from minisandbox.images.mirrors import read_committed  # noqa: PLC0415 - reading task files must not load the sandbox

    repo, identity = str(row["repo"]), row["instance_id"]
    commit = str(row.get("environment_setup_commit") or row["base_commit"])
    if mirrors is None:
        raise TaskFileError(
            f"nothing says what {identity} is built with",
            field="instance_id",
            reason=f"its specification leaves that to {' or '.join(files)} in the repository",
            hint="give --pins DIR with the exported environments, or --repo-mirrors DIR with the repository",
        )
    for path in files:
        folder = posixpath.dirname(path)
        text = read_committed(mirrors, f"https://github.com/{repo}", commit, path)
        if text is None:
            continue
        include = {
            name: read_committed(
                mirrors, f"https://github.com/{repo}", commit, posixpath.normpath(posixpath.join(folder, name))
            )
            or ""
            for name in re.findall(r"^(?:-r|--requirement)[ =]?\s*(\S+)", text, re.MULTILINE)
        }
        return requirements_text(text, include)
    raise TaskFileError(
        f"{' and '.join(files)} of {identity} cannot be read at {commit[:12]}",
        field="environment_setup_commit",
        reason=f"no repository in {mirrors} has that commit with such a file",
        hint="fetch the repository with its history, or give --pins DIR",
    )
