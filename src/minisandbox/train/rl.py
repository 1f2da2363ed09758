"""On-policy GRPO with our rollouts and advantages, and TRL's loss and optimiser.

:func:`_bridge` connects the two with a ``rollout_func`` and a subclass of TRL's trainer. The subclass replaces TRL's
advantages with ours, and compares the log-probabilities of the loss's own forward pass with the sampler's.

TRL expects one row per rollout in every step: it has a slot for each rollout. A slot without a row is filled with a row
that carries no loss. If rollouts have several rows, a step has more slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from minisandbox.errors import InvalidValue, TokenMismatch, TrainingError
from minisandbox.models import Model
from minisandbox.models.protocol import seed_of
from minisandbox.train.config import RlConfig
from minisandbox.train.engines import check_engine, in_precision, open_engine, vllm_arguments
from minisandbox.train.evaluation import Evaluator, Score
from minisandbox.train.groups import Gatherer, Rollouts, Step, tasks_of_step
from minisandbox.train.rows import Gaps, Rounding, TrainingRow, check_tokens, choose
from minisandbox.train.running import (
    TrainingRun,
    open_policy,
    quiet,
    require_training,
    run_callback,
    step_of,
    translate_disk_full,
)
from minisandbox.train.sft import Tell, common_arguments, lora_of, save_policy

if TYPE_CHECKING:
    import torch
    from trl import GRPOTrainer

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
        "check_rows",
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


def train_rl(config: RlConfig, environment: Environment, *, tell: Tell = lambda _: None) -> RlResult:
    """Train a model; a repeated call resumes from the last checkpoint.

    Args:
        config: the experiment's configuration.
        environment: runs the rollouts.
        tell: called with progress messages.

    Raises:
        MissingExtra: the extra ``train`` is not installed.
        InvalidValue: the model cannot be opened, or there are fewer tasks than one step needs.
        TrainingError: no rollout of a step has a reward, or training would use several processes or GPUs.
        TokenMismatch: the trainer's log-probabilities differ from the sampler's.
        RunError: the directory belongs to another experiment, or another process trains there.
        DiskFull: a checkpoint cannot be written.
    """
    require_training(vllm=config.engine == "vllm")
    check_engine(config)
    if len(environment.tasks) < config.groups.tasks:
        raise InvalidValue(
            f"a step needs {config.groups.tasks} tasks, and there are {len(environment.tasks)}",
            hint="lower groups.tasks",
        )
    with TrainingRun(Path(config.out), config, may_change=MAY_CHANGE) as run, asyncio.Runner() as runner:
        checkpoint = run.last_checkpoint()
        begun = step_of(checkpoint)
        for file in ("log.jsonl", "rollouts.jsonl", "scores.jsonl"):
            run.forget_after(begun, file=file)
        if checkpoint:
            tell(f"resuming from step {begun}")
        loop = Loop(config, environment, run, runner, tell)
        try:
            with translate_disk_full(run):
                loop.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                save_policy(loop.trainer, run)
        finally:
            loop.close()
        return RlResult(run.model, loop.trainer.state.global_step, tuple(loop.evaluator.scores()))


class Loop:
    """The training loop, which runs rollouts with the current weights before each optimiser step.

    Args:
        config: the experiment's configuration.
        environment: runs the rollouts.
        run: the run's directory.
        runner: the event loop of the rollouts.
        tell: called with progress messages.

    Raises:
        TrainingError: training would use several processes or GPUs.
    """

    def __init__(
        self, config: RlConfig, environment: Environment, run: TrainingRun, runner: asyncio.Runner, tell: Tell
    ) -> None:
        self.config, self.run, self._environment, self._runner, self.tell = config, run, environment, runner, tell
        self.rows: list[TrainingRow] = []
        self.slots = config.groups.tasks * config.groups.size
        self.rounding = Rounding(0)
        self.gaps = Gaps(config.allowed_gaps)
        with contextlib.ExitStack() as closing:  # after an error, close nodes and run directories
            nodes = closing.enter_context(contextlib.ExitStack())
            nodes.callback(environment.close)
            self.trainer = _bridge(self)
            if self.trainer.accelerator.num_processes > 1:
                raise TrainingError(
                    f"{self.trainer.accelerator.num_processes} processes train",
                    reason="the engine shares the module of one process",
                    hint="start without accelerate launch; use SkyRL for several GPUs and nodes",
                )
            self.engine = open_engine(self.trainer, config)
            closing.callback(lambda: runner.run(self.engine.close()))
            closing.push(nodes.pop_all())  # close the nodes before the engine, which their rollouts use
            self._gatherer = self._gathering(held_out=False, seed=config.seed if config.deterministic else None)
            held = self._gathering(held_out=True, seed=config.seed)
            self.evaluator = Evaluator(config.evaluation, environment.held_out, held, run, tell)
            self._closing = closing.pop_all()

    def _gathering(self, *, held_out: bool, seed: int | None) -> Gatherer:
        config = self.config
        rollouts = self._environment.rollouts(self.engine.model, held_out=held_out)
        return Gatherer(rollouts, config.groups, config.workers, config.rollout_deadline, seed, self.tell)

    def step(self, number: int) -> Step:
        """Run the rollouts of a step, and check and store its rows.

        Args:
            number: the step's number, from 0.
        """
        groups = self.config.groups
        tasks, spare = tasks_of_step(self._environment.tasks, groups.tasks, number, self.config.seed)
        with self.engine.drawing():
            step = self._runner.run(self._gatherer.gather(number, tasks, spare))
            self.rows = step.rows(groups.scale)
            self.rounding = Rounding(len(self.rows))
            self.gaps = Gaps(self.config.allowed_gaps)
            self._check(number)
        self.slots = slots_for(self.rows, groups.tasks * groups.size)
        for row in self.rows:
            line = {"step": number + 1, "rollout": row.rollout, "advantage": row.weight, "tokens": row.loss_tokens}
            self.run.append(line, file="rollouts.jsonl")
        return step

    def _check(self, number: int) -> None:
        """Recompute some rows' log-probabilities, and leave out rows that differ by rounding alone."""
        config = self.config
        chosen = choose(self.rows, config.check_tokens, config.check_rows, number)
        check_tokens(
            self.engine.module, chosen, temperature=config.policy.temperature, tolerance=config.allowed_gaps,
            leave_out=self.leave_out,
        )  # fmt: skip
        self.rows = [one for one in self.rows if one.rollout not in self.rounding.rollouts]

    def leave_out(self, error: TokenMismatch) -> None:
        """Count and report a row that is left out; raise the error if no further row may be left out."""
        self.rounding.take(error)
        self.tell(f"left out because of rounding: {error}")

    def evaluate(self, number: int) -> None:
        """Evaluate on held-out tasks, unless this step has been evaluated already."""
        if self.evaluator.is_due(number):
            with self.engine.drawing():
                self._runner.run(self.evaluator.evaluate(number))

    def close(self) -> None:
        """Close the engine and the rollouts."""
        self._closing.close()


def _arguments(config: RlConfig, run: TrainingRun) -> object:
    """Return TRL's configuration, with new rollouts for each optimiser step, so that training is on-policy."""
    from trl import GRPOConfig  # noqa: PLC0415 - an optional package

    slots = config.groups.tasks * config.groups.size
    made = GRPOConfig(
        **common_arguments(config, run, config.optimizer),
        **vllm_arguments(config),
        max_steps=config.steps,
        per_device_train_batch_size=config.micro_batch,
        gradient_accumulation_steps=slots // config.micro_batch,
        num_generations=config.groups.size,
        max_completion_length=config.loss_length,
        temperature=config.policy.temperature,
        loss_type=config.loss,
        scale_rewards="none",
        beta=config.kl,
        entropy_coef=config.entropy,
        disable_dropout=True,
        logging_steps=1,
    )
    if made.n_gpu > 1:
        raise TrainingError(
            f"{made.n_gpu} GPUs are visible to this process, but it trains on one",
            reason="on several, transformers trains copies of the module (DataParallel), but the engine shares one",
            hint="choose one with CUDA_VISIBLE_DEVICES=0; use SkyRL for several GPUs and nodes",
        )
    return made


def to_trl(rows: Sequence[TrainingRow], slots: int) -> dict[str, list[list[int]] | list[list[float]]]:
    """Convert rows to the format of TRL's ``rollout_func``; fill slots without a row with rows without loss.

    Args:
        rows: the rows, at most one per slot.
        slots: number of slots.
    """
    empty = TrainingRow("", array("i", [0, 0]), b"\0\0", array("d", [0.0, 0.0]))
    filled = [*rows, *([empty] * (slots - len(rows)))]
    starts = [min(row.prompt_length, len(row.ids) - 1) for row in filled]
    pairs = list(zip(filled, starts, strict=True))
    return {
        "prompt_ids": [row.ids[:start].tolist() for row, start in pairs],
        "completion_ids": [row.ids[start:].tolist() for row, start in pairs],
        "logprobs": [(row.logprobs or array("d"))[start:].tolist() for row, start in pairs],
        "env_mask": [list(row.mask[start:]) for row, start in pairs],
    }


def slots_for(rows: Sequence[TrainingRow], rollouts: int) -> int:
    """Return a step's number of slots: the smallest multiple of the number of rollouts that has room for all rows.

    Args:
        rows: the step's rows.
        rollouts: number of rollouts in a step.
    """
    return rollouts * max(1, math.ceil(len(rows) / rollouts))


def weights(rows: Sequence[TrainingRow], slots: int, *, rollouts: int, loss: str) -> list[float]:
    """Return the advantages of all slots, scaled so that a rollout's weight does not depend on its number of rows.

    Slots without a row have the advantage 0.0. They count in the denominator, which is therefore the same in every
    step, as in Dr. GRPO (arXiv 2503.20783): with signal in 2 of 16 groups, a step is an eighth of the size of one with
    signal in all groups. TRL divides the losses ``dr_grpo`` and ``grpo`` by the number of slots, so the advantages are
    multiplied by the number of slots per rollout. ``grpo`` averages over each row's tokens, so the advantage is also
    multiplied by the row's share of the rollout's tokens. ``dapo`` divides by the tokens of all rows, and needs no
    correction.

    Args:
        rows: the rows.
        slots: number of slots.
        rollouts: number of rollouts in a step.
        loss: TRL's loss type.
    """
    factor = 1.0 if loss == "dapo" else slots / rollouts
    shares = [row.share if loss == "grpo" else 1.0 for row in rows]
    weighted = [row.weight * factor * share for row, share in zip(rows, shares, strict=True)]
    return weighted + [0.0] * (slots - len(rows))


def _bridge(loop: Loop) -> GRPOTrainer:
    """Return TRL's trainer, which trains on the rows of our rollouts."""
    import torch  # noqa: PLC0415 - an optional package
    from datasets import Dataset  # noqa: PLC0415 - an optional package

    config = loop.config

    def rollout_func(_prompts: object, trainer: GRPOTrainer) -> dict[str, object]:
        if config.deterministic:  # TRL shuffles rows, and a resumed run must shuffle them in the same way
            torch.manual_seed(seed_of(config.seed, "shuffle", trainer.state.global_step))
        return dict(to_trl(loop.rows, loop.slots))

    def outcome(prompts: list[str], **_: object) -> list[float]:
        return [0.0] * len(prompts)  # replaced by our advantages

    model, tokenizer = open_policy(config.model)
    with in_precision(config):
        made = _bridge_class(loop)(
            model=model, reward_funcs=outcome, args=_arguments(config, loop.run), processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [str(one) for one in range(config.groups.tasks)]}),
            peft_config=lora_of(config.lora), rollout_func=rollout_func,
            callbacks=[run_callback(loop.run, loop.tell, keep=config.checkpoints.keep), _step_callback(loop)],
        )  # fmt: skip
    quiet(made)
    return made


def _bridge_class(loop: Loop) -> type[GRPOTrainer]:
    """Return a subclass of TRL's trainer with our advantages and a check of its log-probabilities."""
    import torch  # noqa: PLC0415 - an optional package
    from trl import GRPOTrainer  # noqa: PLC0415 - an optional package

    class Bridge(GRPOTrainer):  # type: ignore[misc] # mypy does not read TRL
        stats: dict[str, float]
        batch: dict[str, torch.Tensor] | None = None

        def _generate_and_score_completions(self, inputs: list[object]) -> dict[str, torch.Tensor]:
            self.stats = loop.step(self.state.global_step).stats() | {
                "staleness": 0, "logprob_gap_max": 0.0, "ratio_max": 1.0, "ratio_min": 1.0,
                "rows_rounded": len(loop.rounding.rollouts),
            }  # fmt: skip
            repeated = inputs * (loop.slots // len(inputs))
            found: dict[str, torch.Tensor] = super()._generate_and_score_completions(repeated)
            device = found["advantages"].device
            advantages = weights(loop.rows, loop.slots, rollouts=len(inputs), loss=loop.config.loss)
            found["advantages"] = torch.tensor(advantages, device=device)
            found["number"] = torch.arange(loop.slots, device=device)  # finds rows after TRL has shuffled them
            return found

        def _compute_loss(self, model: object, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            self.batch = inputs
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.batch = None

        def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if self.batch is not None:
                _check_masks(loop.rows, self.batch)
                kept = _compare(loop, self.stats, self.batch, found[0].detach())
                if not all(kept):
                    carry = torch.tensor(kept, device=found[0].device)[:, None]
                    found = tuple(one if one is None else torch.where(carry, one, one.detach()) for one in found)
            return found

        def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
            if "loss" in logs:  # drop TRL's rewards, which are per slot instead of per rollout
                for key in [key for key in self._metrics["train"] if "reward" in key]:
                    del self._metrics["train"][key]
                logs = logs | self.stats | {"logprob_gap_mean": loop.gaps.mean}
            super().log(logs, *args, **kwargs)

    return Bridge


def _check_masks(rows: Sequence[TrainingRow], batch: Mapping[str, torch.Tensor]) -> None:
    """Check that TRL's loss counts exactly the tokens that carry loss.

    Args:
        rows: the step's rows.
        batch: the input of TRL's loss; ``number`` maps its rows to ``rows``.

    Raises:
        TrainingError: the loss counts other tokens, or the batch has no mask.
    """
    advice = "rollout_func is experimental in TRL: install the version in requirements-full.lock"
    if "tool_mask" not in batch:
        raise TrainingError("context would carry loss", reason="this TRL ignored our env_mask", hint=advice)
    masks = (batch["completion_mask"] * batch["tool_mask"]).tolist()
    for place, mask in zip(batch["number"].tolist(), masks, strict=True):
        row = rows[place] if place < len(rows) else None  # slots without a row carry no loss
        ours = list(row.mask[row.prompt_length :]) if row else []
        differing = [one for one, (a, b) in enumerate(zip_longest(mask, ours, fillvalue=0)) if a != b]
        if differing:
            name, start = (row.rollout, row.prompt_length) if row else ("a slot without a row", 0)
            raise TrainingError(
                f"{name}, token {start + differing[0]}: TRL's loss and our mask disagree",
                reason="this TRL uses env_mask in another way",
                hint=advice,
            )


def _compare(loop: Loop, stats: dict[str, float], batch: dict[str, torch.Tensor], logprobs: torch.Tensor) -> list[bool]:
    """Compare the loss's own log-probabilities with the sampler's, row by row.

    Returns:
        For each row, whether it may carry loss; False for a row that is left out because of rounding.

    Raises:
        TokenMismatch: the log-probabilities differ by more than the tolerance.
    """
    kept = [True] * len(logprobs)
    for number, (place, values) in enumerate(zip(batch["number"].tolist(), logprobs.float().tolist(), strict=True)):
        if place >= len(loop.rows):
            continue
        row = loop.rows[place]
        start = row.prompt_length
        again = [0.0] * start + values[: len(row.ids) - start]
        try:
            gap = loop.gaps.add(row, again)
        except TokenMismatch as error:
            loop.leave_out(error)
            kept[number] = False
            stats["rows_rounded"] = len(loop.rounding.rollouts)
            continue
        stats["logprob_gap_max"] = max(stats["logprob_gap_max"], gap)
        assert row.logprobs is not None
        ratios = [math.exp(b - a) for a, b, m in zip(row.logprobs, again, row.mask, strict=True) if m]
        stats["ratio_max"], stats["ratio_min"] = max(stats["ratio_max"], *ratios), min(stats["ratio_min"], *ratios)
    return kept


def _step_callback(loop: Loop) -> object:
    """Return a callback that evaluates between steps, and leaves the weights unchanged in a step without signal."""
    from transformers import TrainerCallback, TrainerState  # noqa: PLC0415 - an optional package

    class StepCallback(TrainerCallback):  # type: ignore[misc] # mypy does not read transformers
        def on_step_begin(self, _args: object, state: TrainerState, _control: object, **_: object) -> None:
            if state.global_step % loop.config.evaluation.every == 0:
                loop.evaluate(state.global_step)

        def on_pre_optimizer_step(self, *_args: object, model: torch.nn.Module, **_: object) -> None:
            # Check before the weights change.
            loop.gaps.check()
            if not loop.rows:
                # With gradients of zero, AdamW would still move the weights by its momentum.
                model.zero_grad(set_to_none=True)

        def on_train_end(self, _args: object, state: TrainerState, _control: object, **_: object) -> None:
            loop.evaluate(state.global_step)

    return StepCallback()
