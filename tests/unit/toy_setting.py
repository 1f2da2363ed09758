"""Rollouts without sandboxes: the model is asked twice, and a rule says what its answers are worth.

As a program it trains: ``python -m tests.unit.toy_setting CONFIG STEP``; in that step's rollouts it kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.agents import EmptyAgent, Ending, OracleAgent, Session
from minisandbox.models import Message, Model, Request, Sampling, TokenGraph
from minisandbox.models.protocol import SeededModel
from minisandbox.tasks import Task
from minisandbox.train.config import Checkpoints, Groups, Optimizer, Policy, RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted

Rule = Callable[[Wanted, str], float | None]


def few_letters(_wanted: Wanted, text: str) -> float:
    """Half of a random model's answers or so."""
    return float(sum(map(str.isalpha, text)) > len(text) / 2)


@dataclass
class Toy:
    """Does rollouts of a toy."""

    model: Model
    rule: Rule
    before: Callable[[Wanted], object]
    turns: int = 2

    async def run(self, wanted: Wanted) -> Result:
        self.before(wanted)
        model, graph, texts = SeededModel(self.model, wanted.seed), TokenGraph(), []
        messages = [Message("user", f"the tests of {wanted.task} fail")]
        for _ in range(self.turns):
            sampling = Sampling(max_tokens=6, temperature=0.8)
            answer = await model.complete(Request(tuple(messages), sampling=sampling, session=wanted.name))
            assert answer.tokens is not None
            graph.add(answer.tokens)
            texts.append(answer.message.content)
            messages += [answer.message, Message("user", "and now")]
        return Result(wanted, self.rule(wanted, "".join(texts)), graph.rows())


@dataclass
class ToySetting:
    """Where rollouts are done in tests."""

    rule: Rule = few_letters
    before: Callable[[Wanted], object] = lambda _: None
    tasks: Sequence[str] = ("add", "sub", "mul", "div", "neg")
    held_out: Sequence[str] = ()
    wrap: Callable[[Rollouts], Rollouts] = lambda one: one
    closed: list[bool] = field(default_factory=list)

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
        return Toy(model, self.rule, self.before) if held_out else self.wrap(Toy(model, self.rule, self.before))

    def close(self) -> None:
        self.closed.append(True)


def toy_config(model: Path, out: Path) -> RlConfig:
    return RlConfig(
        model=str(model), tasks=("toy",), out=str(out), steps=4, groups=Groups(tasks=2, size=4),
        policy=Policy(temperature=0.8, deadline=60.0), micro_batch=4, loss_length=16, device="cpu",
        optimizer=Optimizer(learning_rate=3e-3, schedule="constant", warmup_steps=0, weight_decay=0.0),
        checkpoints=Checkpoints(every=2, keep=0), deterministic=True,
    )  # fmt: skip


class SometimesRight:
    """An agent whose model's answer decides whether it does the right thing or nothing."""

    name = "sometimes-right"
    needs_model = True

    async def run(self, task: Task, session: Session) -> Ending:
        session.say(Message("user", "the tests fail"))
        answer = await session.ask()
        right = few_letters(Wanted(task.instance_id, 0, 0), answer.message.content)
        return await (OracleAgent() if right else EmptyAgent()).run(task, session)


def main() -> None:
    from minisandbox.train.options import load  # noqa: PLC0415 - the program alone
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - the same

    config = load(RlConfig, sys.argv[1])
    fatal = int(sys.argv[2]) * config.groups.size * (1 + config.groups.redo) + 1

    def before(wanted: Wanted) -> None:
        if wanted.attempt == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    train_rl(replace(config), ToySetting(before=before))


if __name__ == "__main__":
    main()
