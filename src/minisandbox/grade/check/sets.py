"""Check whole task sets: several tasks at once, in a directory where the check resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import IndexUnavailable, InvalidValue, MiniSandboxError, NotFound
from minisandbox.grade.check.evidence import Evidence, Severity
from minisandbox.grade.check.rows import twins
from minisandbox.grade.check.runs import infrastructure
from minisandbox.grade.check.table import CHECKS, Finding, Needs, findings, unusable_row
from minisandbox.grade.check.verifier import forgeable
from minisandbox.grade.grading import workspace_for
from minisandbox.grade.judging import judge
from minisandbox.grade.sets.resumable import (
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
from minisandbox.grade.submission import reference_change
from minisandbox.grade.validation import Validation, validate
from minisandbox.grade.verdict import Grade
from minisandbox.store.results import Result
from minisandbox.store.rundir import RunDirectory
from minisandbox.tasks import PytestGrader, Task
from minisandbox.tasks.loading import Refused

if TYPE_CHECKING:
    from minisandbox.images import Image

_VERSION = "1"
"""Of the checks: a result of other ones is not taken over."""
_NOT_FINAL = frozenset({"not_built", infrastructure.__name__})


class CheckDirectory(RunDirectory):
    """The directory of a check."""

    kind = "minisandbox-check"


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a task.

    Attributes:
        instance_id: the task's id; of a row that is no task, where the row is.
        findings: what is wrong with it.
        ran: whether its image and its tests were checked, too, and not its row alone.
        reference: how many runs with the reference resolved it, and of how many.
        empty: the same without a patch.
        build_seconds: what all layers of its image took to build.
        test_seconds: the longest run of its tests.
        seconds: what the check took, without building.
    """

    instance_id: str
    findings: tuple[Finding, ...]
    ran: bool = False
    reference: tuple[int, int] = (0, 0)
    empty: tuple[int, int] = (0, 0)
    build_seconds: float = 0.0
    test_seconds: float = 0.0
    seconds: float = 0.0

    def to_body(self) -> dict[str, object]:
        """Return it as a row of the database has it."""
        body: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        found = [{name: getattr(one, name) for name in one.__slots__} for one in self.findings]
        return body | {"findings": found, "reference": list(self.reference), "empty": list(self.empty)}

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> Checked:
        """Read a row of the database."""
        found = body.get("findings")
        return cls(
            text_of(body, "instance_id"),
            tuple(_finding(one) for one in found) if isinstance(found, list) else (),
            True,
            _count(body.get("reference")),
            _count(body.get("empty")),
            *(seconds_of(body, name) for name in ("build_seconds", "test_seconds", "seconds")),
        )


def _finding(body: Mapping[str, object]) -> Finding:
    names = ("task", "check", "where", "what")
    texts = {name: text_of(body, name) for name in names}
    return Finding(**texts, severity=Severity(text_of(body, "severity")), tests=texts_of(body, "tests"))


def _count(value: object) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, list) else (0, 0)


def check_set(
    tasks: Sequence[Task],
    image_of: ImageOf | None,
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

    The same call again resumes: a task is taken over if neither its row nor its image has changed. Checks of rows
    are repeated each time.

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
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; what was finished is kept.
    """
    if repeat < 1:
        raise InvalidValue(f"repeat is {repeat}", hint="give 1 or more")
    with opened(CheckDirectory, out, {"repeat": repeat, "timeout": timeout}) as results:
        if image_of is not None and build is not None:
            build(tasks)
        work = partial(_prepare, repeat=repeat, timeout=timeout)
        found = carry_out(
            [] if image_of is None else [Job(task.instance_id, partial(work, task), task) for task in tasks],
            results,
            image_of=image_of or _no_image,
            workers=workers,
            again=lambda _: False,
            tell=partial(_tell, progress),
        )
    twin = twins(tasks)
    checked = []
    for task in tasks:
        name = task.instance_id
        one = Checked.from_body(found[name].body) if name in found else Checked(name, ())
        about_row = findings(Evidence(task, twin.get(name, "")), Needs.ROW)
        checked.append(replace(one, findings=about_row + one.findings))
    return (*checked, *map(_refused, refused))


def _refused(error: Refused) -> Checked:
    place = error.what.partition(": ")[0]
    check = CHECKS[unusable_row.__name__]
    return Checked(place, (Finding(place, check.name, check.severity, "", str(error)),))


def _no_image(task: Task) -> Image:
    raise NotFound(f"{task.instance_id} has no image")


def _tell(progress: Callable[[Progress[Checked]], None] | None, news: Progress[Result]) -> None:
    if progress is not None:
        latest = Checked.from_body(news.latest.body)
        progress(Progress(news.done, news.total, latest, news.resumed, news.seconds_left))


def _prepare(task: Task, image_of: ImageOf, *, repeat: int, timeout: float | None) -> Work:
    image = prepared_image(task, image_of)
    return Work(fingerprint(task, image, _VERSION), partial(_check, task, image, repeat, timeout))


def _check(
    task: Task, image: Image | MiniSandboxError, repeat: int, timeout: float | None
) -> tuple[Mapping[str, object], bool]:
    """Check a task; what kept us from it is a finding, and not final."""
    began = time.monotonic()
    seen = gather(task, image, repeat=repeat, timeout=timeout)
    found = findings(seen, Needs.IMAGE, Needs.RUNS)
    reference, empty = ((), ()) if seen.validation is None else (seen.validation.reference, seen.validation.empty)
    checked = Checked(
        task.instance_id,
        found,
        True,
        _passed(reference),
        _passed(empty),
        seen.build_seconds,
        max((run.duration for run in reference + empty), default=0.0),
        time.monotonic() - began,
    )
    return checked.to_body(), all(one.check not in _NOT_FINAL for one in found)


def _passed(runs: Sequence[Grade]) -> tuple[int, int]:
    return sum(bool(run.resolved) for run in runs), len(runs)


def gather(task: Task, image: Image | MiniSandboxError, *, repeat: int = 2, timeout: float | None = None) -> Evidence:
    """Run a task, and return what its checks need.

    Args:
        task: the task.
        image: its image, or why there is none.
        repeat: how often the reference and the untouched code are tested.
        timeout: seconds that a run of tests may take; the task's own if None.
    """
    limit = task.grader.timeout if timeout is None else timeout
    if isinstance(image, MiniSandboxError):
        ours = isinstance(image, IndexUnavailable)
        return Evidence(task, timeout=limit, unbuilt=None if ours else image, failure=image if ours else None)
    seen = Evidence(task, timeout=limit)
    with suppress(NotFound):  # a layer that was collected meanwhile
        seen = replace(seen, build_seconds=sum(one.seconds for one in image.records()))
    try:
        found = validate(task, image, runs=repeat, timeout=timeout)
        seen = replace(seen, validation=found)
        if repeat > 1 and found.reference[0].resolved and isinstance(task.grader, PytestGrader):
            seen = replace(seen, reordered=_reordered(task, image, timeout))
        if _is_told_apart(found):
            seen = replace(seen, forged=forgeable(task, image, timeout))
    except MiniSandboxError as error:
        return replace(seen, failure=error)
    return seen


def _is_told_apart(found: Validation) -> bool:
    return all(run.resolved for run in found.reference) and all(run.resolved is False for run in found.empty)


def _reordered(task: Task, image: Image, timeout: float | None) -> Grade | None:
    """Run the reference with the test files in reverse order; None where there is one file."""
    place = workspace_for(task, image, timeout)
    if len(place.files) < 2:
        return None
    return judge(task, replace(place, files=place.files[::-1]).run(reference_change(task)))
