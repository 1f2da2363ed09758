"""Validate several tasks at once in a resumable run directory, and write the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade.options import ONCE
from minisandbox.grade.sets.jobs import markdown_table, task_job, write_log, write_reports
from minisandbox.grade.validation import Cause, Status, Validation, Validity, validate
from minisandbox.grade.verdict import Grade
from minisandbox.runs import ImageOf, RunDirectory, RunOptions, run_jobs
from minisandbox.tasks import Task
from minisandbox.tasks.statuses import STATUSES_NAME, write_statuses
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

_LOG = 8000  # characters kept of each run's output if a task is not valid
_STATUSES = {Status.VALID: "passed", Status.INVALID: "failed", Status.ERROR: "error"}
_MB = 1e6


class ValidationDirectory(RunDirectory):
    """The run directory of a validation."""

    kind = "minisandbox-validation"
    folders = ("logs",)


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer of a task's image, with its size and build time.

    Attributes:
        key: the layer's key in the store.
        bytes: the size on disk.
        seconds: the build time.
    """

    key: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunUse:
    """The result of one run of a task's tests.

    Attributes:
        verdict: the verdict of the run's grade.
        reason: the reason of the verdict.
        seconds: the duration of the run.
    """

    verdict: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Validated(Validity):
    """The recorded validation of a task.

    Attributes:
        repo: the task's repository.
        python: the Python version in the image; empty if it is the host's or there is no image.
        image_key: the hash of all inputs of the image; empty if there is no image.
        layers: the image's layers, bottom first; the last one has the hidden tests.
        reference: the runs with the reference.
        empty: the runs without a patch.
        seconds: the duration of the validation, without the build.
        log: the output of the runs, if the task is not valid.
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
        """Whether the result is final; otherwise a resumed run validates the task again."""
        return self.status is not Status.ERROR

    @property
    def build_seconds(self) -> float:
        """The build time of all layers in seconds, shared layers included."""
        return sum(layer.seconds for layer in self.layers)


def run_validations(
    tasks: Iterable[Task],
    image_of: ImageOf[Task] | None,
    *,
    only: Collection[str] | None = None,
    only_failed: bool = False,
    again: bool = False,
    runs: int = 1,
    timeout: float | None = None,
    confirm: str = ONCE,
    limits: Limits | None = None,
    **options: Unpack[RunOptions[Task, Validated]],
) -> tuple[Validated, ...]:
    """Validate tasks, several at once, and record each result in the run directory.

    Calling it again resumes: a task that was valid or invalid is validated again only if its row or its image has
    changed. A task with an infrastructure error is always validated again.

    Args:
        tasks: the tasks.
        image_of: returns a task's image; called from several threads at once. None if other machines build the images.
        only: the ids to validate; None for all. Other tasks keep their recorded results.
        only_failed: whether to validate only tasks that are recorded as not valid.
        again: whether to validate finished tasks again.
        runs: the number of runs of the reference, and of the empty patch.
        timeout: the time limit of one run of the tests, in seconds; None for each task's own.
        confirm: whether the reference's passes are confirmed, as for :func:`.grade_reference`.
        limits: the limits of each sandbox.
        options: ``out``, ``workers``, ``config``, ``build``, ``progress`` and ``elsewhere``, as :class:`.RunOptions`
            describes them.

    Returns:
        The results, in the order of the tasks; tasks without a result are left out.

    Raises:
        InvalidValue: ``runs`` or ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; finished results are kept.
    """
    if runs < 1:
        raise InvalidValue(f"runs is {runs}", hint="give 1 or more")
    work = partial(_validated, runs=runs, timeout=timeout, limits=limits, confirm=confirm)
    policy = {} if confirm == ONCE else {"confirm": confirm}

    def is_chosen(name: str, earlier: Validated | None) -> bool:
        failed = earlier is not None and not earlier.valid
        return (only is None or name in only) and (failed or not only_failed)

    results = run_jobs(
        ValidationDirectory,
        Validated,
        [task_job(task, work, _failed) for task in tasks],
        image_of,
        {"runs": runs, "timeout": timeout, "workers": options.get("workers", 1), **policy},
        options,
        chosen=is_chosen,
        again=only_failed or again,
    )
    return tuple(results.values())


def _validated(
    task: Task, image: Image, *, runs: int, timeout: float | None, limits: Limits | None, confirm: str
) -> Validated:
    validation = validate(task, image, runs=runs, timeout=timeout, limits=limits, confirm=confirm)
    reference, empty = (
        tuple(RunUse(grade.verdict, grade.reason, grade.duration) for grade in grades)
        for grades in (validation.reference, validation.empty)
    )
    return Validated(
        **{field.name: getattr(validation, field.name) for field in fields(Validity)},
        repo=task.repo,
        python=image.notes.get("python", ""),
        image_key=image.key,
        layers=tuple(LayerUse(layer.key, layer.bytes, layer.seconds) for layer in image.records()),
        reference=reference,
        empty=empty,
        log="" if validation.valid else _logs(validation),
    )


def _failed(task: Task, error: MiniSandboxError, is_infrastructure: bool) -> Validated:
    cause = Cause.INFRASTRUCTURE if is_infrastructure else Cause.NOT_BUILT
    return Validated(task.instance_id, Status.ERROR, cause, f"{type(error).__name__}: {error}", repo=task.repo)


def _logs(validation: Validation) -> str:
    def last(title: str, grades: tuple[Grade, ...]) -> str:
        return "".join(f"--- {title}\n{grade.log[-_LOG:]}\n" for grade in grades[:1])

    return last("with the reference", validation.reference) + last("without a patch", validation.empty)


def write_validation_reports(out: Path, results: Sequence[Validated], total: int) -> None:
    """Write ``report.json``, ``report.md``, ``run_batch_exit_statuses.yaml`` and the logs of a validation.

    Args:
        out: the run directory.
        results: the results.
        total: the number of tasks in the set.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_reports(out, validation_report(results, total), validation_table(results, total))
    write_statuses(out / STATUSES_NAME, {result.instance_id: _STATUSES[result.status] for result in results})
    for result in results:
        write_log(out / "logs" / f"{result.instance_id}.log", result.log)


def validation_report(results: Sequence[Validated], total: int) -> dict[str, object]:
    """Return the machine-readable report. Measurements, which differ between runs, are under ``measured`` only.

    Args:
        results: the results.
        total: the number of tasks in the set.
    """
    uses = _uses(results)
    return {
        "format": "minisandbox-validation-report",
        "version": 1,
        "tasks": total,
        "validated": len(results),
        "counts": {status.value: sum(result.status is status for result in results) for status in Status},
        "causes": dict(sorted(Counter(str(result.cause) for result in results if result.cause).items())),
        "flaky": sum(bool(result.flaky) for result in results),
        "changeable": changeable_counts(results),
        "noted": sum(bool(result.notes) for result in results),
        "measured": _totals(results),
        "results": [_row(result, uses) for result in results],
    }


def _totals(results: Sequence[Validated]) -> dict[str, float]:
    layers = {layer.key: layer for result in results for layer in result.layers}.values()
    return {
        "layer_bytes": sum(layer.bytes for layer in layers),
        "build_seconds": sum(layer.seconds for layer in layers),
        "validate_seconds": sum(result.seconds for result in results),
    }


def changeable_counts(results: Sequence[Validated]) -> dict[str, int]:
    """Count the FAIL_TO_PASS tests of valid tasks by the kind of expectation that can be changed."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update({share.kind: share.tests for share in result.changeable})
    return dict(sorted(counts.items()))


def _row(result: Validated, uses: Mapping[str, int]) -> dict[str, object]:
    unique, shared = _sizes(result, uses)
    return {
        "instance_id": result.instance_id,
        "repo": result.repo,
        "verdict": result.status.value,
        "cause": result.cause,
        "detail": result.detail,
        "tests": list(result.tests),
        "flaky": list(result.flaky),
        "notes": list(result.notes),
        "changeable": changeable_counts([result]),
        "python": result.python,
        "image_key": result.image_key,
        "reference": [[run.verdict, run.reason] for run in result.reference],
        "empty": [[run.verdict, run.reason] for run in result.empty],
        "measured": {
            "build_seconds": result.build_seconds,
            "unique_bytes": unique,
            "shared_bytes": shared,
            "validate_seconds": result.seconds,
            "reference_seconds": [run.seconds for run in result.reference],
            "empty_seconds": [run.seconds for run in result.empty],
        },
    }


def _uses(results: Sequence[Validated]) -> Counter[str]:
    """Count, for each layer, the tasks whose images contain it."""
    return Counter(layer.key for result in results for layer in result.layers)


def _sizes(result: Validated, uses: Mapping[str, int]) -> tuple[int, int]:
    """Return the size in bytes of the layers that only this task's image contains, and of the shared ones."""
    unique = sum(layer.bytes for layer in result.layers if uses[layer.key] == 1)
    return unique, sum(layer.bytes for layer in result.layers) - unique


def validation_table(results: Sequence[Validated], total: int) -> str:
    """Return the report as Markdown.

    Args:
        results: the results.
        total: the number of tasks in the set.
    """
    counts, totals = Counter(result.status for result in results), _totals(results)
    head = (
        f"{counts[Status.VALID]} of {total} tasks are valid, {counts[Status.INVALID]} are not; about "
        f"{counts[Status.ERROR]} we could not find out, {total - len(results)} were not looked at. Their images take "
        f"{totals['layer_bytes'] / _MB:.0f} MB together and {totals['build_seconds']:.0f} s to build; "
        f"validating took {totals['validate_seconds']:.0f} s."
    )
    legend = (
        "*build*: seconds that all layers of the image took, shared ones counted for each task. *unique*, *shared*: "
        "megabytes of layers that no other task's image has, and of the others. *validate*: seconds of all runs."
    )
    uses, number_columns = _uses(results), ("build", "unique", "shared", "validate")
    columns = ("task", "interpreter", *number_columns, "verdict", "cause")
    lines = markdown_table(columns, [_cells(result, uses) for result in results], number_columns)
    return "\n".join((head, "", legend, "", *lines, ""))


def _cells(result: Validated, uses: Mapping[str, int]) -> tuple[str, ...]:
    notes = "; ".join(f"note: {note}" for note in result.notes)
    cause = f"{result.cause}: {result.detail}" if result.cause else notes
    sizes = (f"{size / _MB:.1f}" for size in _sizes(result, uses))
    times = f"{result.build_seconds:.1f}", f"{result.seconds:.1f}"
    return (result.instance_id, result.python, times[0], *sizes, times[1], result.status.value, cause)
