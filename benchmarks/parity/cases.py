"""Grading the reference, the empty patch and the broken variants of one task, and keeping what was found."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.parity.variants import reference_patch, touched_module, unimportable, with_a_change, without_the_end

from minisandbox.errors import FileAccessError
from minisandbox.grade import Grade, Verdict
from minisandbox.grade.grading import grade_in
from minisandbox.grade.judging import SuiteRun, judge
from minisandbox.grade.submission import CodePatch, reference_change
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image
from minisandbox.runs import write_whole
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task

REFERENCE, EMPTY = "reference", "empty"
VARIANTS = (REFERENCE, EMPTY, "shortened", "changed", "unimportable")
"""The reference; nothing; it without its end, with one thing changed, and with a module that cannot be imported."""
_BELIEVED = frozenset({Verdict.RESOLVED, Verdict.FAILED})


@dataclass(frozen=True, slots=True)
class Case:
    """One graded patch.

    Attributes:
        instance_id: the task's id.
        variant: which of :data:`VARIANTS`.
        key: a hash of what it rests on: the row, the image, the patch.
        patch: the patch; forwards.
        verdict: ours.
        reason: of our verdict.
        detail: of our verdict.
        doubt: why the run of the tests, or a pass of it, is not believed; empty where it is.
        not_passed: the named tests that did not count as passed.
        exit_code: the test command's exit status.
        seconds: what grading took.
        log: the name of the file with what the test command printed; empty where no run got that far.
        flags: the kinds of flags that the grade has.
    """

    instance_id: str
    variant: str
    key: str
    patch: str
    verdict: str
    reason: str
    detail: str
    doubt: str
    not_passed: tuple[str, ...]
    exit_code: int | None
    seconds: float
    log: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the case is called."""
        return f"{self.instance_id}.{self.variant}"


@dataclass(frozen=True)
class Recorded(Workspace):
    """A workspace that keeps its runs, and makes the reference's own run, the control, once."""

    runs: list[SuiteRun] = field(default_factory=list)
    references: list[SuiteRun] = field(default_factory=list)

    def run(self, change: CodePatch, edited: Mapping[str, bytes] | None = None, chosen: Sequence[str] = ()) -> SuiteRun:
        """Run the tests, unless this is the control and there is one already; see :meth:`.Workspace.run`."""
        control = edited is None and not chosen and change == reference_change(self.task)
        if control and self.references:
            return self.references[0]
        found = Workspace.run(self, change, edited, chosen)
        (self.references if control else self.runs).append(found)
        return found


def grade_cases(
    task: Task, image: Image, out: Path, timeout: float | None, go_on: Callable[[], bool]
) -> Iterator[Case]:
    """Grade all variants of a task's reference; what an earlier call has finished is taken over.

    Args:
        task: the task.
        image: its image.
        out: the run's directory.
        timeout: seconds that one run of tests may take; the task's own if None.
        go_on: asked before each grading.
    """
    recorded: list[SuiteRun] = []
    for variant, patch in variants(task, image).items():
        key = hashlib.sha256("\0".join((str(task.to_row()), image.key, patch)).encode()).hexdigest()
        file = out / "cases" / f"{task.instance_id}.{variant}.json"
        known = read_case(file)
        if known is not None and known.key == key:
            yield known
            continue
        if not go_on():
            return
        base = Workspace.of(task, image, timeout=timeout)
        place = Recorded(base.image, base.task, base.files, base.timeout, base.limits, references=recorded)
        case = _graded(place, variant, patch, key, out)
        if case.verdict not in (Verdict.UNCONFIRMED, Verdict.INFRA_ERROR):
            write_whole(file, json.dumps(asdict(case), indent=1).encode() + b"\n")
        yield case


def read_case(file: Path) -> Case | None:
    """Return a finished case, or None."""
    try:
        body = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return Case(**{**body, "not_passed": tuple(body["not_passed"]), "flags": tuple(body["flags"])})


def variants(task: Task, image: Image) -> dict[str, str]:
    """Return the patches to grade, by their names."""
    patch = reference_patch(task)
    module, is_new = touched_module(patch)
    top = "" if is_new else _top_of(image, module)
    # a reference of one line has no shorter form: it gets a second change
    shortened = without_the_end(patch) or with_a_change(patch, f"{task.instance_id} shortened")
    changed = with_a_change(patch, task.instance_id)
    return dict(zip(VARIANTS, (patch, "", shortened, changed, unimportable(patch, top)), strict=True))


def _top_of(image: Image, module: str) -> str:
    with Sandbox.create(image.spec()) as box:
        try:
            return box.files.read_bytes(image.workdir / module, limit=1 << 24).decode("utf-8", "surrogateescape")
        except FileAccessError as error:
            raise ValueError(f"{module} is not in the image {image.name}") from error


def _graded(place: Recorded, variant: str, patch: str, key: str, out: Path) -> Case:
    """Grade one patch: the reference and nothing as validation does it, the others as submissions."""
    began = time.monotonic()
    task = place.task
    if variant in (REFERENCE, EMPTY):
        run: SuiteRun | None = place.run(reference_change(task) if variant == REFERENCE else CodePatch())
        assert run is not None
        grade = judge(task, run)
    else:
        grade = grade_in(place, patch.encode("utf-8", "surrogateescape"))
        run = place.runs[0] if place.runs else None
    # of a run that came to nothing there is the end only, which is all of it where nothing started
    printed = "" if run is None else run.whole_log or run.log
    log = f"{task.instance_id}.{variant}.log" if printed else ""
    if log:
        write_whole(out / "logs" / log, printed.encode("utf-8", "surrogateescape"))
    return Case(
        task.instance_id,
        variant,
        key,
        patch,
        grade.verdict,
        grade.reason,
        grade.detail,
        _doubt(grade, run),
        grade.failed_fail_to_pass + grade.failed_pass_to_pass,
        grade.exit_code,
        time.monotonic() - began,
        log,
        tuple(sorted({flag.kind for flag in grade.flags})),
    )


def _doubt(grade: Grade, run: SuiteRun | None) -> str:
    if run is None:
        return f"not run: {grade.reason}"
    if run.doubt is not None:
        return f"{run.doubt.reason}: {run.doubt.detail}"
    return "" if grade.verdict in _BELIEVED else f"{grade.reason}: {grade.detail}"
