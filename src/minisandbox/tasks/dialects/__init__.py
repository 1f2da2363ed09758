"""The row layouts of public datasets: which one a row is in, and what makes a task of it.

Each is a module with ``matches(row)``, which looks at the names of the columns, and ``convert(row, context)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects import (
    custom,
    harbor,
    multilingual,
    own,
    r2e,
    skyrl,
    swebench,
    swebenchpro,
    swegym,
    swerebench,
    swesmith,
)
from minisandbox.tasks.languages import check_language
from minisandbox.tasks.task import Task


class Dialect(Protocol):
    """One layout of rows."""

    def matches(self, row: Mapping[str, object]) -> bool:
        """Whether a row has the columns of this layout."""

    def convert(self, row: Mapping[str, object], context: LoadContext) -> Task:
        """Make a task of a row."""


# In the order in which they are asked: those with columns that no other has come first.
DIALECTS: Mapping[str, Dialect] = {
    "skyrl": skyrl,
    "harbor": harbor,
    "minisandbox": own,
    "r2e": r2e,
    "swebench-pro": swebenchpro,
    "swe-rebench": swerebench,
    "custom": custom,
    "swesmith": swesmith,
    "swebench-multilingual": multilingual,
    "swebench": swebench,
    "swegym": swegym,
}
"""The layouts by the names that ``--dataset`` takes."""


def task_from_row(
    row: Mapping[str, object],
    *,
    base: Path | None = None,
    pins: Path | None = None,
    repo_mirrors: Path | None = None,
    form: str | None = None,
    environment: str = "auto",
) -> Task:
    """Make a task of a dataset row.

    Args:
        row: in MiniSandbox's own layout (``form``, ``build`` and ``test``), where an unknown key is an error; or in
            another one of :data:`DIALECTS`, of which only what is needed is looked at. ``FAIL_TO_PASS`` and
            ``PASS_TO_PASS`` are lists, or JSON in a string.
        base: directory that a relative path of a local source starts from; None: the current directory.
        pins: a directory with the exported environments of the datasets' official images, or None.
        repo_mirrors: a directory of git repositories that are looked in before the network is, or None.
        form: a name in :data:`DIALECTS`; None: the row's columns decide.
        environment: ``"pins"``, ``"image"`` (the dataset's own container image), or ``"auto"``: exact pins where they
            are known, else the image.

    Returns:
        The task; ``task_from_row(task.to_row())`` equals it.

    Raises:
        TaskFileError: a field is missing, unknown, or has a value that cannot be used; ``field`` names it.
        PatchError: ``patch`` or ``test_patch`` is malformed or unsafe.
        InvalidValue: there is no such layout as ``form``, or no such environment.
    """
    return convert(row, LoadContext(base, pins, repo_mirrors, environment=environment), form=form)


def convert(row: Mapping[str, object], context: LoadContext, *, form: str | None = None) -> Task:
    """Make a task of a dataset row; see :func:`task_from_row`.

    Args:
        row: the row.
        context: what conversion looks into.
        form: a name in :data:`DIALECTS`; None: the row's columns decide.

    Raises:
        TaskFileError: as :func:`task_from_row` raises it.
        PatchError: as :func:`task_from_row` raises it.
        InvalidValue: as :func:`task_from_row` raises it.
    """
    dialect = DIALECTS[form_of(row) if form is None else checked_form(form)]
    if dialect is not multilingual:
        check_language(row)
    return dialect.convert(row, context)


def form_of(row: Mapping[str, object]) -> str:
    """Return the name of the layout that a row is in.

    Raises:
        TaskFileError: it is in none.
    """
    for name, dialect in DIALECTS.items():
        if dialect.matches(row):
            return name
    columns = ", ".join(str(name)[:40] for name in list(row)[:12]) or "none"
    raise TaskFileError(
        "its columns are those of no known dataset",
        reason=f"it has {columns}",
        hint="give it `form`, `build` and `test` (docs/task-files.md), or name its layout by --dataset: "
        + ", ".join(DIALECTS),
    )


def checked_form(name: str) -> str:
    """Return the name of a layout.

    Raises:
        InvalidValue: there is none of that name.
    """
    if name not in DIALECTS:
        near = difflib.get_close_matches(name, DIALECTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DIALECTS)}"
        raise InvalidValue(f"there is no dataset layout {name!r}", hint=hint)
    return name
