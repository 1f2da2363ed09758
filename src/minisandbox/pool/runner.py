"""Run many jobs concurrently, and store each result as the job finishes, so that a later process can resume."""

from __future__ import annotations

import dataclasses
import enum
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from minisandbox.errors import IndexUnavailable, InvalidValue, MiniSandboxError, NodeLost
from minisandbox.pool.threads import as_finished
from minisandbox.store.results import Result, Results
from minisandbox.store.rundir import Config, RunDirectory

if TYPE_CHECKING:
    from minisandbox.images import Image

DATABASE = "results.sqlite"
"""File name of the results database in a run directory."""

Item = TypeVar("Item")
ImageOf = Callable[[Item], "Image"]


class JobRecord(Protocol):
    """The result of a job: a dataclass of strings, numbers, enumerations, tuples of these, and dataclasses.

    :func:`run_job` sets its field ``seconds`` to the duration of the job, without the preparation of the image.
    """

    @property
    def finished(self) -> bool:
        """Whether a resumed run keeps the result instead of repeating the job."""


Latest = TypeVar("Latest")
RecordT = TypeVar("RecordT", bound=JobRecord)
Fields = TypeVar("Fields")


@dataclass(frozen=True, slots=True)
class Job(Generic[Item]):
    """One unit of work in a run. A job with a task must be picklable, because another process may run it.

    Attributes:
        id: id of the job and its result.
        fingerprint: returns a hash of all inputs of the result; called with the key of the image, or "" without an
            image. An earlier result with another hash is not reused.
        do: runs the job; called with the image, or None if the job has no task.
        failed: returns the result for an error; called with the error, and True if the infrastructure failed instead of
            the image.
        task: the item whose image the job needs; None if the job needs no image.
    """

    id: str
    fingerprint: Callable[[str], str]
    do: Callable[[Image | None], JobRecord]
    failed: Callable[[MiniSandboxError, bool], JobRecord]
    task: Item | None = None


class Elsewhere(Protocol[Item]):
    """Runs jobs in other processes, for example on the nodes of a cluster."""

    def __call__(
        self, jobs: Sequence[Job[Item]], fingerprints: Mapping[str, str]
    ) -> Iterator[tuple[str, Result | None]]:
        """Run jobs that have a task.

        Args:
            jobs: the jobs.
            fingerprints: fingerprints of earlier results, by id.

        Yields:
            The id of each finished job, and the return value of :func:`run_job`.
        """


@dataclass(frozen=True, slots=True)
class Progress(Generic[Latest]):
    """The progress of a run, reported after each result.

    Attributes:
        done: number of results so far, including results of earlier calls.
        total: number of jobs in the run.
        latest: the result that was just added.
        seconds_left: estimate of the remaining seconds; None before the first new result.
        resumed: whether the latest result comes from an earlier call.
    """

    done: int
    total: int
    latest: Latest
    seconds_left: float | None = None
    resumed: bool = False


@contextmanager
def open_results(directory: type[RunDirectory], out: Path | None, config: Config) -> Iterator[Results]:
    """Open and lock the results of a run; keep them in memory if ``out`` is None.

    Raises:
        RunError: the directory is in use or belongs to another run, or its database is damaged.
        DiskFull: the disk is full.
        OSError: the database cannot be created.
    """
    if out is None:
        with Results(None) as results:
            yield results
        return
    with directory.open(out, config) as run, Results(run.path / DATABASE) as results:
        yield results


def run_jobs(
    jobs: Sequence[Job[Item]],
    results: Results,
    kind: type[RecordT],
    *,
    image_of: ImageOf[Item] | None,
    workers: int,
    again: bool = False,
    build: Callable[[Sequence[Item]], None] | None = None,
    progress: Callable[[Progress[RecordT]], None] | None = None,
    elsewhere: Elsewhere[Item] | None = None,
) -> dict[str, RecordT]:
    """Run the jobs that no earlier call has finished, several at once, and store each result as its job finishes.

    Only the calling thread writes results. After an interruption it writes none, so jobs that fail because their
    sandboxes are stopped leave no result.

    Args:
        jobs: the jobs, with distinct ids.
        results: database of earlier results, which also stores the new ones.
        kind: dataclass of the results.
        image_of: returns the image of a job's task; called in several threads, but not for jobs that run elsewhere.
        workers: number of jobs to run at once.
        again: whether to repeat finished jobs too.
        build: called once with the tasks of all jobs before they start, because building images together is faster.
        progress: called in this thread for each result.
        elsewhere: runs the jobs that have a task; None runs them in this process.

    Returns:
        The results by job id.

    Raises:
        InvalidValue: ``workers`` is less than 1, or neither ``image_of`` nor ``elsewhere`` is given.
        DiskFull: the disk is full; results of finished jobs are kept.
    """
    if workers < 1:
        raise InvalidValue(f"workers is {workers}", hint="give 1 or more")
    if image_of is None and elsewhere is None:
        raise InvalidValue("nothing makes the images", hint="give image_of, or elsewhere")
    if build is not None:
        build([job.task for job in jobs if job.task is not None])
    earlier_results = {} if again else {result.id: result for result in results if result.final}
    pending_count = sum(job.id not in earlier_results for job in jobs)
    records: dict[str, RecordT] = {}
    new_count, began = 0, time.monotonic()
    for name, result in _as_done(jobs, earlier_results, image_of, workers, elsewhere):
        if result is not None:
            results.put(result)
            new_count += 1
        records[name] = read_fields(kind, (result or earlier_results[name]).body)
        if progress is not None:
            seconds = time.monotonic() - began
            seconds_left = seconds / new_count * max(pending_count - new_count, 0) if new_count else None
            progress(Progress(len(records), len(jobs), records[name], seconds_left, resumed=result is None))
    return records


def _as_done(
    jobs: Sequence[Job[Item]],
    earlier_results: Mapping[str, Result],
    image_of: ImageOf[Item] | None,
    workers: int,
    elsewhere: Elsewhere[Item] | None,
) -> Iterator[tuple[str, Result | None]]:
    fingerprints = {name: result.fingerprint for name, result in earlier_results.items()}
    remote_jobs = [job for job in jobs if job.task is not None] if elsewhere is not None else []
    local_jobs = [job for job in jobs if job.task is None] if elsewhere is not None else jobs
    for index, result in as_finished(lambda job: run_job(job, image_of, fingerprints.get(job.id)), local_jobs, workers):
        yield local_jobs[index].id, result
    if elsewhere is not None and remote_jobs:
        yield from elsewhere(remote_jobs, fingerprints)


def run_job(job: Job[Item], image_of: ImageOf[Item] | None, earlier: str | None) -> Result | None:
    """Run a job, and convert an error to a result.

    Args:
        job: the job.
        image_of: returns the image of the job's task.
        earlier: fingerprint of an earlier result, if any.

    Returns:
        The result of the job, or None if the earlier result is still valid.
    """
    image, error = None, None
    if job.task is not None:
        assert image_of is not None
        try:
            image = image_of(job.task)
        except MiniSandboxError as problem:
            error = problem
    fingerprint = job.fingerprint(image.key if image is not None else "")
    if fingerprint == earlier:
        return None
    began = time.monotonic()
    try:
        record = job.do(image) if error is None else job.failed(error, isinstance(error, IndexUnavailable | NodeLost))
    except MiniSandboxError as problem:
        record = job.failed(problem, True)
    body = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type] # records are dataclasses
    return Result(job.id, fingerprint, record.finished, body | {"seconds": time.monotonic() - began})


def read_fields(kind: type[Fields], values: Mapping[str, object]) -> Fields:
    """Create a dataclass from JSON values by field name; missing fields get their defaults, unknown names are ignored.

    Older versions wrote fewer fields.
    """
    hints = typing.get_type_hints(kind)
    return kind(**{name: _decoded(hints[name], value) for name, value in values.items() if name in hints})


def _decoded(kind: typing.Any, value: typing.Any) -> object:
    """Convert a JSON value to a field's type; a nested dataclass is stored as an object, or as a list of its fields."""
    if typing.get_origin(kind) is tuple:
        return tuple(_decoded(typing.get_args(kind)[0], item) for item in value)
    if typing.get_origin(kind) is types.UnionType:
        return None if value is None else _decoded(typing.get_args(kind)[0], value)
    if dataclasses.is_dataclass(kind) and isinstance(value, list | dict):
        fields = value if isinstance(value, dict) else dict(zip(typing.get_type_hints(kind), value, strict=False))
        return read_fields(typing.cast("type[object]", kind), fields)
    return kind(value) if isinstance(kind, type) and issubclass(kind, float | enum.Enum) else value
