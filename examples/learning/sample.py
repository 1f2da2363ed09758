"""Run rollouts of a model, and write a line per rollout: to evaluate it, or to choose rows for fine-tuning.

python -m examples.learning.sample MODEL TASKS --attempts 16 --known OUTCOMES -o rollouts.jsonl

The same command resumes after an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.learning.environment import Outcome, open_thread
from examples.learning.outcomes import Known

from minisandbox.models import Sampling
from minisandbox.models.engine import TransformersEngine
from minisandbox.models.protocol import seed_of
from minisandbox.rollouts.setup import Draw
from minisandbox.store.disk.durable import write_atomic
from minisandbox.tasks import Task, TaskSet
from minisandbox.train.evaluation import pass_at
from minisandbox.train.groups import tasks_of_step

TRIES = 3
"""Tries of a rollout that an infrastructure error ended."""


def main() -> None:
    """Run rollouts."""
    parser = argparse.ArgumentParser(description="run rollouts of a model on tasks")
    parser.add_argument("model", type=Path, help="the model's directory")
    parser.add_argument("tasks", help="a task set")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--known", type=Path, required=True, help="the file of the tests' outcomes")
    parser.add_argument("--attempts", type=int, default=16, help="rollouts per task")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of all sampling, and of the order of --like-rl")
    parser.add_argument("--turns", type=int, default=6, help="maximum responses per rollout")
    parser.add_argument("--max-tokens", type=int, default=8, help="maximum tokens per response")
    parser.add_argument("--first", type=int, metavar="N", help="use only the first N tasks of a shuffled set")
    parser.add_argument(
        "--like-rl", type=int, nargs=2, metavar=("STEPS", "TASKS"),
        help="run the rollouts of that many steps of reinforcement learning, with --attempts as the groups' size",
    )  # fmt: skip
    args = parser.parse_args()
    tasks = {task.instance_id: task for task in TaskSet.load(args.tasks)}
    names = chosen(tuple(tasks), args.attempts, args.seed, args.like_rl, args.first)
    engine = TransformersEngine.load(args.model, max_batch=16)
    known, part = Known(args.known), args.out.with_suffix(".part")
    sampling = Sampling(args.temperature, max_tokens=args.max_tokens)
    with open_thread(engine, known, steps=args.turns, agents=8) as thread:

        async def run(task: Task, attempt: int) -> None:
            draw = Draw(sampling, seed_of(args.seed, task.instance_id, attempt))
            for _ in range(TRIES):
                trajectory = await thread.rollout(task, attempt=attempt, draw=draw)
                if trajectory.reward is not None:
                    break
            row = max(trajectory.rows, key=lambda row: sum(row.mask), default=None)
            tokens = {} if row is None else {"input_ids": list(row.ids), "loss_mask": list(row.mask)}
            line = asdict(Outcome.of(trajectory)) | {"traj_id": f"{task.instance_id}__{attempt}"} | tokens
            with part.open("a") as file:
                file.write(json.dumps(line) + "\n")

        async def run_all() -> None:
            done = {(line["task"], line["attempt"]) for line in finished(part)}
            await asyncio.gather(*(run(tasks[task], attempt) for task, attempt in names if (task, attempt) not in done))

        asyncio.run(run_all())
    order = {name: number for number, name in enumerate(names)}
    outcomes = sorted(finished(part), key=lambda line: order[str(line["task"]), int(str(line["attempt"]))])
    write_atomic(args.out, "".join(f"{json.dumps(line)}\n" for line in outcomes).encode())
    part.unlink()
    print(summary(outcomes, args.attempts))


def finished(part: Path) -> list[dict[str, object]]:
    """Return the rollouts that an interrupted command has written; remove a line that is cut off."""
    text = part.read_text() if part.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        part.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def chosen(
    tasks: Sequence[str], attempts: int, seed: int, like_rl: Sequence[int] | None = None, first: int | None = None
) -> list[tuple[str, int]]:
    """Return the tasks and attempt numbers of all rollouts.

    Args:
        tasks: ids of the tasks.
        attempts: rollouts per task, or per task and step.
        seed: seed of the order.
        like_rl: numbers of steps and of tasks per step, for the rollouts of reinforcement learning with this seed.
        first: the number of tasks to use; None for all.
    """
    if like_rl is not None:
        steps, count = like_rl
        uses: Counter[str] = Counter()
        for step in range(steps):
            uses.update(tasks_of_step(tasks, count, step, seed)[0])
        return [(task, attempt) for task, times in uses.items() for attempt in range(times * attempts)]
    kept = tasks if first is None else tasks_of_step(tasks, min(first, len(tasks)), 0, seed)[0]
    return [(task, attempt) for task in kept for attempt in range(attempts)]


def summary(outcomes: Sequence[dict[str, object]], attempts: int) -> str:
    """Return a line with pass@k and the rate of cheats."""
    by_task: dict[object, list[float]] = {}
    for outcome in outcomes:
        if outcome["honest"] is not None:
            by_task.setdefault(outcome["task"], []).append(float(str(outcome["honest"])))
    rates = ", ".join(f"pass@{k} {value:.1%}" for k, value in pass_at(by_task.values(), attempts).items())
    cheats = sum(bool(outcome["cheated"]) for outcome in outcomes) / len(outcomes)
    return f"{len(outcomes)} rollouts: {rates}; {cheats:.1%} cheated"


if __name__ == "__main__":
    main()
