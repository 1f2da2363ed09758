"""Reinforcement learning whose rollouts are done on two nodes: the run is, number by number, that of one machine."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests import waiting
from tests.cluster.cluster_tools import ROOT, begin, clean_hosts, live, make_tasks
from tests.unit.tiny_model import save_tiny_model
from tests.unit.toy_setting import toy_config

from minisandbox.rollouts import RunReader
from minisandbox.train.config import Evaluation, Groups, Optimizer, RlConfig
from minisandbox.train.options import store
from minisandbox.train.running import TrainingRun

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # those of torch are theirs
DEADLINE = 1800.0
STEPS = int(os.environ.get("MINISANDBOX_TEST_CLUSTER_STEPS", "3"))


def experiment(place: Path, run: str) -> RlConfig:
    """Half of the answers or so make the agent do the right thing: the model learns to give such answers."""
    config = toy_config(place / "model", place / run)
    policy = replace(config.policy, agent="tests.unit.toy_setting:SometimesRight", max_tokens=6, deadline=600.0)
    config = replace(
        config, tasks=(str(place / "trained.jsonl"),), steps=STEPS, groups=Groups(tasks=2, size=4), micro_batch=4,
        workers=4, policy=policy, evaluation=Evaluation(tasks=(str(place / "held.jsonl"),), every=STEPS, attempts=2),
        optimizer=Optimizer(learning_rate=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0),
    )  # fmt: skip
    store(config, place / f"{run}.yaml")
    return config


def numbers(config: RlConfig) -> dict[str, Sequence[object]]:
    """What a run computed, without times."""
    with TrainingRun(Path(config.out), config) as run:
        log = [[one.get(key) for key in ("step", "loss", "reward", "grad_norm", "groups")] for one in run.lines()]
        scores = [
            {key: value for key, value in one.items() if "seconds" not in key} for one in run.lines("scores.jsonl")
        ]
        return {"log": log, "rollouts": list(run.lines("rollouts.jsonl")), "scores": scores}


def test_training_on_two_nodes_is_training_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tasks(tmp_path, 3)
    lines = (tmp_path / "tasks.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "trained.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "held.jsonl").write_text(lines[2])
    save_tiny_model(tmp_path / "model", "llama")
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with clean_hosts(tmp_path, 2, 2, extra={0: path, 1: path}) as cluster:
        found = {}
        for run, more in (("one", ()), ("two", ("--cluster", cluster.head))):
            config = experiment(tmp_path, run)
            words = (sys.executable, "-m", "minisandbox", "train", "rl", str(tmp_path / f"{run}.yaml"), *more)
            with begin(cluster, tmp_path, run, *words) as running:
                assert running.wait(DEADLINE) == 0, (tmp_path / f"{run}.err").read_text()
            found[run] = numbers(config)
            waiting.until(lambda: not live())
    with capsys.disabled():
        print((tmp_path / "two.out").read_text())
        for line in found["two"]["log"]:
            print(line)
    assert found["one"] == found["two"]
    rewards = [float(str(line[2])) for line in found["two"]["log"] if isinstance(line, list) and line[2] is not None]
    assert len(rewards) == STEPS
    if STEPS >= 12:  # fewer say nothing
        assert statistics.fmean(rewards[-4:]) > statistics.fmean(rewards[:4]), rewards
    with RunReader(tmp_path / "two" / "rollouts") as reader:
        kept = list(reader.summaries())
    assert len(kept) >= STEPS * 8
    assert {one.model for one in kept} == {"policy"}
