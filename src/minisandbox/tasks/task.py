"""Task: one dataset row, with SWE-bench's own field names, and how to build and test it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.patches import touched_files
from minisandbox.tasks.graders import Grader, PytestGrader, ScriptGrader, bad_field

if TYPE_CHECKING:
    from minisandbox.images import PythonRecipe, Source

_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]*")
_OUTSIDE = re.compile(r"^(?:\.\./)+[^/]+/")
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]*")


class Form(enum.StrEnum):
    """Which way round a task's ``patch`` is."""

    SWEBENCH = "swebench"
    """``patch`` is the fix; ``test_patch`` adds the hidden tests."""

    SWESMITH = "swesmith"
    """``patch`` is the bug, applied to clean source; the reference is its reverse; tests that fail are hidden."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where a task's repository comes from, as its row says it.

    Attributes:
        kind: ``"sdist"``, ``"git"`` or ``"local"``.
        fields: the row's own keys and values: ``name``, ``version``, ``sha256``; ``url``, ``commit``; or ``path``.
        within: the directories that a ``path`` must not leave, as :class:`.LocalSource` has them; no part of the row.
    """

    kind: str
    fields: tuple[tuple[str, str], ...]
    within: tuple[Path, ...] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def on_github(cls, repo: str, commit: str) -> SourceSpec:
        """Return a commit of a repository that is called ``owner/name`` there."""
        return cls("git", (("url", github(repo)), ("commit", commit)))

    def source(self) -> Source:
        """Return it as the images package wants it."""
        from minisandbox import images  # noqa: PLC0415 - reading task files must not load the sandbox

        values = dict(self.fields)
        if self.kind == "sdist":
            return images.SdistSource(**values)
        if self.kind == "git":
            return images.GitSource(**values)
        return images.LocalSource(Path(values["path"]), self.within)


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """How a task's image is made.

    Attributes:
        python: the interpreter asked for: "3.11", "3.11.7", ">=3.11"; None for no more than the host's /usr.
        requirements: pinned packages, installed before the source is there, so that tasks can share them.
        complete: whether ``requirements`` name everything that is to be installed with them.
        overrides: packages installed after the requirements; they win.
        source: the repository, or None for an empty one.
        install: shell commands run at /testbed.
        environment: variables captured in the image.
        network: what the install commands reach: "off", "index" (the package index) or "host".
        exclude_newer: a date: packages uploaded later are not there; "" for all.
        system: packages of the host's distribution; takes root.
        torch_backend: "cpu": builds of PyTorch without CUDA, whatever the requirements say; "" for what they say.
    """

    python: str | None = None
    requirements: tuple[str, ...] = ()
    complete: bool = False
    overrides: tuple[str, ...] = ()
    source: SourceSpec | None = None
    install: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    network: str = "index"
    exclude_newer: str = ""
    system: tuple[str, ...] = ()
    torch_backend: str = ""

    def recipe(self) -> PythonRecipe:
        """Return it as the images package wants it, without anything of a task."""
        from minisandbox.images import PythonRecipe  # noqa: PLC0415 - reading task files must not load the sandbox

        return PythonRecipe(
            python=self.python,
            requirements=self.requirements,
            complete=self.complete,
            overrides=self.overrides,
            source=None if self.source is None else self.source.source(),
            install=self.install,
            environment=self.environment,
            network=self.network,
            exclude_newer=self.exclude_newer,
            system=self.system,
            torch_backend=self.torch_backend,
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """The known solution of a task.

    Attributes:
        patch: a unified diff.
        reverse: whether it solves the task when it is applied in reverse.
    """

    patch: str
    reverse: bool


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row and how to build and test it. Field names are SWE-bench's.

    Attributes:
        instance_id: unique in its set, and usable as a file name.
        repo: ``owner/name``.
        base_commit: the commit (or, for an sdist, the release) that the repository is at.
        problem_statement: what the agent is told.
        patch: the fix (SWE-bench's form) or the bug (SWE-smith's).
        test_patch: hidden tests; SWE-bench's form only.
        FAIL_TO_PASS: ids of the tests that must start passing.
        PASS_TO_PASS: ids of the tests that must keep passing.
        version: the project's version, for people.
        form: which way round ``patch`` is.
        build: how the image is made.
        grader: how it is judged. A script's verdict is its reward: such a task may name no tests, and no patch.

    Raises:
        TaskFileError: a field has a value that cannot be used; ``field`` names it.
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
    build: BuildSpec = BuildSpec()
    grader: Grader = field(default_factory=PytestGrader)

    def __post_init__(self) -> None:
        _check_id(self.instance_id)
        _check_patches(self)
        _check_tests(self)

    @property
    def reference(self) -> Reference:
        """The known solution: ``patch``, reversed in SWE-smith's form."""
        return Reference(self.patch, reverse=self.form is Form.SWESMITH)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files that hold the named tests or that ``test_patch`` touches, sorted; never a file of ``patch``.

        A doctest lives in a file that the agent has to change, so that such a file cannot be restored.
        """
        files = _files_of(self.FAIL_TO_PASS + self.PASS_TO_PASS) | set(touched_files(self.test_patch))
        return tuple(sorted(files - set(touched_files(self.patch))))

    @property
    def hidden_files(self) -> tuple[str, ...]:
        """Files taken out of the tree that the agent sees, sorted.

        In SWE-smith's form those with FAIL_TO_PASS tests; in SWE-bench's none (``test_patch`` is simply not applied).
        """
        if self.form is Form.SWEBENCH:
            return ()
        return tuple(sorted(_files_of(self.FAIL_TO_PASS) - set(touched_files(self.patch))))

    def recipe(self) -> PythonRecipe:
        """Return the recipe of this task's image."""
        from_git = self.build.source is not None and self.build.source.kind == "git"  # archives say their version
        return replace(
            self.build.recipe(),
            version=self.version if from_git and _VERSION.fullmatch(self.version) else "",
            patch=self.patch if self.form is Form.SWESMITH else "",
            hidden=self.hidden_files,
            test_patch=self.test_patch,
        )

    def to_row(self) -> dict[str, object]:
        """Return the task as a row of a task file; reading it back gives an equal task."""
        return {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "base_commit": self.base_commit,
            "version": self.version,
            "form": self.form.value,
            "problem_statement": self.problem_statement,
            "patch": self.patch,
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": list(self.FAIL_TO_PASS),
            "PASS_TO_PASS": list(self.PASS_TO_PASS),
            "build": _build_row(self.build),
            "test": self.grader.to_row(),
        }


def _build_row(build: BuildSpec) -> dict[str, object]:
    source = None if build.source is None else {build.source.kind: dict(build.source.fields)}
    return {
        "python": build.python,
        "requirements": list(build.requirements),
        **({"complete": True} if build.complete else {}),
        **({"overrides": list(build.overrides)} if build.overrides else {}),
        "source": source,
        "install": list(build.install),
        "environment": dict(build.environment),
        **({} if build.network == "index" else {"network": build.network}),
        **({"exclude_newer": build.exclude_newer} if build.exclude_newer else {}),
        **({"system": list(build.system)} if build.system else {}),
        **({"torch_backend": build.torch_backend} if build.torch_backend else {}),
    }


def github(repo: str) -> str:
    """Return the address of a repository that is called ``owner/name``."""
    return f"https://github.com/{repo}"


def node_id(test_id: str) -> str:
    """Return what pytest itself calls a test that it may print otherwise.

    With ``-c /dev/null`` it takes /dev for its root, and prints ``../dev/tests/test_x.py::test_y``.
    """
    return _OUTSIDE.sub("", test_id, count=1) if test_id.startswith("../") else test_id


def file_of(test_id: str) -> str:
    """Return the file that a pytest id names; "" for those of other runners (``test_x (module.Class)``)."""
    file, colons, _ = node_id(test_id).partition("::")
    return file if (colons or file.endswith(".py")) and " " not in file else ""


def _files_of(test_ids: tuple[str, ...]) -> set[str]:
    return {file for test_id in test_ids if (file := file_of(test_id)) and is_inside(file)}


def is_inside(file: str) -> bool:
    """Whether a path of a test's id leads to a file of the repository; a test whose file lies elsewhere has none."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _check_id(instance_id: str) -> None:
    """Check that an id can name a file: trajectories and images are called after it."""
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
            hint="set form to 'swebench' if patch is the fix",
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
    seen: dict[str, str] = {}
    for name, ids in (("FAIL_TO_PASS", task.FAIL_TO_PASS), ("PASS_TO_PASS", task.PASS_TO_PASS)):
        for test_id in ids:
            if not test_id.strip():
                raise bad_field(name, "has an empty test id", hint="take it out")
            if test_id in seen:
                where = "twice" if seen[test_id] == name else f"and {seen[test_id]} has it too"
                raise bad_field(name, f"has {test_id[:200]!r} {where}", hint="name each test once")
            seen[test_id] = name
