"""TaskSet: an ordered collection of tasks with unique ids."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.tasks.jsonl import read_tasks, tasks_from_bytes
from minisandbox.tasks.task import Task

_SUFFIX = ".jsonl"


class TaskSet:
    """Tasks in order, each id once. It never changes.

    Args:
        tasks: the tasks.
        name: what people and logs call the set.

    Raises:
        InvalidValue: two tasks have the same id.
    """

    __slots__ = ("_by_id", "name")

    def __init__(self, tasks: Iterable[Task], *, name: str = "") -> None:
        self.name = name
        self._by_id: dict[str, Task] = {}
        for task in tasks:
            if task.instance_id in self._by_id:
                raise InvalidValue(f"two tasks have the id {task.instance_id!r}", hint="give each task its own id")
            self._by_id[task.instance_id] = task

    @classmethod
    def load(cls, source: str | Path) -> TaskSet:
        """Read a bundled set by its name, or a task file by its path.

        Args:
            source: a name of :func:`bundled_sets`, such as ``"quickstart"``, or the path of a JSONL file. A name wins
                over a file of the same name in the current directory (``./quickstart`` is the file).

        Raises:
            TaskFileError: there is no such file, or it cannot be read; ``path``, ``line`` and ``field`` say where.
            PatchError: a task's patch is malformed or unsafe.
        """
        if isinstance(source, str) and source in bundled_sets():
            data = _data_directory().joinpath(source + _SUFFIX).read_bytes()
            return cls(tasks_from_bytes(data, Path(source + _SUFFIX)), name=source)
        path = Path(source)
        return cls(read_tasks(path), name=path.name.removesuffix(_SUFFIX))

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
        return TaskSet((task for task in self if task.instance_id in chosen), name=self.name)

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

    def _unknown(self, wanted: str) -> NotFound:
        near = difflib.get_close_matches(wanted, self.ids, n=3) or self.ids[:3]
        return NotFound(
            f"no task of {self.name or 'the set'} is called {wanted!r}",
            hint=f"for instance {', '.join(near)}" if near else "the set is empty",
        )


def bundled_sets() -> tuple[str, ...]:
    """Return the names of the task sets that come with the package, sorted."""
    names = (entry.name for entry in _data_directory().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def _data_directory() -> Traversable:
    return resources.files("minisandbox.tasks").joinpath("data")
