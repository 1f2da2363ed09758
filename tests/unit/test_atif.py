"""ATIF: our rollouts as Harbor's jobs and back, and Harbor's own trajectories as training data."""

from __future__ import annotations

import json
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_rollout_exports import DONE, FAILED, WITHOUT_MODEL

from minisandbox.cli.main import main
from minisandbox.errors import MissingExtra, TrajectoryError
from minisandbox.grade import Flag
from minisandbox.models import Message, Tokens, ToolCall
from minisandbox.models.graph import TokenGraph
from minisandbox.rollouts import RunDirectory
from minisandbox.rollouts.examples import open_examples
from minisandbox.trajectories import PatchRecord
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.sources import read_examples

assert DONE.grade is not None
GRAPH = TokenGraph()
GRAPH.add(Tokens(array("i", (1, 2, 3)), array("i", (4, 5)), array("d", (-0.25, -1.5))))
GRAPH.add(Tokens(array("i", (1, 2, 3, 4, 5, 6)), array("i", (7, 8)), array("d", (-0.125, -1.0)), ((3, 1), (4, 1))))
WITH_TOKENS = replace(
    DONE,
    instance_id="a__b-4",
    rows=GRAPH.rows(),
    patches=(PatchRecord(1, b"diff --git a/x b/x\n"),),
    grade=replace(DONE.grade, flags=(Flag("pytest_config", "setup.cfg"),)),
)
TEXT = replace(
    DONE,
    instance_id="a__b-5",
    messages=(
        Message("system", "You are"),
        Message("user", "Solve this \ud800"),
        Message("assistant", "I look.\n\n```bash\nls\n```", reasoning="Perhaps ls?"),
        Message("user", "x"),
        Message("assistant", "No action."),
    ),
)
ODD = replace(
    DONE,
    instance_id="a__b-6",
    messages=(
        Message("user", "Solve"),
        Message("assistant", "", (ToolCall("c1", "bash", '{"command": '), ToolCall("c2", "bash", "[1]"))),
        Message("tool", "no JSON", (), "c1"),
        Message("tool", "no object", (), "c2"),
        Message("user", "Go on"),
        Message("assistant", "Done."),
    ),
    turns=(replace(DONE.turns[0], message=1), replace(DONE.turns[1], message=5)),
    steps=(),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        for one in (DONE, FAILED, WITHOUT_MODEL, WITH_TOKENS, TEXT, ODD):
            directory.write(one)
    return tmp_path / "run"


def test_there_and_back(run: Path, tmp_path: Path) -> None:
    job = tmp_path / "jobs/job"
    assert main(["trajectories", "export", str(run), "--to", "atif", "-o", str(job)]) == 0
    kept = {one.traj_id: one for one in open_examples(run) if one.messages}
    kept = {name: replace(one, source="job") for name, one in kept.items()}
    found = {one.traj_id: one for one in read_examples(job)}
    [replayed] = [one for name, one in found.items() if name not in kept]
    assert (replayed.instance_id, replayed.agent, replayed.turns) == ("a__b-3", "replay", 0)  # no model, no answers
    for name, one in kept.items():
        readable = (replace(message, content=message.content.replace("\ud800", "?")) for message in one.messages)
        assert found[name] == replace(one, messages=tuple(readable))
    assert [one.rows for one in found.values() if one.instance_id == "a__b-4"] == [WITH_TOKENS.rows]
    assert {one.source for one in read_examples(job.parent)} == {"jobs"}
    [alone] = read_examples(job / "a__b-4/agent/trajectory.json")
    assert (alone.rows, alone.submission) == (WITH_TOKENS.rows, DONE.submission)


def test_the_results_of_a_job(run: Path, tmp_path: Path) -> None:
    argv = ["trajectories", "export", str(run), "--to", "atif", "--no-tokens", "-o", str(tmp_path / "job")]
    assert main(argv) == 0
    job = json.loads((tmp_path / "job/result.json").read_text())
    assert (job["n_total_trials"], job["stats"]["n_errored_trials"]) == (6, 1)
    assert job["stats"]["evals"]["bash__m-1__adhoc"]["metrics"] == [{"mean": 1.0}]
    failed = json.loads((tmp_path / "job/a__b-2/result.json").read_text())
    assert (failed["verifier_result"], failed["exception_info"]["exception_type"]) == (None, "ModelUnavailable")
    trajectory = json.loads((tmp_path / "job/a__b-4/agent/trajectory.json").read_text())
    assert trajectory["schema_version"] == "ATIF-v1.8"
    steps = trajectory["steps"]
    assert "completion_token_ids" not in steps[2]["metrics"]
    assert steps[2]["timestamp"] == "2025-01-01T00:00:00.100000+00:00"
    assert steps[2]["extra"] == {"minisandbox": {"turn": 1, "patch": "diff --git a/x b/x\n", "detail": ""}}
    assert ["extra" in step for step in steps] == [False, False, True, False]
    assert steps[2]["observation"] == {"results": [{"content": "x", "source_call_id": "c1"}]}


def write_trajectory(folder: Path, steps: list[dict[str, object]]) -> None:
    """Write the trajectory of a trial, or of a trial's step, as Harbor does."""
    (folder / "agent").mkdir(parents=True)
    agent = {"name": "terminus-2", "version": "2.0.0", "model_name": "m"}
    body = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps}
    (folder / "agent/trajectory.json").write_text(json.dumps(body))


def write_trial(job: Path, steps: list[dict[str, object]], **result: object) -> Path:
    """Write a trial as Harbor does."""
    write_trajectory(job / "fix-it__AbC", steps)
    (job / "fix-it__AbC/result.json").write_text(json.dumps({"task_name": "org/fix-it", **result}))
    return job


def test_trajectories_of_other_agents(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Look"},
        {"type": "text", "text": ""},
        {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}},
    ]
    call = {"tool_call_id": "1", "function_name": "bash", "arguments": {"command": "ls"}}
    steps: list[dict[str, object]] = [
        {"step_id": 1, "source": "system", "message": "Be good"},
        {"step_id": 2, "source": "user", "message": parts},
        {"step_id": 3, "source": "agent", "message": "before", "is_copied_context": True},
        {"step_id": 4, "source": "agent", "message": "set up", "llm_call_count": 0},
        {"step_id": 5, "source": "agent", "message": "", "reasoning_content": "Hm.", "tool_calls": [call],
         "observation": {"results": [{"content": "calc.py"}]}, "metrics": {"prompt_tokens": 9, "completion_tokens": 2}},
    ]  # fmt: skip
    [found] = read_examples(write_trial(tmp_path, steps, verifier_result={"rewards": {"reward": 0.5}}))
    assert found == Example(
        traj_id="s",
        instance_id="org/fix-it",
        messages=(
            Message("system", "Be good"),
            Message("user", "Look\n\n[image: a.png]"),
            Message("user", "set up"),
            Message("assistant", "", (ToolCall("1", "bash", '{"command": "ls"}'),), reasoning="Hm."),
            Message("tool", "calc.py", (), "1"),
        ),
        style="tool",
        reward=0.5,
        exit_status="submitted",
        model="m",
        agent="terminus-2",
        tokens=11,
        source=tmp_path.name,
    )


@pytest.mark.parametrize(
    ("result", "reward", "status"),
    [
        ({"verifier_result": {"rewards": {"correct": 1}}}, 1.0, "submitted"),
        ({"verifier_result": {"rewards": {"correct": 1, "fast": 0}}}, None, "submitted"),  # which one counts?
        ({"exception_info": {"exception_type": "AgentTimeoutError"}}, None, "AgentTimeoutError"),
        (
            {"verifier_result": {"rewards": {"reward": 0.0}}, "reward_valid": False,
             "exception_info": {"exception_type": "ApiRateLimitError", "policy": {"has_valid_reward": False}}},
            None, "ApiRateLimitError",
        ),
        (
            {"verifier_result": {"rewards": {"reward": 0.0}}, "reward_valid": True,
             "exception_info": {"exception_type": "AgentTimeoutError", "policy": {"has_valid_reward": True}}},
            0.0, "AgentTimeoutError",
        ),
        ({}, None, None),
    ],
)  # fmt: skip
def test_rewards_of_trials(tmp_path: Path, result: dict[str, object], reward: float | None, status: str | None) -> None:
    [found] = read_examples(write_trial(tmp_path, [{"step_id": 1, "source": "user", "message": "?"}], **result))
    assert (found.reward, found.exit_status) == (reward, status)


def test_trials_of_several_steps(tmp_path: Path) -> None:
    job = tmp_path / "job"
    trial = job / "fix-it__AbC"
    for name in ("build", "deploy", "late"):
        write_trajectory(trial / "steps" / name, [{"step_id": 1, "source": "user", "message": f"{name} it"}])
    rate_limit = {"exception_type": "ApiRateLimitError", "policy": {"has_valid_reward": False}}
    outcomes = [
        {"step_name": "build", "verifier_result": {"rewards": {"reward": 1.0}}},
        {"step_name": "deploy", "verifier_result": {"rewards": {"reward": 0.0}}, "exception_info": rate_limit},
    ]
    means = {"reward_valid": False, "verifier_result": {"rewards": {"reward": 0.5}}}
    (trial / "result.json").write_text(json.dumps({"task_name": "org/fix-it", "step_results": outcomes, **means}))
    expected = [
        ("s/build", "org/fix-it", 1.0, "submitted"),
        ("s/deploy", "org/fix-it", None, "ApiRateLimitError"),
        ("s/late", "org/fix-it", None, None),
    ]
    for path in (tmp_path, job, trial):
        examples = read_examples(path)
        assert [(one.traj_id, one.instance_id, one.reward, one.exit_status) for one in examples] == expected
    [example] = read_examples(trial / "steps/build/agent/trajectory.json")
    assert (example.traj_id, example.instance_id, example.reward) == expected[0][:3]


def test_sorted_keys(tmp_path: Path) -> None:
    write_trajectory(tmp_path, [{"step_id": 1, "source": "user", "message": "?"}])
    body = json.loads((tmp_path / "agent/trajectory.json").read_text())
    body["agent"]["extra"] = {"prompt": "x" * 1000}
    (tmp_path / "sorted.json").write_text(json.dumps(body, sort_keys=True, indent=1))
    [example] = read_examples(tmp_path / "sorted.json")
    assert example.traj_id == "s"


def test_files_of_other_versions_and_programs(tmp_path: Path) -> None:
    """Fields that no version has are ignored, and steps may be numbered from 0."""
    step = {"step_id": 0, "source": "agent", "message": "Done.", "mood": "good", "metrics": {"joules": 3}}
    body = {"schema_version": "ATIF-v1.9", "agent": {"name": "other"}, "steps": [step], "mode": "fast"}
    (tmp_path / "t.json").write_text(json.dumps(body))
    [example] = read_examples(tmp_path / "t.json")
    assert (example.messages, example.agent) == ((Message("assistant", "Done."),), "other")


def test_log_probabilities_of_another_length(tmp_path: Path) -> None:
    """The answer carries no loss; the others do."""

    def answer(prompt: list[int], sampled: list[int], logprobs: list[float]) -> dict[str, object]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": logprobs}
        return {"source": "agent", "message": "x", "metrics": metrics}

    broken, whole = answer([1], [2, 3], [-0.5]), answer([1, 2, 3, 4], [5], [-0.25])
    write_trial(tmp_path / "some", [broken, whole])
    [example] = read_examples(tmp_path / "some")
    [row] = example.rows
    assert (row.ids.tolist(), row.mask, row.logprobs.tolist()) == ([1, 2, 3, 4, 5], b"\0\0\0\0\1", [0, 0, 0, 0, -0.25])
    assert example.turns == 2
    write_trial(tmp_path / "all", [broken])
    assert [one.rows for one in read_examples(tmp_path / "all")] == [()]


def test_the_package_atif_is_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atif", None)
    argv = ["trajectories", "export", str(run), "--to", "atif", "-o", str(tmp_path / "job")]
    assert main(argv) == MissingExtra.exit_code
    assert "swe-minisandbox[atif]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        '{"schema_version": "ATIF-v1.6", "steps": []}',
        '{"schema_version": "ATIF-v1.6", "steps": [{"source": "nobody"}]}',
        '{"schema_version": "ATIF-v1.6", "steps": [{"message": "x"}]}',
        '{"schema_version": "ATIF-v2.0", "steps": [{"source": "user"}]}',
        '{"schema_version": "ATIF-v1.6", "steps": [{"source": "agent", "tool_calls": [{}]}]}',
        '{"schema_version": "ATIF-v1.6", "steps": [',
        '{"schema_version": "ATIF-v1.7", "steps": [{"source": "user"}], "extra": {"minisandbox": {}}}',
    ],
)
def test_damaged_trajectories(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TrajectoryError, match=r"t\.json"):
        list(read_examples(tmp_path / "t.json"))
