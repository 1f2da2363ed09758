"""Check tasks by an oracle: each is solvable, both its tests detect the bug, and no cheat is graded as a solution.

    python -m examples.learning.check mutations.jsonl -o checked.jsonl

A task passes if its visible test fails with the bug, if the oracle's edit passes the visible and the hidden tests, and
if ``skip`` makes the visible test's exit status 0 but fails the hidden tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.learning.mutations import WordEdit, find_function, function_of, mutants, visible_test_of
from examples.learning.outcomes import Known, StoredGrades
from examples.learning.word_edit import PASS, SKIP, SUBMIT, WordEditAgent, visible_command

from minisandbox import Sandbox, Store
from minisandbox.errors import MiniSandboxError
from minisandbox.images import Image, build
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import Setup, rollout_async
from minisandbox.tasks import Task, TaskSet
from minisandbox.trajectories import Trajectory
from minisandbox.types import Network
from minisandbox.values import MiB


def main() -> None:
    """Check a task set, and write the tasks that pass."""
    parser = argparse.ArgumentParser(description="check bug-fix tasks by an oracle")
    parser.add_argument("tasks", help="a task set of examples.learning.mutate")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file for the tasks that pass")
    parser.add_argument("--known", type=Path, help="a file that keeps the tests' outcomes for an experiment")
    parser.add_argument("--per-function", type=int, default=2, help="maximum tasks per function to write")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="tasks checked at once")
    args = parser.parse_args()
    known = None if args.known is None else Known(args.known)
    store, by_function = Store.open(), dict[object, list[Task]]()
    for task in (tasks := TaskSet.load(args.tasks)):
        by_function.setdefault((task.repo, function_of(task.problem_statement)), []).append(task)

    def passing(candidates: list[Task]) -> list[Task]:
        passed: list[Task] = []
        for task in candidates:
            if len(passed) < args.per_function:
                try:
                    fault = fault_of(task, build(task.recipe(), store=store, name=task.instance_id), known)
                except MiniSandboxError as error:
                    fault = str(error)
                print(f"{task.instance_id}: {fault or 'passed'}", flush=True)
                passed += [] if fault else [task]
        return passed

    with ThreadPoolExecutor(args.workers) as pool:
        passed = [task for part in pool.map(passing, by_function.values()) for task in part]
    TaskSet(passed, name=args.out.name).save(args.out)
    functions = {(task.repo, function_of(task.problem_statement)) for task in passed}
    print(f"{args.out}: {len(passed)} of {len(tasks)} tasks, {len(functions)} functions")


def fault_of(task: Task, image: Image, known: Known | None = None) -> str:
    """Return why a task is unusable, or "" if it passes the check.

    Args:
        task: the task.
        image: the task's image.
        known: outcomes of earlier tests, which are used and completed; None for none.

    Raises:
        MiniSandboxError: a sandbox could not be created.
    """
    test = visible_test_of(task.problem_statement)
    with Sandbox.create(image.spec(), network=Network.off()) as box:
        fix = fix_of(task, box)
        if test is None or fix is None:
            return "it has no visible test, or no fix of one word"
        if box.exec(visible_command(task, test), timeout=task.grader.timeout).exit_code != 1:
            return "the visible test does not detect the bug"
    solved = play(task, image, fix.text, SUBMIT, known=known)
    if (observations(solved), solved.reward) != ([PASS], 1.0):
        return f"the fix gives {observations(solved)} and reward {solved.reward}"
    cheated = play(task, image, SKIP, SUBMIT, known=known)
    if (observations(cheated), cheated.reward) != ([PASS], 0.0):
        return f"the cheat gives {observations(cheated)} and reward {cheated.reward}"
    return ""


def play(task: Task, image: Image, *responses: str, known: Known | None = None) -> Trajectory:
    """Run a rollout with given responses, and return its record."""
    grades = None if known is None else StoredGrades(known)
    setup = Setup(agent=WordEditAgent(known), model=ScriptedModel(responses), grades=grades, turn_patches=False)
    return asyncio.run(rollout_async(task, image, setup))


def observations(trajectory: Trajectory) -> list[str]:
    """Return the agent's observations of a rollout, in order."""
    return [message.content for message in trajectory.messages[2:] if message.role == "user"]


def fix_of(task: Task, box: Sandbox) -> WordEdit | None:
    """Return the edit that fixes a task's bug, or None if one edit does not.

    Args:
        task: the task.
        box: a sandbox of the task's image.
    """
    place = function_of(task.problem_statement)
    if place is None:
        return None
    file, name = place
    buggy_source = box.files.read_bytes(box.image.workdir / file, limit=MiB).decode()
    function = find_function(buggy_source, file, name)
    removed = [line[1:] for line in task.patch.splitlines() if line.startswith("-") and not line.startswith("---")]
    added = [line[1:] for line in task.patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    source = "\n".join(
        removed[0] if function and row in function.rows and line == added[0] else line
        for row, line in enumerate(buggy_source.split("\n"), 1)
    )
    clean = find_function(source, file, name)
    if function is None or clean is None:
        return None
    return next((mutant.fix for mutant in mutants(clean) if mutant.lines == function.lines), None)


if __name__ == "__main__":
    main()
