"""Recompute the log-probabilities of captured tokens, to check that the capture is exact."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from minisandbox.models.graph import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AT_ONCE = 2048
"""Tokens whose logits are in memory at once; with a vocabulary of 152,000 they take 1.2 GB in float32."""


def recompute_logprobs(
    model: PreTrainedModel, row: TokenRow, *, temperature: float = 1.0, at_once: int = _AT_ONCE
) -> array[float]:
    """Return the log-probabilities of a row's tokens by forward passes without a cache.

    In float32 they equal captured ones within 1e-4 where ``top_p`` is 1 and ``top_k`` 0. Logits are computed only for
    sampled tokens. A row with more than ``at_once`` of them takes several passes, each up to the last token of a part.

    Args:
        model: the model that sampled, with the same weights, in evaluation mode.
        row: the captured row.
        temperature: the sampling temperature; 1 also if that was 0.
        at_once: sampled tokens whose logits are in memory together: each takes the vocabulary, twice, in float32.

    Returns:
        The log-probability of each token given those before it (``array('d')``); 0.0 for context, as in the row.
    """
    import torch  # noqa: PLC0415 - an extra

    device = next(model.parameters()).device
    ids = torch.tensor([row.ids], dtype=torch.long, device=device)
    sampled = [index for index, carries in enumerate(row.mask) if carries and index]
    logprobs = array("d", bytes(8 * len(row.ids)))
    with torch.inference_mode():
        for start in range(0, len(sampled), at_once):
            indices = sampled[start : start + at_once]
            before = torch.tensor(indices, device=device) - 1  # a token's logits are at the position before it
            part = ids[:, : indices[-1]]
            logits = (
                model(input_ids=part, use_cache=False, logits_to_keep=before).logits[0].float().div_(temperature or 1.0)
            )
            values = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, before + 1, None])[:, 0].tolist()
            for index, value in zip(indices, values, strict=True):
                logprobs[index] = value
    return logprobs
