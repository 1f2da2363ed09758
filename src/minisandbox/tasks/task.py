"""Task: one dataset row with SWE-bench's field names, and how to build and test it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from minisandbox.patches import touched_files
from minisandbox.spec import GitSource, PythonRecipe, Recipe
from minisandbox.tasks.builds import Build, ContainerBuild, build_row
from minisandbox.tasks.fields import bad_field, keys_of, object_of
from minisandbox.tasks.graders import Grader, PytestGrader, ScriptGrader
from minisandbox.tasks.needs import Needs, Solution

_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]*")
_OUTSIDE = re.compile(r"^(?:\.\./)+[^/]+/")
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*")


class Form(enum.StrEnum):
    """Whether a task's ``patch`` is the fix or the bug."""

    SWEBENCH = "swebench"
    """``patch`` is the fix; ``test_patch`` adds the hidden tests."""

    SWESMITH = "swesmith"
    """``patch`` adds the bug to correct source, its reverse is the solution; files with failing tests are hidden."""

    BUGGY = "buggy"
    """The repository contains the bug of ``patch``, whose reverse is the solution; ``test_patch`` adds the tests."""


ROW_KEYS = (
    "instance_id", "repo", "base_commit", "version", "form", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS",
    "PASS_TO_PASS", "build", "test", "solution", "needs",
)  # fmt: skip
"""The keys of a task's row, in order."""

_HOST_ALONE = PythonRecipe()
_NO_NEEDS = Needs()
_PYTEST = PytestGrader()


@dataclass(frozen=True, slots=True)
class Reference:
    """The known solution of a task.

    Attributes:
        patch: a unified diff.
        reverse: whether the patch solves the task when applied in reverse.
        script: a script that solves the task instead of the patch, or None.
    """

    patch: str
    reverse: bool
    script: Solution | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row and how to build and test it. Field names are SWE-bench's.

    Attributes:
        instance_id: the id, unique in its task set and usable as a file name.
        repo: ``owner/name``.
        base_commit: the repository's commit, or the release of an sdist.
        problem_statement: the text for the agent.
        patch: the fix (SWE-bench's form) or the bug (the other forms).
        test_patch: the patch that adds the hidden tests; empty in SWE-smith's form.
        FAIL_TO_PASS: ids of the tests that must start passing.
        PASS_TO_PASS: ids of the tests that must keep passing.
        version: the project's version, for display.
        form: whether ``patch`` is the fix or the bug.
        build: the build of the task's image.
        grader: the grader. A task with a script grader needs no tests and no patch.
        solution: a script that solves the task instead of ``patch``, or None.
        needs: the requirements of the task's sandboxes.

    Raises:
        TaskFileError: the value of a field is invalid; ``field`` names it.
        PatchError: ``patch`` or ``test_patch`` is malformed or unsafe.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    version: str = ""
    form: Form = Form.SWEBENCH
    build: Build = _HOST_ALONE
    grader: Grader = _PYTEST
    solution: Solution | None = None
    needs: Needs = _NO_NEEDS

    def __post_init__(self) -> None:
        _check_id(self.instance_id)
        _check_patches(self)
        _check_tests(self)

    @property
    def reference(self) -> Reference:
        """The known solution: the script, or ``patch``, which is applied in reverse if it is the bug."""
        return Reference(self.patch, reverse=self.form is not Form.SWEBENCH, script=self.solution)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files of the named tests and of ``test_patch``, sorted, without the files that ``patch`` changes.

        Grading restores these files. It cannot restore a file that ``patch`` changes, e.g. code with doctests, because
        the agent may have to change this file.
        """
        files = _files_of(self.FAIL_TO_PASS + self.PASS_TO_PASS) | set(touched_files(self.test_patch))
        return tuple(sorted(files - set(touched_files(self.patch))))

    @property
    def hidden_files(self) -> tuple[str, ...]:
        """Files that are hidden from the agent, sorted.

        In SWE-smith's form, these are the files with FAIL_TO_PASS tests. Other forms hide none, because the agent's
        repository does not have ``test_patch`` applied.
        """
        if self.form is not Form.SWESMITH:
            return ()
        return tuple(sorted(_files_of(self.FAIL_TO_PASS) - set(touched_files(self.patch))))

    def recipe(self) -> PythonRecipe | Recipe:
        """Return the recipe of this task's image."""
        patch = self.patch if self.form is Form.SWESMITH else ""
        if isinstance(self.build, ContainerBuild):
            return self.build.recipe(self.base_commit, patch, self.hidden_files, self.test_patch)
        # only a git checkout needs the version, because a source archive contains it
        has_version = isinstance(self.build.source, GitSource) and _VERSION.fullmatch(self.version)
        return replace(
            self.build,
            version=self.version if has_version else "",
            patch=patch,
            hidden=self.hidden_files,
            test_patch=self.test_patch,
        )

    def to_row(self) -> dict[str, object]:
        """Return the task as a row; its conversion creates an equal task."""
        row = object_of(self, [name for name in keys_of(Task) if name not in ("solution", "needs")])
        row["test"] = row.pop("grader")
        row["build"] = build_row(self.build)
        return {key: row[key] for key in ROW_KEYS if key in row}


def node_id(test_id: str) -> str:
    """Normalize the id of a pytest test, which pytest may print with a path outside the repository.

    With ``-c /dev/null``, pytest's root is /dev, so it prints ``../dev/tests/test_x.py::test_y``.
    """
    return _OUTSIDE.sub("", test_id, count=1) if test_id.startswith("../") else test_id


def file_of(test_id: str) -> str:
    """Return the file in a pytest id, or "" for an id of another runner (``test_x (module.Class)``)."""
    file, colons, _ = node_id(test_id).partition("::")
    return file if (colons or file.endswith(".py")) and " " not in file else ""


def _files_of(test_ids: tuple[str, ...]) -> set[str]:
    return {file for test_id in test_ids if (file := file_of(test_id)) and is_inside(file)}


def is_inside(file: str) -> bool:
    """Return whether the path in a test id is inside the repository."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _check_id(instance_id: str) -> None:
    """Check that an id is a valid file name, because trajectories and images are named after the task."""
    if not instance_id.strip():
        problem = "is empty"
    elif len(instance_id) > 200:
        problem = f"has {len(instance_id)} characters, more than 200"
    elif not _ID.fullmatch(instance_id):
        problem = f"is {instance_id!r}"
    else:
        return
    raise bad_field(
        "instance_id",
        problem,
        reason="ids name files and images",
        hint="use letters, digits and . _ @ + = - (not . or - in front), e.g. 'owner__name-123'",
    )


def _check_patches(task: Task) -> None:
    if not task.patch.strip() and not isinstance(task.grader, ScriptGrader):
        raise bad_field("patch", "is empty", hint="give the fix (swebench) or the bug (swesmith) as a unified diff")
    if task.form is Form.SWESMITH and task.test_patch.strip():
        raise bad_field(
            "test_patch",
            "is not empty in a task of SWE-smith's form",
            reason="its tests are those of the clean source",
            hint="set form to 'swebench' if patch is the fix, to 'buggy' if the repository has the bug",
        )
    touched_files(task.patch, name="field 'patch'")
    touched_files(task.test_patch, name="field 'test_patch'")


def _check_tests(task: Task) -> None:
    if not task.FAIL_TO_PASS and not isinstance(task.grader, ScriptGrader):
        raise bad_field(
            "FAIL_TO_PASS",
            "is empty",
            reason="the tests never failed, so nothing can be graded",
            hint="measure it: the tests that fail before the fix and pass after it",
        )
    list_of_test: dict[str, str] = {}
    for name, ids in (("FAIL_TO_PASS", task.FAIL_TO_PASS), ("PASS_TO_PASS", task.PASS_TO_PASS)):
        for test_id in ids:
            if not test_id.strip():
                raise bad_field(name, "has an empty test id", hint="take it out")
            if test_id in list_of_test:
                problem = "twice" if list_of_test[test_id] == name else f"and {list_of_test[test_id]} has it too"
                raise bad_field(name, f"has {test_id[:200]!r} {problem}", hint="name each test once")
            list_of_test[test_id] = name
