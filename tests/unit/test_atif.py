"""ATIF: our rollouts as Harbor's jobs and back, and Harbor's own trajectories as training data."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_rollout_exports import DONE, FAILED, WITHOUT_MODEL

from minisandbox.cli.main import main
from minisandbox.errors import TrajectoryError
from minisandbox.grade import Flag
from minisandbox.models import Message, Tokens, ToolCall
from minisandbox.models.graph import TokenGraph
from minisandbox.rollouts import RunDirectory
from minisandbox.rollouts.examples import open_examples
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.sources import read_examples

assert DONE.grade is not None
GRAPH = TokenGraph()
GRAPH.add(Tokens(array("i", (1, 2, 3)), array("i", (4, 5)), array("d", (-0.25, -1.5))))
GRAPH.add(Tokens(array("i", (1, 2, 3, 4, 5, 6)), array("i", (7,)), array("d", (-0.125,))))
WITH_TOKENS = replace(
    DONE,
    instance_id="a__b-4",
    rows=GRAPH.rows(),
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
    steps = json.loads((tmp_path / "job/a__b-4/agent/trajectory.json").read_text())["steps"]
    assert "completion_token_ids" not in steps[2]["metrics"]
    assert steps[2]["timestamp"] == "2025-01-01T00:00:00.100000+00:00"
    assert steps[2]["observation"] == {"results": [{"content": "x", "source_call_id": "c1"}]}


def harbors(place: Path, steps: list[dict[str, object]], **result: object) -> Path:
    """A trial as Harbor writes it."""
    trial = place / "fix-it__AbC"
    (trial / "agent").mkdir(parents=True)
    agent = {"name": "terminus-2", "version": "2.0.0", "model_name": "m"}
    body = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps}
    (trial / "agent/trajectory.json").write_text(json.dumps(body))
    (trial / "result.json").write_text(json.dumps({"task_name": "org/fix-it", **result}))
    return place


def test_trajectories_of_other_agents(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Look"},
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
    [found] = read_examples(harbors(tmp_path, steps, verifier_result={"rewards": {"reward": 0.5}}))
    assert found == Example(
        traj_id="s",
        instance_id="org/fix-it",
        messages=(
            Message("system", "Be good"),
            Message("user", "Look\n[image: a.png]"),
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
        ({}, None, None),
    ],
)
def test_rewards_of_trials(tmp_path: Path, result: dict[str, object], reward: float | None, status: str | None) -> None:
    [found] = read_examples(harbors(tmp_path, [{"step_id": 1, "source": "user", "message": "?"}], **result))
    assert (found.reward, found.exit_status) == (reward, status)


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
