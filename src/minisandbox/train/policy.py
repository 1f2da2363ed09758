"""Update a policy by reinforcement learning on a step's rows. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from minisandbox.train.config import RlConfig
from minisandbox.train.learner import Batch, Learner, TokenLogprobs, cast, full
from minisandbox.train.losses import corrections, divergences, policy_losses, scales
from minisandbox.train.rows import TrainingRow
from minisandbox.train.running import open_policy

Compare = Callable[[TrainingRow, list[float]], bool]


class PolicyLearner(Learner[RlConfig]):
    """The policy of reinforcement learning, with a model that samples and, if there is a penalty, a reference model.

    Attributes:
        sampler: a model with the same weights that samples: the same object, or rank 0's copy if ``model`` is sharded.
    """

    def __init__(self, config: RlConfig, checkpoint: Path | None) -> None:
        """Open the policy.

        Args:
            config: the experiment's configuration.
            checkpoint: a directory of :meth:`save` to resume from; None for the initial model.
        """
        super().__init__(config, checkpoint, temperature=config.policy.temperature)
        self.schedule(config.steps)
        self.sampler = self.model
        if self.is_sharded and self.accelerator.is_main_process:
            self.sampler = cast(self._open(checkpoint)[0], self.dtype).to(self.accelerator.device)
        if config.kl and not config.lora.rank:
            self.reference = self._open_reference(checkpoint)

    def _open_reference(self, checkpoint: Path | None) -> TokenLogprobs:
        updated = checkpoint / "reference" if checkpoint and self.config.reference.every else None
        model, _ = open_policy(str(updated) if updated else self.config.model)
        reference = TokenLogprobs(cast(model, self.dtype).requires_grad_(False), self.config.policy.temperature)
        if self.is_sharded:
            self.shard(reference)
        reference.to(self.accelerator.device)
        return reference

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
        config, totals = self.config, torch.zeros(5, dtype=torch.float64)
        rate, norm, batches = self.set_rate(number), 0.0, self.batches(rows, config.micro_batch)
        tokens = sum(row.loss_tokens for row in rows)
        for iteration in range(config.iterations if rows else 0):
            for batch in batches:
                loss, sums = self._loss(batch, tokens, compare)
                self.backward(loss)
                totals += torch.stack([loss.detach(), *sums]).double().cpu()
            if not iteration:
                check()
            norm = self.change_weights()
        every = config.reference.every
        if self.reference is not None and every and (number + 1) % every == 0:
            self._update_reference(self.reference)
        loss_sum, count, entropy, divergence, clipped = self.total(totals)
        count = count or 1.0
        stats = {"loss": loss_sum / config.iterations, "grad_norm": norm, "learning_rate": rate,
                 "entropy": entropy / count, "clipped": clipped / count}  # fmt: skip
        return stats | ({"kl": divergence / count} if config.kl else {})

    def _loss(self, batch: Batch, tokens: int, compare: Compare) -> tuple[torch.Tensor, list[torch.Tensor]]:
        config, tensors = self.config, batch.tensors
        logprobs, entropies = self.scorer(*batch.inputs)
        if batch.old is None:
            batch.old = logprobs.detach()
            for index, (row, values) in enumerate(zip(batch.rows, batch.old.tolist(), strict=True)):
                if row.loss_tokens and not compare(row, values[: len(row.ids)]):
                    tensors["mask"][index] = 0.0
            batch.reference = self._reference_logprobs(batch) if config.kl else None
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
    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        with contextlib.nullcontext() if self.reference else self.model.disable_adapter():
            logprobs, _ = (self.reference or self.scorer)(*batch.inputs)
        return logprobs

    @torch.no_grad()  # type: ignore[untyped-decorator] # mypy does not read torch
    def _update_reference(self, reference: TokenLogprobs) -> None:
        for name, old in reference.model.named_parameters():
            old.copy_(old.float().lerp(self._weights[name], self.config.reference.mix))

    def refresh_sampler(self) -> None:
        """Copy the weights to the model that samples, if it is another one."""
        if not self.is_sharded:
            return
        copies = dict(self.sampler.named_parameters()) if self.accelerator.is_main_process else {}
        for name, weight in self._weights.items():
            full_weight = full(weight)
            if name in copies:
                copies[name].data.copy_(full_weight)
