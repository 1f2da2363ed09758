"""Recompute the log-probabilities of captured tokens, to check that the capture is exact."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from minisandbox.models.graph import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AT_ONCE = 2048
"""Number of tokens whose logits are in memory at once: 1.2 GB in float32 for a vocabulary of 152,000."""


def recompute_logprobs(
    model: PreTrainedModel, row: TokenRow, *, temperature: float = 1.0, at_once: int = _AT_ONCE
) -> array[float]:
    """Recompute the log-probabilities of a row's sampled tokens, by forward passes without a cache.

    In float32, they equal the captured log-probabilities within 1e-4 if ``top_p`` is 1 and ``top_k`` is 0. Logits are
    computed only for sampled tokens. A row with more than ``at_once`` sampled tokens takes several passes, each from
    the row's start to the last token of the pass.

    Args:
        model: the model that sampled, with the same weights, in evaluation mode.
        row: the captured row.
        temperature: the sampling temperature; 0 is treated as 1.
        at_once: number of sampled tokens per pass. Each needs two float32 vectors of the vocabulary's size.

    Returns:
        The log-probability of each token given the tokens before it (``array('d')``); 0.0 for context, as in the row.
    """
    import torch  # noqa: PLC0415 - an optional package

    device = next(model.parameters()).device
    ids = torch.tensor([row.ids], dtype=torch.long, device=device)
    sampled = [index for index, carries in enumerate(row.mask) if carries and index]
    logprobs = array("d", bytes(8 * len(row.ids)))
    with torch.inference_mode():
        for start in range(0, len(sampled), at_once):
            indices = sampled[start : start + at_once]
            before = torch.tensor(indices, device=device) - 1  # a token is predicted at the position before it
            part = ids[:, : indices[-1]]
            logits = (
                model(input_ids=part, use_cache=False, logits_to_keep=before).logits[0].float().div_(temperature or 1.0)
            )
            values = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, before + 1, None])[:, 0].tolist()
            for index, value in zip(indices, values, strict=True):
                logprobs[index] = value
    return logprobs
