"""Work on many tasks at once that any later process can go on with: what is finished is kept, and done once."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.pool import as_finished
from minisandbox.store import canonical_json
from minisandbox.store.results import Result, Results
from minisandbox.store.rundir import Config, RunDirectory
from minisandbox.tasks import ScriptGrader, Task

if TYPE_CHECKING:
    from minisandbox.images import Image

DATABASE = "results.sqlite"
"""What the database of a run directory is called."""

Record = TypeVar("Record")
ImageOf = Callable[[Task], "Image"]


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do for one id, once it is known what it rests on.

    Attributes:
        fingerprint: of all that; an earlier result with another one is not taken over.
        do: does it; returns the result, and whether it stays or is done again when the run goes on.
    """

    fingerprint: str
    do: Callable[[], tuple[Mapping[str, object], bool]]


@dataclass(frozen=True, slots=True)
class Job:
    """One id of a run.

    Attributes:
        id: whose result it will be.
        prepare: finds out what there is to do; on a thread of its own, for it may build an image. It may be sent to
            another process (pickle), unless ``task`` is None.
        task: whose image it asks for; None where it needs none.
    """

    id: str
    prepare: Callable[[ImageOf], Work]
    task: Task | None = None


class Elsewhere(Protocol):
    """Does jobs somewhere else: on the nodes of a cluster."""

    def __call__(self, jobs: Sequence[Job], known: Mapping[str, str]) -> Iterator[tuple[str, Result | None]]:
        """Do jobs that have a task.

        Args:
            jobs: the jobs.
            known: fingerprints of earlier results, by id.

        Yields:
            As :func:`serve`, with the job's id, as they end.
        """


@dataclass(frozen=True, slots=True)
class Progress(Generic[Record]):
    """What a run tells while it goes on.

    Attributes:
        done: how many have ended, those of earlier calls included.
        total: how many there are in all.
        latest: the one that ended just now.
        resumed: whether that was finished by an earlier call.
        seconds_left: an estimate; None while nothing has ended.
    """

    done: int
    total: int
    latest: Record
    resumed: bool
    seconds_left: float | None


@contextmanager
def opened(directory: type[RunDirectory], out: Path | None, config: Config) -> Iterator[Results]:
    """Open a run's results, locked against other processes; those of a run without a directory are in memory.

    Raises:
        RunError: the directory is in use, belongs to another run, or its database is damaged.
        DiskFull: the disk is full.
        OSError: it cannot be made.
    """
    if out is None:
        with Results(None) as results:
            yield results
        return
    with directory.open(out, config) as run, Results(run.path / DATABASE) as results:
        if results.journal != "wal":
            said = f"{run.path}: this file system has no shared memory, so that SQLite uses a rollback journal"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        yield results


def serve(job: Job, image_of: ImageOf, known: str | None) -> Result | None:
    """Do a job; returns its result, or None where an earlier one still holds.

    Args:
        job: the job.
        image_of: returns a task's image.
        known: the fingerprint of the earlier result, if there is one.
    """
    work = job.prepare(image_of)
    if work.fingerprint == known:
        return None
    body, final = work.do()
    return Result(job.id, work.fingerprint, final, body)


def carry_out(
    jobs: Sequence[Job],
    results: Results,
    *,
    image_of: ImageOf | None,
    workers: int,
    again: Callable[[Result], bool],
    tell: Callable[[Progress[Result]], None],
    elsewhere: Elsewhere | None = None,
) -> dict[str, Result]:
    """Do what no earlier call has finished, several at once, and keep each result as it comes.

    Results are written by the calling thread alone. So where it is interrupted nothing more is written, and work that
    ends because its sandboxes are taken away leaves no trace.

    Args:
        jobs: what there is to do; each id once.
        results: where results are, and go.
        image_of: returns a task's image; not used where they are done elsewhere.
        workers: how many at once.
        again: says of an earlier final result whether it is done again all the same.
        tell: called on this thread for each result.
        elsewhere: does those that need an image; this process if None.

    Returns:
        The results by id.

    Raises:
        InvalidValue: ``workers`` is less than 1, or there is nothing that makes images.
        DiskFull: the disk is full; what was finished is kept.
    """
    if workers < 1:
        raise InvalidValue(f"workers is {workers}", hint="give 1 or more")
    if image_of is None and elsewhere is None:
        raise InvalidValue("nothing makes the images", hint="give image_of, or elsewhere")
    before = {one.id: one for one in results if one.final and not again(one)}
    known = {name: one.fingerprint for name, one in before.items()}
    clock = _Clock(sum(job.id not in before for job in jobs))
    found: dict[str, Result] = {}
    for name, result in _as_done(jobs, known, image_of or _no_image, workers, elsewhere):
        if result is not None:
            results.put(result)
            clock.tick()
        found[name] = result or before[name]
        tell(Progress(len(found), len(jobs), found[name], result is None, clock.left()))
    return found


def _as_done(
    jobs: Sequence[Job], known: Mapping[str, str], image_of: ImageOf, workers: int, elsewhere: Elsewhere | None
) -> Iterator[tuple[str, Result | None]]:
    """Do jobs, here or elsewhere; yields each one's id and what :func:`serve` says, as they end."""
    away = [] if elsewhere is None else [job for job in jobs if job.task is not None]
    here = [job for job in jobs if job.task is None] if elsewhere is not None else jobs
    for number, result in as_finished(lambda job: serve(job, image_of, known.get(job.id)), here, workers):
        yield here[number].id, result
    if elsewhere is not None and away:
        yield from elsewhere(away, known)


def _no_image(task: Task) -> Image:
    raise NotImplementedError(f"{task.instance_id}: images are made elsewhere")


class _Clock:
    """How long it will take, from how long it has taken."""

    def __init__(self, todo: int) -> None:
        self._todo = todo
        self._done = 0
        self._began = time.monotonic()

    def tick(self) -> None:
        self._done += 1

    def left(self) -> float | None:
        if not self._done:
            return None
        return (time.monotonic() - self._began) / self._done * max(self._todo - self._done, 0)


def prepared_image(task: Task, image_of: ImageOf) -> Image | MiniSandboxError:
    """Return a task's image, or what kept it from being made."""
    try:
        return image_of(task)
    except MiniSandboxError as error:
        return error


def fingerprint(task: Task, image: Image | MiniSandboxError | None, *more: str) -> str:
    """Return a hash of what a result rests on: the task's row, its image if there is one, and what more there is."""
    key = "" if image is None or isinstance(image, MiniSandboxError) else image.key
    row = canonical_json(task.to_row())  # type: ignore[arg-type] # a row holds what JSON has
    digest = hashlib.sha256(row)
    for part in (key, *more, *_script_files(task)):
        digest.update(b"\n" + hashlib.sha256(part.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()


def _script_files(task: Task) -> Iterator[str]:
    """Yield the names and contents, hashed, of the files that a task's scripts bring."""
    grader, solution = task.grader, task.solution
    folders = (
        grader.files if isinstance(grader, ScriptGrader) else None,
        None if solution is None else solution.files,
    )
    for folder in folders:
        for path in () if folder is None else sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def text_of(body: Mapping[str, object], key: str) -> str:
    """Return a text of a result; empty if it is missing."""
    value = body.get(key)
    return value if isinstance(value, str) else ""


def seconds_of(body: Mapping[str, object], key: str) -> float:
    """Return a number of a result; 0.0 if it is missing."""
    value = body.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def texts_of(body: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the texts of a list of a result."""
    value = body.get(key)
    return tuple(str(one) for one in value) if isinstance(value, list | tuple) else ()
