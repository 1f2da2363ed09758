"""What a model says of tokens that were sampled before: the check of everything that is captured."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from minisandbox.models.graph import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_logprobs(model: PreTrainedModel, row: TokenRow, *, temperature: float = 1.0) -> array[float]:
    """Return the log-probabilities of a row's tokens by one forward pass over the whole row.

    In float32 they equal captured ones within 1e-4 where ``top_p`` is 1 and ``top_k`` 0. It takes memory for the logits
    of the whole row: tokens times vocabulary times four bytes.

    Args:
        model: the one that sampled, with the weights that it had then, in evaluation mode.
        row: what was captured.
        temperature: what was sampled with; 1 for 0 too.

    Returns:
        One for each token, given those before it (``array('d')``); 0.0 for context, as in the row.
    """
    import torch  # noqa: PLC0415 - an extra

    device = next(model.parameters()).device
    ids = torch.tensor([row.ids], dtype=torch.long, device=device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / (temperature or 1.0)
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
    sampled = (0.0, *logprobs)
    return array("d", (value if carries else 0.0 for value, carries in zip(sampled, row.mask, strict=True)))
