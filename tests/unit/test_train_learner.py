"""Updates of a tiny model against a plain loop over full logits, and the ways to save memory against doing without."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiny_model import save_tiny_model, torch, transformers
from tests.unit.toy_setting import toy_config
from tests.unit.two_processes import run_in_two_processes

from minisandbox.errors import InvalidValue
from minisandbox.train.config import Clip, Correction, Lora, Reference, RlConfig
from minisandbox.train.rows import TrainingRow, collate
from minisandbox.train.running import TrainingRun

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from minisandbox.train.learner import TokenLogprobs  # noqa: E402 - imports torch
from minisandbox.train.policy import PolicyLearner  # noqa: E402 - the same

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]


def row(length: int, weight: float, seed: int, share: float = 1.0) -> TrainingRow:
    generator = torch.Generator().manual_seed(seed)
    ids = array("i", torch.randint(5, 300, (length,), generator=generator).tolist())
    mask = bytes(int(place % 3 > 0) for place in range(length))
    logprobs = array("d", [-5.0 if carries else 0.0 for carries in mask])
    return TrainingRow(f"t__{seed}", ids, mask, logprobs, weight, share=share)


ROWS = [row(9, 0.5, 1), row(14, -1.0, 2), row(6, 0.75, 3, 0.4), row(12, 0.75, 4, 0.6), row(9, -0.25, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RlConfig:
    return replace(toy_config(model, tmp_path / "run"), micro_batch=2, check_tokens=False)


def update(learner: PolicyLearner, rows: Sequence[TrainingRow] = ROWS, number: int = 0) -> dict[str, float]:
    return learner.update(rows, number, lambda *_: True, lambda: None)


def weights_of(learner: PolicyLearner) -> dict[str, Any]:
    return {name: value.detach().float().clone() for name, value in learner.model.state_dict().items()}


def assert_close(weights: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, atol=tolerance, rtol=0), name


def difference(weights: dict[str, Any], expected: dict[str, Any]) -> float:
    """The norm of all differences. Single weights may differ: AdamW amplifies the rounding of small gradients."""
    return float(torch.stack([(weights[name] - value).norm() for name, value in expected.items()]).norm())


def test_an_update_is_that_of_a_plain_loop_over_full_logits(config: RlConfig, model: Path) -> None:
    config = replace(config, kl=0.3, entropy=0.02, reference=Reference(every=1))
    learner, plain = PolicyLearner(config, None), transformers.AutoModelForCausalLM.from_pretrained(model)
    first = transformers.AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.0)
    for number in range(3):
        stats, total = update(learner, number=number), torch.zeros(())
        for one in ROWS:
            ids, mask = torch.tensor([one.ids.tolist()]), torch.tensor(list(one.mask[1:]))
            logits = [(each(ids).logits[0, :-1] / 0.8).log_softmax(-1) for each in (plain, first)]
            new, start = (values.gather(-1, ids[0, 1:, None])[:, 0] for values in logits)
            change = start.detach() - new
            entropy = -(logits[0].exp() * logits[0]).sum(-1)
            losses = -(new - new.detach()).exp() * one.weight + 0.3 * (change.exp() - change - 1) - 0.02 * entropy
            total = total + (losses * mask).sum() / 8 / 16
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        first.load_state_dict(plain.state_dict())
        assert (stats["loss"], stats["grad_norm"]) == pytest.approx((total.item(), norm.item()), abs=1e-5)
    began = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert difference(weights_of(learner), plain.state_dict()) < 1e-3 * difference(plain.state_dict(), began)


def test_log_probabilities_in_chunks_are_those_of_all_logits(model: Path) -> None:
    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    batch = collate(ROWS, pad=0)
    inputs = [batch[name] for name in ("input_ids", "attention_mask", "mask")]
    found = []
    for at_once in (3, 1000):
        logprobs, entropies = TokenLogprobs(policy, 0.8, at_once)(*inputs)
        (logprobs - 0.1 * entropies).sum().backward()
        found.append([logprobs, entropies, *[one.grad.clone() for one in policy.parameters()]])
        policy.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    logits = policy(input_ids=inputs[0], attention_mask=inputs[1]).logits[:, :-1] / 0.8
    expected = logits.log_softmax(-1).gather(-1, inputs[0][:, 1:, None])[..., 0] * inputs[2][:, 1:]
    assert torch.allclose(found[0][0][:, 1:], expected, atol=1e-5)


def test_recomputed_activations_give_the_same_update(config: RlConfig) -> None:
    plain, recomputing = PolicyLearner(config, None), PolicyLearner(replace(config, gradient_checkpointing=True), None)
    assert recomputing.model.is_gradient_checkpointing
    assert update(recomputing) == pytest.approx(update(plain))
    assert_close(weights_of(recomputing), weights_of(plain), 1e-6)


def test_bfloat16_learns_what_float32_does_though_its_steps_are_below_its_precision(config: RlConfig) -> None:
    slow = replace(config.optimizer, learning_rate=1e-5)
    config = replace(config, optimizer=slow, correction=Correction("none"))
    exact, small = PolicyLearner(config, None), PolicyLearner(replace(config, precision="bfloat16"), None)
    began = weights_of(exact)
    assert {one.dtype for one in small.model.parameters()} == {torch.bfloat16}
    for number in range(10):
        stats = [update(one, number=number) for one in (exact, small)]
        assert stats[1]["grad_norm"] == pytest.approx(stats[0]["grad_norm"], rel=0.05)
    masters, moved = small.full_weights(small.model), weights_of(exact)
    changes = [torch.cat([(one[name] - began[name]).flatten() for name in began]) for one in (masters, moved)]
    assert torch.nn.functional.cosine_similarity(*changes, dim=0) > 0.9
    assert changes[0].norm().item() == pytest.approx(changes[1].norm().item(), rel=0.05)
    assert all(torch.equal(value, masters[name].bfloat16()) for name, value in small.model.named_parameters())


def test_several_iterations_clip_the_ratio(config: RlConfig) -> None:
    config = replace(config, iterations=3, clip=Clip(0.01, 0.01))
    assert update(PolicyLearner(config, None))["clipped"] > 0.1
    assert update(PolicyLearner(replace(config, iterations=1), None))["clipped"] == 0


@pytest.mark.parametrize("kind", ["whole", "lora", "bfloat16", "reference"])
def test_a_resumed_learner_makes_the_same_next_update(config: RlConfig, kind: str) -> None:
    changes: dict[str, Any] = {
        "lora": {"lora": Lora(rank=2), "kl": 0.1}, "bfloat16": {"precision": "bfloat16"},
        "reference": {"kl": 0.1, "reference": Reference(every=2, mix=0.5)},
    }  # fmt: skip
    config = replace(config, **changes.get(kind, {}))
    learner = PolicyLearner(config, None)
    for number in range(2):
        update(learner, number=number)
    with TrainingRun(Path(config.out), config) as run:
        learner.save(run, 2)
        resumed = PolicyLearner(config, run.last_checkpoint())
        assert update(resumed, number=2) == update(learner, number=2)
        assert_close(weights_of(resumed), weights_of(learner), 0.0)
        learner.save_model(run)
        saved = transformers.AutoModelForCausalLM.from_pretrained(run.model)
    if kind != "lora":
        assert_close({name: one.float() for name, one in saved.state_dict().items()}, weights_of(learner), 0.0)


def test_without_rows_the_weights_stay(config: RlConfig) -> None:
    learner = PolicyLearner(config, None)
    update(learner)
    began = weights_of(learner)
    stats = update(learner, rows=[], number=1)
    assert (stats["loss"], stats["grad_norm"]) == (0.0, 0.0)
    assert_close(weights_of(learner), began, 0.0)


def test_no_step_has_a_learning_rate_of_0(config: RlConfig) -> None:
    for schedule in ("linear", "cosine", "constant_with_warmup"):
        learner = PolicyLearner(
            replace(config, optimizer=replace(config.optimizer, schedule=schedule, warmup_steps=2)), None
        )
        rates = [update(learner, rows=[], number=number)["learning_rate"] for number in range(config.steps)]
        assert min(rates) > 0
        assert rates[1] == max(rates) == 3e-3


def test_a_reference_that_nothing_uses_is_refused(config: RlConfig) -> None:
    with pytest.raises(InvalidValue, match="no reference model is loaded"):
        replace(config, reference=Reference(every=5))


def shared_config(model: Path, out: Path, kind: str) -> RlConfig:
    config = replace(toy_config(model, out), micro_batch=2, check_tokens=False, kl=0.1)
    return replace(config, **{"lora": {"lora": Lora(2)}, "whole": {"reference": Reference(2, 0.5)}}[kind])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["whole", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_processes_make_the_update_of_one(config: RlConfig, kind: str) -> None:
    """Two processes share the weights (FSDP 2, gloo), save, resume, and write a model for transformers."""
    config = shared_config(Path(config.model), Path(config.out), kind)
    code = f"from tests.unit.test_train_learner import *; in_process({kind!r}, {config.model!r}, {config.out!r})"
    run_in_two_processes("-c", code)
    learner = PolicyLearner(config, None)
    for number in range(3):
        update(learner, number=number)
    saved = transformers.AutoModelForCausalLM.from_pretrained(Path(config.out, "model")).state_dict()
    with TrainingRun(Path(config.out), config) as run:
        learner.save_model(run)
    expected = transformers.AutoModelForCausalLM.from_pretrained(Path(config.out, "model")).state_dict()
    assert_close(saved, expected, 1e-4)


def in_process(kind: str, model: str, out: str) -> None:
    """One of two processes: two updates, a checkpoint, and the third update of a resumed learner."""
    config = shared_config(Path(model), Path(out), kind)
    learner = PolicyLearner(config, None)
    with TrainingRun(Path(config.out), config) as run:
        for number in range(2):
            update(learner, number=number)
        learner.save(run, 2)
        learner = PolicyLearner(config, run.last_checkpoint())
        update(learner, number=2)
        learner.refresh_sampler()
        if learner.accelerator.is_main_process:
            whole = {name: one.detach() for name, one in learner.sampler.named_parameters()}
        gathered = learner.full_weights(learner.model)
        if learner.accelerator.is_main_process:
            assert all(torch.allclose(whole[name].float(), one, atol=1e-2) for name, one in gathered.items())
        learner.save_model(run)
    torch.distributed.destroy_process_group()
