"""Evaluating predictions: the grade of each, several at once, in a directory where it goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError
from minisandbox.grade.grading import grade, grade_reference, grade_untouched
from minisandbox.grade.options import FLAGGED, recorded_policy
from minisandbox.grade.sets.predictions import EMPTY, GOLD, Prediction
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
from minisandbox.grade.verdict import Flag, Grade, Reason, Verdict
from minisandbox.store.results import Result
from minisandbox.store.rundir import RunDirectory
from minisandbox.tasks import Task
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

EMPTY_PATCH = "empty_patch"
"""The verdict on a prediction without a patch: nothing is run for it, as swebench has it."""
MALFORMED = "malformed"
"""The verdict on a prediction that cannot be used."""

Grader = Callable[[Task, "Image", Prediction], Grade]


class EvaluationDirectory(RunDirectory):
    """The directory of an evaluation."""

    kind = "minisandbox-evaluation"
    folders = ("logs",)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation keeps of a prediction.

    Attributes:
        instance_id: the task's id.
        repo: the task's repository.
        model: whose prediction it is.
        verdict: of its grade; ``empty_patch`` or ``malformed`` without a grade.
        reason: of its grade.
        detail: the same in a sentence.
        flags: what screening found.
        failed_fail_to_pass: the FAIL_TO_PASS tests that did not pass.
        failed_pass_to_pass: the PASS_TO_PASS tests that did not pass.
        seconds: what grading it took, without building.
        log: the end of what the tests printed.
    """

    instance_id: str
    repo: str
    model: str
    verdict: str
    reason: str = ""
    detail: str = ""
    flags: tuple[Flag, ...] = ()
    failed_fail_to_pass: tuple[str, ...] = ()
    failed_pass_to_pass: tuple[str, ...] = ()
    seconds: float = 0.0
    log: str = ""

    @property
    def resolved(self) -> bool:
        """Whether it resolves its task."""
        return self.verdict == Verdict.RESOLVED

    @property
    def finished(self) -> bool:
        """Whether there is a verdict about it; otherwise it is evaluated again when the run goes on."""
        return self.verdict not in (Verdict.UNCONFIRMED, Verdict.INFRA_ERROR)

    def to_body(self) -> dict[str, object]:
        """Return it as a row of the database has it."""
        body: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return body | {"flags": [[one.kind, one.path, one.detail] for one in self.flags]}

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> Evaluated:
        """Read a row of the database."""
        names = ("instance_id", "repo", "model", "verdict", "reason", "detail", "log")
        flags = body.get("flags")
        return cls(
            **{name: text_of(body, name) for name in names},
            flags=tuple(Flag(*one) for one in flags) if isinstance(flags, list) else (),
            failed_fail_to_pass=texts_of(body, "failed_fail_to_pass"),
            failed_pass_to_pass=texts_of(body, "failed_pass_to_pass"),
            seconds=seconds_of(body, "seconds"),
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of evaluating predictions.

    Attributes:
        tasks: the tasks, with or without a prediction.
        predictions: those for one of the tasks, in the order of the tasks.
        results: one for each, in the same order.
        unknown: predictions for tasks that are not there.
    """

    tasks: tuple[Task, ...]
    predictions: tuple[Prediction, ...]
    results: tuple[Evaluated, ...]
    unknown: tuple[Prediction, ...] = ()


def run_evaluation(
    tasks: Iterable[Task],
    predictions: Iterable[Prediction],
    image_of: ImageOf | None,
    *,
    out: Path | None = None,
    workers: int = 1,
    timeout: float | None = None,
    confirm: str = FLAGGED,
    limits: Limits | None = None,
    config: Mapping[str, str] | None = None,
    build: Callable[[Sequence[Task]], None] | None = None,
    progress: Callable[[Progress[Evaluated]], None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Evaluation:
    """Grade predictions, several at once, and keep each grade in a run directory as it ends.

    The same call again resumes: predictions that have a verdict are taken over if neither their
    patch nor their task nor its image has changed; unconfirmed ones and those at which we failed are graded again.

    Args:
        tasks: the tasks.
        predictions: at most one for each task.
        image_of: returns a task's image; called by several threads at once. None where it is done elsewhere.
        out: the run directory; None to keep nothing.
        workers: predictions at once.
        timeout: seconds that the tests may take; each task's own if None.
        confirm: which passes are confirmed, as for :func:`.grade`.
        limits: what each sandbox may use.
        config: what else describes the run; going on with it needs the same.
        build: called once with the tasks whose images are needed: building many together is faster.
        progress: called on this thread for every one that ends, those that were finished before included.
        elsewhere: does it, with images of its own: the nodes of a cluster (:class:`.ClusterChecks`).

    Raises:
        InvalidValue: ``workers`` is less than 1.
        RunError: the directory is in use or belongs to another run.
        DiskFull: the disk is full; what was finished is kept.
    """
    everything, given = tuple(tasks), {one.instance_id: one for one in predictions}
    chosen = tuple(task for task in everything if task.instance_id in given)
    mine = tuple(given[task.instance_id] for task in chosen)
    resolved = {**(config or {}), "timeout": timeout, "workers": workers, **recorded_policy(confirm)}
    grader = partial(_grade, timeout=timeout, limits=limits, confirm=confirm)
    with opened(EvaluationDirectory, out, resolved) as results:
        if build is not None:
            build([task for task, one in zip(chosen, mine, strict=True) if not _is_clear(one)])
        found = carry_out(
            [
                Job(task.instance_id, partial(_prepare, task, one, grader), None if _is_clear(one) else task)
                for task, one in zip(chosen, mine, strict=True)
            ],
            results,
            image_of=image_of,
            workers=workers,
            again=lambda _: False,
            tell=partial(_tell, progress),
            elsewhere=elsewhere,
        )
    ids = {task.instance_id for task in everything}
    return Evaluation(
        everything,
        mine,
        tuple(Evaluated.from_body(found[task.instance_id].body) for task in chosen),
        tuple(one for name, one in given.items() if name not in ids),
    )


def _tell(progress: Callable[[Progress[Evaluated]], None] | None, news: Progress[Result]) -> None:
    if progress is not None:
        latest = Evaluated.from_body(news.latest.body)
        progress(Progress(news.done, news.total, latest, news.resumed, news.seconds_left))


def _grade(
    task: Task, image: Image, prediction: Prediction, *, timeout: float | None, limits: Limits | None, confirm: str
) -> Grade:
    if prediction.stands_for == GOLD:
        return grade_reference(task, image, timeout=timeout, limits=limits, confirm=confirm)
    if prediction.stands_for == EMPTY:
        return grade_untouched(task, image, timeout=timeout, limits=limits)
    return grade(task, image, prediction.patch, timeout=timeout, limits=limits, confirm=confirm)


def _is_clear(prediction: Prediction) -> bool:
    """Whether there is nothing to run for it."""
    return bool(prediction.problem) or prediction.is_empty


def _prepare(task: Task, prediction: Prediction, grader: Grader, image_of: ImageOf) -> Work:
    said = (prediction.model, prediction.problem, prediction.stands_for, hashlib.sha256(prediction.patch).hexdigest())
    if _is_clear(prediction):
        verdict, detail = (MALFORMED, prediction.problem) if prediction.problem else (EMPTY_PATCH, "")
        done = Evaluated(task.instance_id, task.repo, prediction.model, verdict, verdict, detail)
        return Work(fingerprint(task, None, *said), lambda: (done.to_body(), True))
    image = prepared_image(task, image_of)
    return Work(fingerprint(task, image, *said), partial(_evaluate, task, image, prediction, grader))


def _evaluate(
    task: Task, image: Image | MiniSandboxError, prediction: Prediction, grader: Grader
) -> tuple[Mapping[str, object], bool]:
    """Grade a prediction; what keeps us from it is a result, and not final."""
    began = time.monotonic()
    try:
        if isinstance(image, MiniSandboxError):
            raise image
        graded = grader(task, image, prediction)
    except MiniSandboxError as error:
        detail = f"{type(error).__name__}: {error}"
        graded = Grade(task.instance_id, Verdict.INFRA_ERROR, Reason.INFRASTRUCTURE, detail)
    found = Evaluated(
        task.instance_id,
        task.repo,
        prediction.model,
        graded.verdict,
        graded.reason,
        graded.detail,
        graded.flags,
        graded.failed_fail_to_pass,
        graded.failed_pass_to_pass,
        time.monotonic() - began,
        graded.log,
    )
    return found.to_body(), found.finished
