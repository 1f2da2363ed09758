"""A policy whose weights several processes share is saved whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.tiny_model import save_tiny_model, torch, transformers
from tests.unit.two_processes import run_in_two_processes

from minisandbox.train.config import Optimizer, SftConfig
from minisandbox.train.options import store

for _name in ("trl", "peft", "datasets"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_two_processes_save_one_model(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    run_in_two_processes("-m", "tests.unit.sharded_saving", str(tmp_path / "model"), str(tmp_path / "run"), kind)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    began = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if kind == "lora":
        from tests.unit.sharded_saving import adapted  # noqa: PLC0415 - loads the training stack

        began = adapted(began).merge_and_unload()
    weights, expected = saved.state_dict(), began.state_dict()
    assert weights.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.allclose(weights[name], one, atol=1e-6), name
    assert type(saved) is type(began)


def test_two_processes_fine_tune_as_one_does(tmp_path: Path) -> None:
    """Each has its rows of every step; one process takes as many by accumulation."""
    save_tiny_model(tmp_path / "model", "llama")
    rows = [{"input_ids": [5 + n, 6, 7 + n, *[8] * n], "loss_mask": [0, 1, *[1] * (n + 1)]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftConfig(
        model=str(tmp_path / "model"), data=(str(tmp_path / "rows.jsonl"),), out=str(tmp_path / "one"), max_steps=3,
        batch_size=1, accumulation=2, device="cpu",
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=0, schedule="constant"),
    )  # fmt: skip
    store(replace(config, out=str(tmp_path / "two"), accumulation=1), tmp_path / "two.yaml")
    run_in_two_processes("-m", "minisandbox", "train", "sft", str(tmp_path / "two.yaml"))
    from minisandbox.train.sft import train_sft  # noqa: PLC0415 - loads the training stack

    train_sft(config)
    weights, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("two", "one")
    )
    assert all(torch.allclose(weights[name], value, atol=1e-4, rtol=0) for name, value in expected.items())
