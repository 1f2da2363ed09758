"""A run as a log of Inspect, read back by Inspect itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageAssistant, ContentReasoning
from tests.unit.training_tools import trajectory

from minisandbox.cli.main import main
from minisandbox.models import Message, ToolCall
from minisandbox.rollouts import RunDirectory
from minisandbox.trajectories import Failure

CALLS = (
    Message("system", "You are an agent."),
    Message("user", "Fix it."),
    Message(
        "assistant", "", (ToolCall("1", "bash", '{"command": "ls"}'), ToolCall("2", "bash", "{")), reasoning="Look."
    ),
    Message("tool", "a.py", tool_call_id="1"),
    Message("tool", "not JSON \ud800", tool_call_id="2"),
    Message("assistant", "Done."),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    failure = Failure(phase="agent", kind="SandboxGone", detail="it was killed")
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        directory.write(trajectory("a__b-1"))
        directory.write(trajectory("a__b-1", 1, 0.0, messages=CALLS, turns=()))
        directory.write(trajectory("a__b-2", grade=None, failure=failure, messages=(), turns=(), model=""))
    return tmp_path / "run"


@pytest.mark.parametrize("suffix", ["eval", "json"])
def test_inspect_reads_the_log(run: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"logs/run.{suffix}"
    assert main(["trajectories", "export", str(run), "--to", "inspect", "-o", str(out)]) == 0
    log = read_eval_log(str(out))
    assert (log.status, log.eval.task, log.eval.solver, log.eval.model) == ("success", "run", "bash", "m-1")
    samples = {(sample.id, sample.epoch): sample for sample in log.samples or ()}
    assert set(samples) == {("a__b-1", 1), ("a__b-1", 2), ("a__b-2", 1)}
    resolved, failed, broken = (samples[key] for key in sorted(samples))
    values = [(sample.scores or {})["hidden tests"].value for sample in (resolved, failed, broken)]
    assert values[:2] == [1.0, 0.0]
    assert isinstance(values[2], float)
    assert math.isnan(values[2])
    assert log.results is not None
    assert log.results.scores[0].metrics["mean"].value == 0.5
    assert (resolved.scores or {})["hidden tests"].answer.startswith("diff --git")
    assert resolved.model_usage["m-1"].output_tokens == 10
    assert broken.error is not None
    assert broken.error.message == "agent: SandboxGone: it was killed"


def test_messages_keep_calls_and_thoughts(run: Path, tmp_path: Path) -> None:
    assert main(["trajectories", "export", str(run), "--to", "inspect", "-o", str(tmp_path / "run.eval")]) == 0
    sample = next(sample for sample in read_eval_log(str(tmp_path / "run.eval")).samples or () if sample.epoch == 2)
    assert [message.role for message in sample.messages] == [message.role for message in CALLS]
    answer = sample.messages[2]
    assert isinstance(answer, ChatMessageAssistant)
    assert isinstance(answer.content, list)
    assert isinstance(answer.content[0], ContentReasoning)
    assert answer.content[0].reasoning == "Look."
    assert answer.tool_calls is not None
    assert [call.arguments for call in answer.tool_calls] == [{"command": "ls"}, {"arguments": "{"}]
    assert sample.messages[3].text == "a.py"
