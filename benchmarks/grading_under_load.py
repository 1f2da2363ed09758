"""Grade honest passes on a loaded machine, with tight limits, and count the verdicts.

python benchmarks/grading_under_load.py [--gradings N] [--workers N] [--load N] [--times X] [--tasks GLOB...]

The submissions are the references of the bundled quickstart tasks; images that are not in the store (MINISANDBOX_STORE)
are built first. What the reference needs is measured on the machine as it is: the seconds of its tests, and the least
memory with which they pass. The limits of the gradings are --times that. Then --gradings gradings are made, --workers
at once, next to --load busy processes, which are ended whatever happens. Eight gradings at once are a load of 8.

It ends with 1 if a grading is anything but resolved, unconfirmed or infra_error: none of these passes may be called
tampered or failed, or have the reward 0.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from minisandbox.agents.baselines import apply_command
from minisandbox.grade import Grade, Verdict, grade
from minisandbox.grade.judging import SuiteRun
from minisandbox.grade.submission import reference_change
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image, build
from minisandbox.runs import as_finished
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet
from minisandbox.types import Limits
from minisandbox.values import MiB

_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
_ALLOWED = (Verdict.RESOLVED, Verdict.UNCONFIRMED, Verdict.INFRA_ERROR)
_MEMORY = tuple(int(16 * MiB * 1.25**step) for step in range(26))  # up to 4 GiB


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task's reference needs.

    Attributes:
        task: the task.
        image: its image.
        seconds: what its tests took, the longest of three runs.
        memory: the least bytes with which they passed.
    """

    task: Task
    image: Image
    seconds: float
    memory: int


def main() -> int:
    """Measure, load the machine, grade, and print one line; 0 if no honest pass was blamed."""
    options = _options()
    store = Store.open()
    needs = [_needs(task, build(task.recipe(), store=store, name=task.instance_id)) for task in _tasks(options.tasks)]
    for need in needs:
        print(f"{need.task.instance_id}: {need.seconds:.2f} s, {need.memory / MiB:.0f} MiB", flush=True)
    todo = list(itertools.islice(itertools.cycle(needs), options.gradings))
    began = time.monotonic()
    with _busy(options.load):
        grades = list(_grade_all(todo, options.times, options.workers))
    counts = Counter(one.verdict for one in grades)
    blamed = [one for one in grades if one.verdict not in _ALLOWED]
    zero = sum(one.reward == 0 for one in grades)
    print(
        f"{len(grades)} gradings of honest passes, {options.workers} at once, next to {options.load} busy processes, "
        f"limits {options.times:g} times the reference's needs, load average {os.getloadavg()[1]:.0f}, "
        f"{time.monotonic() - began:.0f} s: "
        f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in Verdict)}; {zero} with reward 0"
    )
    for one in blamed:
        print(f"  {one.instance_id}: {one.verdict}: {one.reason}: {one.detail}")
    return 1 if blamed or zero else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--gradings", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8, help="gradings at once")
    parser.add_argument("--load", type=int, default=0, help="busy processes next to them")
    parser.add_argument("--times", type=float, default=3.0, help="limits as a multiple of the reference's needs")
    parser.add_argument("--tasks", nargs="+", default=["*"], metavar="GLOB", help="of the quickstart tasks")
    return parser.parse_args()


def _tasks(patterns: Sequence[str]) -> TaskSet:
    return TaskSet.load("quickstart").select(patterns)


def _needs(task: Task, image: Image) -> Needs:
    """Measure what the reference needs: its time with the memory that is usual, then the least memory."""
    seconds = max(_reference_run(task, image, Limits()).duration for _ in range(3))
    memory = next(size for size in _MEMORY if _passes(task, image, size))
    return Needs(task, image, seconds, memory)


def _passes(task: Task, image: Image, memory: int) -> bool:
    run = _reference_run(task, image, Limits(memory=memory))
    return run.doubt is None and run.exit_code == 0


def _reference_run(task: Task, image: Image, limits: Limits) -> SuiteRun:
    return Workspace.of(task, image, limits=limits).run(reference_change(task))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _grade_all(todo: Sequence[Needs], times: float, workers: int) -> Iterator[Grade]:
    def one(needs: Needs) -> Grade:
        task, image = needs.task, needs.image
        limits = Limits(memory=int(times * needs.memory))
        submission = _submission(task, image)
        return grade(task, image, submission, timeout=times * needs.seconds, limits=limits)

    for number, (_, found) in enumerate(as_finished(one, todo, workers), 1):
        said = f": {found.reason}: {found.detail}" if found.verdict is not Verdict.RESOLVED else ""
        print(f"{number}/{len(todo)} {found.instance_id}: {found.verdict}{said}, {found.duration:.1f} s", flush=True)
        yield found


def _submission(task: Task, image: Image) -> bytes:
    """Return the patch of an agent that applies the reference."""
    with Sandbox.create(image.spec()) as box:
        box.exec(apply_command(task.reference), timeout=120.0).check()
        return box.patch()


if __name__ == "__main__":
    sys.exit(main())
