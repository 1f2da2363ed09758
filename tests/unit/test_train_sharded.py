"""A policy whose weights several processes share is saved whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.tiny_model import tiny_model, tiny_tokenizer, torch, transformers

for _name in ("trl", "peft", "datasets"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_two_processes_save_one_model(kind: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer), "llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    command = [sys.executable, "-m", "tests.unit.sharded_saving", str(tmp_path / "model"), str(tmp_path / "run"), kind]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=300)[0] for one in both]
    finally:
        for one in both:
            one.kill()
            one.wait()
    assert [one.returncode for one in both] == [0, 0], said
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
