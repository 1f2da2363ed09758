"""From a row in MiniSandbox's own layout (a JSON object) to a Task, with every wrong field named."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypedDict

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.tasks.builds import Build, DockerfileBuild, ImageBuild, PythonBuild, SourceSpec
from minisandbox.tasks.confining import address_problem, problem_of
from minisandbox.tasks.graders import FIELDS, Grader, LogGrader, PytestGrader, ScriptGrader, bad_field
from minisandbox.tasks.needs import Needs, Solution, network_of
from minisandbox.tasks.task import Form, Task

_FIELDS = (
    "instance_id",
    "repo",
    "base_commit",
    "version",
    "form",
    "problem_statement",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "build",
    "test",
    "solution",
    "needs",
)
# Columns of the public datasets that say nothing about how a task is built, run or graded here.
_IGNORED = frozenset(
    {
        "created_at",
        "difficulty",
        "environment_setup_commit",
        "eval_script",
        "eval_type",
        "hints_text",
        "image",
        "image_name",
        "log_parser",
        "strategy",
        "validation",
    }
)
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "sdist": ("name", "version", "sha256"),
    "git": ("url", "commit"),
    "local": ("path",),
}
_BUILD = (
    "python", "requirements", "complete", "overrides", "requirements_file", "source", "install", "environment",
    "network", "exclude_newer", "system", "torch_backend",
)  # fmt: skip
_CONTAINER = ("workdir", "environment", "cut", "reset", "remove")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Container(TypedDict):
    workdir: str
    environment: tuple[tuple[str, str], ...]
    cut: bool
    reset: bool
    remove: tuple[str, ...]


def task_from_own_row(
    row: Mapping[str, object],
    *,
    base: Path | None = None,
    places: tuple[Path, ...] | None = None,
    public_network: bool = False,
) -> Task:
    """Make a task of a row in MiniSandbox's own layout.

    Args:
        row: SWE-bench's fields, ``form``, ``build`` and ``test``; ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` as lists, or as
            JSON in a string (the public datasets do both). Other known columns of the datasets are ignored.
        base: directory that a relative path of a local source starts from; None: the current directory.
        places: directories in which paths of this machine must lie; None: they may lie anywhere.
        public_network: whether a row that asks for the public network gets it.

    Returns:
        The task; ``task_from_own_row(task.to_row())`` equals it.

    Raises:
        TaskFileError: a field is missing, unknown, or has a value that cannot be used; ``field`` names it.
        PatchError: ``patch`` or ``test_patch`` is malformed or unsafe.
    """
    fields = _Fields(row, "", known=_FIELDS, ignored=_IGNORED)
    return Task(
        instance_id=fields.text("instance_id"),
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit", default=""),
        version=fields.text("version", default=""),
        form=_form(fields.text("form")),
        problem_statement=fields.text("problem_statement"),
        patch=fields.text("patch"),
        test_patch=fields.text("test_patch", default=""),
        FAIL_TO_PASS=fields.ids("FAIL_TO_PASS"),
        PASS_TO_PASS=fields.ids("PASS_TO_PASS"),
        build=_build(fields.table("build"), base, places),
        grader=_grader(fields.table("test"), base, places),
        solution=None if row.get("solution") is None else _solution(fields.table("solution"), base, places),
        needs=_needs(fields.table("needs", default={}), public=public_network),
    )


def _solution(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> Solution:
    fields = _Fields(row, "solution.", known=("files", "command", "files_at", "timeout", "environment"))
    files = (base or Path()) / fields.text("files")
    fields.confine("files", problem_of(files, places))
    return Solution(
        files,
        fields.text("command", default="bash /solution/solve.sh"),
        fields.text("files_at", default="/solution"),
        fields.number("timeout", default=1800.0),
        fields.variables("environment"),
    )


def _needs(row: Mapping[str, object], *, public: bool) -> Needs:
    fields = _Fields(row, "needs.", known=("memory", "disk", "seconds", "network", "grader_network"))
    memory, disk, seconds = (fields.number(name, default=0.0) for name in ("memory", "disk", "seconds"))
    try:
        networks = [network_of(row.get(name, "off"), public=public) for name in ("network", "grader_network")]
    except InvalidValue as error:
        raise fields.error("network", f"is wrong: {error.what}", reason=error.reason, hint=error.hint) from error
    return Needs(int(memory) or None, int(disk) or None, networks[0], networks[1], seconds or None)


def build_spec(table: Mapping[str, object], *, base: Path | None = None) -> PythonBuild:
    """Read what a row of a Python project has under ``build``; recipe files have the same keys.

    Args:
        table: the object.
        base: directory that a relative path of a local source starts from; None: the current directory.

    Raises:
        TaskFileError: a field is unknown, or has a value that cannot be used; ``field`` names it.
    """
    return _python(table, base, None)


def _grader(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> Grader:
    kind = row.get("grader", "log" if "parser" in row or "runner" in row else "pytest")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise bad_field("test.grader", f"is {kind!r}", hint=f"known are {', '.join(FIELDS)}")
    fields = _Fields(row, "test.", known=FIELDS[kind])
    command = fields.text("command")
    if kind == "pytest":
        return PytestGrader(command, fields.number("timeout", default=300.0))
    if kind == "log":
        watched = "unittest" if fields.text("runner", default="pytest") == "other" else "pytest"
        return LogGrader(
            command,
            fields.text("parser", default=""),
            fields.text("rule", default="pass_and_fail"),
            fields.text("reporter", default="none" if "grader" in row else watched),
            fields.number("timeout", default=300.0),
        )
    return _script(fields, command, base, places)


def _script(fields: _Fields, command: str, base: Path | None, places: tuple[Path, ...] | None) -> ScriptGrader:
    files = None
    if name := fields.text("files", default=""):
        files = Path(name) if base is None else base / name
        fields.confine("files", problem_of(files, places))
    names = ("files_at", "reward_file", "mode", "user", "workdir")
    return ScriptGrader(
        command,
        files,
        timeout=fields.number("timeout", default=600.0),
        environment=fields.variables("environment"),
        **{name: fields.text(name) for name in names if name in fields.row},
        carry=fields.texts("carry", default=()),
    )


def _form(value: str) -> Form:
    try:
        return Form(value)
    except ValueError:
        raise TaskFileError(
            f"field 'form' is {value!r}",
            field="form",
            hint=_HINTS["form"],
        ) from None


def _build(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> Build:
    if "dockerfile" in row:
        return _dockerfile(row, base, places)
    return _image(row, base, places) if "image" in row else _python(row, base, places)


def _image(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> ImageBuild:
    fields = _Fields(row, "build.", known=("image", "platform", *_CONTAINER))
    reference = fields.text("image")
    kind, colon, path = reference.partition(":")
    if colon and kind in ("oci", "oci-archive", "docker-archive"):
        fields.confine("image", problem_of((base or Path()) / path.partition(":")[0], places))
        reference = f"{kind}:{(base or Path()) / path}"
    _check_reference(fields, reference)
    return ImageBuild(reference, fields.text("platform", default=""), **_container(fields))


def _check_reference(fields: _Fields, text: str) -> None:
    from minisandbox.images.oci.reference import parse_reference  # noqa: PLC0415 - reading task files must not load the sandbox

    try:
        parse_reference(text)
    except InvalidValue as error:
        raise fields.error("image", f"is {text!r}", reason=error.what, hint=error.hint) from error


def _dockerfile(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> DockerfileBuild:
    fields = _Fields(row, "build.", known=("dockerfile", "context", "args", "target", "platform", *_CONTAINER))
    dockerfile = (base or Path()) / fields.text("dockerfile")
    context = (base or Path()) / fields.text("context") if "context" in row else dockerfile.parent
    for name, path in (("dockerfile", dockerfile), ("context", context)):
        fields.confine(name, problem_of(path, places))
    texts = (fields.text(name, default="") for name in ("target", "platform"))
    return DockerfileBuild(dockerfile, context, fields.variables("args"), *texts, **_container(fields))


def _container(fields: _Fields) -> _Container:
    workdir, remove = fields.text("workdir", default=""), fields.texts("remove", default=())
    for name, path in (("workdir", workdir), *(("remove", path) for path in remove)):
        if path and (not path.startswith("/") or not _beneath_root(path)):
            raise fields.error(name, f"has {path!r}", hint="write an absolute path such as '/testbed'")
    return {
        "workdir": workdir,
        "environment": fields.variables("environment"),
        "cut": fields.flag("cut", default=True),
        "reset": fields.flag("reset", default=True),
        "remove": remove,
    }


def _beneath_root(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return len(parts) > 1 and ".." not in parts and "\0" not in path


def _python(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> PythonBuild:
    fields = _Fields(row, "build.", known=_BUILD)
    source = None if row.get("source") is None else _source(fields.table("source"), base, places)
    return PythonBuild(
        python=None if row.get("python") is None else fields.text("python"),
        requirements=_requirements(fields, base, places),
        complete=fields.flag("complete"),
        overrides=fields.texts("overrides", default=()),
        source=source,
        install=fields.texts("install", default=()),
        environment=fields.variables("environment"),
        network=fields.text("network", default="index"),
        exclude_newer=fields.text("exclude_newer", default=""),
        system=fields.texts("system", default=()),
        torch_backend=fields.text("torch_backend", default=""),
    )


def _requirements(fields: _Fields, base: Path | None, places: tuple[Path, ...] | None) -> tuple[str, ...]:
    """The list of requirements, after those of a file: pip freeze, requirements.txt, environment.yml."""
    listed = fields.texts("requirements", default=())
    name = fields.text("requirements_file", default="")
    if not name:
        return listed

    def check(path: Path) -> None:
        if (problem := problem_of(path, places)) is not None:
            what, reason, hint = problem
            raise InvalidValue(f"{path} {what}", reason=reason, hint=hint)

    from minisandbox.images.python.pins import read_pins  # noqa: PLC0415 - reading task files must not load the sandbox

    try:
        return (*read_pins((base or Path()) / name, check).requirements, *listed)
    except InvalidValue as error:
        raise fields.error(
            "requirements_file", f"is {name!r}: {error.what}", reason=error.reason, hint=error.hint
        ) from error


def _source(row: Mapping[str, object], base: Path | None, places: tuple[Path, ...] | None) -> SourceSpec:
    kinds = _Fields(row, "build.source.", known=tuple(_SOURCES))
    if len(row) != 1:
        raise TaskFileError(
            "field 'build.source' does not have exactly one key",
            field="build.source",
            hint='for instance {"sdist": {"name": "...", "version": "...", "sha256": "..."}}',
        )
    kind = next(iter(row))
    fields = _Fields(kinds.table(kind), f"build.source.{kind}.", known=_SOURCES[kind])
    values = {name: fields.text(name) for name in _SOURCES[kind]}
    if kind == "sdist" and not _SHA256.fullmatch(values["sha256"]):
        raise fields.error("sha256", "is not a SHA-256", hint="give the 64 lower-case hex digits that the index shows")
    if kind == "local":
        values["path"] = values["path"] if base is None else str(base / values["path"])
        fields.confine("path", problem_of(Path(values["path"]), places))
    if kind == "git":
        fields.confine("url", address_problem(values["url"], places))
    within = None if places is None else tuple(place.resolve() for place in places)
    return SourceSpec(kind, tuple(values.items()), within)


@dataclass(frozen=True, slots=True)
class TestLists:
    """The tests of a row.

    Attributes:
        FAIL_TO_PASS: those that must start passing.
        PASS_TO_PASS: those that must keep passing.
    """

    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]


class RowFields:
    """Typed access to the columns of a public dataset's row, of which only some are looked at.

    Args:
        row: the row.
    """

    def __init__(self, row: Mapping[str, object]) -> None:
        self._fields = _Fields(row, "", known=tuple(row))

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string.

        Raises:
            TaskFileError: it is missing, or has another type.
        """
        return self._fields.text(key, default=default)

    def test_lists(self) -> TestLists:
        """Return FAIL_TO_PASS and PASS_TO_PASS, each test once: one that is in both has to start passing.

        Raises:
            TaskFileError: one is missing, or is no list of strings.
        """
        starting = dict.fromkeys(self._fields.ids("FAIL_TO_PASS"))
        second = dict.fromkeys(self._fields.ids("PASS_TO_PASS"))
        return TestLists(tuple(starting), tuple(test for test in second if test not in starting))

    def task(
        self, build: Build, grader: Grader, *, form: Form = Form.SWEBENCH, lists: TestLists | None = None, **texts: str
    ) -> Task:
        """Return the row as a task.

        Args:
            build: how it is built.
            grader: how it is judged.
            form: which way round its patch is.
            lists: its tests; None for the row's own.
            texts: fields of the task that are not the row's columns of these names.

        Raises:
            TaskFileError: a column is missing or wrong.
            PatchError: a patch is malformed or unsafe.
        """

        def text(name: str, default: str | None = None) -> str:
            return texts[name] if name in texts else self.text(name, default=default)

        lists = lists or self.test_lists()
        return Task(
            instance_id=text("instance_id"),
            repo=text("repo"),
            base_commit=text("base_commit"),
            version=text("version", ""),
            form=form,
            problem_statement=text("problem_statement"),
            patch=text("patch"),
            test_patch=text("test_patch", ""),
            FAIL_TO_PASS=lists.FAIL_TO_PASS,
            PASS_TO_PASS=lists.PASS_TO_PASS,
            build=build,
            grader=grader,
        )


class _Fields:
    """Typed access to the values of one JSON object; errors carry the field's whole name.

    Args:
        row: the object.
        prefix: what stands before its keys in a field's name, e.g. ``"build."``.
        known: keys that it may have.
        ignored: keys that it may have and that mean nothing here.
    """

    def __init__(
        self, row: Mapping[str, object], prefix: str, *, known: tuple[str, ...], ignored: frozenset[str] = frozenset()
    ) -> None:
        self.row = row
        self.prefix = prefix
        for key in row:
            if key not in known and key not in ignored:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise self.error(key, "is unknown", hint=hint)

    def error(self, key: str, problem: str, *, reason: str | None = None, hint: str | None = None) -> TaskFileError:
        """Return the error for a field."""
        name = self.prefix + key
        return TaskFileError(f"field {name!r} {problem}", field=name, reason=reason, hint=hint)

    def confine(self, key: str, problem: tuple[str, str, str] | None) -> None:
        """Refuse what lies elsewhere than it may (:mod:`.confining`)."""
        if problem is not None:
            what, reason, hint = problem
            raise self.error(key, what, reason=reason, hint=hint)

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        if default is not None and self.row.get(key) is None:
            return default
        return self._text(key, self._required(key))

    def number(self, key: str, *, default: float) -> float:
        """Return a number as float."""
        value = self.row.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, "is too large a number", hint=_HINTS.get(self.prefix + key)) from None

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.row.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return default if value is None else value

    def variables(self, key: str) -> tuple[tuple[str, str], ...]:
        """Return an object of environment variables; empty where it is not there."""
        table = self.table(key, default={})
        for name in table:
            if not _VARIABLE.fullmatch(name):
                raise self.error(key, f"has the name {name!r}", hint="use letters, digits and '_'")
        values = _Fields(table, f"{self.prefix}{key}.", known=tuple(table))
        return tuple((name, values.text(name)) for name in table)

    def table(self, key: str, *, default: Mapping[str, object] | None = None) -> Mapping[str, object]:
        """Return an object."""
        value = self.row.get(key, default) if default is not None else self._required(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def texts(self, key: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of strings as a tuple."""
        value = self.row.get(key, default) if default is not None else self._required(key)
        if not isinstance(value, list | tuple):
            raise self._wrong(key, value, "a list of strings")
        return tuple(self._text(f"{key}[{index}]", item) for index, item in enumerate(value))

    def ids(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, which may be written as JSON in a string."""
        value = self._required(key)
        if not isinstance(value, str):
            return self.texts(key)
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(
                key, "is a string that is not JSON", reason=str(error), hint='give a list: ["tests/test_x.py::test_y"]'
            ) from None
        if not isinstance(decoded, list):
            raise self._wrong(key, decoded, "a list of strings")
        return tuple(self._text(f"{key}[{index}]", item) for index, item in enumerate(decoded))

    def _required(self, key: str) -> object:
        if key not in self.row:
            near = difflib.get_close_matches(key.lower(), [name.lower() for name in self.row], n=1)
            reason = f"it is spelt differently: {near[0]!r}" if near else None
            raise self.error(key, "is missing", reason=reason, hint=_HINTS.get(self.prefix + key))
        return self.row[key]

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                key, f"has half of a surrogate pair at character {error.start}", hint="write the character itself"
            ) from None
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> TaskFileError:
        return self.error(key, f"is {_kind(value)}, not {wanted}", hint=_HINTS.get(self.prefix + key))


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "a number"),
    (float, "a number"),
    (list, "a list"),
    (dict, "an object"),
)
_HINTS = {
    "instance_id": "give the task an id of its own, e.g. 'owner__name-123'",
    "repo": "give the repository as 'owner/name'",
    "problem_statement": "say what the agent is told",
    "patch": "give the fix (swebench) or the bug (swesmith) as a unified diff",
    "test.timeout": "give seconds, e.g. 300",
    "build": 'say how the image is made: {"python": ">=3.11", "requirements": [], "source": {...}, "install": []}, '
    '{"image": "REFERENCE"} or {"dockerfile": "PATH"}',
    "test": 'say how the tests are run: {"command": "python -m pytest", "timeout": 300}',
    "test.command": "say how the tests are run, e.g. 'python -m pytest'",
    "form": "'swebench' where patch is the fix, 'swesmith' where it is the bug, 'buggy' where it is applied already",
    "FAIL_TO_PASS": "the ids of the tests that fail before the fix and pass after it, as a list",
    "PASS_TO_PASS": "the ids of the tests that pass before and after the fix, as a list (it may be empty)",
}


def _kind(value: object) -> str:
    return "null" if value is None else next((name for kind, name in _KINDS if isinstance(value, kind)), "unknown")
