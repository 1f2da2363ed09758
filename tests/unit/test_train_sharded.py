"""Fine-tuning in several processes that share the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.tiny_model import save_tiny_model, torch, transformers
from tests.unit.two_processes import run_in_two_processes

from minisandbox.train.config import Optimizer, SftConfig
from minisandbox.train.options import store

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]


def test_two_processes_fine_tune_as_one_does(tmp_path: Path) -> None:
    """They share the weights (FSDP 2, gloo), and resume; one process has twice as many rows by accumulation."""
    save_tiny_model(tmp_path / "model", "llama")
    rows = [{"input_ids": [5 + n, 6, 7 + n, *[8] * n], "loss_mask": [0, 1, *[1] * (n + 1)]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftConfig(
        model=str(tmp_path / "model"), data=(str(tmp_path / "rows.jsonl"),), out=str(tmp_path / "one"), max_steps=3,
        held_out=(str(tmp_path / "rows.jsonl"),), batch_size=1, accumulation=2, device="cpu",
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=0, schedule="constant"),
    )  # fmt: skip
    shared = replace(config, out=str(tmp_path / "two"), accumulation=1)
    store(shared, tmp_path / "two.yaml")
    run_in_two_processes("-m", "minisandbox", "train", "sft", str(tmp_path / "two.yaml"), "--set", "max_steps=2")
    run_in_two_processes("-m", "minisandbox", "train", "sft", str(tmp_path / "two.yaml"))
    from minisandbox.train.sft import train_sft  # noqa: PLC0415 - loads the training stack

    train_sft(config)
    weights, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("two", "one")
    )
    assert all(torch.allclose(weights[name], value, atol=1e-4, rtol=0) for name, value in expected.items())
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    ]
    logs[0] = [line for line in logs[0] if line["step"] != 2 or "loss" in line]  # max_steps=2 also ended with one
    for key in ("loss", "grad_norm", "eval_loss"):
        values = [[line[key] for line in log if key in line] for log in logs]
        assert values[0] == pytest.approx(values[1], abs=1e-4), key
