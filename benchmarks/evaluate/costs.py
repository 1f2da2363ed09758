"""What confirming an honest pass costs: the time of all its test runs, in units of the first run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from unittest import mock

from minisandbox.agents.baselines import apply_command
from minisandbox.grade import Grade, GradingOptions, Verdict, grade
from minisandbox.grade.confirm.changeable import changeable_tests
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.submission import CodePatch
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task


def print_costs(images: Sequence[tuple[Task, Image]]) -> bool:
    """Grade every reference as a submission, by the default policy; return whether all are resolved."""
    costs, policy = [], GradingOptions().confirm
    for task, image in images:
        result, runs = count_runs(task, image, policy)
        if result.verdict is Verdict.RESOLVED:
            costs.append(result.duration / runs[0])
        times = ", ".join(f"{seconds:.1f}" for seconds in runs)
        print(f"{task.instance_id}: {result.verdict}, {len(runs)} runs of {times} s in {result.duration:.1f} s, "
              f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    ninetieth = statistics.quantiles(costs, n=10, method="inclusive")[-1]
    print(f"policy {policy}: {len(costs)} of {len(images)} resolved, each for {statistics.fmean(costs):.2f} runs of "
          f"its tests on average, 90th percentile {ninetieth:.2f}")  # fmt: skip
    return len(costs) == len(images)


def count_runs(task: Task, image: Image, policy: str) -> tuple[Grade, list[float]]:
    """Grade a task's reference as a submission; return the grade, and the seconds of each run of tests.

    The one search per task for tests that can be changed is not counted.
    """
    changeable_tests(Workspace.of(task, image))
    submission, run, seconds = submission_of(task, image), Workspace.run, []

    def timed(
        self: Workspace, change: CodePatch, edited: Mapping[str, bytes] | None = None, chosen: Sequence[str] = ()
    ) -> SuiteRun:
        start = time.monotonic()
        try:
            return run(self, change, edited, chosen)
        finally:
            seconds.append(time.monotonic() - start)

    with mock.patch.object(Workspace, "run", timed):
        return grade(task, image, submission, confirm=policy), seconds


def submission_of(task: Task, image: Image) -> bytes:
    """Return the patch of an agent that applies the reference."""
    with Sandbox.create(image.spec()) as box:
        box.exec(apply_command(task.reference), timeout=120.0).check()
        return box.patch()
