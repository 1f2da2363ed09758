"""Update a policy on rows of tokens, on one device or sharded over several with FSDP 2. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute
from transformers import PreTrainedModel, get_scheduler

from minisandbox.train.config import LOGITS_AT_ONCE, RlConfig
from minisandbox.train.losses import corrections, divergences, policy_losses, scales
from minisandbox.train.rows import EMPTY, TrainingRow, collate
from minisandbox.train.running import TrainingRun, open_policy
from minisandbox.train.sft import lora_of, write_policy

_WAIT = timedelta(days=7)
"""How long processes wait for each other: rank 0 runs a step's rollouts, which take hours, while the others wait."""

Compare = Callable[[TrainingRow, list[float]], bool]


class TokenLogprobs(torch.nn.Module):  # type: ignore[misc] # mypy does not read torch
    """A causal language model that returns log-probabilities of tokens without keeping all logits in memory.

    Args:
        model: the model, which may have adapters.
        temperature: divisor of the logits.
        at_once: number of tokens whose logits are in memory at once.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.model = model
        self._temperature, self._at_once = temperature, at_once

    def forward(
        self, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of the tokens in the mask, as [rows, tokens]; 0.0 for other tokens.

        Args:
            ids: tokens [rows, tokens].
            attention: 1 for tokens, 0 for padding on the right.
            mask: 1.0 for tokens to score; the first token of a row cannot be scored.
        """
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        hidden = base.get_decoder()(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
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
class _Batch:
    """A micro-batch. ``old`` and ``reference`` are log-probabilities, known after its first forward pass."""

    rows: Sequence[TrainingRow]
    tensors: dict[str, torch.Tensor]
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None


class Learner:
    """A policy with its optimiser. All processes of a node have one, and call the same methods in the same order.

    In ``bfloat16``, the model computes in bfloat16, and the optimiser changes a float32 copy of its weights. The
    gradients of all micro-batches are added in float32.

    Args:
        config: the experiment's configuration.
        checkpoint: a directory of :meth:`save` to resume from; None for the initial model.

    Attributes:
        model: the model, sharded if there are several processes.
        sampler: a model with the same weights that samples: the same object, or rank 0's copy if ``model`` is sharded.
        tokenizer: the model's tokenizer.
        accelerator: the device and the processes.
    """

    def __init__(self, config: RlConfig, checkpoint: Path | None) -> None:
        self._config = config
        self.accelerator = Accelerator(
            cpu=config.device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=_WAIT)],
            log_with=None if config.report_to == "none" else config.report_to, project_dir=config.out,
        )  # fmt: skip
        self._sharded = self.accelerator.num_processes > 1
        self.dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        set_seed(config.seed)  # new adapters are random
        self.model, self.tokenizer = self._open(checkpoint)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._scorer = TokenLogprobs(self.model, config.policy.temperature)
        self.sampler: PreTrainedModel = self.model
        if self._sharded and self.accelerator.is_main_process:
            self.sampler = _cast(self._open(checkpoint)[0], self.dtype).to(self.accelerator.device)
        self._weights = self._prepared()
        self._reference = self._open_reference(checkpoint) if config.kl and not config.lora.rank else None
        self._optimizer = self._open_optimizer()
        if checkpoint:
            self._load_optimizer(torch.load(checkpoint / "optimizer.pt", weights_only=True))

    # --- loading -----------------------------------------------------------------------------------------------------

    def _open(self, checkpoint: Path | None) -> tuple[Any, Any]:
        config = self._config
        model, tokenizer = open_policy(str(checkpoint) if checkpoint and not config.lora.rank else config.model)
        if (lora := lora_of(config.lora)) is not None:
            from peft import PeftModel, get_peft_model  # noqa: PLC0415 - only adapters need it

            resumed = checkpoint and PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
            model = resumed or get_peft_model(model, lora)
        for module in model.modules():  # sampling uses no dropout, so training must not either
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        return model.train(), tokenizer

    def _prepared(self) -> dict[str, torch.Tensor]:
        """Move the model to its device, sharded or in its precision; return the weights that the optimiser changes."""
        if self._sharded:
            self._shard(self._scorer)
        device = self.accelerator.device
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        if self._sharded or self.dtype == torch.float32:
            self.model.to(device)
            return trained
        masters = {name: weight.detach().to(device, copy=True) for name, weight in trained.items()}
        _cast(self.model, self.dtype).to(device)
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(_adder(masters[name]))
        return masters

    def _shard(self, scorer: TokenLogprobs) -> None:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        kinds = scorer.model._no_split_modules or ()
        blocks = [module for module in scorer.modules() if type(module).__name__ in kinds]
        for module in (*blocks, scorer):
            # By default, the last one would stay whole after a pass without gradients, as the reference makes.
            fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    def _open_reference(self, checkpoint: Path | None) -> TokenLogprobs:
        updated = checkpoint / "reference" if checkpoint and self._config.reference.every else None
        model, _ = open_policy(str(updated) if updated else self._config.model)
        reference = TokenLogprobs(_cast(model, self.dtype).requires_grad_(False), self._config.policy.temperature)
        if self._sharded:
            self._shard(reference)
        reference.to(self.accelerator.device)
        return reference

    def _open_optimizer(self) -> torch.optim.AdamW:
        options, weights = self._config.optimizer, list(self._weights.values())
        matrices, vectors = ([weight for weight in weights if (weight.ndim > 1) is wide] for wide in (True, False))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
        )  # fmt: skip
        schedule = get_scheduler(options.schedule, optimizer, options.warmup_steps, self._config.steps + 1)
        self._rate: Callable[[int], float] = schedule.lr_lambdas[0]
        return optimizer

    def _load_optimizer(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, weight in self._weights.items():
            self._optimizer.state[weight] = {
                key: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
                if isinstance(weight, DTensor) and value.ndim
                else value.to(weight.device if value.ndim else value.device)
                for key, value in states.get(name, {}).items()
            }

    # --- an update ---------------------------------------------------------------------------------------------------

    def update(
        self, rows: Sequence[TrainingRow], number: int, compare: Compare, check: Callable[[], object]
    ) -> dict[str, float]:
        """Change the weights by a step's rows, with ``iterations`` steps of the optimiser; without rows, do nothing.

        Args:
            rows: the step's rows, the same in all processes.
            number: the step's number, from 0.
            compare: called with each row of this process and its log-probabilities; returns whether it carries loss.
            check: called before the weights change for the first time.

        Returns:
            The statistics to log.
        """
        config, totals = self._config, torch.zeros(5, dtype=torch.float64)
        # From a warm-up of 0 to a decay to 0, no step has a rate of 0: its rollouts would be wasted.
        rate = config.optimizer.learning_rate * self._rate(number + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batches, norm = self._batches(rows), 0.0
        tokens = sum(row.loss_tokens for row in rows)
        for iteration in range(config.iterations if rows else 0):
            for batch in batches:
                loss, sums = self._loss(batch, tokens, compare)
                # FSDP takes the mean over processes of the gradients of these sums.
                (loss * self.accelerator.num_processes).backward()
                totals += torch.stack([loss.detach(), *sums]).double().cpu()
            if not iteration:
                check()
            norm = self._change_weights()
        every = config.reference.every
        if self._reference is not None and every and (number + 1) % every == 0:
            self._update_reference(self._reference)
        loss_sum, count, entropy, divergence, clipped = self.accelerator.reduce(
            totals.to(self.accelerator.device)
        ).tolist()
        count = count or 1.0
        stats = {"loss": loss_sum / config.iterations, "grad_norm": norm, "learning_rate": rate,
                 "entropy": entropy / count, "clipped": clipped / count}  # fmt: skip
        return stats | ({"kl": divergence / count} if config.kl else {})

    def _batches(self, rows: Sequence[TrainingRow]) -> list[_Batch]:
        """Return this process's micro-batches of rows of similar length; each process has the same number of them."""
        processes = self.accelerator.num_processes
        size = min(self._config.micro_batch, -(-len(rows) // processes) or 1)
        ordered = sorted(rows, key=lambda row: len(row.ids))
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        parts += [[EMPTY]] * (-len(parts) % processes)
        padding, device = self.tokenizer.pad_token_id, self.accelerator.device
        return [
            _Batch(part, {name: tensor.to(device) for name, tensor in collate(part, pad=padding).items()})
            for part in parts[self.accelerator.process_index :: processes]
        ]

    def _loss(self, batch: _Batch, tokens: int, compare: Compare) -> tuple[torch.Tensor, list[torch.Tensor]]:
        config, tensors = self._config, batch.tensors
        inputs = tensors["input_ids"], tensors["attention_mask"], tensors["mask"]
        logprobs, entropies = self._scorer(*inputs)
        if batch.old is None:
            batch.old = logprobs.detach()
            for index, (row, values) in enumerate(zip(batch.rows, batch.old.tolist(), strict=True)):
                if row.loss_tokens and not compare(row, values[: len(row.ids)]):
                    tensors["mask"][index] = 0.0
            batch.reference = self._reference_logprobs(*inputs) if config.kl else None
        mask = tensors["mask"]
        losses, is_clipped = policy_losses(config.loss, logprobs, batch.old, tensors["weights"], mask, config.clip)
        losses = losses * corrections(batch.old, tensors["logprobs"], mask, config.used_correction)
        losses = losses - config.entropy * entropies * mask
        divergence = torch.zeros_like(mask)
        if batch.reference is not None:
            divergence = divergences(logprobs, batch.reference) * mask
            losses = losses + config.kl * divergence
        factors = scales(
            config.loss, mask, tensors["shares"], rollouts=config.groups.tasks * config.groups.size, tokens=tokens,
            length=config.loss_length,
        )  # fmt: skip
        sums = [mask, entropies * mask, divergence, is_clipped * mask]
        return (losses * factors).sum(), [values.detach().sum() for values in sums]

    @torch.no_grad()  # type: ignore[untyped-decorator] # mypy does not read torch
    def _reference_logprobs(self, *inputs: torch.Tensor) -> torch.Tensor:
        initial = contextlib.nullcontext() if self._reference else self.model.disable_adapter()
        with initial:
            logprobs, _ = (self._reference or self._scorer)(*inputs)
        return logprobs

    def _change_weights(self) -> float:
        """Make one step of the optimiser; return the norm of the gradients before they are clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.optimizer.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._weights and self._weights[name] is not parameter:
                    parameter.copy_(self._weights[name])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()  # type: ignore[untyped-decorator] # mypy does not read torch
    def _update_reference(self, reference: TokenLogprobs) -> None:
        for name, old in reference.model.named_parameters():
            old.copy_(old.float().lerp(self._weights[name], self._config.reference.mix))

    # --- weights -----------------------------------------------------------------------------------------------------

    def refresh_sampler(self) -> None:
        """Copy the weights to the model that samples, if it is another one."""
        if not self._sharded:
            return
        copies = dict(self.sampler.named_parameters()) if self.accelerator.is_main_process else {}
        for name, weight in self._weights.items():
            full_weight = _full(weight)
            if name in copies:
                copies[name].data.copy_(full_weight)

    def save(self, run: TrainingRun, step: int) -> None:
        """Write a checkpoint: a model that transformers or peft opens, and the state of the optimiser.

        Args:
            run: the run's directory.
            step: number of finished steps.
        """
        weights, path = self._full_weights(self.model), run.checkpoints / f"checkpoint-{step}"
        states = {
            name: {key: _full(value).cpu() for key, value in self._optimizer.state[weight].items()}
            for name, weight in self._weights.items()
        }
        reference = self._reference if self._config.reference.every else None
        updated = self._full_weights(reference.model) if reference else {}
        if self.accelerator.is_main_process:
            self.model.save_pretrained(path, state_dict=weights)
            self.tokenizer.save_pretrained(path)
            torch.save(states, path / "optimizer.pt")
            if reference:
                reference.model.save_pretrained(path / "reference", state_dict=updated)
                self.tokenizer.save_pretrained(path / "reference")
            run.checkpoint_written(step, self._config.checkpoints.keep)
        self.accelerator.wait_for_everyone()

    def save_model(self, run: TrainingRun) -> None:
        """Write the trained model with the optimiser's float32 weights and, with LoRA, also the adapter alone."""
        weights = self._full_weights(self.model)
        if self.accelerator.is_main_process:
            changed = self._sharded or self.dtype != torch.float32
            write_policy(self.model, weights, self.tokenizer, run, reopen=changed)
        self.accelerator.wait_for_everyone()

    def _full_weights(self, model: Any) -> dict[str, torch.Tensor]:
        """Return unsharded weights in the optimiser's precision, tied ones as one tensor; with LoRA the adapters'."""
        names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if id(value) in names or not self._config.lora.rank
        }
        optimised = {key: self._weights[name] for key, name in names.items()}
        distinct = {id(value): value for value in state.values()}
        full = {key: _full(optimised.get(key, value)) for key, value in distinct.items()}
        return {name: full[id(value)] for name, value in state.items()}


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model's parameters. Its buffers stay in float32, because the frequencies of positions need it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _full(value: torch.Tensor) -> torch.Tensor:
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
