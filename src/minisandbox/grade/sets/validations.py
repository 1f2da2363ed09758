"""Validating whole task sets: several tasks at once, in a directory where it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import IndexUnavailable, InvalidValue, MiniSandboxError, NodeLost
from minisandbox.grade.options import FLAGGED
from minisandbox.grade.sets.resumable import (
    Elsewhere,
    ImageOf,
    Job,
    Progress,
    Work,
    carry_out,
    fingerprint,
    opened,
    prepared_image,
    seconds_of,
    text_of,
    texts_of,
)
from minisandbox.grade.validation import Cause, Status, Validation, validate
from minisandbox.grade.verdict import Grade
from minisandbox.store.results import Result
from minisandbox.store.rundir import RunDirectory
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_LOG = 8000  # characters kept of each output of a task that is not valid


class ValidationDirectory(RunDirectory):
    """The directory of a validation."""

    kind = "minisandbox-validation"
    folders = ("logs",)


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer of a task's image.

    Attributes:
        key: its address in the store.
        bytes: what it takes on disk.
        seconds: what making it took.
    """

    key: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunUse:
    """One run of a task's tests.

    Attributes:
        verdict: of its grade.
        reason: of its grade.
        seconds: what it took.
    """

    verdict: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Validated:
    """What a validation keeps of a task.

    Attributes:
        instance_id: the task's id.
        repo: the task's repository.
        status: valid, invalid, or error where we could not find out.
        cause: why it is not valid, or None.
        detail: the same in a sentence.
        tests: the tests that the sentence is about.
        flaky: the named tests that did not do the same in all runs.
        python: the interpreter of its image; empty where that is the host's or there is no image.
        image_key: the hash of everything that decides what its image is; empty without an image.
        layers: of its image, bottom first, the layer with its hidden tests last.
        reference: the runs with the reference.
        empty: the runs without a patch.
        seconds: what validating it took, without building.
        log: what the runs printed, where the task is not valid.
        notes: what is odd about a task that is valid by its benchmark's rules.
    """

    instance_id: str
    repo: str
    status: Status
    cause: Cause | None = None
    detail: str = ""
    tests: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    python: str = ""
    image_key: str = ""
    layers: tuple[LayerUse, ...] = ()
    reference: tuple[RunUse, ...] = ()
    empty: tuple[RunUse, ...] = ()
    seconds: float = 0.0
    log: str = ""
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the task can be used."""
        return self.status is Status.VALID

    def to_body(self) -> dict[str, object]:
        """Return it as a row of the database has it."""
        body: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        body["layers"] = [[one.key, one.bytes, one.seconds] for one in self.layers]
        for runs in ("reference", "empty"):
            body[runs] = [[one.verdict, one.reason, one.seconds] for one in getattr(self, runs)]
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> Validated:
        """Read a row of the database."""
        cause = text_of(body, "cause")
        return cls(
            **{name: text_of(body, name) for name in ("instance_id", "repo", "detail", "python", "image_key", "log")},
            status=Status(text_of(body, "status")),
            cause=Cause(cause) if cause else None,
            tests=texts_of(body, "tests"),
            flaky=texts_of(body, "flaky"),
            notes=texts_of(body, "notes"),
            layers=tuple(LayerUse(key, int(size), float(took)) for key, size, took in _rows(body, "layers")),
            reference=_runs(body, "reference"),
            empty=_runs(body, "empty"),
            seconds=seconds_of(body, "seconds"),
        )


def _runs(body: Mapping[str, object], key: str) -> tuple[RunUse, ...]:
    return tuple(RunUse(verdict, reason, float(took)) for verdict, reason, took in _rows(body, key))


def _rows(body: Mapping[str, object], key: str) -> Iterable[tuple[str, str, str]]:
    """The rows of a table, of three cells each; numbers are still to be read as such."""
    rows = body.get(key)
    return [(one[0], one[1], one[2]) for one in rows] if isinstance(rows, list) else ()


def run_validations(
    tasks: Iterable[Task],
    image_of: ImageOf | None,
    *,
    out: Path | None = None,
    only: Collection[str] | None = None,
    only_failed: bool = False,
    again: bool = False,
    runs: int = 1,
    workers: int = 1,
    timeout: float | None = None,
    confirm: str = FLAGGED,
    limits: Limits | None = None,
    config: Mapping[str, str] | None = None,
    build: Callable[[Sequence[Task]], None] | None = None,
    progress: Callable[[Progress[Validated]], None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[Validated, ...]:
    """Validate tasks, several at once, and keep each in a run directory as it ends.

    The same call again resumes: tasks that were found valid or invalid are taken over if neither
    their row nor their image has changed; those about which we could not find out are done again.

    Args:
        tasks: the tasks.
        image_of: returns a task's image; called by several threads at once. None where it is done elsewhere.
        out: the run directory; None to keep nothing.
        only: ids to validate; None for all. Of the others what is known is reported.
        only_failed: validate the tasks that are known not to be valid, and no others.
        again: validate them even where they are finished.
        runs: how often the reference and the empty patch are run.
        workers: tasks at once.
        timeout: seconds that a run of tests may take; each task's own if None.
        confirm: whether the reference's passes are confirmed, as for :func:`.grade_reference`.
        limits: what each sandbox may use.
        config: what else describes the run; going on with it needs the same.
        build: called once with the tasks that are to be validated: building many images together is faster.
        progress: called on this thread for every task that ends, those that were finished before included.
        elsewhere: does it, with images of its own: the nodes of a cluster (:class:`.ClusterChecks`).

    Returns:
        What is known of each task, in the order of the tasks; those of which nothing is known are left out.

    Raises:
        InvalidValue: ``runs`` or ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; what was finished is kept.
    """
    if runs < 1:
        raise InvalidValue(f"runs is {runs}", hint="give 1 or more")
    everything = list(tasks)
    given = {} if confirm == FLAGGED else {"confirm": confirm}  # which says nothing of a reference
    resolved = {**(config or {}), "runs": runs, "timeout": timeout, "workers": workers, **given}
    check = partial(validate, runs=runs, timeout=timeout, limits=limits, confirm=confirm)
    with opened(ValidationDirectory, out, resolved) as results:
        known = {one.id: one for one in results}
        chosen = [task for task in everything if only is None or task.instance_id in only]
        if only_failed:
            chosen = [task for task in chosen if task.instance_id in known and not _is_valid(known[task.instance_id])]
        if build is not None:
            build(chosen)
        found = carry_out(
            [Job(task.instance_id, partial(_prepare, task, check), task) for task in chosen],
            results,
            image_of=image_of,
            workers=workers,
            again=lambda _: only_failed or again,
            tell=partial(_tell, progress),
            elsewhere=elsewhere,
        )
    known.update(found)
    return tuple(Validated.from_body(known[t.instance_id].body) for t in everything if t.instance_id in known)


def _is_valid(result: Result) -> bool:
    return result.body.get("status") == Status.VALID


def _tell(progress: Callable[[Progress[Validated]], None] | None, news: Progress[Result]) -> None:
    if progress is not None:
        latest = Validated.from_body(news.latest.body)
        progress(Progress(news.done, news.total, latest, news.resumed, news.seconds_left))


def _prepare(task: Task, check: Callable[[Task, Image], Validation], image_of: ImageOf) -> Work:
    image = prepared_image(task, image_of)
    return Work(fingerprint(task, image), partial(_validate, task, image, check))


def _validate(
    task: Task, image: Image | MiniSandboxError, check: Callable[[Task, Image], Validation]
) -> tuple[Mapping[str, object], bool]:
    """Validate a task; what keeps us from it is a result, and not final."""
    began = time.monotonic()
    if isinstance(image, MiniSandboxError):
        ours = isinstance(image, NodeLost | IndexUnavailable)
        found = _error(task, Cause.INFRASTRUCTURE if ours else Cause.NOT_BUILT, image)
    else:
        try:
            found = _kept(task, image, check(task, image))
        except MiniSandboxError as error:
            found = _error(task, Cause.INFRASTRUCTURE, error)
    body = found.to_body() | {"seconds": time.monotonic() - began}
    return body, found.status is not Status.ERROR


def _error(task: Task, cause: Cause, error: MiniSandboxError) -> Validated:
    return Validated(task.instance_id, task.repo, Status.ERROR, cause, f"{type(error).__name__}: {error}")


def _kept(task: Task, image: Image, found: Validation) -> Validated:
    return Validated(
        found.instance_id,
        task.repo,
        found.status,
        found.cause,
        found.detail,
        found.tests,
        found.flaky,
        image.notes.get("python", ""),
        image.key,
        tuple(LayerUse(one.key, one.bytes, one.seconds) for one in image.records()),
        tuple(RunUse(one.verdict, one.reason, one.duration) for one in found.reference),
        tuple(RunUse(one.verdict, one.reason, one.duration) for one in found.empty),
        log="" if found.valid else _logs(found),
        notes=found.notes,
    )


def _logs(found: Validation) -> str:
    def last(title: str, grades: tuple[Grade, ...]) -> str:
        return "".join(f"--- {title}\n{one.log[-_LOG:]}\n" for one in grades[:1])

    return last("with the reference", found.reference) + last("without a patch", found.empty)
