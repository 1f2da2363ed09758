"""Measure what grading honest passes costs, in runs of their tests, by policy of confirmation.

python benchmarks/grading_runs.py [TASKS] [--repo-mirrors DIR] [--pins DIR]
    [--environment auto|pins|image] [--only GLOB...] [--policies POLICY...]

The submissions are the references, screened as any other. Images that are not in the store (MINISANDBOX_STORE) are
built first; a task whose image cannot be built is named and left out. Which tests can be changed is checked before, as
`validate` does. The cost of a pass is the time of all its runs in runs of its tests: that of the first is 1. Prints a
line per task and policy, the mean and the 90th percentile. It ends with 1 if a pass is not resolved.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from minisandbox.agents.oracle import apply_command
from minisandbox.errors import MiniSandboxError
from minisandbox.grade import ONCE, Grade, grade
from minisandbox.grade.confirm.changeable import changeable_tests
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.submission import Change
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image, build
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet


def main() -> int:
    """Grade every task's reference with every policy; 0 if all are resolved."""
    options = _options()
    store = Store.open()
    tasks = TaskSet.load(
        options.tasks, pins=options.pins, repo_mirrors=options.repo_mirrors, environment=options.environment
    )
    costs: dict[str, list[float]] = {policy: [] for policy in options.policies}
    resolved: Counter[str] = Counter()
    for task in tasks.select(options.only):
        try:
            image = build(task.recipe(), store=store, name=task.instance_id, mirrors=options.repo_mirrors)
        except MiniSandboxError as error:
            print(f"{task.instance_id}: left out: {error.what}", flush=True)
            continue
        for policy in options.policies:
            found, seconds = count_runs(task, image, policy)
            flags = ", ".join(sorted({flag.kind for flag in found.flags})) or "no flags"
            cost = sum(seconds) / seconds[0] if seconds else 0.0
            print(
                f"{task.instance_id} {policy}: {found.verdict}, {len(seconds)} runs, cost {cost:.2f}, "
                f"{found.duration:.1f} s, {flags}",
                flush=True,
            )
            costs[policy].append(cost)
            resolved[policy] += found.verdict == "resolved"
    for policy, each in costs.items():
        print(f"{policy}: {resolved[policy]} of {len(each)} resolved, {_summary(each)}")
    return 0 if len({resolved[policy] for policy in options.policies}) == 1 else 1


def count_runs(task: Task, image: Image, policy: str) -> tuple[Grade, list[float]]:
    """Grade a task's reference as a submission; returns the grade, and the seconds of each run of tests.

    What is found out once per task about the tests that can be changed is not counted.
    """
    changeable_tests(Workspace.of(task, image))
    submission, run, seconds = submission_of(task, image), Workspace.run, []

    def timed(
        self: Workspace, change: Change, edited: Mapping[str, bytes] | None = None, chosen: Sequence[str] = ()
    ) -> SuiteRun:
        start = time.monotonic()
        try:
            return run(self, change, edited, chosen)
        finally:
            seconds.append(time.monotonic() - start)

    with mock.patch.object(Workspace, "run", timed):
        return grade(task, image, submission, confirm=policy), seconds


def _summary(costs: Sequence[float]) -> str:
    """Return the mean and the 90th percentile of costs, and the load, as text."""
    if not costs:
        return "no pass"
    high = sorted(costs)[max(0, -(-9 * len(costs) // 10) - 1)]
    load = os.getloadavg()[0]
    return f"mean cost {sum(costs) / len(costs):.2f}, 90th percentile {high:.2f} runs of tests; load {load:.1f}"


def submission_of(task: Task, image: Image) -> bytes:
    """Return the patch of an agent that applies the reference."""
    with Sandbox.create(image.spec()) as box:
        box.exec(apply_command(task.reference), timeout=120.0).check()
        return box.patch()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("tasks", nargs="?", default="quickstart", help="a task set (default: the bundled one)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="ids of tasks")
    parser.add_argument("--policies", nargs="+", default=[ONCE], metavar="POLICY")
    parser.add_argument("--repo-mirrors", type=Path, metavar="DIR", help="git repositories to look in first")
    parser.add_argument("--pins", type=Path, metavar="DIR", help="exported environments of the official images")
    parser.add_argument("--environment", default="auto", help="what images are made of: auto, pins or image")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
