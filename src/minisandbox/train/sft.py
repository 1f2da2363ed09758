"""Fine-tune on token rows with TRL's SFTTrainer. Only sampled tokens carry loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import TrainingError
from minisandbox.train.config import Lora, Optimizer, RlConfig, SftConfig
from minisandbox.train.rows import TrainingRow, held_out, read_rows
from minisandbox.train.running import (
    TrainingRun,
    check_vocabulary,
    is_first,
    open_policy,
    quiet,
    require_training,
    run_callback,
    step_of,
    translate_disk_full,
)

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
    from trl import SFTTrainer

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
    """The training rows and held-out rows of an experiment.

    Attributes:
        train: training rows.
        held_out: rows on which only the loss is measured.
        left_out: number of rows above the length limit.
    """

    train: Sequence[TrainingRow]
    held_out: Sequence[TrainingRow]
    left_out: int

    @property
    def shared_tasks(self) -> frozenset[str]:
        """The tasks with both training and held-out rows."""
        return frozenset(row.task for row in self.train if row.task) & {row.task for row in self.held_out}

    @classmethod
    def load(cls, config: SftConfig) -> SftData:
        """Read the rows of a configuration.

        Raises:
            InvalidValue: a file is missing.
            TaskFileError: a file cannot be read.
            TrainingError: a row cannot be trained on, or there are no rows.
        """
        everything = [row for name in config.data for row in read_rows(Path(name))]
        rows = [row for row in everything if len(row.ids) <= config.max_length]
        if not rows:
            longer = f"all {len(everything)} rows are longer than max_length {config.max_length}"
            raise TrainingError("there are no rows to train on", reason=longer if everything else "the files are empty")
        if not config.held_out:
            kept, held = held_out(rows, config.held_out_share, config.seed)
            return cls(kept, held, len(everything) - len(rows))
        other = [row for name in config.held_out for row in read_rows(Path(name))]
        held = [row for row in other if len(row.ids) <= config.max_length]
        return cls(rows, held, len(everything) - len(rows) + len(other) - len(held))


def train_sft(config: SftConfig, *, tell: Tell = lambda _: None) -> SftResult:
    """Fine-tune a model; a repeated call resumes from the last checkpoint.

    Args:
        config: the experiment's configuration.
        tell: called with progress messages.

    Raises:
        MissingExtra: the extra ``train`` is not installed.
        InvalidValue: the model cannot be opened, or a file of rows is missing.
        TaskFileError: a file of rows cannot be read.
        TrainingError: a row cannot be trained on.
        RunError: the directory belongs to another experiment, or another process trains there.
        DiskFull: a checkpoint cannot be written.
    """
    require_training()
    data = SftData.load(config)
    with TrainingRun(Path(config.out), config, may_change=MAY_CHANGE) as run:
        trainer = make_trainer(config, data, run, tell)
        checkpoint = run.last_checkpoint()
        if is_first():
            left = f"; {data.left_out} longer rows are left out" if data.left_out else ""
            begin = f", from {checkpoint.name}" if checkpoint else ""
            tell(f"training on {len(data.train)} rows{left}{begin}")
            if shared := data.shared_tasks:
                which = f"{len(shared)} tasks, such as {min(shared)}"
                tell(f"warning: {which}, are trained on and held out: the held-out loss is not for unseen tasks")
        run.forget_after(step_of(checkpoint))
        with translate_disk_full(run):
            _train(trainer, checkpoint, config.max_steps)
            held = _held_out_loss(trainer) if data.held_out else None
            save_policy(trainer, run)
        losses = [float(str(line["loss"])) for line in run.lines() if "loss" in line]
        return SftResult(
            run.model, trainer.state.global_step, losses[0] if losses else None, losses[-1] if losses else None, held,
            len(data.train), data.left_out,
        )  # fmt: skip


def _train(trainer: SFTTrainer, checkpoint: Path | None, max_steps: int) -> None:
    """Train the remaining steps.

    If ``max_steps`` was reached within an epoch, only load the checkpoint, because transformers would train one more
    step.
    """
    if max_steps and step_of(checkpoint) >= max_steps:
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state.global_step = step_of(checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _held_out_loss(trainer: SFTTrainer) -> float:
    """Return the final loss on held-out rows; measure the loss if the last step did not."""
    last = [one for one in trainer.state.log_history if one["step"] == trainer.state.global_step]
    known = [one["eval_loss"] for one in last if "eval_loss" in one] or [trainer.evaluate()["eval_loss"]]
    return float(known[-1])


def make_trainer(config: SftConfig, data: SftData, run: TrainingRun, tell: Tell = lambda _: None) -> SFTTrainer:
    """Create TRL's trainer for an experiment.

    Args:
        config: the experiment's configuration.
        data: the rows.
        run: the directory for checkpoints and the log.
        tell: called with each logged step.
    """
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415 - an optional package

    model, tokenizer = open_policy(config.model)
    longest = max((*data.train, *data.held_out), key=lambda row: max(row.ids))
    check_vocabulary(model, max(longest.ids), longest.rollout)
    arguments = SFTConfig(
        **common_arguments(config, run, config.optimizer),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        logging_steps=config.log_every,
        eval_strategy="steps" if data.held_out else "no",
        eval_steps=config.evaluate_every,
        max_length=config.max_length,
        packing=config.packing,
        eval_packing=False,
    )
    made = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset_of(data.train),
        eval_dataset=dataset_of(data.held_out) if data.held_out else None,
        processing_class=tokenizer,
        peft_config=lora_of(config.lora),
        callbacks=[run_callback(run, tell, keep=config.checkpoints.keep)],
    )
    quiet(made)
    return made


def common_arguments(config: SftConfig | RlConfig, run: TrainingRun, optimizer: Optimizer) -> dict[str, object]:
    """Return the options that fine-tuning and reinforcement learning share, in transformers' names.

    Args:
        config: an ``SftConfig`` or an ``RlConfig``.
        run: the run's directory.
        optimizer: the optimiser's options.
    """
    cpu = config.device == "cpu"
    return {
        "output_dir": str(run.checkpoints),
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.schedule,
        "warmup_steps": optimizer.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
        "bf16": config.precision == "bfloat16",
        "gradient_checkpointing": config.gradient_checkpointing,
        "use_cpu": cpu,
        "dataloader_pin_memory": not cpu,
        "save_strategy": "steps",
        "save_steps": config.checkpoints.every,
        "report_to": config.report_to,
        "seed": config.seed,
        "disable_tqdm": True,
    }


def dataset_of(rows: Sequence[TrainingRow]) -> Dataset:
    """Return rows as a dataset for TRL, with our labels, so that TRL does not create its own loss mask."""
    from datasets import Dataset  # noqa: PLC0415 - an optional package

    return Dataset.from_dict({"input_ids": [row.ids.tolist() for row in rows], "labels": [row.labels for row in rows]})


def lora_of(lora: Lora) -> LoraConfig | None:
    """Return peft's configuration, or None if all weights are trained."""
    if not lora.rank:
        return None
    from peft import LoraConfig  # noqa: PLC0415 - an optional package

    modules = lora.modules if lora.modules == "all-linear" else lora.modules.split(",")
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=modules, task_type="CAUSAL_LM"
    )


def save_policy(trainer: Trainer, run: TrainingRun) -> None:
    """Save the model of a trainer of transformers.

    Every process must call this function, because rank 0 gathers weights that are sharded among them (FSDP, ZeRO-3).
    """
    accelerator = trainer.accelerator
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        sharded = accelerator.distributed_type.value in ("FSDP", "DEEPSPEED")
        write_policy(accelerator.unwrap_model(trainer.model), weights, trainer.processing_class, run, reopen=sharded)


def write_policy(
    model: PreTrainedModel | PeftModel, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase,
    run: TrainingRun, *, reopen: bool,
) -> None:  # fmt: skip
    """Write the whole trained model and, with LoRA, also the adapter alone.

    Args:
        model: the model.
        weights: its weights; with LoRA at least those of the adapter.
        tokenizer: its tokenizer.
        run: the run's directory.
        reopen: merge the adapter into the base model as it is on disk, because ``model`` is sharded or in bfloat16.
    """
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(run.path / "adapter", state_dict=weights)
        model = _merged(model, run.path / "adapter") if reopen else model.merge_and_unload()
        weights = model.state_dict()
    with run.new_model() as place:
        model.save_pretrained(place, state_dict=weights)
        tokenizer.save_pretrained(place)


def _merged(model: PeftModel, adapter: Path) -> PreTrainedModel:
    """Open the base model anew, and return it with the adapter merged into its weights."""
    from peft import PeftModel  # noqa: PLC0415 - an optional package

    base, _ = open_policy(model.peft_config["default"].base_model_name_or_path)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload()
