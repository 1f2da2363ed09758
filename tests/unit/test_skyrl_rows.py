"""What SkyRL is told of rollouts, and how: without SkyRL. tests/kernel/grading/test_skyrl.py asks SkyRL itself."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.training_tools import trajectory

from minisandbox.cli.main import main
from minisandbox.errors import InvalidValue, NotFound, TaskFileError
from minisandbox.integrations.skyrl import output as of_skyrl
from minisandbox.integrations.skyrl.config import SandboxOptions, packaged, read_arguments
from minisandbox.integrations.skyrl.output import Ended, metrics_of
from minisandbox.models import TokenRow
from minisandbox.tasks import TaskSet, task_from_row
from minisandbox.train.options import describe, from_mapping
from minisandbox.trajectories import Failure, Trajectory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "training-options.md"


@dataclass(frozen=True)
class Name:
    """As SkyRL's own."""

    instance_id: str
    repetition_id: int


def row(*, context: int, sampled: int, turn: int = 0, shared: int = 0) -> TokenRow:
    """A row; ``shared`` of its sampled tokens carry loss in an earlier one."""
    mask = b"\0" * (context + shared) + b"\1" * (sampled - shared)
    logprobs = array("d", [0.0] * context + [-0.25] * sampled)
    return TokenRow(array("i", range(10, 10 + context + sampled)), logprobs, mask, (turn,))


def failed(one: Trajectory) -> Trajectory:
    return replace(one, grade=None, failure=Failure("sandbox", "SandboxCreationError", "no room"))


def group(prompt: str, *trajectories: Trajectory | None) -> list[Ended]:
    return [Ended(Name(prompt, number), one) for number, one in enumerate(trajectories)]


def output_of(ended: list[Ended], **options: Any) -> Any:
    return of_skyrl.output_of(ended, **options)


def check(output: dict[str, Any]) -> None:
    """What SkyRL's ``validate_generator_output`` asks of rows, in words of our own."""
    columns = [output[name] for name in ("response_ids", "rewards", "loss_masks", "stop_reasons", "trajectory_ids")]
    columns += [output[name] for name in ("rollout_logprobs", "is_last_step", "trajectory_generation_times")]
    assert {len(column) for column in columns} == {len(output["prompt_token_ids"])}
    for prompt, response, mask, logprobs in zip(
        output["prompt_token_ids"],
        output["response_ids"],
        output["loss_masks"],
        output["rollout_logprobs"],
        strict=True,
    ):
        assert prompt
        assert response
        assert len(response) == len(mask) == len(logprobs)
    names = output["trajectory_ids"]
    assert [a != b for a, b in pairwise(names)] + [True] == output["is_last_step"]


def test_a_step_with_all_that_happens() -> None:
    good, bad = trajectory(), trajectory(reward=0.0)
    cut = replace(bad, turns=(*bad.turns[:-1], replace(bad.turns[-1], finish_reason="length")))
    forked = replace(good, rows=(row(context=3, sampled=4), row(context=3, sampled=6, turn=1, shared=2)))
    ended = [*group("a", good, bad, failed(good), None), *group("b", forked, cut, replace(good, rows=()), bad)]
    output = output_of(ended, pad_token=7)
    check(output)
    a, b = [[one for one in output["trajectory_ids"] if one.instance_id == name] for name in "ab"]
    assert (len(a), len(b)) == (4, 5)
    rewards = dict(zip(output["trajectory_ids"], output["rewards"], strict=True))
    assert [rewards[Name("a", n)] for n in range(4)] == [1.0, 0.0, 0.5, 0.5]  # failures do not move the mean
    assert output["stop_reasons"] == ["stop", "stop", "error", "error", "stop", "stop", "length", "error", "stop"]
    masked = [not any(mask) for mask in output["loss_masks"]]
    assert masked == [False, False, True, True, False, False, False, True, False]
    place = output["response_ids"].index([10 + n for n in range(5, 9)])
    assert output["prompt_token_ids"][place] == [10, 11, 12, 13, 14]
    assert output["loss_masks"][place] == [1, 1, 1, 1]


def test_a_row_is_cut_where_its_loss_begins() -> None:
    (one,) = trajectory().rows
    output = output_of(group("a", trajectory()), pad_token=0)
    (prompt,), (response,), (mask,), (logprobs,) = (
        output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    )
    assert [*prompt, *response] == one.ids.tolist()
    assert [0] * len(prompt) + mask == list(one.mask)
    assert logprobs == one.logprobs.tolist()[len(prompt) :]
    assert mask[0] == 1
    assert 0 in mask  # observations


def test_what_was_cut_off_can_go_without_loss() -> None:
    cut = replace(trajectory(), exit_status="submitted (exit_context)")
    output = output_of(group("a", cut, trajectory(reward=0.0)), pad_token=0, drop_truncated=True)
    check(output)
    assert [any(mask) for mask in output["loss_masks"]] == [False, True]
    assert output["rewards"] == [1.0, 0.0]


def test_a_group_without_any_reward_says_nothing() -> None:
    output = output_of(group("a", None, failed(trajectory())), pad_token=0)
    check(output)
    assert output["rewards"] == [0.0, 0.0]
    assert not any(map(any, output["loss_masks"]))


def test_metrics_leave_failures_out() -> None:
    found = metrics_of([*group("a", trajectory(), failed(trajectory()), None), *group("b", trajectory(reward=0.0))])
    assert found["sandbox/reward_mean"] == 0.5
    assert found["sandbox/rollouts_failed"] == 2
    assert found["sandbox/groups_silent"] == 2
    assert found["sandbox/turns_mean"] == 2.0
    # SkyRL takes the least of what has "min" in its name, and the mean of what has "mean"
    assert not any("min" in name or "max" in name for name in found)
    assert "sandbox/reward_mean" not in metrics_of(group("a", None))


# --- the configuration -----------------------------------------------------------------------------------------------


def test_words_come_after_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("trainer: {epochs: 2, policy: {model: {path: m}}}\ndata: {train_data: [a]}\n")
    words = [f"minisandbox.config={tmp_path}/x.yaml", "trainer.override_entrypoint=x", "trainer.epochs=3"]
    assert read_arguments(words) == (
        {"trainer.epochs": 2, "trainer.policy.model.path": "m", "data.train_data": ["a"]},
        ["trainer.epochs=3"],
    )
    with pytest.raises(NotFound, match="one-node, two-nodes"):
        read_arguments(["minisandbox.config=three-nodes"])
    (tmp_path / "x.yaml").write_text("[a]")
    with pytest.raises(InvalidValue, match="is not a mapping"):
        read_arguments([f"minisandbox.config={tmp_path}/x.yaml"])


def test_the_packaged_ones_have_the_original_s_values() -> None:
    assert packaged() == ("one-node", "two-nodes")
    for name, samples in (("one-node", 8), ("two-nodes", 16)):
        found, _ = read_arguments([f"minisandbox.config={name}"])
        assert found["trainer.train_batch_size"] == 16
        assert found["generator.n_samples_per_prompt"] == samples
        assert found["trainer.max_prompt_length"] == 16384
        assert found["generator.sampling_params.max_generate_length"] == 4096
        assert found["trainer.policy.optimizer_config.lr"] == 1e-6
        assert found["trainer.algorithm.advantage_estimator"] == "grpo"
        assert found["trainer.algorithm.use_kl_loss"] is True
        ours = {key.partition(".")[2]: value for key, value in found.items() if key.startswith("minisandbox.")}
        assert from_mapping(SandboxOptions, ours, place="x").context == 16384 + 4096


def test_our_section_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidValue, match="did you mean workers"):
        from_mapping(SandboxOptions, {"worker": 3}, place="minisandbox")
    with pytest.raises(InvalidValue, match="builds"):
        from_mapping(SandboxOptions, {"builds": -1}, place="minisandbox")
    assert main(["train", "options", "skyrl"]) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    (workers,) = (words[1] for words in printed if words[0] == "minisandbox.workers")
    assert workers.split()[:4] == ["a", "whole", "number", "128"]
    text = PAGE.read_text(encoding="utf-8")
    for one in describe(SandboxOptions, "minisandbox."):
        assert f"| `{one.key}` | {one.kind} | {f'`{one.default}`' if one.default else ''} | {one.help} |" in text


# --- the data --------------------------------------------------------------------------------------------------------


def test_tasks_become_parquet_and_parquet_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="the extra [data] is not installed")
    out = tmp_path / "data"
    words = ["tasks", "export", "quickstart", "--to", "skyrl", "--shuffle", "42", "-o", str(out)]
    assert main([*words, "--range", "0", "3"]) == 0
    exported = TaskSet.load(out / "train.parquet")
    original = TaskSet.load("quickstart")
    assert len(exported) == 3
    assert [original[task.instance_id] for task in exported] == list(exported)
    row = exported.row(exported.ids[0])
    assert row["prompt"] == [{"role": "user", "content": exported[exported.ids[0]].problem_statement}]
    assert task_from_row({key: value for key, value in row.items() if key != "prompt"}) == exported[exported.ids[0]]
    capsys.readouterr()
    assert main([*words, "--range", "0:3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"] == list(exported.ids)
    assert main([*words, "--range", "3:", "--validation", str(out / "train.parquet")]) == 0
    assert TaskSet.load(out / "validation.parquet").ids == exported.ids
    assert main([*words, "--validation", str(out / "validation.parquet")]) == 3
    assert "in both the training and the validation set" in capsys.readouterr().err
    assert main([*words, "--range", "0", "1", "2"]) == 3


def test_rows_of_the_original_are_read(tmp_path: Path) -> None:
    """``preprocess_swegym.py`` wrote the data set's own row as a struct."""
    instance = json.loads((Path(__file__).parents[1] / "data" / "swesmith_rows.jsonl").read_text().splitlines()[0])
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "env_class": "null", "instance": instance}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps(instance) + "\n")
    assert TaskSet.load(tmp_path / "rows.jsonl") == TaskSet.load(tmp_path / "plain.jsonl")
    wrongs: list[object] = ["{", "[]", {"instance": {}, "prompt": []}]
    for wrong in wrongs:
        with pytest.raises(TaskFileError, match="instance"):
            task_from_row({**row, "instance": wrong})


def test_the_configurations_are_yaml_that_says_everything_once() -> None:
    directory = Path(__file__).resolve().parents[2] / "src" / "minisandbox" / "integrations" / "skyrl" / "configs"
    one, two = (yaml.safe_load((directory / f"{name}.yaml").read_text()) for name in packaged())
    assert one.keys() == two.keys()
    assert one["trainer"].keys() == two["trainer"].keys()
