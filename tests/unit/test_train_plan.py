"""The plan of a training step, against real tensors, and the commands that use it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tiny_model import save_tiny_model, tiny_model, tiny_tokenizer, torch
from tests.unit.toy_setting import ToySetting, toy_config

from minisandbox.cli.main import main
from minisandbox.errors import InvalidValue, TrainingError
from minisandbox.train.config import Lora, RlConfig, SftConfig
from minisandbox.train.options import load
from minisandbox.train.plan import DEVICES, check_states, plan_of, shape_of

pytest.importorskip("peft", reason="the extra [train] is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are theirs
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_activations_are_those_of_real_tensors(model: Path) -> None:
    plan = plan_of(SftConfig(str(model), ("x",), "out", batch_size=2))
    module = tiny_model(len(tiny_tokenizer()))
    assert plan.parameters == plan.trained == module.num_parameters()
    weights, stored = {one.data_ptr() for one in module.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    mask = torch.ones((2, 512), dtype=torch.long)
    mask[1, 256:] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module.model(input_ids=torch.zeros_like(mask), attention_mask=mask, use_cache=False)
    assert output.last_hidden_state.shape == (2, 512, 48)
    size = sum(one.nbytes() for one in stored.values())
    counted = plan.constant + plan.per_token * 1024 + plan.per_square * 512**2
    assert counted == pytest.approx(size, rel=0.1)


def test_states_of_a_step(model: Path) -> None:
    config = toy_config(model, Path("out"))
    plan = plan_of(config)
    count = plan.parameters
    assert plan.states == {
        "weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count, "cached conversations": 0,
    }  # fmt: skip
    assert plan_of(config, 4).states["optimizer"] == 2 * count
    adapters = plan_of(SftConfig(str(model), ("x",), "out", lora=Lora(rank=4)))
    assert 0 < adapters.trained < count
    assert adapters.states["weights"] == 4 * adapters.parameters
    recomputed = plan_of(SftConfig(str(model), ("x",), "out", gradient_checkpointing=True))
    assert recomputed.per_token < plan_of(SftConfig(str(model), ("x",), "out")).per_token
    assert plan.memory(plan.longest_row(GIB)) <= GIB < plan.memory(plan.longest_row(GIB) + 1)


def test_known_sizes() -> None:
    assert plan_of(load(RlConfig, "rl-qwen2.5-coder-3b")).parameters == pytest.approx(3.09e9, rel=0.01)
    with pytest.raises(InvalidValue, match="the shape of the model nobody/knows-it is unknown"):
        shape_of("nobody/knows-it")


def test_what_cannot_fit_is_refused() -> None:
    plan = plan_of(load(RlConfig, "rl-qwen2.5-coder-3b"))
    check_states(plan, DEVICES["H100"].memory, "H100")
    with pytest.raises(TrainingError, match=r"training needs 58.* GiB of memory, and L40S has 48.0 GiB"):
        check_states(plan, DEVICES["L40S"].memory, "L40S")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "plan", "sft-qwen2.5-coder-3b", "--gpu", "H100", "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "3.09 billion parameters" in printed
    assert "longest row that fits" in printed
    assert main(["train", "plan", "rl-qwen2.5-coder-3b", "--gpu", "L40S"]) == TrainingError.exit_code
    assert "L40S has 48.0 GiB" in capsys.readouterr().err


def test_training_starts_nothing_that_cannot_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    monkeypatch.setattr("minisandbox.train.plan.plan_of", lambda *_: plan_of(load(SftConfig, "sft-qwen2.5-coder-3b")))
    monkeypatch.setattr("minisandbox.train.plan.free_memory", lambda _: ("it", 12 * GIB))
    words = ["--set", f"model={model}", "--set", f"data=[{rows}]", "-o", str(tmp_path / "out")]
    assert main(["train", "sft", "sft-tiny", *words]) == TrainingError.exit_code
    assert "and it has 12.0 GiB" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - loads the training stack

    with pytest.raises(TrainingError, match=r"and it has 12\.0 GiB"):  # without the command, too
        train_rl(toy_config(model, tmp_path / "out"), ToySetting())
    assert not (tmp_path / "out").exists()
