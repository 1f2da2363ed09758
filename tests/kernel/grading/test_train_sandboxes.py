"""Reinforcement learning in real sandboxes, with rewards from real tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.tiny_model import save_tiny_model
from tests.unit.toy_setting import toy_config

from minisandbox.images import Image
from minisandbox.rollouts import RunReader
from minisandbox.tasks import Task
from minisandbox.train.config import Evaluation, Groups
from minisandbox.train.sandboxes import SandboxEnvironment

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from minisandbox.train.rl import train_rl  # noqa: E402 - after what it needs
from minisandbox.train.running import TrainingRun  # noqa: E402 - the same

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("default")]  # those of torch are theirs


def test_a_step_in_sandboxes(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    config = toy_config(tmp_path / "model", tmp_path / "run")
    policy = replace(config.policy, agent="tests.unit.toy_setting:SometimesRight", max_tokens=6, deadline=300.0)
    config = replace(config, steps=1, groups=Groups(tasks=1, size=6, redo=0), micro_batch=6, workers=2, policy=policy,
                     evaluation=Evaluation(tasks=("x",), attempts=1))  # fmt: skip
    ours = {smith.instance_id: smith}
    held = {"held-out": replace(smith, instance_id="held-out")}
    result = train_rl(config, SandboxEnvironment(config, ours, held, lambda _: smith_image))
    assert [(one.step, one.rollouts) for one in result.scores] == [(0, 1), (1, 1)]
    with RunReader(Path(config.out) / "rollouts") as run:
        found = [run.trajectory(one.instance_id, one.attempt) for one in run.summaries()]
    rewards = [one.reward for one in found if one is not None and one.reward is not None]
    assert set(rewards) == {0.0, 1.0}
    assert len(rewards) == 6
    assert all(len(one.rows) == 1 for one in found if one is not None)
    with TrainingRun(Path(config.out), config) as training:
        (line,) = (one for one in training.lines() if "loss" in one)
        assert line["reward"] == sum(rewards) / 6
        assert float(str(line["logprob_gap_max"])) < 1e-4
        assert len(training.lines("rollouts.jsonl")) == 6
