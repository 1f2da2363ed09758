"""Validate task sets: several tasks at once, in a resumable run directory, and write the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade.options import ONCE
from minisandbox.grade.sets.fingerprint import fingerprint
from minisandbox.grade.sets.reports import markdown_table, write_reports
from minisandbox.grade.validation import Cause, Status, Validation, Validity, validate
from minisandbox.grade.verdict import Grade
from minisandbox.pool import Elsewhere, ImageOf, Job, Progress, open_results, run_jobs
from minisandbox.pool.runner import read_record
from minisandbox.store.rundir import RunDirectory, write_whole
from minisandbox.tasks import Task
from minisandbox.tasks.statuses import STATUSES_NAME, write_statuses
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_LOG = 8000  # characters kept of each output of a task that is not valid
_STATUSES = {Status.VALID: "passed", Status.INVALID: "failed", Status.ERROR: "error"}
_MB = 1e6


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
class Validated(Validity):
    """What a validation keeps of a task.

    Attributes:
        repo: the task's repository.
        python: the interpreter of its image; empty where that is the host's or there is no image.
        image_key: the hash of everything that decides what its image is; empty without an image.
        layers: of its image, bottom first, the layer with its hidden tests last.
        reference: the runs with the reference.
        empty: the runs without a patch.
        seconds: what validating it took, without building.
        log: what the runs printed, where the task is not valid.
    """

    repo: str = ""
    python: str = ""
    image_key: str = ""
    layers: tuple[LayerUse, ...] = ()
    reference: tuple[RunUse, ...] = ()
    empty: tuple[RunUse, ...] = ()
    seconds: float = 0.0
    log: str = ""

    @property
    def finished(self) -> bool:
        """Whether we could find out; otherwise it is validated again when the run goes on."""
        return self.status is not Status.ERROR


def run_validations(
    tasks: Iterable[Task],
    image_of: ImageOf[Task] | None,
    *,
    out: Path | None = None,
    only: Collection[str] | None = None,
    only_failed: bool = False,
    again: bool = False,
    runs: int = 1,
    workers: int = 1,
    timeout: float | None = None,
    confirm: str = ONCE,
    limits: Limits | None = None,
    config: Mapping[str, str] | None = None,
    build: Callable[[Sequence[Task]], None] | None = None,
    progress: Callable[[Progress[Validated]], None] | None = None,
    elsewhere: Elsewhere[Task] | None = None,
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
    given = {} if confirm == ONCE else {"confirm": confirm}
    resolved = {**(config or {}), "runs": runs, "timeout": timeout, "workers": workers, **given}
    check = partial(validate, runs=runs, timeout=timeout, limits=limits, confirm=confirm)
    with open_results(ValidationDirectory, out, resolved) as results:
        before = {one.id: read_record(Validated, one) for one in results}
        chosen = [task for task in everything if only is None or task.instance_id in only]
        if only_failed:
            failed = {one.instance_id for one in before.values() if not one.valid}
            chosen = [task for task in chosen if task.instance_id in failed]
        found = run_jobs(
            [_job(task, check) for task in chosen],
            results,
            Validated,
            image_of=image_of,
            workers=workers,
            again=only_failed or again,
            build=build,
            progress=progress,
            elsewhere=elsewhere,
        )
    known = before | found
    return tuple(known[task.instance_id] for task in everything if task.instance_id in known)


def _job(task: Task, check: Callable[[Task, Image], Validation]) -> Job[Task]:
    return Job(
        task.instance_id, partial(fingerprint, task, ()), partial(_validated, task, check), partial(_failed, task), task
    )


def _validated(task: Task, check: Callable[[Task, Image], Validation], image: Image | None) -> Validated:
    assert image is not None
    found = check(task, image)
    reference, empty = (
        tuple(RunUse(one.verdict, one.reason, one.duration) for one in runs) for runs in (found.reference, found.empty)
    )
    return Validated(
        **{one.name: getattr(found, one.name) for one in fields(Validity)},
        repo=task.repo,
        python=image.notes.get("python", ""),
        image_key=image.key,
        layers=tuple(LayerUse(one.key, one.bytes, one.seconds) for one in image.records()),
        reference=reference,
        empty=empty,
        log="" if found.valid else _logs(found),
    )


def _failed(task: Task, error: MiniSandboxError, ours: bool) -> Validated:
    cause = Cause.INFRASTRUCTURE if ours else Cause.NOT_BUILT
    return Validated(task.instance_id, Status.ERROR, cause, f"{type(error).__name__}: {error}", repo=task.repo)


def _logs(found: Validation) -> str:
    def last(title: str, grades: tuple[Grade, ...]) -> str:
        return "".join(f"--- {title}\n{one.log[-_LOG:]}\n" for one in grades[:1])

    return last("with the reference", found.reference) + last("without a patch", found.empty)


def write_validation_reports(out: Path, found: Sequence[Validated], total: int) -> None:
    """Write what a validation found: ``report.json``, ``report.md``, ``run_batch_exit_statuses.yaml`` and logs.

    Args:
        out: the run directory.
        found: what is known of the tasks.
        total: how many tasks the set has.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_reports(out, validation_report(found, total), validation_table(found, total))
    write_statuses(out / STATUSES_NAME, {one.instance_id: _STATUSES[one.status] for one in found})
    for one in found:
        log = out / "logs" / f"{one.instance_id}.log"
        if one.log:
            write_whole(log, one.log.encode("utf-8", "surrogateescape"))
        else:
            log.unlink(missing_ok=True)


def validation_report(found: Sequence[Validated], total: int) -> dict[str, object]:
    """Return the report for programs.

    What is measured, and so differs from run to run, is under ``measured`` alone.

    Args:
        found: what is known of the tasks.
        total: how many tasks the set has.
    """
    uses = _uses(found)
    layers = {layer.key: layer for one in found for layer in one.layers}
    return {
        "format": "minisandbox-validation-report",
        "version": 1,
        "tasks": total,
        "validated": len(found),
        "counts": {status.value: sum(one.status is status for one in found) for status in Status},
        "causes": dict(sorted(Counter(str(one.cause) for one in found if one.cause).items())),
        "flaky": sum(bool(one.flaky) for one in found),
        "changeable": changeable_counts(found),
        "noted": sum(bool(one.notes) for one in found),
        "measured": {
            "layer_bytes": sum(layer.bytes for layer in layers.values()),
            "build_seconds": sum(layer.seconds for layer in layers.values()),
            "validate_seconds": sum(one.seconds for one in found),
        },
        "results": [_row(one, uses) for one in found],
    }


def changeable_counts(found: Sequence[Validated]) -> dict[str, int]:
    """Count the FAIL_TO_PASS tests of valid tasks by where their expectation can be changed."""
    counts: Counter[str] = Counter()
    for one in found:
        counts.update({share.kind: share.tests for share in one.changeable})
    return dict(sorted(counts.items()))


def _row(one: Validated, uses: Mapping[str, int]) -> dict[str, object]:
    return {
        "instance_id": one.instance_id,
        "repo": one.repo,
        "verdict": one.status.value,
        "cause": one.cause,
        "detail": one.detail,
        "tests": list(one.tests),
        "flaky": list(one.flaky),
        "notes": list(one.notes),
        "changeable": {share.kind: share.tests for share in one.changeable},
        "python": one.python,
        "image_key": one.image_key,
        "reference": [[run.verdict, run.reason] for run in one.reference],
        "empty": [[run.verdict, run.reason] for run in one.empty],
        "measured": {
            "build_seconds": sum(layer.seconds for layer in one.layers),
            "unique_bytes": _bytes(one.layers, uses, shared=False),
            "shared_bytes": _bytes(one.layers, uses, shared=True),
            "validate_seconds": one.seconds,
            "reference_seconds": [run.seconds for run in one.reference],
            "empty_seconds": [run.seconds for run in one.empty],
        },
    }


def _uses(found: Sequence[Validated]) -> Counter[str]:
    """Count by layer the tasks whose images have it."""
    return Counter(layer.key for one in found for layer in one.layers)


def _bytes(layers: Sequence[LayerUse], uses: Mapping[str, int], *, shared: bool) -> int:
    return sum(layer.bytes for layer in layers if (uses[layer.key] > 1) is shared)


def validation_table(found: Sequence[Validated], total: int) -> str:
    """Return the report for people, in Markdown.

    Args:
        found: what is known of the tasks.
        total: how many tasks the set has.
    """
    counts = Counter(one.status for one in found)
    layers = {layer.key: layer for one in found for layer in one.layers}
    disk, built = sum(one.bytes for one in layers.values()), sum(one.seconds for one in layers.values())
    tested = sum(one.seconds for one in found)
    head = (
        f"{counts[Status.VALID]} of {total} tasks are valid, {counts[Status.INVALID]} are not; about "
        f"{counts[Status.ERROR]} we could not find out, {total - len(found)} were not looked at. Their images take "
        f"{disk / _MB:.0f} MB together and {built:.0f} s to build; validating took {tested:.0f} s."
    )
    note = (
        "*build*: seconds that all layers of the image took, shared ones counted for each task. *unique*, *shared*: "
        "megabytes of layers that no other task's image has, and of the others. *validate*: seconds of all runs."
    )
    uses, numbers = _uses(found), ("build", "unique", "shared", "validate")
    columns = ("task", "interpreter", *numbers, "verdict", "cause")
    lines = markdown_table(columns, [_cells(one, uses) for one in found], numbers)
    return "\n".join((head, "", note, "", *lines, ""))


def _cells(one: Validated, uses: Mapping[str, int]) -> tuple[str, ...]:
    cause = f"{one.cause}: {one.detail}" if one.cause else "; ".join(f"note: {note}" for note in one.notes)
    return (
        one.instance_id,
        one.python,
        f"{sum(layer.seconds for layer in one.layers):.1f}",
        f"{_bytes(one.layers, uses, shared=False) / _MB:.1f}",
        f"{_bytes(one.layers, uses, shared=True) / _MB:.1f}",
        f"{one.seconds:.1f}",
        one.status.value,
        cause,
    )
