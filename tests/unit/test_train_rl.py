"""Reinforcement learning of a tiny model, by the real trainer and the real engine."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from array import array
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiny_model import save_tiny_model, torch, transformers
from tests.unit.toy_setting import Toy, ToySetting, few_letters, toy_config
from tests.unit.two_processes import run_in_two_processes

from minisandbox.errors import DiskFull, InvalidValue, SandboxCreationError, TokenMismatch, TrainingError
from minisandbox.models import Model, OpenAIModel, TokenRow, client
from minisandbox.models.engine import EngineServer
from minisandbox.train.config import Checkpoints, Evaluation, Groups, Optimizer, RlConfig
from minisandbox.train.groups import Result, Rollouts, Wanted
from minisandbox.train.options import store

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from minisandbox.train.rl import train_rl  # noqa: E402 - after what it needs
from minisandbox.train.running import TrainingRun  # noqa: E402 - the same

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("default"),
]  # those of torch and transformers are theirs
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RlConfig:
    return toy_config(model, tmp_path / "run")


def lines(config: RlConfig, file: str = "log.jsonl") -> list[dict[str, Any]]:
    with TrainingRun(Path(config.out), config) as run:
        return [line for line in run.lines(file) if file != "log.jsonl" or "loss" in line]


def weights_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    return found


def equal(one: Path, other: Path) -> bool:
    a, b = weights_of(one), weights_of(other)
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RlConfig:
    """A run of four steps that nothing has disturbed."""
    config = toy_config(model, tmp_path_factory.mktemp("whole") / "run")
    train_rl(config, ToySetting())
    return config


def test_every_row_that_reaches_the_loss_is_what_was_sampled(whole: RlConfig) -> None:
    log = lines(whole)
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    for line in log:
        assert line["logprob_gap_max"] < 1e-4
        assert line["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert line["ratio_min"] == pytest.approx(1.0, abs=1e-4)
        assert line["staleness"] == 0
        assert 0 <= line["reward"] <= 1
    assert any(line["grad_norm"] > 0 for line in log)


def test_no_rollout_is_trained_on_twice(whole: RlConfig) -> None:
    names = [line["rollout"] for line in lines(whole, "rollouts.jsonl")]
    assert names
    assert len(set(names)) == len(names)


def test_after_kill_9_the_next_step_is_what_it_would_have_been(whole: RlConfig, model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path / "run")
    store(config, tmp_path / "experiment.yaml")
    command = [sys.executable, "-m", "tests.unit.toy_setting", str(tmp_path / "experiment.yaml"), "3"]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert killed.returncode == -9, killed.stderr
    assert len(lines(config)) == 3  # a step more than the checkpoint has
    train_rl(config, ToySetting())
    assert lines(config, "rollouts.jsonl") == lines(whole, "rollouts.jsonl")
    same = ("loss", "grad_norm", "reward", "groups", "entropy")
    assert [[line[key] for key in same] for line in lines(config)] == [
        [line[key] for key in same] for line in lines(whole)
    ]
    assert equal(Path(config.out, "model"), Path(whole.out, "model"))


@dataclass
class Forked:
    """Gives each answer a row of its own, after the same tokens: what a trainer learns from them is the same."""

    inner: Rollouts

    async def run(self, wanted: Wanted) -> Result:
        result = await self.inner.run(wanted)
        (row,) = result.rows
        spans = [match.span() for match in re.finditer(rb"\x01+", row.mask)]
        masks = [bytes(start) + b"\1" * (end - start) for start, end in spans]
        rows = [TokenRow(row.ids[: len(mask)], row.logprobs[: len(mask)], mask, (n,)) for n, mask in enumerate(masks)]
        return replace(result, rows=tuple(rows))


@pytest.mark.parametrize("loss", ["dr_grpo", "grpo", "dapo"])
def test_a_rollout_counts_the_same_in_several_rows(config: RlConfig, tmp_path: Path, loss: str) -> None:
    config = replace(config, steps=1, loss=loss, optimizer=replace(config.optimizer, learning_rate=1e-4))
    forked = replace(config, out=str(tmp_path / "forked"))
    train_rl(config, ToySetting())
    train_rl(forked, ToySetting(wrap=Forked))
    [line], [line_of_forked] = lines(config), lines(forked)
    rollouts = len(lines(config, "rollouts.jsonl"))
    assert len(lines(forked, "rollouts.jsonl")) == 2 * rollouts > 0
    assert (line["rollouts_forked"], line_of_forked["rollouts_forked"]) == (0, rollouts)
    assert line_of_forked["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
    a, b = (weights_of(Path(one.out, "model")) for one in (config, forked))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_failures_and_stragglers_do_not_end_a_step(config: RlConfig) -> None:
    """Of each step's first try one sandbox cannot be made, one grader has no verdict, and one rollout hangs."""

    class Faulty:
        def __init__(self, inner: Rollouts) -> None:
            self.inner = inner

        async def run(self, wanted: Wanted) -> Result:
            match wanted.attempt % config.groups.size:
                case 0:
                    raise SandboxCreationError("no room for a sandbox")
                case 1:
                    return Result(wanted, None, detail="the grader has failed")
                case 2 if wanted.attempt < config.groups.size:
                    await asyncio.sleep(3600)
            return await self.inner.run(wanted)

    said: list[str] = []
    config = replace(config, steps=1, policy=replace(config.policy, deadline=4.0), rollout_deadline=5.0)
    config = replace(config, groups=Groups(tasks=2, size=6), micro_batch=6)
    result = train_rl(config, ToySetting(wrap=Faulty), tell=said.append)
    assert result.steps == 1
    (line,) = lines(config)
    assert line["rollouts_failed"] >= 4
    assert line["rollouts_redone"] >= 6
    assert any("no room for a sandbox" in one for one in said)
    assert any("stopped after 5 s" in one for one in said)


def test_a_model_server_that_dies_and_returns_costs_a_step_nothing(
    whole: RlConfig, config: RlConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers come over HTTP; the server goes in the middle of them, and is back half a second later."""

    class Dying(ToySetting):
        def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
            if not held_out:
                self.server, self.asked, self.deaths = EngineServer(model), 0, 0
            return self

        async def run(self, wanted: Wanted) -> Result:
            self.asked += 1
            number = self.asked
            if number == 1:
                self.loop, self.started = asyncio.get_running_loop(), asyncio.create_task(self.server.start())
            await self.started
            if number == 3:
                self.deaths += 1
                self.death = asyncio.create_task(self.die())
            asked = OpenAIModel(config.model, self.server.base_url, tokens="yes")
            try:
                return await Toy(asked, self.rule, self.before).run(wanted)
            finally:
                await asked.close()

        async def die(self) -> None:
            await self.server.stop()
            await asyncio.sleep(0.5)
            await self.server.start()

        def close(self) -> None:
            self.loop.run_until_complete(self.server.stop())

    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.05)
    setting = Dying()
    train_rl(replace(config, steps=1), setting)
    assert setting.deaths == 1
    (line,) = lines(replace(config, steps=1))
    assert line["rollouts_failed"] == 0
    assert line["logprob_gap_max"] < 1e-4
    undisturbed = [line for line in lines(whole, "rollouts.jsonl") if line["step"] == 1]
    assert lines(replace(config, steps=1), "rollouts.jsonl") == undisturbed


def test_a_full_disk_stops_the_run_which_goes_on_as_if_nothing_had_been(whole: RlConfig, config: RlConfig) -> None:
    """The file of the optimiser's state is one that has no room: the kernel itself says so."""

    def fill(wanted: Wanted) -> None:
        if wanted.attempt == 3 * config.groups.size * (1 + config.groups.redo):  # of the step before checkpoint 4
            place = Path(config.out, "checkpoints", "checkpoint-4")
            place.mkdir()
            (place / "optimizer.pt").symlink_to("/dev/full")

    with pytest.raises(DiskFull, match="resumes from the checkpoint of step 2"):
        train_rl(config, ToySetting(before=fill))
    assert train_rl(config, ToySetting()).steps == 4
    assert lines(config, "rollouts.jsonl") == lines(whole, "rollouts.jsonl")
    assert equal(Path(config.out, "model"), Path(whole.out, "model"))


def test_bfloat16_trains_on_what_bfloat16_sampled(config: RlConfig) -> None:
    train_rl(replace(config, precision="bfloat16", steps=2), ToySetting())
    log = lines(replace(config, precision="bfloat16", steps=2))
    assert [0 < line["logprob_gap_mean"] < 0.1 for line in log] == [True, True]


def test_rows_of_older_policies_are_dropped_and_counted(config: RlConfig) -> None:
    @dataclass
    class Old:
        inner: Rollouts

        async def run(self, wanted: Wanted) -> Result:
            result = await self.inner.run(wanted)
            (row,) = result.rows
            assert row.oldest_version == wanted.attempt // 8  # of the step
            versions = ((0, len(row.ids)),) if wanted.attempt == 8 else row.versions
            return replace(result, rows=(replace(row, versions=versions),))

    rule = lambda wanted, _: wanted.attempt % 2  # noqa: E731 - a rule
    for staleness, expected in ((0, [(0, 0), (0, 2)]), (1, [(0, 0), (1, 0)])):
        changed = replace(config, steps=2, staleness=staleness, out=f"{config.out}-{staleness}")
        train_rl(changed, ToySetting(wrap=Old, rule=rule))
        assert [(line["staleness"], line["rows_stale"]) for line in lines(changed)] == expected
        assert len(lines(changed, "rollouts.jsonl")) == 16 - expected[1][1]


def test_an_interrupted_run_leaves_a_checkpoint_of_its_last_step(whole: RlConfig, config: RlConfig) -> None:
    def interrupt(wanted: Wanted) -> None:
        if wanted.attempt == 3 * config.groups.size * (1 + config.groups.redo):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_rl(config, ToySetting(before=interrupt))
    assert [one.name for one in Path(config.out, "checkpoints").glob("*-3")] == ["checkpoint-3"]
    told: list[str] = []
    train_rl(config, ToySetting(), tell=told.append)
    assert "resuming from step 3" in told
    assert lines(config, "rollouts.jsonl") == lines(whole, "rollouts.jsonl")
    assert equal(Path(config.out, "model"), Path(whole.out, "model"))


def test_a_step_that_says_nothing_leaves_the_weights_alone(config: RlConfig, model: Path) -> None:
    said_something = lambda wanted, text: few_letters(wanted, text) if wanted.attempt < 8 else 0.0  # noqa: E731 - a rule
    config = replace(config, steps=3, checkpoints=replace(config.checkpoints, every=1))
    train_rl(config, ToySetting(rule=said_something))
    places = [Path(config.out, "checkpoints", f"checkpoint-{n}") for n in (1, 2, 3)]
    assert equal(places[0], places[1])
    assert equal(places[1], places[2])
    assert not equal(model, places[0])
    log = lines(config)
    assert [line["groups"] for line in log][1:] == [0, 0]
    json.dumps(log, allow_nan=False)  # an infinite ratio is no JSON


@dataclass
class Lying:
    """Says other log-probabilities than the sampler, of some rollouts."""

    inner: Rollouts
    by: float = 0.01
    about: Container[str] | None = None

    async def run(self, wanted: Wanted) -> Result:
        found = await self.inner.run(wanted)
        if self.about is not None and wanted.name not in self.about:
            return found
        (row,) = found.rows
        logprobs = array("d", (one - self.by if m else 0.0 for one, m in zip(row.logprobs, row.mask, strict=True)))
        return replace(found, rows=(replace(row, logprobs=logprobs),))


def test_tokens_that_were_not_sampled_stop_the_run(config: RlConfig) -> None:
    with pytest.raises(TokenMismatch, match=r"__\d+, token \d+ ") as caught:
        train_rl(config, ToySetting(wrap=Lying))
    assert caught.value.position > 0
    train_rl(replace(config, check_tokens=False, steps=1), ToySetting(wrap=Lying))


def test_one_row_of_fifty_may_be_rounded(config: RlConfig) -> None:
    config = replace(config, groups=Groups(tasks=4, size=16), micro_batch=16, steps=1)
    told: list[str] = []

    def train(name: str, by: float, *about: str) -> Path:
        setting = ToySetting(wrap=lambda inner: Lying(inner, by, about), tasks=("add", "sub", "mul", "div"))
        return train_rl(replace(config, out=f"{config.out}-{name}"), setting, tell=told.append).model

    one, none = train("one", 3e-4, "add__5"), train("none", 0.0)
    (line,) = lines(replace(config, out=f"{config.out}-one"))
    assert (line["rows_rounded"], line["logprob_gap_max"] < 1e-4) == (1, True)
    assert len([text for text in told if text.startswith("left out because of rounding: add__5, token ")]) == 1
    assert not equal(one, none)
    with pytest.raises(TokenMismatch, match="add__5"):  # too much
        train("much", 2e-3, "add__5")
    with pytest.raises(TokenMismatch, match="__5"):  # too many
        train("many", 3e-4, "add__5", "sub__5")


def test_a_run_without_any_reward_stops_and_goes_on(config: RlConfig) -> None:
    setting = ToySetting(rule=lambda wanted, text: None if wanted.attempt >= 16 else few_letters(wanted, text))
    with pytest.raises(TrainingError, match="step 2: none of"):
        train_rl(config, setting)
    assert setting.closed
    assert train_rl(config, ToySetting()).steps == 4


def test_evaluation_before_during_and_after(config: RlConfig) -> None:
    """The held-out tasks are best solved after two steps; that policy is kept."""
    from minisandbox.train.evaluation import draw_curve, draw_tasks  # noqa: PLC0415 - for this test alone

    evaluations = Rewards([1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0])
    config = replace(config, evaluation=Evaluation(every=2, attempts=3), checkpoints=Checkpoints(every=2, keep=0))
    told: list[str] = []
    result = train_rl(config, ToySetting(held_out=("one", "two"), rule=evaluations), tell=told.append)
    assert [(one.step, one.rollouts, one.failed) for one in result.scores] == [(0, 6, 0), (2, 6, 0), (4, 6, 0)]
    assert result.scores[1].tasks == {"one": pytest.approx(2 / 3), "two": pytest.approx(1 / 3)}
    assert result.scores[1].pass_at == {"1": pytest.approx(0.5), "2": pytest.approx((1 + 2 / 3) / 2)}
    out = Path(config.out)
    assert equal(out / "best", out / "checkpoints" / "checkpoint-2")
    assert not equal(out / "best", out / "model")
    assert "step 2: 50.0% of 6 held-out rollouts resolved, pass@2 83.3%" in told
    line = r"step 1 of 4: loss .*, reward .*, entropy .*; rollouts .* s \(mean .*tests .*\), update"
    assert re.search(line, "".join(told))
    draw_curve({"toy": result.scores}, out / "curve.png")
    draw_tasks(result.scores, out / "tasks.png")
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("curve.png", "tasks.png"))


class Rewards:
    """Prescribes the rewards of each evaluation, by task and attempt; training rollouts have those of their texts."""

    def __init__(self, *evaluations: list[int]) -> None:
        self.rewards = [float(reward) for rewards in evaluations for reward in rewards]
        self.count = 0

    def __call__(self, wanted: Wanted, text: str) -> float:
        if wanted.task not in ("one", "two"):
            return few_letters(wanted, text)
        evaluation, self.count = self.count // 6, self.count + 1
        return self.rewards[6 * evaluation + 3 * (wanted.task == "two") + wanted.attempt]


def test_it_learns(config: RlConfig) -> None:
    fast = Optimizer(learning_rate=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    groups = Groups(tasks=2, size=8)
    config = replace(config, steps=14, groups=groups, micro_batch=16, optimizer=fast)
    train_rl(config, ToySetting())
    rewards = [line["reward"] for line in lines(config)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_a_run_that_cannot_begin_lets_go_of_everything(config: RlConfig) -> None:
    class Failing(ToySetting):
        def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:
            if held_out:
                raise SandboxCreationError("no room for a sandbox")
            return super().rollouts(model, held_out=held_out)

    setting = Failing()
    with pytest.raises(SandboxCreationError):
        train_rl(config, setting)
    assert setting.closed == [True]


def test_fewer_tasks_than_a_step_has(config: RlConfig) -> None:
    with pytest.raises(InvalidValue, match="a step needs 2 tasks, and there are 1"):
        train_rl(config, ToySetting(tasks=("add",)))


@pytest.mark.slow
def test_two_processes_train_as_one_does(whole: RlConfig, model: Path, tmp_path: Path) -> None:
    """Rank 0 runs the rollouts, with a copy of the weights; both update."""
    config = toy_config(model, tmp_path / "run")
    store(config, tmp_path / "experiment.yaml")
    run_in_two_processes("-m", "tests.unit.toy_setting", str(tmp_path / "experiment.yaml"), "99")
    log, expected = lines(config), lines(whole)
    assert [line["reward"] for line in log] == [line["reward"] for line in expected]
    assert [line["grad_norm"] for line in log] == pytest.approx([line["grad_norm"] for line in expected], rel=1e-3)
    weights, others = (weights_of(Path(run.out, "model")) for run in (config, whole))
    assert all(torch.allclose(weights[name], others[name], atol=1e-3) for name in weights)
