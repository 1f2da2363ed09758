"""Hold a model and its optimiser, on one device or sharded over several with FSDP 2, and write checkpoints.

Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute
from transformers import PreTrainedModel, get_scheduler

from minisandbox.errors import MissingExtra, TrainingError
from minisandbox.train.config import LOGITS_AT_ONCE, RlConfig, SftConfig
from minisandbox.train.interrupts import Interrupts
from minisandbox.train.options import flat
from minisandbox.train.rows import EMPTY, TrainingRow, collate
from minisandbox.train.running import TrainingRun, lora_of, open_policy, step_of

_WAIT = timedelta(days=7)
"""How long processes wait for each other: rank 0 runs a step's rollouts, which take hours, while the others wait."""

C = TypeVar("C", bound=SftConfig | RlConfig)


class TokenLogprobs(torch.nn.Module):  # type: ignore[misc] # mypy does not read torch
    """A causal language model that returns log-probabilities of tokens without keeping all logits in memory.

    Args:
        model: the model, which may have adapters.
        temperature: divisor of the logits.
        at_once: number of tokens whose logits are in memory at once.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.model = model
        self._temperature, self._at_once = temperature, at_once

    def forward(
        self, ids: torch.Tensor, attention: torch.Tensor | None, mask: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return log-probabilities and entropies of the tokens in the mask, as [rows, tokens]; 0.0 for other tokens.

        Args:
            ids: tokens [rows, tokens].
            attention: 1 for tokens, 0 for padding on the right; None with ``positions``.
            mask: 1.0 for tokens to score; the first token of a row cannot be scored.
            positions: the tokens' positions if rows are packed; tokens attend only to those of the same packed row.
        """
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        hidden = base.get_decoder()(
            input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
        ).last_hidden_state
        is_scored = mask.bool()
        before, tokens = hidden[:, :-1][is_scored[:, 1:]], ids[is_scored]
        parts = zip(before.split(self._at_once), tokens.split(self._at_once), strict=True)
        scores = [recompute(self._score, base, *part, use_reentrant=False) for part in parts]
        logprobs, entropies = (torch.cat(values) for values in zip(*scores, strict=True))
        zeros = torch.zeros_like(mask)
        return zeros.masked_scatter(is_scored, logprobs), zeros.masked_scatter(is_scored, entropies)

    def _score(
        self, base: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, options = base.get_output_embeddings()(hidden).float(), base.config.get_text_config()
        # Granite and Cohere scale their logits, Gemma bounds them.
        logits = logits * (getattr(options, "logit_scale", None) or 1.0)
        logits = logits / (getattr(options, "logits_scaling", None) or 1.0)
        if cap := getattr(options, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        logprobs = torch.log_softmax(logits / self._temperature, -1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, tokens[:, None])[:, 0], entropies


@dataclass(slots=True)
class Batch:
    """A micro-batch.

    Attributes:
        rows: its rows.
        tensors: their tensors, as from :func:`.collate`.
        old: log-probabilities before the step, known after the first forward pass of reinforcement learning.
        reference: log-probabilities of the reference model, likewise.
    """

    rows: Sequence[TrainingRow]
    tensors: dict[str, torch.Tensor]
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments of :class:`TokenLogprobs`."""
        return tuple(self.tensors.get(name) for name in ("input_ids", "attention_mask", "mask", "positions"))


class Learner(Generic[C]):
    """A model with its optimiser. All processes of a node have one, and call the same methods in the same order.

    In ``bfloat16``, the model computes in bfloat16, and the optimiser changes a float32 copy of its weights. The
    gradients of all micro-batches are added in float32.

    Args:
        config: the experiment's configuration.
        checkpoint: a directory of :meth:`save` to resume from; None for the initial model.
        temperature: divisor of the logits.

    Attributes:
        model: the model, sharded if there are several processes.
        scorer: returns the model's log-probabilities.
        tokenizer: the model's tokenizer.
        accelerator: the device and the processes.
        reference: the reference model, if reinforcement learning has one.
        finished: number of finished steps.

    Raises:
        InvalidValue: the model cannot be opened.
        MissingExtra: the package of the experiment tracker is not installed.
        TrainingError: the experiment tracker did not start.
    """

    def __init__(self, config: C, checkpoint: Path | None, *, temperature: float = 1.0) -> None:
        self.config = config
        self.accelerator = Accelerator(
            cpu=config.device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=_WAIT)],
            log_with=None if config.report_to == "none" else config.report_to, project_dir=config.out,
        )  # fmt: skip
        self._start_tracker()
        self.is_sharded = self.accelerator.num_processes > 1
        self.dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        set_seed(config.seed)  # new adapters are random
        self.model, self.tokenizer = self._open(checkpoint)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.scorer = TokenLogprobs(self.model, temperature)
        self.reference: TokenLogprobs | None = None
        self._weights = self._prepared()
        self._optimizer = self._open_optimizer()
        self._rate: Callable[[int], float] = lambda _: 1.0
        self.finished, self._interrupts = step_of(checkpoint), Interrupts()
        if checkpoint:
            self._load_optimizer(torch.load(checkpoint / "optimizer.pt", weights_only=True))

    def _start_tracker(self) -> None:
        name, options = self.config.report_to, flat(self.config).items()
        values = {key: value if isinstance(value, int | float) else str(value) for key, value in options}
        try:
            self.accelerator.init_trackers("minisandbox", values)
        except Exception as error:  # each tracker has its own exceptions
            raise TrainingError(
                f"report_to: {name} did not start",
                reason=str(error),
                hint="correct its settings, or set report_to: none",
            ) from error
        if name != "none" and not self.accelerator.trackers:  # accelerate leaves it out with a warning
            raise MissingExtra(f"report_to is {name}, but the package is not installed", hint=f"pip install {name}")

    # --- loading -----------------------------------------------------------------------------------------------------

    def _open(self, checkpoint: Path | None) -> tuple[Any, Any]:
        config = self.config
        model, tokenizer = open_policy(str(checkpoint) if checkpoint and not config.lora.rank else config.model)
        if (lora := lora_of(config.lora)) is not None:
            from peft import PeftModel, get_peft_model  # noqa: PLC0415 - only adapters need it

            resumed = checkpoint and PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
            model = resumed or get_peft_model(model, lora)
        for module in model.modules() if isinstance(config, RlConfig) else ():
            # Sampling uses no dropout, so reinforcement learning must not either.
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return model.train(), tokenizer

    def _prepared(self) -> dict[str, torch.Tensor]:
        """Move the model to its device, sharded or in its precision; return the weights that the optimiser changes."""
        if self.is_sharded:
            self.shard(self.scorer)
        device = self.accelerator.device
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        if self.is_sharded or self.dtype == torch.float32:
            self.model.to(device)
            return trained
        masters = {name: weight.detach().to(device, copy=True) for name, weight in trained.items()}
        cast(self.model, self.dtype).to(device)
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(_adder(masters[name]))
        return masters

    def shard(self, scorer: TokenLogprobs) -> None:
        """Distribute the weights of a model over all processes."""
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        kinds = scorer.model._no_split_modules or ()
        blocks = [module for module in scorer.modules() if type(module).__name__ in kinds]
        for module in (*blocks, scorer):
            # By default, the last one would stay whole after a pass without gradients, as the reference makes.
            fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    def _open_optimizer(self) -> torch.optim.AdamW:
        options, weights = self.config.optimizer, list(self._weights.values())
        matrices, vectors = ([weight for weight in weights if (weight.ndim > 1) is wide] for wide in (True, False))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=(0.9, options.beta2),
            weight_decay=options.weight_decay, fused=True,
        )  # fmt: skip

    def _load_optimizer(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, weight in self._weights.items():
            self._optimizer.state[weight] = {
                key: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
                if isinstance(weight, DTensor) and value.ndim
                else value.to(weight.device if value.ndim else value.device)
                for key, value in states.get(name, {}).items()
            }

    # --- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, steps: int) -> None:
        """Set the number of steps after which the learning rate's schedule ends."""
        options = self.config.optimizer
        # From a warm-up of 0 to a decay to 0, no step has a rate of 0: its rollouts would be wasted.
        self._rate = get_scheduler(options.schedule, self._optimizer, options.warmup_steps, steps + 1).lr_lambdas[0]

    def set_rate(self, number: int) -> float:
        """Set and return the learning rate of a step, which is numbered from 0."""
        rate = self.config.optimizer.learning_rate * self._rate(number + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def batches(self, rows: Sequence[TrainingRow], size: int) -> list[Batch]:
        """Return this process's micro-batches of rows of similar length; each process has the same number of them.

        Args:
            rows: the rows of all processes.
            size: most rows per micro-batch.
        """
        processes = self.accelerator.num_processes
        size = min(size, -(-len(rows) // processes) or 1)
        ordered = sorted(rows, key=lambda row: len(row.ids))
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        parts += [[EMPTY]] * (-len(parts) % processes)
        padding, device = self.tokenizer.pad_token_id, self.accelerator.device
        return [
            Batch(part, {name: tensor.to(device) for name, tensor in collate(part, pad=padding).items()})
            for part in parts[self.accelerator.process_index :: processes]
        ]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss, which is its part of the sum over all processes."""
        (loss * self.accelerator.num_processes).backward()  # FSDP takes the mean over processes

    def change_weights(self) -> float:
        """Make one step of the optimiser; return the norm of the gradients before they are clipped.

        From here until :meth:`finish`, Ctrl-C and SIGTERM wait.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self.config.optimizer.max_grad_norm)
        self._interrupts.delay()
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._weights and self._weights[name] is not parameter:
                    parameter.copy_(self._weights[name])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def finish(self, step: int) -> None:
        """Count a step, after it has been logged; an interruption may now end the loop."""
        self.finished = step
        self._interrupts.allow()

    def total(self, sums: torch.Tensor) -> list[float]:
        """Return the sums of all processes' numbers."""
        numbers: list[float] = self.accelerator.reduce(sums.to(self.accelerator.device)).tolist()
        return numbers

    # --- files -------------------------------------------------------------------------------------------------------

    def save_if_due(self, run: TrainingRun, *, first: int, last: int) -> None:
        """Write a checkpoint after every ``checkpoints.every`` steps, and after the first and the last step.

        The first step's checkpoint shows early whether the disk suffices, and what an interruption leaves.

        Args:
            run: the run's directory.
            first: number of steps that were finished when the process started.
            last: number of steps of the run.
        """
        if self.finished % self.config.checkpoints.every == 0 or self.finished in (first + 1, last):
            self.save(run, self.finished)

    @contextlib.contextmanager
    def interruptible(self, run: TrainingRun) -> Iterator[None]:
        """Write a checkpoint of the finished steps if Ctrl-C or SIGTERM ends the block, unless weights are sharded.

        Args:
            run: the run's directory.
        """
        with self._interrupts:
            try:
                yield
            except KeyboardInterrupt:  # also SIGTERM
                if self.finished > step_of(run.last_checkpoint()) and not self.is_sharded:
                    self.save(run, self.finished)
                raise

    def save(self, run: TrainingRun, step: int) -> None:
        """Write a checkpoint: a model that transformers or peft opens, and the state of the optimiser.

        Args:
            run: the run's directory.
            step: number of finished steps.
        """
        self._interrupts.delay()
        weights, path = self.full_weights(self.model), run.checkpoints / f"checkpoint-{step}"
        states = {
            name: {key: full(value).cpu() for key, value in self._optimizer.state[weight].items()}
            for name, weight in self._weights.items()
        }
        reference = self.reference if isinstance(self.config, RlConfig) and self.config.reference.every else None
        updated = self.full_weights(reference.model) if reference else {}
        if self.accelerator.is_main_process:
            self.model.save_pretrained(path, state_dict=weights)
            self.tokenizer.save_pretrained(path)
            torch.save(states, path / "optimizer.pt")
            if reference:
                reference.model.save_pretrained(path / "reference", state_dict=updated)
                self.tokenizer.save_pretrained(path / "reference")
            run.checkpoint_written(step, self.config.checkpoints.keep)
        self.accelerator.wait_for_everyone()
        self._interrupts.allow()

    def save_model(self, run: TrainingRun, name: str = "model") -> None:
        """Write the trained model with the optimiser's float32 weights and, with LoRA, also the adapter alone.

        Args:
            run: the run's directory.
            name: name of the model's directory in it.
        """
        weights, model = self.full_weights(self.model), self.model
        if self.accelerator.is_main_process:
            if self.config.lora.rank:
                model.save_pretrained(run.path / "adapter", state_dict=weights)
                model = self._merged(run.path / "adapter")
                weights = model.state_dict()
            with run.new_model(name) as path:
                model.save_pretrained(path, state_dict=weights)
                self.tokenizer.save_pretrained(path)
        self.accelerator.wait_for_everyone()

    def _merged(self, adapter: Path) -> PreTrainedModel:
        """Open the base model anew in float32, and return it with the adapter merged into its weights."""
        from peft import PeftModel  # noqa: PLC0415 - an optional package

        return PeftModel.from_pretrained(open_policy(self.config.model)[0], adapter).merge_and_unload()

    def full_weights(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return unsharded weights in the optimiser's precision, tied ones as one tensor; with LoRA the adapters'."""
        names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if id(value) in names or not self.config.lora.rank
        }
        optimised = {key: self._weights[name] for key, name in names.items()}
        distinct = {id(value): value for value in state.values()}
        weights = {key: full(optimised.get(key, value)) for key, value in distinct.items()}
        return {name: weights[id(value)] for name, value in state.items()}

    def close(self) -> None:
        """Finish the experiment trackers' log."""
        self.accelerator.end_training()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert a model's parameters. Its buffers stay in float32, because the frequencies of positions need it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def full(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its shards; all processes must call this function."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _adder(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds a parameter's gradient to its float32 copy's, and frees it."""

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return add
