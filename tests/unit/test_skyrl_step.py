"""One training step of SkyRL on a CPU, by its Jax backend, on tokens that our engine sampled.

Skipped where SkyRL or Jax is not installed: `make test-skyrl` makes an environment with them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-skyrl")
pytest.importorskip("jax", reason="Jax is not installed: make test-skyrl")

from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tinker import types
from tests.unit.tiny_model import tiny_engine, tiny_tokenizer

from minisandbox.models import Message, Request, Sampling, TokenGraph, TokenRow

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]
MODEL, RESPONSES = "policy", 8


async def sample_group(path: Path) -> list[TokenRow]:
    """Save the tiny model, and sample one group of responses from it."""
    engine = tiny_engine("llama")
    engine.model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    prompt = (Message("user", "the tests of the module fail"),)
    rows: list[TokenRow] = []
    try:
        for seed in range(RESPONSES):
            completion = await engine.complete(Request(prompt, (), Sampling(max_tokens=24, temperature=1.0, seed=seed)))
            graph = TokenGraph()
            assert completion.tokens is not None
            graph.add(completion.tokens)
            rows += graph.rows()
    finally:
        await engine.close()
    return rows


def batch_of(rows: list[TokenRow], advantages: list[float]) -> types.PreparedModelPassBatch:
    """Convert rows to what SkyRL's engine hands its backends: the target of a position is the token that follows."""
    return types.PreparedModelPassBatch(
        all_model_inputs=[
            types.ModelInput(chunks=[types.EncodedTextChunk(tokens=row.ids[:-1].tolist())]) for row in rows
        ],
        all_targets=[row.ids[1:].tolist() for row in rows],
        all_token_weights=[[float(bit) for bit in row.mask[1:]] for row in rows],
        all_sampling_logprobs=[row.logprobs[1:].tolist() for row in rows],
        all_advantages=[[advantage] * (len(row.ids) - 1) for row, advantage in zip(rows, advantages, strict=True)],
        all_values=[[]] * len(rows), all_returns=[[]] * len(rows),
        all_model_ids=[MODEL] * len(rows), all_loss_fns=["importance_sampling"] * len(rows),
        all_loss_fn_configs=[None] * len(rows), request_batch_slices=[("request", MODEL, 0, len(rows))],
    )  # fmt: skip


def sampled_logprobs(result: dict[str, types.ForwardBackwardOutput], rows: list[TokenRow]) -> list[list[float]]:
    """The log-probabilities that the backend reports for the sampled tokens of each row."""
    outputs = result["request"].loss_fn_outputs
    return [
        [value for value, bit in zip(output["logprobs"]["data"], row.mask[1:], strict=True) if bit]
        for output, row in zip(outputs, rows, strict=True)
    ]


def test_a_step_raises_the_probability_of_what_was_rewarded(tmp_path: Path) -> None:
    rows = asyncio.run(sample_group(tmp_path))
    rewards = [float(seed % 2) for seed in range(RESPONSES)]
    mean = sum(rewards) / len(rewards)
    batch = batch_of(rows, [reward - mean for reward in rewards])
    backend = JaxBackend(
        str(tmp_path), JaxBackendConfig(max_lora_adapters=2, max_lora_rank=8, train_micro_batch_size=4)
    )
    backend.create_model(MODEL, types.LoraConfig(rank=8, alpha=16.0, seed=0))
    before = sampled_logprobs(backend.forward_backward(batch), rows)
    for row, logprobs in zip(rows, before, strict=True):
        drawn = [logprob for logprob, bit in zip(row.logprobs, row.mask, strict=True) if bit]
        assert logprobs == pytest.approx(drawn, abs=1e-4)  # the trainer and the engine agree on every token
    adam = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
    metrics = backend.optim_step(MODEL, types.OptimStepInput(adam_params=adam)).metrics
    assert metrics is not None
    assert metrics["skyrl.ai/grad_norm"] > 0
    after = sampled_logprobs(backend.forward(batch), rows)
    gain = [sum(new) - sum(old) for new, old in zip(after, before, strict=True)]
    assert sum(change * (reward - mean) for change, reward in zip(gain, rewards, strict=True)) > 0
