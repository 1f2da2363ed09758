"""Fine-tune on token rows. Only sampled tokens carry loss. :class:`.learner.Learner` has the weights."""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import TrainingError
from minisandbox.train.config import SftConfig
from minisandbox.train.plan import prepare
from minisandbox.train.rows import StoredRows, TrainingRow, held_out, pack, read_rows
from minisandbox.train.running import (
    TrainingRun,
    check_vocabulary,
    is_first,
    require_training,
    step_of,
    translate_disk_full,
)

if TYPE_CHECKING:
    from minisandbox.train.learner import Learner

MAY_CHANGE = frozenset(
    {"out", "max_steps", "epochs", "checkpoints.every", "checkpoints.keep", "log_every", "report_to"}
)
"""Options that may change when a run resumes, because the training data does not depend on them."""

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of fine-tuning.

    Attributes:
        model: the model's directory.
        steps: optimiser steps, including those of earlier calls.
        first_loss: loss of the first logged step.
        last_loss: loss of the last logged step.
        held_out_loss: final loss on held-out rows; None without such rows.
        rows: number of training rows.
        left_out: number of rows above the length limit.
    """

    model: Path
    steps: int
    first_loss: float | None
    last_loss: float | None
    held_out_loss: float | None
    rows: int
    left_out: int


@dataclass(frozen=True, slots=True)
class SftData:
    """The training rows and held-out rows of an experiment, in a temporary file in its directory.

    Attributes:
        train: training rows.
        held_out: rows on which only the loss is measured.
        left_out: number of rows above the length limit.
        largest: the largest token id.
        largest_rollout: name of the rollout that has it.
    """

    train: StoredRows
    held_out: StoredRows
    left_out: int
    largest: int
    largest_rollout: str

    @property
    def shared_tasks(self) -> set[str]:
        """The tasks with both training and held-out rows."""
        return set(self.train.tasks) & set(self.held_out.tasks)

    @classmethod
    def load(cls, config: SftConfig) -> SftData:
        """Read the rows of a configuration, one at a time.

        Raises:
            InvalidValue: a file is missing.
            TaskFileError: a file cannot be read.
            TrainingError: a row cannot be trained on, or there are no rows.
        """
        Path(config.out).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=config.out))
            counts, largest = [0, 0], (0, "")
            rows, others = StoredRows(file), StoredRows(file)
            for stored, names in ((rows, config.data), (others, config.held_out)):
                for row in (row for name in names for row in read_rows(Path(name))):
                    is_long = len(row.ids) > config.max_length
                    counts[is_long] += 1
                    if not is_long:
                        stored.append(row)
                        largest = max(largest, (max(row.ids), row.rollout))
                if not rows:
                    longer = f"all {counts[1]} rows are longer than max_length {config.max_length}"
                    reason = longer if counts[1] else "the files are empty"
                    raise TrainingError("there are no rows to train on", reason=reason)
            if not config.held_out:
                rows, others = rows.split(held_out(rows.tasks, config.held_out_share, config.seed))
            stack.pop_all()  # train.close() closes the file
        return cls(rows, others, counts[1], *largest)


def train_sft(config: SftConfig, *, tell: Tell = lambda _: None) -> SftResult:
    """Fine-tune a model; a repeated call resumes from the last checkpoint.

    If several processes call it, as ``accelerate launch`` and ``torchrun`` start them, they share the weights.

    Args:
        config: the experiment's configuration.
        tell: called with progress messages.

    Raises:
        MissingExtra: the extra ``train`` is not installed.
        InvalidValue: the model cannot be opened, or a file of rows is missing.
        TaskFileError: a file of rows cannot be read.
        TrainingError: a row cannot be trained on, or the training does not fit into memory.
        RunError: the directory belongs to another experiment, or another process trains there.
        DiskFull: a checkpoint cannot be written.
    """
    require_training()
    prepare(config, tell)
    out = Path(config.out)
    with translate_disk_full(out):
        data = SftData.load(config)
    with contextlib.closing(data.train), TrainingRun(out, config, may_change=MAY_CHANGE) as run:
        checkpoint = run.last_checkpoint()
        tuning = FineTuning(config, data, run, tell, checkpoint)
        if is_first():
            left = f"; {data.left_out} longer rows are left out" if data.left_out else ""
            begin = f", from {checkpoint.name}" if checkpoint else ""
            tell(f"training on {len(data.train)} rows{left}{begin}")
            if shared := data.shared_tasks:
                which = f"{len(shared)} tasks, such as {min(shared)}"
                tell(f"warning: {which}, are trained on and held out: the held-out loss is not for unseen tasks")
        run.forget_after(step_of(checkpoint))
        with translate_disk_full(out):
            steps = tuning.train(step_of(checkpoint))
        lines = run.lines()
        losses, held_out_losses = (
            [float(str(line[key])) for line in lines if key in line] for key in ("loss", "eval_loss")
        )
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        held_out_loss = held_out_losses[-1] if held_out_losses else None
        return SftResult(run.model, steps, first, last, held_out_loss, len(data.train), data.left_out)


class FineTuning:
    """The loop of fine-tuning.

    Args:
        config: the experiment's configuration.
        data: the rows.
        run: the directory for checkpoints and the log.
        tell: called with each logged step.
        checkpoint: the checkpoint to resume from.

    Attributes:
        learner: has the weights.
        steps: number of steps of the run.
    """

    def __init__(
        self, config: SftConfig, data: SftData, run: TrainingRun, tell: Tell = lambda _: None,
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        from minisandbox.train.learner import Learner  # noqa: PLC0415 - imports optional packages

        self._config, self._data, self._run, self._tell = config, data, run, tell
        self.learner: Learner[SftConfig] = Learner(config, checkpoint)
        check_vocabulary(self.learner.model, data.largest, data.largest_rollout)
        self._sequences = self._packed() if config.packing else [[index] for index in range(len(data.train))]
        self._step_size = config.batch_size * config.accumulation * self.learner.accelerator.num_processes
        self._steps_per_epoch = math.ceil(len(self._sequences) / self._step_size)
        self._epoch, self._order = -1, list[int]()
        steps: int = math.ceil(config.epochs * self._steps_per_epoch)
        self.steps = min(steps, config.max_steps or steps)
        self.learner.schedule(self.steps)

    def _packed(self) -> list[list[int]]:
        """Divide the rows, in random order, into sequences of at most ``max_length`` tokens."""
        sequences, room, rows = list[list[int]](), 0, self._data.train
        for number in self._shuffled(len(rows), "packing"):
            _, length, _ = rows.index[number]
            if length > room:
                sequences.append([])
                room = self._config.max_length
            sequences[-1].append(number)
            room -= length
        return sequences

    def _shuffled(self, count: int, name: object) -> list[int]:
        return random.Random(f"{self._config.seed} {name}").sample(range(count), count)  # noqa: S311 - not a secret

    def rows_of(self, number: int) -> list[TrainingRow]:
        """Return the rows of a step, which is numbered from 0; packed rows are one."""
        epoch, index = divmod(number, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(len(self._sequences), epoch)
        chosen = self._order[index * self._step_size : (index + 1) * self._step_size]
        return [pack([self._data.train[row] for row in self._sequences[sequence]]) for sequence in chosen]

    def train(self, first_step: int) -> int:
        """Make the remaining steps, save checkpoints and the model, and return the number of steps.

        Args:
            first_step: number of steps that are already done.
        """
        config, learner, losses = self._config, self.learner, list[float]()
        with learner.interruptible(self._run):
            for step in range(first_step + 1, self.steps + 1):
                stats = self.step(step - 1)
                losses.append(stats["loss"])
                if step % config.log_every == 0 or step == self.steps:
                    self._log(step, {**stats, "loss": sum(losses) / len(losses), "epoch": step / self._steps_per_epoch})
                    losses.clear()
                learner.finish(step)
                if self._data.held_out and (step % config.evaluate_every == 0 or step == self.steps):
                    self._log(step, {"eval_loss": self.held_out_loss()})
                learner.save_if_due(self._run, first=first_step, last=self.steps)
        learner.save_model(self._run)
        learner.close()
        return max(first_step, self.steps)

    def step(self, number: int) -> dict[str, float]:
        """Change the weights once, by the mean loss of a step's tokens; return the statistics to log."""
        import torch  # noqa: PLC0415 - an optional package

        learner = self.learner
        dropout = f"{self._config.seed} dropout {number} {learner.accelerator.process_index}"
        torch.manual_seed(random.Random(dropout).getrandbits(60))  # noqa: S311 - not a secret
        rate, rows = learner.set_rate(number), self.rows_of(number)
        tokens, total = sum(row.loss_tokens for row in rows), torch.zeros(1, dtype=torch.float64)
        for batch in learner.batches(rows, self._config.batch_size):
            loss = -learner.scorer(*batch.inputs)[0].sum() / tokens
            learner.backward(loss)
            total += loss.detach().double().cpu()
        return {"loss": learner.total(total)[0], "grad_norm": learner.change_weights(), "learning_rate": rate}

    def held_out_loss(self) -> float:
        """Return the mean loss of the held-out tokens."""
        import torch  # noqa: PLC0415 - an optional package

        rows, learner, sums = self._data.held_out, self.learner, torch.zeros(2, dtype=torch.float64)
        size = self._config.batch_size * learner.accelerator.num_processes
        learner.model.eval()
        with torch.no_grad():
            for start in range(0, len(rows), size):
                chunk = [rows[index] for index in range(start, min(start + size, len(rows)))]
                for batch in learner.batches(chunk, self._config.batch_size):
                    logprobs, _ = learner.scorer(*batch.inputs)
                    sums += torch.stack([-logprobs.sum(), batch.tensors["mask"].sum()]).double().cpu()
        learner.model.train()
        loss, tokens = learner.total(sums)
        return loss / tokens

    def _log(self, step: int, stats: dict[str, float]) -> None:
        self.learner.accelerator.log(stats, step)
        if is_first():
            self._run.append({"step": step, **stats})
            shown = ", ".join(f"{key} {stats[key]:.4g}" for key in ("loss", "eval_loss") if key in stats)
            self._tell(f"step {step} of {self.steps}: {shown}")
