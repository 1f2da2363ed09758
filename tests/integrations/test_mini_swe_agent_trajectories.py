"""Trajectories that mini-swe-agent 2 wrote, as training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.extras import needs_mini
from tests.integrations.scripted_model import scripted_model

from minisandbox.models import Message
from minisandbox.trajectories.sources import read_examples

pytestmark = needs_mini

COMMANDS = ("echo one; echo two >&2", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo diff")
OBSERVED = "{{ output.output }}"


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let litellm use the prices that it ships."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def run(model: object, path: Path, **options: object) -> dict[str, Any]:
    """Run mini-swe-agent's default agent on this machine, and return the file that it wrote."""
    from minisweagent.agents.default import DefaultAgent  # noqa: PLC0415 - it may not be installed
    from minisweagent.environments.local import LocalEnvironment  # noqa: PLC0415 - the same

    templates = {"system_template": "You are", "instance_template": "Solve {{ task }}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates, output_path=path, **options)
    agent.run("this")
    body: dict[str, Any] = json.loads(path.read_text())
    return body


def served(kind: str, url: str) -> object:
    """Return mini-swe-agent's own client of a server, which calls tools or reads blocks."""
    from minisweagent.models import get_model  # noqa: PLC0415 - it may not be installed

    options: dict[str, object] = {
        "model_class": kind, "model_kwargs": {"api_base": url, "api_key": "none"}, "cost_tracking": "ignore_errors",
        "observation_template": OBSERVED,
    }  # fmt: skip
    if kind == "litellm_textbased":
        options["action_regex"] = r"```bash\s*\n(.*?)\n```"
    model: object = get_model("openai/m-1", options)
    return model


@pytest.mark.parametrize("kind", ["litellm", "litellm_textbased"])
def test_chats(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "last_mini_run.traj.json"
    with scripted_model(COMMANDS) as server:
        body = run(served(kind, server.url), path)
        *_, read = server.seen
    assert body["messages"][-1]["role"] == "exit"
    [one] = read_examples(path)
    assert list(one.messages[:-1]) == [Message.from_json(message) for message in read], "what the model has read"
    assert one.messages[-1].role == "assistant"
    assert (one.exit_status, one.submission, one.model, one.agent) == (
        "submitted",
        b"diff\n",
        "openai/m-1",
        "mini-swe-agent",
    )
    assert one.style == ("tool" if kind == "litellm" else "text")
    if kind == "litellm":
        from minisweagent.models.utils.actions_toolcall import BASH_TOOL  # noqa: PLC0415 - it may not be installed

        assert one.tools == (BASH_TOOL,)
        assert json.loads(one.messages[-1].tool_calls[0].arguments) == {"command": COMMANDS[1]}


def test_responses(tmp_path: Path) -> None:
    from minisweagent.models.test_models import (  # noqa: PLC0415 - it may not be installed
        DeterministicResponseAPIToolcallModel,
        make_response_api_output,
    )

    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    outputs = [
        make_response_api_output(f"Step {number}.", [{"command": command, "tool_call_id": f"c{number}"}])
        for number, command in enumerate(COMMANDS)
    ]
    outputs[0]["output"].insert(0, thought)
    model = DeterministicResponseAPIToolcallModel(outputs=outputs, observation_template=OBSERVED)
    body = run(model, tmp_path / "x.traj.json")
    assert [item.get("object") or item.get("type") for item in body["messages"][2:5]] == [
        "response", "function_call_output", "response",
    ]  # fmt: skip
    [one] = read_examples(tmp_path / "x.traj.json")
    assert [message.role for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    first, observed, last = one.messages[2:]
    assert (first.content, first.reasoning, observed.content) == ("Step 0.", "hm", "one\ntwo\n")
    assert first.tool_calls[0].id == observed.tool_call_id == "c0"
    assert json.loads(last.tool_calls[0].arguments) == {"command": COMMANDS[1]}
    assert one.style == "tool"


def test_limits(tmp_path: Path) -> None:
    with scripted_model(("echo one",)) as server:
        run(served("litellm", server.url), tmp_path / "x.traj.json", step_limit=2)
    [one] = read_examples(tmp_path / "x.traj.json")
    assert (one.exit_status, one.submission, one.turns, one.messages[-1].role) == ("LimitsExceeded", b"", 2, "tool")
