"""Check whole task sets: several tasks at once, in a directory where the check resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.grade.check.evidence import Evidence
from minisandbox.grade.check.image import not_built
from minisandbox.grade.check.rows import twins
from minisandbox.grade.check.runs import infrastructure
from minisandbox.grade.check.table import CHECKS, ROWS, RUNS, Finding, findings, unusable_row
from minisandbox.grade.check.verifier import forgeable
from minisandbox.grade.judging import judge
from minisandbox.grade.sets.fingerprint import fingerprint
from minisandbox.grade.submission import reference_change
from minisandbox.grade.validation import validate
from minisandbox.grade.verdict import Grade
from minisandbox.grade.workspace import Workspace
from minisandbox.pool import ImageOf, Job, Progress, open_results, run_jobs
from minisandbox.store.rundir import RunDirectory
from minisandbox.tasks import PytestGrader, Task
from minisandbox.tasks.loading import Refused

if TYPE_CHECKING:
    from minisandbox.images import Image

_VERSION = "1"
"""Of the checks: a result of other ones is not taken over."""
_NOT_FINAL = frozenset({not_built.__name__, infrastructure.__name__})


class CheckDirectory(RunDirectory):
    """The directory of a check."""

    kind = "minisandbox-check"


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a task.

    Attributes:
        instance_id: the task's id; of a row that is not a task, where the row is.
        findings: what is wrong with it.
        ran: whether its image and its tests were checked as well as its row.
        runs: runs of the reference, and as many of the untouched code.
        reference: those of the reference that resolved it.
        empty: those of the untouched code that resolved it.
        build_seconds: what all layers of its image took to build.
        test_seconds: the longest run of its tests.
        seconds: what the check took, without building.
    """

    instance_id: str
    findings: tuple[Finding, ...]
    ran: bool = False
    runs: int = 0
    reference: int = 0
    empty: int = 0
    build_seconds: float = 0.0
    test_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it stays; otherwise the task is checked again when the run is resumed."""
        return not any(one.check in _NOT_FINAL for one in self.findings)


def check_set(
    tasks: Sequence[Task],
    image_of: ImageOf[Task] | None,
    *,
    refused: Sequence[Refused] = (),
    out: Path | None = None,
    repeat: int = 2,
    workers: int = 1,
    timeout: float | None = None,
    build: Callable[[Sequence[Task]], None] | None = None,
    progress: Callable[[Progress[Checked]], None] | None = None,
) -> tuple[Checked, ...]:
    """Check tasks, several at once, and keep each in a run directory as it ends.

    The same call again resumes: a task is taken over if neither its row nor its image, nor ``repeat`` or ``timeout``
    has changed. Checks of rows are repeated each time.

    Args:
        tasks: the tasks.
        image_of: returns a task's image, and is called by several threads at once; None checks rows alone.
        refused: why other rows of the set are no tasks; each becomes a finding.
        out: the run directory; None to keep nothing.
        repeat: how often the reference and the untouched code are tested.
        workers: tasks at once.
        timeout: seconds that a run of tests may take; each task's own if None.
        build: called once with the tasks whose images are needed: building many together is faster.
        progress: called on this thread for every task that ends, those that were finished before included.

    Returns:
        What is known of each task, in their order, and then of the refused rows.

    Raises:
        InvalidValue: ``repeat`` or ``workers`` is less than 1.
        RunError: the directory is in use or belongs to a run of another kind.
        DiskFull: the disk is full; what was finished is kept.
    """
    if repeat < 1:
        raise InvalidValue(f"repeat is {repeat}", hint="give 1 or more")
    found: Mapping[str, Checked] = {}
    with open_results(CheckDirectory, out, {}) as results:
        if image_of is not None:
            jobs = [_job(task, repeat, timeout) for task in tasks]
            found = run_jobs(jobs, results, Checked, image_of=image_of, workers=workers, build=build, progress=progress)
    twin = twins(tasks)
    checked = []
    for task in tasks:
        name = task.instance_id
        one = found.get(name, Checked(name, ()))
        about_row = findings(Evidence(task, twin.get(name, "")), ROWS)
        checked.append(replace(one, findings=about_row + one.findings))
    return (*checked, *map(_refused, refused))


def _refused(error: Refused) -> Checked:
    place = error.what.partition(": ")[0]
    check = CHECKS[unusable_row.__name__]
    return Checked(place, (Finding(place, check.name, check.severity, "", str(error)),))


def _job(task: Task, repeat: int, timeout: float | None) -> Job[Task]:
    return Job(
        task.instance_id,
        partial(fingerprint, task, (_VERSION, f"{repeat} {timeout}")),
        partial(_check, task, repeat, timeout),
        partial(_failed, task),
        task,
    )


def _check(task: Task, repeat: int, timeout: float | None, image: Image | None) -> Checked:
    assert image is not None
    seen = gather(task, image, repeat, timeout)
    reference, empty = seen.found.reference, seen.found.empty
    return Checked(
        task.instance_id,
        findings(seen, RUNS),
        True,
        repeat,
        sum(bool(run.resolved) for run in reference),
        sum(bool(run.resolved) for run in empty),
        seen.build_seconds,
        max(run.duration for run in reference + empty),
    )


def _failed(task: Task, error: MiniSandboxError, ours: bool) -> Checked:
    check = CHECKS[(infrastructure if ours else not_built).__name__]
    return Checked(task.instance_id, findings(Evidence(task, failure=error), (check,)), True)


def gather(task: Task, image: Image, repeat: int, timeout: float | None) -> Evidence:
    """Run a task, and return what its checks need.

    Args:
        task: the task.
        image: its image.
        repeat: how often the reference and the untouched code are tested.
        timeout: seconds that a run of tests may take; the task's own if None.

    Raises:
        MiniSandboxError: the task could not be run.
    """
    found = validate(task, image, runs=repeat, timeout=timeout)
    seen = Evidence(
        task,
        timeout=task.grader.timeout if timeout is None else timeout,
        build_seconds=sum(one.seconds for one in image.records()),
        validation=found,
    )
    if not all(run.resolved for run in found.reference) or any(run.resolved is not False for run in found.empty):
        return seen
    reordered = _reordered(task, image, timeout) if repeat > 1 else None
    return replace(seen, reordered=reordered, forged=forgeable(task, image, timeout))


def _reordered(task: Task, image: Image, timeout: float | None) -> Grade | None:
    """Run the reference with the test files in reverse order; None for a single file."""
    place = Workspace.of(task, image, timeout=timeout)
    if not isinstance(task.grader, PytestGrader) or len(place.files) < 2:
        return None
    return judge(task, replace(place, files=place.files[::-1]).run(reference_change(task)))
