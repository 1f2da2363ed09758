"""TaskSet: an immutable, ordered collection of tasks with unique ids."""

from __future__ import annotations

import difflib
import fnmatch
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.spec import PythonRecipe
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects import checked_form
from minisandbox.tasks.formats.documents import Layout
from minisandbox.tasks.formats.jsonl import json_lines
from minisandbox.tasks.loading import Refused, tasks_of
from minisandbox.tasks.reading import Source, layout_of_name, open_source
from minisandbox.tasks.saving import write_rows
from minisandbox.tasks.task import Task

_SUFFIX = ".jsonl"


class TaskSet:
    """An immutable, ordered collection of tasks with unique ids.

    Args:
        tasks: the tasks.
        name: the name of the set, for display.
        rows: the original rows by ``instance_id``; a task without a row is converted when it is saved.
        layout: the storage format of the rows.
        schema: the original ``pyarrow.Schema`` of the rows, or None.

    Raises:
        InvalidValue: two tasks have the same id.
    """

    __slots__ = ("_by_id", "_rows", "_schema", "layout", "name")

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        name: str = "",
        rows: Mapping[str, Mapping[str, object]] | None = None,
        layout: Layout = Layout.JSONL,
        schema: object = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self._rows = rows or {}
        self._schema = schema
        self._by_id: dict[str, Task] = {}
        for task in tasks:
            if task.instance_id in self._by_id:
                raise InvalidValue(f"two tasks have the id {task.instance_id!r}", hint="give each task its own id")
            self._by_id[task.instance_id] = task

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        pins: Path | None = None,
        repo_mirrors: Path | None = None,
        form: str | None = None,
        environment: str = "auto",
        torch_backend: str = "",
        allow_local_sources: bool = False,
        public_network: bool = False,
        on_refused: Callable[[Refused], None] | None = None,
    ) -> TaskSet:
        """Load a bundled set, or tasks from a file, a directory or the hub.

        Args:
            source: one of these; ``":split"`` after a folder, directory or dataset selects one split.

                - a name of :func:`bundled_sets`, e.g. ``"quickstart"``. It takes precedence over a file of that name in
                  the current directory; ``"./quickstart"`` is the file.
                - a file: JSON Lines, JSON (a list, or an object of rows by id) or Parquet, gzipped or not
                - a folder that ``datasets.load_from_disk`` reads
                - a directory of task files
                - a Harbor task directory, or a directory of them: ``"harbor:DIR"``
                - a dataset of the Hugging Face hub: ``"hub:owner/name"``, or ``"owner/name"`` if there is no such file
            pins: a directory with the exported environments of the datasets' official images, or None.
            repo_mirrors: a directory of git repositories that are tried before the network, or None.
            form: the layout of all rows, a name that ``--dataset`` accepts; None: the columns of each row decide.
            environment: how to build rows whose dataset publishes container images: ``"pins"``, ``"image"``, or
                ``"auto"`` (exact pins if there are any, else the image).
            torch_backend: ``"cpu"`` installs builds of PyTorch without CUDA; "" follows the rows.
            allow_local_sources: whether rows may name any directory, git repository and requirements file of this
                machine. Otherwise, rows may name only paths in the directory of their file, and no local repository.
                Set it only if you trust the authors of the rows with everything that you can read.
            public_network: whether to grant the public network to tasks that request it.
            on_refused: called with the error of an invalid row, which is then skipped; None: raise the error.

        Raises:
            TaskFileError: the file is missing or malformed; ``path``, ``line`` and ``field`` have the position.
            PatchError: a task's patch is malformed or unsafe.
            InvalidValue: there is no layout called ``form``.
            MissingExtra: a required package is not installed; the message names the extra to install.
        """
        if form is not None:
            checked_form(form)
        bundled = isinstance(source, str) and source in bundled_sets()
        opened = _bundled(str(source)) if bundled else open_source(source)
        places = None if bundled or allow_local_sources else opened.places
        context = LoadContext(opened.base, pins, repo_mirrors, places, environment, public_network)
        loaded = list(tasks_of(opened.rows, Path(str(source)), context, form=form, on_refused=on_refused))
        rows = {task.instance_id: row.values for task, row in loaded}
        tasks = (task if not torch_backend else _with_backend(task, torch_backend) for task, _ in loaded)
        return cls(tasks, name=opened.name, rows=rows, layout=opened.layout, schema=opened.schema)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, in order."""
        return tuple(self._by_id)

    def select(self, patterns: Iterable[str]) -> TaskSet:
        """Return the tasks that match any of the patterns, in the order of this set.

        Args:
            patterns: ids, or globs of ids (``*``, ``?``, ``[...]``). An existing id is never treated as a glob.

        Raises:
            NotFound: a pattern matches no task.
        """
        chosen_ids: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matches = (
                {pattern}
                if pattern in self._by_id
                else {instance_id for instance_id in self._by_id if fnmatch.fnmatchcase(instance_id, pattern)}
            )
            if not matches:
                raise self._unknown(pattern)
            chosen_ids |= matches
        return self.take(instance_id for instance_id in self._by_id if instance_id in chosen_ids)

    def take(self, ids: Iterable[str]) -> TaskSet:
        """Return the tasks with these ids, in the order of ``ids``.

        Args:
            ids: ids of this set.

        Raises:
            NotFound: this set has no task with one of the ids.
            InvalidValue: an id occurs twice.
        """
        tasks = [self[instance_id] for instance_id in ids]
        return TaskSet(tasks, name=self.name, rows=self._rows, layout=self.layout, schema=self._schema)

    def row(self, instance_id: str) -> Mapping[str, object]:
        """Return the original row of a task. Raise NotFound if the set has no such task."""
        task = self[instance_id]
        return self._rows.get(instance_id) or task.to_row()

    def save(self, path: str | Path) -> None:
        """Write the tasks' original rows with all columns.

        Args:
            path: the target. Its ending selects the format: ``.jsonl``, ``.json``, ``.parquet``, ``.jsonl.gz`` or
                ``.json.gz``. Any other name selects the format of the loaded set: the same kind of file, or a folder
                for ``datasets.load_from_disk``.

        Raises:
            InvalidValue: Parquet cannot store a column's values, or the folder already exists.
            MissingExtra: a required package is not installed.
            OSError: writing failed; the earlier file is unchanged.
        """
        path = Path(path)
        layout = layout_of_name(path) or self.layout
        if layout is Layout.JSON and self.layout is Layout.JSON_BY_ID:
            layout = self.layout
        write_rows(path, {name: self.row(name) for name in self._by_id}, layout, schema=self._schema)

    def to_jsonl(self) -> str:
        """Return the set as JSON Lines; loading them gives an equal set."""
        return "".join(json.dumps(task.to_row(), ensure_ascii=False) + "\n" for task in self)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_id.values())

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> Task:
        """Return a task by its id. Raise NotFound (a LookupError) if the set has no such task."""
        try:
            return self._by_id[instance_id]
        except KeyError:
            raise self._unknown(instance_id) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskSet) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TaskSet({self.name!r}, {len(self)} tasks)"

    def _unknown(self, name: str) -> NotFound:
        similar = difflib.get_close_matches(name, self.ids, n=3) or self.ids[:3]
        return NotFound(
            f"no task of {self.name or 'the set'} is called {name!r}",
            hint=f"for instance {', '.join(similar)}" if similar else "the set is empty",
        )


def _with_backend(task: Task, backend: str) -> Task:
    if not isinstance(task.build, PythonRecipe):
        return task
    return replace(task, build=replace(task.build, torch_backend=backend))


def bundled_sets() -> tuple[str, ...]:
    """Return the names of the task sets that come with the package, sorted."""
    names = (entry.name for entry in _data_directory().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def _bundled(name: str) -> Source:
    content = _data_directory().joinpath(name + _SUFFIX).read_bytes()
    return Source(json_lines(io.BytesIO(content), Path(name + _SUFFIX)), Layout.JSONL, name, Path())


def _data_directory() -> Traversable:
    return resources.files("minisandbox.tasks").joinpath("data")
