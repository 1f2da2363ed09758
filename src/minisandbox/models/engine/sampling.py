"""Sample tokens, and report their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minisandbox.models.protocol import Sampling

if TYPE_CHECKING:
    import torch


def draw(logits: torch.Tensor, how: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample a token for each row.

    The result depends only on the row's own logits and random number, not on the rest of the batch.

    Args:
        logits: the next token's logits, [rows, vocabulary].
        how: the sampling options of each row.
        uniforms: a random number in [0, 1) for each row.

    Returns:
        The tokens, and their log-probabilities under the sampled distribution: after temperature, top_k and top_p.
        At temperature 0 the likeliest token is taken, and its log-probability is the one at temperature 1, as in
        vLLM.
    """
    import torch  # noqa: PLC0415 - an extra

    temperatures = [one.temperature or 1.0 for one in how]
    scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    for row, one in enumerate(how):
        if one.temperature and (one.top_k or one.top_p < 1):
            logprobs[row] = _narrow(logprobs[row], one)
    # The inverse of the cumulative distribution, in double precision: a vocabulary has 100,000 small summands.
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    aims = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, aims, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)
    greedy = torch.tensor([not one.temperature for one in how], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()


def _narrow(logprobs: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Restrict a distribution by ``top_k`` and ``top_p``, and normalise it."""
    import torch  # noqa: PLC0415 - an extra

    ordered, places = logprobs.sort(descending=True)
    count = min(how.top_k or len(ordered), len(ordered))
    # the smallest set that reaches top_p: keep a token while those before it do not reach it
    before = ordered[:count].exp().cumsum(dim=-1) - ordered[:count].exp()
    stay = places[:count][before < how.top_p]
    narrowed = torch.full_like(logprobs, -torch.inf)
    narrowed[stay] = torch.log_softmax(logprobs[stay], dim=-1)
    return narrowed
