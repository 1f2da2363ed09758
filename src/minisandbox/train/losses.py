"""Losses of reinforcement learning, as functions of the log-probabilities of a micro-batch. Imports torch.

All tensors have the shape [rows, tokens], or [rows, 1] for values per row. ``mask`` is 1.0 for tokens that carry loss.
"""

from __future__ import annotations

import torch

from minisandbox.train.config import Clip, Correction


def policy_losses(
    loss: str, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: Clip
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens' losses, before :func:`scales`, and which of their ratios were clipped.

    The ratio of new and old probability is that of a token (PPO's objective, arXiv 2402.03300), or that of a whole row:
    its product for ``rloo`` (arXiv 2402.14740), its geometric mean for ``gspo`` (arXiv 2507.18071). ``cispo``
    (arXiv 2506.13585) clips the ratio as a constant factor of the log-probability, so that each token has a gradient.

    Args:
        loss: the loss's name.
        logprobs: log-probabilities of the policy.
        old: log-probabilities of the policy before the step.
        advantages: the rows' advantages.
        mask: the tokens that carry loss.
        clip: the range of the ratio.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1.0)
    change = (logprobs - old) * mask
    if loss in ("rloo", "gspo"):
        total = change.sum(-1, keepdim=True)
        change = (total if loss == "rloo" else total / count).expand_as(mask)
    ratio = change.exp()
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    if loss == "cispo":
        return -clipped.detach() * advantages * logprobs * mask, clipped != ratio
    losses = -torch.minimum(ratio * advantages, clipped * advantages) * mask
    is_clipped = clipped * advantages < ratio * advantages
    return losses / count if loss == "rloo" else losses, is_clipped


def corrections(old: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, options: Correction) -> torch.Tensor:
    """Return the factors that correct the difference between trainer and sampler: ratios of their probabilities.

    Args:
        old: the trainer's log-probabilities before the step.
        sampled: the sampler's log-probabilities.
        mask: the tokens that carry loss.
        options: whether tokens or rows have a ratio, and what happens to ratios above the limit.
    """
    if options.by == "none":
        return torch.ones_like(mask)
    change = (old - sampled) * mask
    ratio = (change.sum(-1, keepdim=True).expand_as(mask) if options.by == "sequence" else change).exp()
    above = torch.zeros_like(ratio) if options.above == "mask" else torch.full_like(ratio, options.limit)
    return torch.where(ratio > options.limit, above, ratio)


def divergences(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return each token's KL divergence from the reference: the estimator k3 of http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: log-probabilities of the policy.
        reference: log-probabilities of the reference model.
    """
    change = reference - logprobs
    return change.expm1() - change


def scales(
    loss: str, mask: torch.Tensor, shares: torch.Tensor, *, rollouts: int, tokens: int, length: int
) -> torch.Tensor:
    """Return the rows' factors, so that a step's loss is the sum of all tokens' losses times these factors.

    The step's numbers of rollouts and tokens do not depend on the micro-batches. ``rollouts`` counts all rollouts of a
    step, whether they have a reward and a signal or not. The gradient therefore shrinks if groups drop out, as in
    Dr. GRPO (arXiv 2503.20783): with signal in 2 of 16 groups it is an eighth. Only ``dapo`` and ``cispo`` divide by
    the tokens that carry loss, so their gradient does not shrink.

    Args:
        loss: the loss's name.
        mask: the tokens that carry loss.
        shares: each row's share of its rollout's tokens, so that a rollout with several rows counts once.
        rollouts: number of rollouts of the step.
        tokens: number of tokens of the step that carry loss.
        length: ``dr_grpo``'s divisor of a rollout's sum.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1.0)
    if loss in ("grpo", "gspo"):
        return shares / count / rollouts
    divisor = {"dr_grpo": rollouts * length, "rloo": rollouts}.get(loss, max(tokens, 1))
    return torch.ones_like(shares) / divisor
