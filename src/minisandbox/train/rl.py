"""On-policy reinforcement learning: run a step's rollouts, check their tokens, update the policy, evaluate.

:class:`.policy.PolicyLearner` has the weights. If several processes train, rank 0 runs the rollouts and sends their
rows to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from minisandbox.errors import InvalidValue, TokenMismatch
from minisandbox.models import Model
from minisandbox.train.config import RlConfig
from minisandbox.train.engines import check_engine, open_engine
from minisandbox.train.evaluation import Evaluator, Score, scores_of
from minisandbox.train.groups import Gatherer, Rollouts, tasks_of_step
from minisandbox.train.plan import prepare
from minisandbox.train.progress import RolloutProgress, describe_step, warnings_of
from minisandbox.train.rows import Gaps, Rounding, TrainingRow
from minisandbox.train.running import TrainingRun, require_training, step_of, translate_disk_full
from minisandbox.train.sft import Tell

T = TypeVar("T")
MAY_CHANGE = frozenset(
    {
        "out",
        "steps",
        "workers",
        "gradings",
        "engine_cache",
        "checkpoints.every",
        "checkpoints.keep",
        "report_to",
        "check_tokens",
        "vllm.memory",
        "vllm.url",
        "vllm.group_port",
    }
)
"""Options that may change when a run resumes, because the training data does not depend on them."""


class Environment(Protocol):
    """The interface by which the training loop runs rollouts, in sandboxes or in a substitute for them."""

    @property
    def tasks(self) -> Sequence[str]:
        """Ids of the tasks to train on."""
        ...

    @property
    def held_out(self) -> Sequence[str]:
        """Ids of the tasks to evaluate on."""
        ...

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
        """Return an object that runs rollouts with a model.

        Args:
            model: the model that agents use.
            held_out: whether the rollouts are for evaluation, which may use other sampling options.
        """
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class RlResult:
    """The result of reinforcement learning.

    Attributes:
        model: the model's directory.
        steps: optimiser steps, including those of earlier calls.
        scores: the evaluations, by step.
    """

    model: Path
    steps: int
    scores: tuple[Score, ...]


def train_rl(
    config: RlConfig, environment: Environment, *, tell: Tell = lambda _: None, status: Tell = lambda _: None
) -> RlResult:
    """Train a model; a repeated call resumes from the last checkpoint.

    If several processes call it, as ``accelerate launch`` and ``torchrun`` start them, they share the weights.

    Args:
        config: the experiment's configuration.
        environment: runs the rollouts.
        tell: called with progress messages.
        status: called every second with the progress of a step's rollouts, for a terminal's status line.

    Raises:
        MissingExtra: the extra ``train`` is not installed.
        InvalidValue: the model cannot be opened, or there are fewer tasks than one step needs.
        TrainingError: no rollout of a step has a reward, or the training does not fit into memory.
        TokenMismatch: the trainer's log-probabilities differ from the sampler's.
        RunError: the directory belongs to another experiment, or another process trains there.
        DiskFull: a checkpoint cannot be written.
    """
    require_training(vllm=config.engine == "vllm")
    check_engine(config)
    prepare(config, tell)
    if len(environment.tasks) < config.groups.tasks:
        raise InvalidValue(
            f"a step needs {config.groups.tasks} tasks, and there are {len(environment.tasks)}",
            hint="lower groups.tasks",
        )
    with TrainingRun(Path(config.out), config, may_change=MAY_CHANGE) as run, asyncio.Runner() as runner:
        checkpoint = run.last_checkpoint()
        first_step = step_of(checkpoint)
        for file in ("log.jsonl", "rollouts.jsonl", "scores.jsonl"):
            run.forget_after(first_step, file=file)
        if checkpoint:
            tell(f"resuming from step {first_step}")
        loop = Loop(config, environment, run, runner, tell, status)
        try:
            with translate_disk_full(run.path):
                loop.train(first_step)
        finally:
            loop.close()
        return RlResult(run.model, max(first_step, config.steps), tuple(scores_of(run)))


class Loop:
    """The training loop, which runs rollouts with the current weights before each update.

    Args:
        config: the experiment's configuration.
        environment: runs the rollouts.
        run: the run's directory.
        runner: the event loop of the rollouts.
        tell: called with progress messages.
        status: called with the progress of rollouts.
    """

    def __init__(
        self, config: RlConfig, environment: Environment, run: TrainingRun, runner: asyncio.Runner, tell: Tell,
        status: Tell = lambda _: None,
    ) -> None:  # fmt: skip
        from minisandbox.train.policy import PolicyLearner  # noqa: PLC0415 - imports optional packages

        self.config, self.run, self._environment, self._runner, self.tell = config, run, environment, runner, tell
        self._status = status
        self._reset(0)
        with contextlib.ExitStack() as closing:  # after an error, close nodes and run directories
            nodes = closing.enter_context(contextlib.ExitStack())
            nodes.callback(environment.close)
            self.learner = PolicyLearner(config, run.last_checkpoint())
            closing.callback(self.learner.close)
            if self.is_main:
                self.engine = open_engine(self.learner, config)
                closing.callback(lambda: runner.run(self.engine.close()))
            elif config.engine == "vllm":
                self.learner.accelerator.wait_for_everyone()  # as TRL does in rank 0 once vLLM has started
            closing.push(nodes.pop_all())  # close the nodes before the engine, which their rollouts use
            if self.is_main:
                self._gatherer = self._gathering(held_out=False, seed=config.seed if config.deterministic else None)
                held = self._gathering(held_out=True, seed=config.seed)
                self._evaluator = Evaluator(config.evaluation, environment.held_out, held, run, tell)
            self._closing = closing.pop_all()

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, which runs rollouts and writes files."""
        return bool(self.learner.accelerator.is_main_process)

    def _gathering(self, *, held_out: bool, seed: int | None) -> Gatherer:
        config = self.config
        rollouts = self._environment.rollouts(self.engine.model, held_out=held_out)
        progress = RolloutProgress(
            self.tell, self._status, lambda: getattr(self.engine.model, "sampled", 0),
            lambda: getattr(rollouts, "testing", 0),
        )  # fmt: skip
        return Gatherer(rollouts, config.groups, config.workers, config.rollout_deadline, seed, self.tell, progress)

    def _reset(self, rows: int) -> None:
        self._rounding, self._gaps, self._ratios = Rounding(rows), Gaps(self.config.allowed_gaps), [1.0]

    def train(self, first_step: int) -> None:
        """Make the remaining steps, evaluate, and save checkpoints and the model.

        Args:
            first_step: number of steps that are already done.
        """
        config, learner = self.config, self.learner
        with learner.interruptible(self.run):
            for number in range(first_step, config.steps):
                learner.refresh_sampler()
                if number % config.evaluation.every == 0:
                    self._evaluate(number)
                rows, stats = self._shared(self._step(number) if self.is_main else None)
                self._reset(len(rows))
                began = time.monotonic()
                stats |= learner.update(rows, number, self._compare, self._check) | self._comparison()
                stats["update_seconds"] = round(time.monotonic() - began, 3)
                self._log(number + 1, stats)
                learner.finish(number + 1)
                learner.save_if_due(self.run, first=first_step, last=config.steps)
        learner.refresh_sampler()
        self._evaluate(max(first_step, config.steps))
        learner.save_model(self.run)

    def _shared(self, value: T | None) -> T:
        """Return rank 0's value in all processes."""
        from accelerate.utils import broadcast_object_list  # noqa: PLC0415 - an optional package

        values = [value]
        broadcast_object_list(values)
        assert values[0] is not None
        return values[0]

    def _step(self, number: int) -> tuple[list[TrainingRow], dict[str, float]]:
        """Run the rollouts of a step; return its rows, checked and without stale ones, and its statistics."""
        config, groups = self.config, self.config.groups
        tasks, spare = tasks_of_step(self._environment.tasks, groups.tasks, number, config.seed)
        with self.engine.drawing(number):
            step = self._runner.run(self._gatherer.gather(number, tasks, spare))
            rows = step.rows(
                groups.scale, leave_one_out=config.loss == "rloo", overlong=config.overlong == "train"
            )  # fmt: skip
            ages = [0 if row.oldest_version is None else number - row.oldest_version for row in rows]
            fresh = [row for row, age in zip(rows, ages, strict=True) if age <= config.staleness]
        for row in fresh:
            row.check()
            line = {"step": number + 1, "rollout": row.rollout, "advantage": row.weight, "tokens": row.loss_tokens}
            self.run.append(line, file="rollouts.jsonl")
        stale = {"staleness": max([age for age in ages if age <= config.staleness], default=0)}
        return fresh, step.stats() | stale | {"rows_stale": len(rows) - len(fresh)}

    def _leave_out(self, error: TokenMismatch) -> None:
        """Count and report a row that is left out; raise the error if no further row may be left out."""
        self._rounding.take(error)
        self.tell(f"left out because of rounding: {error}")

    def _compare(self, row: TrainingRow, logprobs: Sequence[float]) -> bool:
        """Compare the update's log-probabilities with the sampler's; return whether the row carries loss.

        Raises:
            TokenMismatch: the log-probabilities differ by more than the tolerance.
        """
        try:
            self._gaps.add(row, logprobs)
        except TokenMismatch as error:
            self._leave_out(error)
            return False
        assert row.logprobs is not None
        self._ratios += [math.exp(b - a) for a, b, m in zip(row.logprobs, logprobs, row.mask, strict=True) if m]
        return True

    def _check(self) -> None:
        """Check the differences of all processes' rows before the weights change."""
        from accelerate.utils import gather_object  # noqa: PLC0415 - an optional package

        parts = gather_object([(self._gaps.sizes, self._rounding.rollouts, self._ratios)])
        for index, (sizes, rollouts, ratios) in enumerate(parts):
            if index != self.learner.accelerator.process_index:
                self._gaps.sizes.extend(sizes)
                self._rounding.rollouts += rollouts
                self._ratios += ratios
        self._gaps.check()

    def _comparison(self) -> dict[str, float]:
        return {
            "logprob_gap_max": max(self._gaps.sizes, default=0.0), "logprob_gap_mean": self._gaps.mean,
            "ratio_max": max(self._ratios), "ratio_min": min(self._ratios),
            "rows_rounded": len(self._rounding.rollouts),
        }  # fmt: skip

    def _log(self, step: int, stats: Mapping[str, float]) -> None:
        self.learner.accelerator.log(dict(stats), step)
        if self.is_main:
            self.run.append({"step": step, **stats})
            self.tell(f"step {step} of {self.config.steps}: {describe_step(stats)}")
            first = next((float(str(line["entropy"])) for line in self.run.lines() if line.get("entropy")), None)
            for text in warnings_of(stats, first):
                self.tell(f"warning: {text}")

    def _evaluate(self, number: int) -> None:
        """Evaluate on held-out tasks, unless this step has been evaluated already; keep the best policy so far."""
        score, is_best = None, False
        if self.is_main and self._evaluator.is_due(number):
            with self.engine.drawing(number):
                score = self._runner.run(self._evaluator.evaluate(number))
            earlier = max((score.reward for score in self._evaluator.scores()), default=0.0)
            is_best = score is not None and number > 0 and score.reward > earlier
        if self._shared(is_best):
            self.learner.save_model(self.run, "best")
        if score is not None:
            self._evaluator.store(score)

    def close(self) -> None:
        """Close the engine and the rollouts."""
        self._closing.close()
