"""Run many jobs concurrently, and store each result as the job finishes, so that a later process can resume."""

from __future__ import annotations

import dataclasses
import enum
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypedDict, TypeVar

from minisandbox.errors import IndexUnavailable, InvalidValue, MiniSandboxError, NodeLost
from minisandbox.runs.database import DATABASE, Result, Results
from minisandbox.runs.directory import Config, RunDirectory
from minisandbox.runs.threads import as_finished

if TYPE_CHECKING:
    from minisandbox.images import Image

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


class RunOptions(TypedDict, Generic[Item, RecordT], total=False):
    """Keyword arguments of the functions that run a set of jobs.

    Attributes:
        out: the run directory; None, the default, stores nothing.
        workers: the number of jobs that run at once (default: 1).
        config: further settings that identify the run; resuming it requires the same values.
        build: called once with the tasks whose images are needed, because building the images together is faster.
        progress: called on the calling thread for each result, including results of an earlier call.
        elsewhere: runs the jobs that have a task, in other processes with their own images (:class:`.ClusterChecks`).
    """

    out: Path | None
    workers: int
    config: Mapping[str, str]
    build: Callable[[Sequence[Item]], None] | None
    progress: Callable[[Progress[RecordT]], None] | None
    elsewhere: Elsewhere[Item] | None


def run_jobs(
    directory: type[RunDirectory],
    kind: type[RecordT],
    jobs: Sequence[Job[Item]],
    image_of: ImageOf[Item] | None,
    identity: Config,
    options: RunOptions[Item, RecordT],
    *,
    chosen: Callable[[str, RecordT | None], bool] = lambda _id, _earlier: True,
    again: bool = False,
) -> dict[str, RecordT]:
    """Run the chosen jobs that no earlier call has finished, several at once, and store each result as its job ends.

    Only the calling thread writes results. After an interruption it writes none, so jobs that fail because their
    sandboxes are stopped leave no result.

    Args:
        directory: the class of the run directory.
        kind: the dataclass of the results.
        jobs: the jobs, with distinct ids.
        image_of: returns the image of a job's task; called in several threads. None if other processes build the
            images.
        identity: the settings that identify the run; resuming it requires the same values.
        options: the caller's options.
        chosen: decides whether to run a job, given its id and its earlier result, if any.
        again: whether to repeat the chosen jobs that are finished.

    Returns:
        The results by id, in the order of the jobs. Jobs that were not chosen keep their earlier result, if any.

    Raises:
        InvalidValue: ``workers`` is less than 1, or neither ``image_of`` nor ``elsewhere`` is given.
        RunError: the directory is in use or belongs to another run, or its database is damaged.
        DiskFull: the disk is full; results of finished jobs are kept.
        OSError: the directory or its database cannot be created.
    """
    if (workers := options.get("workers", 1)) < 1:
        raise InvalidValue(f"workers is {workers}", hint="give 1 or more")
    if image_of is None and options.get("elsewhere") is None and any(job.task is not None for job in jobs):
        raise InvalidValue("nothing makes the images", hint="give image_of, or elsewhere")
    out = options.get("out")
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(directory.open(out, {**options.get("config", {}), **identity}))
        results = stack.enter_context(Results(None if out is None else out / DATABASE))
        earlier_results = {result.id: result for result in results}
        records = {name: read_fields(kind, result.body) for name, result in earlier_results.items()}
        chosen_jobs = [job for job in jobs if chosen(job.id, records.get(job.id))]
        if (build := options.get("build")) is not None and chosen_jobs:
            build([job.task for job in chosen_jobs if job.task is not None])
        reusable = {name: result for name, result in earlier_results.items() if result.final and not again}
        pending_count = sum(job.id not in reusable for job in chosen_jobs)
        new_count, began = 0, time.monotonic()
        fingerprints = {name: result.fingerprint for name, result in reusable.items()}
        ended = _as_ended(chosen_jobs, fingerprints, image_of, workers, options.get("elsewhere"))
        for done, (name, result) in enumerate(ended, 1):
            if result is not None:
                results.put(result)
                new_count += 1
            records[name] = read_fields(kind, (result or reusable[name]).body)
            if (progress := options.get("progress")) is not None:
                seconds = time.monotonic() - began
                seconds_left = seconds / new_count * max(pending_count - new_count, 0) if new_count else None
                progress(Progress(done, len(chosen_jobs), records[name], seconds_left, resumed=result is None))
    return {job.id: records[job.id] for job in jobs if job.id in records}


def _as_ended(
    jobs: Sequence[Job[Item]],
    fingerprints: Mapping[str, str],
    image_of: ImageOf[Item] | None,
    workers: int,
    elsewhere: Elsewhere[Item] | None,
) -> Iterator[tuple[str, Result | None]]:
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
