"""vLLM in the trainer's process: in the place of our decoding loop, and under TRL with its weights kept up to date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.toy_setting import toy_config
from tests.vllm import decoding
from tests.vllm.conftest import ENVIRONMENT, TOLERANCE, Agreement, Served

from minisandbox.errors import PackageError
from minisandbox.models import TokenRow
from minisandbox.train.config import Groups, RlConfig, Vllm
from minisandbox.train.options import store

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parents[2]
LONG = 1800.0


def program(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of these tests."""
    environment = {**os.environ, **ENVIRONMENT, **variables}
    return subprocess.run(
        [sys.executable, "-m", f"tests.vllm.{name}", *words],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=LONG, env=environment,
    )  # fmt: skip


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((done.stdout + done.stderr).splitlines()[-60:])


def test_conversations_by_vllm_s_engine_are_single_rows(policy: Path, agreement: Agreement, tmp_path: Path) -> None:
    done = program("decoding", str(policy), str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, end_of(done)
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [one["conversation"] for one in found] == [*range(decoding.CONVERSATIONS)]
    assert all(one["turns"] == [*range(decoding.TURNS)] for one in found)
    rows = [
        TokenRow(array("i", one["ids"]), array("d", one["logprobs"]), bytes(one["mask"]), tuple(one["turns"]))
        for one in found
    ]
    agreement.check("decoder", rows, temperature=decoding.TEMPERATURE)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(policy: Path, tmp_path: Path) -> RlConfig:
    plain = toy_config(policy, tmp_path / "run")
    return replace(
        plain, engine="vllm", vllm=Vllm(memory=0.2), deterministic=False, device="auto", steps=2,
        groups=Groups(tasks=2, size=4), policy=replace(plain.policy, context=1024),
    )  # fmt: skip


def train(config: RlConfig, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    store(config, tmp_path / "rl.yaml")
    return program("training", str(tmp_path / "rl.yaml"), **variables)


def steps(config: RlConfig) -> list[Mapping[str, Any]]:
    lines = [json.loads(line) for line in Path(config.out, "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_training_with_vllm_in_the_trainer_s_process(config: RlConfig, tmp_path: Path) -> None:
    """The second step's rollouts are drawn with the weights of the first: a stale engine shows as a mismatch."""
    done = train(config, tmp_path)
    assert done.returncode == 0, end_of(done)
    log = steps(config)
    assert [line["step"] for line in log] == [1, 2]
    for line in log:
        assert line["logprob_gap_max"] <= TOLERANCE
        assert line["grad_norm"] > 0
        print(f"step {line['step']}: logprob_gap_max {line['logprob_gap_max']:.2e}")


def test_what_trl_says_of_a_server_is_passed_on(config: RlConfig, server: Served, tmp_path: Path) -> None:
    config = replace(config, vllm=Vllm(mode="server", url=server.url.removesuffix("/v1")))
    done = train(config, tmp_path)
    assert done.returncode == PackageError.exit_code, end_of(done)
    assert "minisandbox: trl " in done.stderr
    assert "VLLM_SERVER_DEV_MODE=1" in done.stderr
    assert "a bug in MiniSandbox" not in done.stderr
