"""Convert rows in MiniSandbox's own layout to tasks, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue, PackageError
from minisandbox.plugins import load_plugin, plugin_names
from minisandbox.spec import (
    DockerfileBase,
    GitSource,
    LocalSource,
    OciBase,
    PythonRecipe,
    SdistSource,
    Source,
    parse_reference,
    read_pins,
    split_local,
)
from minisandbox.tasks.builds import CONTAINER_KEYS, DOCKERFILE_KEYS, PYTHON_KEYS, SOURCES, Build, ContainerBuild
from minisandbox.tasks.context import LoadContext, address_problem, problem_of
from minisandbox.tasks.fields import HINTS, Fields, bad_field, keys_of
from minisandbox.tasks.graders import KINDS, Grader, PytestGrader
from minisandbox.tasks.needs import Needs, Solution, network_of
from minisandbox.tasks.task import ROW_KEYS, Form, Task

Tests = tuple[tuple[str, ...], tuple[str, ...]]
"""The lists FAIL_TO_PASS and PASS_TO_PASS."""

# Columns of public datasets that do not affect how a task is built, run or graded.
_IGNORED = frozenset(
    {
        "created_at", "difficulty", "environment_setup_commit", "eval_script", "eval_type", "hints_text", "image",
        "image_name", "log_parser", "strategy", "validation",
    }
)  # fmt: skip
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GITLINK_CHANGE = re.compile(
    r"^diff --git .*\n(?:index .* 160000\n|(?:new|deleted) file mode 160000\nindex .*\n)"
    r"--- .*\n\+\+\+ .*\n@@ .*\n(?:[-+]Subproject commit .*(?:\n|\Z))+",
    re.MULTILINE,
)
"""A change of a submodule's commit. It is dropped, because ``git apply`` and the benchmark's harness ignore it."""


class RowFields(Fields):
    """The columns of a dataset row in any layout; see :class:`.Fields` for the arguments."""

    def test_lists(self) -> Tests:
        """Return FAIL_TO_PASS and PASS_TO_PASS without duplicates; a test in both lists counts as FAIL_TO_PASS.

        Raises:
            TaskFileError: a list is missing or malformed.
        """
        fail_to_pass = dict.fromkeys(self.ids("FAIL_TO_PASS"))
        return tuple(fail_to_pass), tuple(
            test for test in dict.fromkeys(self.ids("PASS_TO_PASS")) if test not in fail_to_pass
        )

    def task(
        self, build: Build, grader: Grader, *, form: Form = Form.SWEBENCH, lists: Tests | None = None, **overrides: str
    ) -> Task:
        """Convert the row to a task.

        Args:
            build: the build of the task's image.
            grader: the task's grader.
            form: whether the row's patch is the fix or the bug.
            lists: the test lists; None for the row's own.
            overrides: values that replace columns of the row, by name.

        Raises:
            TaskFileError: a column is missing or invalid.
            PatchError: a patch is malformed or unsafe.
        """

        def text(name: str, default: str | None = None) -> str:
            return overrides[name] if name in overrides else self.text(name, default=default)

        fail_to_pass, pass_to_pass = lists or self.test_lists()
        return Task(
            instance_id=text("instance_id"),
            repo=text("repo"),
            base_commit=text("base_commit"),
            version=text("version", ""),
            form=form,
            problem_statement=text("problem_statement"),
            patch=_GITLINK_CHANGE.sub("", text("patch")),
            test_patch=_GITLINK_CHANGE.sub("", text("test_patch", "")),
            FAIL_TO_PASS=fail_to_pass,
            PASS_TO_PASS=pass_to_pass,
            build=build,
            grader=grader,
        )


def task_from_own_row(row: Mapping[str, object], context: LoadContext) -> Task:
    """Convert a row in MiniSandbox's own layout to a task.

    Args:
        row: SWE-bench's fields, ``form``, ``build`` and ``test``. Test lists and objects may also be JSON in a string,
            because public datasets have both. Other known columns of the datasets are ignored.
        context: the settings of the conversion.

    Returns:
        The task; ``task_from_own_row(task.to_row(), context)`` equals it.

    Raises:
        TaskFileError: a field is missing or unknown, or its value is invalid; ``field`` names it.
        PatchError: ``patch`` or ``test_patch`` is malformed or unsafe.
    """
    columns = {name: value for name, value in row.items() if name not in _IGNORED}
    fields = RowFields(columns, keys=ROW_KEYS, context=context)
    form = _form(fields.text("form"))
    task = fields.task(
        _build(fields.nested("build")),
        _grader(fields.nested("test")),
        form=form,
        lists=(fields.ids("FAIL_TO_PASS"), fields.ids("PASS_TO_PASS")),
        base_commit=fields.text("base_commit", default=""),
    )
    if columns.get("solution") is not None:
        solution = fields.nested("solution", keys=keys_of(Solution)).read(Solution)
        task = replace(task, solution=solution)
    return replace(task, needs=_needs(fields.nested("needs", keys=keys_of(Needs)))) if columns.get("needs") else task


def build_spec(table: Mapping[str, object], *, base: Path | None = None) -> PythonRecipe:
    """Read the ``build`` object of a Python project's row; recipe files have the same keys.

    Args:
        table: the ``build`` object.
        base: the directory for the relative paths of local sources; None: the current directory.

    Raises:
        TaskFileError: a field is unknown or its value is invalid; ``field`` names it.
    """
    return _python(Fields(table, "build.", context=LoadContext(base)))


def _form(value: str) -> Form:
    try:
        return Form(value)
    except ValueError:
        raise bad_field("form", f"is {value!r}", hint=HINTS["form"]) from None


def _needs(fields: Fields) -> Needs:
    memory, disk, seconds = (fields.number(name, default=0.0) for name in ("memory", "disk", "seconds"))
    public = fields.context.public_network
    try:
        networks = [network_of(fields.row.get(name, "off"), public=public) for name in ("network", "grader_network")]
    except InvalidValue as error:
        raise fields.error("network", f"is wrong: {error.what}", reason=error.reason, hint=error.hint) from error
    limits = {"memory": int(memory) or None, "disk": int(disk) or None, "seconds": seconds or None}
    return fields.read(Needs, **limits, network=networks[0], grader_network=networks[1])


def _grader(fields: Fields) -> Grader:
    name = fields.row.get("grader", PytestGrader.kind)
    kind = KINDS.get(name) or load_plugin("graders", name, KINDS) if isinstance(name, str) else None
    if kind is None:
        names = (*KINDS, *plugin_names("graders", KINDS))
        raise fields.error("grader", f"is {name!r}", hint=f"known are {', '.join(names)}")
    if not isinstance(kind, type) or not issubclass(kind, Grader):
        raise PackageError(f"graders: {name!r} is not a subclass of a grader", hint="docs/how-to/extend.md")
    fields = Fields(fields.row, "test.", keys=(*keys_of(kind), "grader"), context=fields.context)
    return fields.read(kind, command=fields.text("command"))


def _build(fields: Fields) -> Build:
    if "dockerfile" not in fields.row and "image" not in fields.row:
        return _python(fields)
    base_keys = DOCKERFILE_KEYS if "dockerfile" in fields.row else ("image",)
    fields = Fields(fields.row, "build.", keys=(*base_keys, *CONTAINER_KEYS), context=fields.context)
    platform = fields.text("platform", default="")
    base: OciBase | DockerfileBase
    if "image" in fields.row:
        base = OciBase(_reference(fields), platform)
    else:
        dockerfile = fields.path("dockerfile")
        base = DockerfileBase(
            dockerfile,
            fields.path("context") if "context" in fields.row else dockerfile.parent,
            fields.variables("args") if fields.row.get("args") is not None else (),
            fields.text("target", default=""),
            platform,
        )
    return _checked(fields.read(ContainerBuild, base=base), fields)


def _reference(fields: Fields) -> str:
    reference, base = fields.text("image"), fields.context.base or Path()
    if (local := split_local(reference)) is not None:
        kind, location = local
        fields.confine("image", problem_of(base / location.partition(":")[0], fields.context.places))
        reference = f"{kind}:{base / location}"
    try:
        parse_reference(reference)
    except InvalidValue as error:
        raise fields.error("image", f"is {reference!r}", reason=error.what, hint=error.hint) from error
    return reference


def _checked(build: ContainerBuild, fields: Fields) -> ContainerBuild:
    """Return the build; raise TaskFileError if a path inside the image is relative or is the root directory."""
    for name, path in (("workdir", build.workdir), *(("remove", path) for path in build.remove)):
        components = PurePosixPath(path).parts
        if path and (not path.startswith("/") or len(components) < 2 or ".." in components or "\0" in path):
            raise fields.error(name, f"has {path!r}", hint="write an absolute path such as '/testbed'")
    return build


def _python(fields: Fields) -> PythonRecipe:
    keys = (*PYTHON_KEYS, "requirements_file")
    fields = Fields(fields.row, "build.", keys=keys, context=fields.context)
    source = None if fields.row.get("source") is None else _source(fields.nested("source", keys=tuple(SOURCES)))
    return fields.read(PythonRecipe, source=source, requirements=_requirements(fields))


def _requirements(fields: Fields) -> tuple[str, ...]:
    """Return the requirements of the file (pip freeze, requirements.txt, environment.yml), then those of the list."""
    inline_requirements = fields.texts("requirements") if fields.row.get("requirements") is not None else ()
    name = fields.text("requirements_file", default="")
    if not name:
        return inline_requirements

    def check(path: Path) -> None:
        if (problem := problem_of(path, fields.context.places)) is not None:
            reason_text, reason, hint = problem
            raise InvalidValue(f"{path} {reason_text}", reason=reason, hint=hint)

    try:
        return (*read_pins((fields.context.base or Path()) / name, check).requirements, *inline_requirements)
    except InvalidValue as error:
        sentence = f"is {name!r}: {error.what}"
        raise fields.error("requirements_file", sentence, reason=error.reason, hint=error.hint) from error


def _source(fields: Fields) -> Source:
    if len(fields.row) != 1:
        raise bad_field(
            "build.source",
            "does not have exactly one key",
            hint='for instance {"sdist": {"name": "...", "version": "...", "sha256": "..."}}',
        )
    kind, places = next(iter(fields.row)), fields.context.places
    keys = [key for key in keys_of(SOURCES[kind]) if key != "within"]
    fields = fields.nested(kind, keys=keys)
    values = {name: fields.text(name) for name in keys}
    if kind == "sdist" and not _SHA256.fullmatch(values["sha256"]):
        raise fields.error("sha256", "is not a SHA-256", hint="give the 64 lower-case hex digits that the index shows")
    if kind == "local":
        within = None if places is None else tuple(directory.resolve() for directory in places)
        return LocalSource(fields.path("path"), within)
    if kind == "sdist":
        return SdistSource(**values)
    fields.confine("url", address_problem(values["url"], places))
    return GitSource(**values)
