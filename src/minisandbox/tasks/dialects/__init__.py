"""Detect the row layout of a public dataset, and convert its rows to tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue, PackageError, TaskFileError
from minisandbox.plugins import load_plugin, plugin_names
from minisandbox.tasks import harbor
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects import by_columns, r2e, skyrl, swebench, swesmith
from minisandbox.tasks.languages import check_language
from minisandbox.tasks.rows import RowFields, task_from_own_row
from minisandbox.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Dialect:
    """One row layout, and the function that converts its rows to tasks.

    Attributes:
        convert: converts a row to a task.
        columns: sets of columns, separated by spaces; a row of this layout has all columns of one set.
        fits: returns whether a row with these columns really has this layout.
    """

    convert: Callable[[RowFields, LoadContext], Task]
    columns: tuple[str, ...]
    fits: Callable[[Mapping[str, object]], bool] = lambda _: True

    def matches(self, row: Mapping[str, object]) -> bool:
        """Return whether a row has this layout."""
        return any(row.keys() >= set(columns.split()) for columns in self.columns) and self.fits(row)


_BENCH = "repo instance_id base_commit patch test_patch FAIL_TO_PASS"
_PRO = "dockerhub_tag fail_to_pass pass_to_pass base_commit patch test_patch"
_MULTILINGUAL = f"{_BENCH} version PASS_TO_PASS"
_CUSTOM = ("python_version", *by_columns.CUSTOM_INSTALL, *by_columns.CUSTOM_TEST)

# Detection tries the layouts in this order, so those with unique columns come first.
DIALECTS: Mapping[str, Dialect] = {
    "skyrl": Dialect(
        lambda row, context: convert(skyrl.inner_row(row.row), context), ("instance prompt", "instance data_source")
    ),
    "harbor": Dialect(harbor.convert, ("harbor",)),
    "minisandbox": Dialect(lambda row, context: task_from_own_row(row.row, context), ("form", "build", "test")),
    "r2e": Dialect(r2e.convert, ("docker_image commit_hash parsed_commit_content",)),
    "swebench-pro": Dialect(by_columns.swebench_pro, (_PRO,)),
    "swe-rebench": Dialect(by_columns.swerebench, ("install_config base_commit patch FAIL_TO_PASS",)),
    "custom": Dialect(by_columns.custom, tuple(f"patch {column}" for column in _CUSTOM)),
    "swesmith": Dialect(swesmith.convert, ("instance_id patch FAIL_TO_PASS",), swesmith.fits),
    "swebench-multilingual": Dialect(swebench.convert_multilingual, (_MULTILINGUAL,), swebench.fits_multilingual),
    "swebench": Dialect(
        swebench.convert, (f"{_BENCH} version environment_setup_commit", f"{_BENCH} eval_script log_parser")
    ),
    "swegym": Dialect(by_columns.swegym, (f"{_BENCH} PASS_TO_PASS",)),
}
"""The row layouts, by the names that ``--dataset`` accepts."""


def task_from_row(
    row: Mapping[str, object],
    *,
    base: Path | None = None,
    pins: Path | None = None,
    repo_mirrors: Path | None = None,
    form: str | None = None,
    environment: str = "auto",
) -> Task:
    """Convert a dataset row to a task.

    Args:
        row: a row in MiniSandbox's own layout (``form``, ``build`` and ``test``), in which an unknown key is an error,
            or in another layout of :data:`DIALECTS`, in which unknown columns are ignored. ``FAIL_TO_PASS`` and
            ``PASS_TO_PASS`` are lists, or JSON in a string.
        base: the directory for the relative paths of local sources; None: the current directory.
        pins: a directory with the exported environments of the datasets' official images, or None.
        repo_mirrors: a directory of git repositories that are tried before the network, or None.
        form: a name in :data:`DIALECTS`; None: the row's columns decide.
        environment: ``"pins"``, ``"image"`` (the dataset's own container image), or ``"auto"``: exact pins if there are
            any, else the image.

    Returns:
        The task; ``task_from_row(task.to_row())`` equals it.

    Raises:
        TaskFileError: a field is missing or unknown, or its value is invalid; ``field`` names it.
        PatchError: ``patch`` or ``test_patch`` is malformed or unsafe.
        InvalidValue: there is no layout called ``form``, or no such environment.
    """
    return convert(row, LoadContext(base, pins, repo_mirrors, environment=environment), form=form)


def convert(row: Mapping[str, object], context: LoadContext, *, form: str | None = None) -> Task:
    """Convert a dataset row to a task; see :func:`task_from_row`.

    Args:
        row: the row.
        context: the settings of the conversion.
        form: a name in :data:`DIALECTS`; None: the row's columns decide.

    Raises:
        TaskFileError: see :func:`task_from_row`.
        PatchError: see :func:`task_from_row`.
        InvalidValue: see :func:`task_from_row`.
    """
    name = form_of(row) if form is None else checked_form(form)
    if name != "swebench-multilingual":
        check_language(row)
    return _dialect(name).convert(RowFields(row, context=context), context)


def form_of(row: Mapping[str, object]) -> str:
    """Return the name of a row's layout.

    Raises:
        TaskFileError: the columns match no known layout.
    """
    for name, dialect in DIALECTS.items():
        if dialect.matches(row):
            return name
    for name in plugin_names("dialects", DIALECTS):
        if _dialect(name).matches(row):
            return name
    columns = ", ".join(str(name)[:40] for name in list(row)[:12]) or "none"
    raise TaskFileError(
        "its columns are those of no known dataset",
        reason=f"it has {columns}",
        hint="give it `form`, `build` and `test` (docs/task-files.md), or name its layout by --dataset: "
        + ", ".join(DIALECTS),
    )


def checked_form(name: str) -> str:
    """Return the name of a layout unchanged if the layout exists.

    Raises:
        InvalidValue: there is no layout of that name.
    """
    if name not in DIALECTS and name not in (added := plugin_names("dialects", DIALECTS)):
        similar = difflib.get_close_matches(name, (*DIALECTS, *added), n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"known are {', '.join((*DIALECTS, *added))}"
        raise InvalidValue(f"there is no dataset layout {name!r}", hint=hint)
    return name


def _dialect(name: str) -> Dialect:
    """Return a layout of this package or of a plugin.

    Raises:
        PackageError: the plugin cannot be loaded.
    """
    if name in DIALECTS:
        return DIALECTS[name]
    dialect = load_plugin("dialects", name, DIALECTS)
    if not isinstance(dialect, Dialect):
        raise PackageError(f"dialects: {name!r} is not a minisandbox.tasks.Dialect", hint="docs/how-to/extend.md")
    return dialect
