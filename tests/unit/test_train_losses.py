"""Losses, corrections and scales against a reference in plain floats, and their gradients against differences of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from minisandbox.train.config import LOSSES, Clip, Correction

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="the extra [train] is not installed")

from minisandbox.train import losses

Rows = Sequence[Sequence[float]]
MASK = [[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
"""Three rows of two rollouts: the first two are one rollout's."""
NONE = Correction("none")
SHARES, ROLLOUTS, LENGTH, CLIP = [0.75, 0.25, 1.0], 4, 8, Clip(0.2, 0.3)


def bounded(ratio: float) -> float:
    return min(max(ratio, 1 - CLIP.low), 1 + CLIP.high)


def column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def reference(
    loss: str, new: Rows, old: Rows, sampled: Rows, first: Rows, advantages: Sequence[float], *,
    correction: Correction = NONE, kl: float = 0.0, fixed: Rows | None = None,
) -> float:  # fmt: skip
    """Return a step's loss. ``fixed`` are log-probabilities in factors without a gradient."""
    total, fixed = 0.0, new if fixed is None else fixed
    tokens = sum(map(sum, MASK))
    for row, advantage in enumerate(advantages):
        places = [place for place, carries in enumerate(MASK[row]) if carries]
        product = sum(new[row][place] - old[row][place] for place in places)
        gap = sum(old[row][place] - sampled[row][place] for place in places)
        for place in places:
            change = {"rloo": product, "gspo": product / len(places)}.get(loss, new[row][place] - old[row][place])
            value = -min(math.exp(change) * advantage, bounded(math.exp(change)) * advantage)
            if loss == "cispo":
                value = -bounded(math.exp(fixed[row][place] - old[row][place])) * advantage * new[row][place]
            if correction.by != "none":
                ratio = math.exp(gap if correction.by == "sequence" else old[row][place] - sampled[row][place])
                limited = ratio <= correction.limit
                value *= ratio if limited else (correction.limit if correction.above == "truncate" else 0.0)
            change = first[row][place] - new[row][place]
            value += kl * (math.exp(change) - change - 1) * (len(places) if loss == "rloo" else 1)
            scale = {"dr_grpo": 1 / ROLLOUTS / LENGTH, "rloo": 1 / ROLLOUTS / len(places)}.get(loss, 1 / tokens)
            if loss in ("grpo", "gspo"):
                scale = SHARES[row] / len(places) / ROLLOUTS
            total += value * scale
    return total


def ours(
    loss: str, new: torch.Tensor, old: Rows, sampled: Rows, first: Rows, advantages: Sequence[float], *,
    correction: Correction = NONE, kl: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    old_, sampled_, first_, mask = (torch.tensor(one, dtype=torch.float64) for one in (old, sampled, first, MASK))
    values, _ = losses.policy_losses(loss, new, old_, column(advantages), mask, CLIP)
    values = values * losses.corrections(old_, sampled_, mask, correction)
    values = values + kl * losses.divergences(new, first_) * mask
    scales = losses.scales(
        loss, mask, column(SHARES), rollouts=ROLLOUTS, tokens=sum(map(sum, MASK)), length=LENGTH
    )  # fmt: skip
    return (values * scales).sum()


def logprobs(seed: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[float]] = (-2 + 0.4 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).tolist()
    return found


CORRECTIONS = [Correction(by, above, 1.1) for by in ("token", "sequence") for above in ("truncate", "mask")]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", [Correction("none"), *CORRECTIONS], ids=lambda one: f"{one.by}-{one.above}")
def test_loss_and_gradient_are_those_of_the_formula(loss: str, correction: Correction) -> None:
    for seed, advantages in itertools.product((1, 5), ([0.5, 0.5, -1.0], [-0.5, 0.25, 2.0])):
        old, sampled, first, start = (logprobs(seed + one) for one in range(4))
        new = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        value = ours(loss, new, old, sampled, first, advantages, correction=correction, kl=0.3)
        value.backward()
        options = {"correction": correction, "kl": 0.3, "fixed": start}
        assert value.item() == pytest.approx(reference(loss, start, old, sampled, first, advantages, **options))  # type: ignore[arg-type]
        assert new.grad is not None
        for row, place in itertools.product(range(3), range(4)):
            higher, lower = ([list(one) for one in start] for _ in range(2))
            higher[row][place] += 1e-6
            lower[row][place] -= 1e-6
            a, b = (reference(loss, one, old, sampled, first, advantages, **options) for one in (higher, lower))  # type: ignore[arg-type]
            assert new.grad[row, place].item() == pytest.approx((a - b) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_before_the_first_update_all_losses_have_the_gradient_of_reinforce(loss: str) -> None:
    old, advantages = logprobs(1), [0.5, 0.5, -1.0]
    new = torch.tensor(old, dtype=torch.float64, requires_grad=True)
    ours(loss, new, old, old, old, advantages).backward()
    assert new.grad is not None
    scale = {"dr_grpo": 1 / 32, "dapo": 1 / 8, "cispo": 1 / 8, "rloo": 1 / 4}
    for row, advantage in enumerate(advantages):
        factor = scale.get(loss, SHARES[row] / sum(MASK[row]) / ROLLOUTS)
        expected = [-advantage * factor * carries for carries in MASK[row]]
        assert new.grad[row].tolist() == pytest.approx(expected)


def test_clipping_is_counted_where_it_removes_the_gradient() -> None:
    old, mask = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    new = torch.tensor([[0.5, -0.5], [0.5, -0.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    _, is_clipped = losses.policy_losses("grpo", new, old, advantages, mask, CLIP)
    assert is_clipped.tolist() == [[True, False], [False, True]]
