"""TaskSet: an ordered collection of tasks with unique ids."""

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
    """Tasks in order, each id once. It never changes.

    Args:
        tasks: the tasks.
        name: what people and logs call the set.
        rows: the rows that tasks were made of, by ``instance_id``; a task without one is its own row.
        layout: how the rows were stored.
        schema: the ``pyarrow.Schema`` that they had, or None.

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
        """Read a bundled set by its name, or tasks from wherever they are.

        Args:
            source: a name of :func:`bundled_sets`, such as ``"quickstart"``; a file of rows: JSON Lines, JSON (a
                list, or an object of rows by their ids) or Parquet, each gzipped or not; a folder that
                ``datasets.load_from_disk`` reads; a directory of such files; a Harbor task directory or a directory of
                them, ``"harbor:DIR"``; or a dataset of the Hugging Face hub, ``"hub:owner/name"``, or ``"owner/name"``
                where no such file is. ``":split"`` after a folder, directory or dataset names one part of it. A bundled
                set wins over a file of the same name in the current directory (``./quickstart`` is the file).
            pins: a directory with the exported environments of the datasets' official images, or None.
            repo_mirrors: a directory of git repositories that are looked in before the network is, or None.
            form: the layout of all rows, a name that ``--dataset`` takes; None: the columns of each decide.
            environment: how rows are built whose data set publishes container images: ``"pins"``, ``"image"``, or
                ``"auto"``: from exact pins where they are known, else from the image.
            torch_backend: ``"cpu"``: their images get builds of PyTorch without CUDA; "" for what the rows say.
            allow_local_sources: whether rows may name any directories, git repositories and lists of requirements of
                this machine, not only what lies in their file's directory and is no repository: for rows of people
                whom you trust with all that you can read.
            public_network: whether tasks that ask for the public network get it; without, they have none.
            on_refused: called with the reason why a row is no task; the row is left out; None: it is raised.

        Raises:
            TaskFileError: there is no such file, or it cannot be read; ``path``, ``line`` and ``field`` say where.
            PatchError: a task's patch is malformed or unsafe.
            InvalidValue: there is no such layout as ``form``.
            MissingExtra: a package that it takes is not installed; the message says which extra has it.
        """
        if form is not None:
            checked_form(form)
        bundled = isinstance(source, str) and source in bundled_sets()
        opened = _bundled(str(source)) if bundled else open_source(source)
        places = None if bundled or allow_local_sources else opened.places
        context = LoadContext(opened.base, pins, repo_mirrors, places, environment, public_network)
        pairs = list(tasks_of(opened.rows, Path(str(source)), context, form=form, on_refused=on_refused))
        rows = {task.instance_id: row.values for task, row in pairs}
        tasks = (task if not torch_backend else _with_backend(task, torch_backend) for task, _ in pairs)
        return cls(tasks, name=opened.name, rows=rows, layout=opened.layout, schema=opened.schema)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, in order."""
        return tuple(self._by_id)

    def select(self, patterns: Iterable[str]) -> TaskSet:
        """Return the tasks that any of the patterns names, in this set's order.

        Args:
            patterns: ids, or globs of ids (``*``, ``?``, ``[...]``). An id that exists is never read as a glob.

        Raises:
            NotFound: a pattern names no task.
        """
        chosen: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matches = (
                {pattern} if pattern in self._by_id else {i for i in self._by_id if fnmatch.fnmatchcase(i, pattern)}
            )
            if not matches:
                raise self._unknown(pattern)
            chosen |= matches
        return self.take(instance_id for instance_id in self._by_id if instance_id in chosen)

    def take(self, ids: Iterable[str]) -> TaskSet:
        """Return the tasks of these ids, in their order.

        Args:
            ids: ids of this set.

        Raises:
            NotFound: this set has no task of one of them.
            InvalidValue: one is there twice.
        """
        tasks = [self[instance_id] for instance_id in ids]
        return TaskSet(tasks, name=self.name, rows=self._rows, layout=self.layout, schema=self._schema)

    def row(self, instance_id: str) -> Mapping[str, object]:
        """Return the row that a task was made of, as it was read; NotFound where the set has no task of that id."""
        task = self[instance_id]
        return self._rows.get(instance_id) or task.to_row()

    def save(self, path: str | Path) -> None:
        """Write the rows that the tasks were made of, every column as it was.

        Args:
            path: where to. Its ending says the format: ``.jsonl``, ``.json``, ``.parquet``, or one of the first two and
                ``.gz``. Any other name gets the format that the set was read in: the same kind of file, or a folder for
                ``datasets.load_from_disk``.

        Raises:
            InvalidValue: a column has values that no Parquet column holds, or the folder is there already.
            MissingExtra: a package that it takes is not installed.
            OSError: it cannot be written; what was there before is still there.
        """
        path = Path(path)
        layout = layout_of_name(path) or self.layout
        if layout is Layout.JSON and self.layout is Layout.JSON_BY_ID:
            layout = self.layout
        write_rows(path, {name: self.row(name) for name in self._by_id}, layout, schema=self._schema)

    def to_jsonl(self) -> str:
        """Return the set as a task file's text; reading it gives an equal set."""
        return "".join(json.dumps(task.to_row(), ensure_ascii=False) + "\n" for task in self)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_id.values())

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> Task:
        """Return a task by its id; NotFound (a LookupError) where the set has none of that id."""
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
        near = difflib.get_close_matches(name, self.ids, n=3) or self.ids[:3]
        return NotFound(
            f"no task of {self.name or 'the set'} is called {name!r}",
            hint=f"for instance {', '.join(near)}" if near else "the set is empty",
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
    data = _data_directory().joinpath(name + _SUFFIX).read_bytes()
    return Source(json_lines(io.BytesIO(data), Path(name + _SUFFIX)), Layout.JSONL, name, Path())


def _data_directory() -> Traversable:
    return resources.files("minisandbox.tasks").joinpath("data")
