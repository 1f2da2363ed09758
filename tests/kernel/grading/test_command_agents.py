"""Command-line agents in sandboxes: a small agent of these tests, a scripted model, and the capture proxy between."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scripted_server import ScriptedServer, serving

from minisandbox.agents import AgentLimits, AgentRecipe, CommandAgent
from minisandbox.errors import InvalidValue
from minisandbox.images import Image
from minisandbox.images.oci.export import export_images
from minisandbox.models import Message, Model, OpenAIModel, Request, ScriptedModel, Timeouts
from minisandbox.models.protocol import ToolCall
from minisandbox.rollouts import Setup, rollout_async
from minisandbox.rollouts.rollout import install
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

pytestmark = [pytest.mark.kernel, pytest.mark.once]

# It asks, runs what the model wants, and ends when the model wants nothing. Its first argument is what goes wrong.
AGENT = """
import json, os, subprocess, sys, time, urllib.error, urllib.request

def post(messages, key=os.environ["KEY"], url=os.environ["BASE_URL"] + "/chat/completions", tools=True):
    body = {"model": "m", "messages": messages}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]

fault, text = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
if fault == "stdin":
    text = sys.stdin.read()
if fault == "file":
    text = open("/tmp/task-message").read()
messages = [{"role": "user", "content": text}]
if fault == "early":
    sys.exit("I give up")
if fault == "key":
    post(messages, key="ms-another")
if fault == "title":
    post([{"role": "user", "content": "a title, please"}], tools=False)
while True:
    answer = post(messages)
    messages.append(answer)
    for call in answer.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    if not answer.get("tool_calls"):
        break
if fault == "host":
    urllib.request.urlopen("http://example.org/")
if fault == "forks":
    while True:
        subprocess.Popen(["sleep", "1000"])
if fault == "terminal":
    open("/dev/tty").read()
if fault == "waits":
    assert sys.stdin.read() == ""
    time.sleep(1000)
"""


def recipe(fault: str, **more: object) -> AgentRecipe:
    return AgentRecipe(
        "fake", "1", ("python3", "/tmp/agent.py", fault, "{message}"),
        environment={"KEY": "{key}", "BASE_URL": "{base_url}"}, files={"/tmp/agent.py": AGENT}, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def call(command: str, number: int = 0) -> Message:
    return Message("assistant", "", (ToolCall(f"c{number}", "sh", json.dumps({"command": command})),))


FIX = call("sed -i 's/a - b/a + b/' calc/core.py")
LOOK = call("cat calc/core.py; env", 1)
DONE = Message("assistant", "Done.")


def run(
    task: Task, image: Image, recipe: AgentRecipe, model: Model | None = None, **limits: float | None
) -> Trajectory:
    agent = CommandAgent(recipe)
    setup = Setup(
        agent=agent,
        model=model or ScriptedModel([LOOK, FIX, DONE]),
        agent_limits=AgentLimits(**limits),  # type: ignore[arg-type]
    )
    return asyncio.run(rollout_async(task, image, setup))


def test_a_command_line_agent_solves_a_task_and_its_tokens_are_one_row(smith: Task, smith_image: Image) -> None:
    done = run(smith, smith_image, recipe("none"))
    assert (done.exit_status, done.detail, done.reward, done.failure) == ("submitted", "", 1.0, None)
    assert [one.role for one in done.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert done.messages[0].content == smith.problem_statement
    assert [turn.message for turn in done.turns] == [1, 3, 5]
    [row] = done.rows
    assert (row.turns, sum(row.mask)) == ((0, 1, 2), sum(turn.usage.completion for turn in done.turns))
    [step] = done.steps
    assert step.command == "python3 /tmp/agent.py none '{message}'"  # no key
    assert Trajectory.from_text(done.to_text()) == done


@pytest.mark.parametrize("way", ["stdin", "file"])
def test_the_message_comes_from_stdin_or_a_file(smith: Task, smith_image: Image, way: str) -> None:
    agent = replace(recipe(way), command=("python3", "/tmp/agent.py", way), stdin="message")
    task = replace(smith, problem_statement="long {key} 'quoted'\n" * 10_000)  # more than an argument may have
    done = run(task, smith_image, agent)
    assert done.messages[0].content == task.problem_statement
    assert done.reward == 1.0


def test_a_side_request_has_a_row_of_its_own_and_is_not_in_the_history(smith: Task, smith_image: Image) -> None:
    def answer(request: Request) -> Message:
        return [LOOK, FIX, DONE][sum(one.role == "assistant" for one in request.messages)] if request.tools else DONE

    done = run(smith, smith_image, recipe("title"), ScriptedModel(answer))
    assert [turn.message for turn in done.turns] == [-1, 1, 3, 5]
    assert [row.turns for row in done.rows] == [(0,), (1, 2, 3)]
    assert done.reward == 1.0


@pytest.mark.parametrize(
    ("fault", "limits", "status", "detail"),
    [
        ("host", {}, "submitted (exit_network)", "refused: example.org:80 is not on this sandbox's allow-list"),
        ("terminal", {}, "submitted (exit_command)", "/dev/tty"),
        ("waits", {"seconds": 2.0}, "submitted (exit_total_execution_time)", "2 seconds"),
        ("waits", {"steps": 2}, "exit_steps", "2 steps"),
    ],
)  # fmt: skip
def test_what_an_agent_has_done_is_graded_however_it_ends(
    smith: Task, smith_image: Image, fault: str, limits: dict[str, float], status: str, detail: str
) -> None:
    model = ScriptedModel([FIX, LOOK, DONE] if "steps" in limits else [FIX, DONE])
    done = run(smith, smith_image, recipe(fault), model, **limits)
    assert status in done.exit_status
    assert detail in done.detail
    assert (done.reward, done.failure) == (1.0, None)
    assert len(done.turns) == 2


def test_an_agent_that_forks_without_end_is_graded(smith: Task, smith_image: Image) -> None:
    """Its processes may leave none for git; then the agent has broken its workspace, and its patch is empty."""
    done = run(smith, smith_image, recipe("forks"), ScriptedModel([FIX, DONE]), seconds=20.0)
    if done.exit_status == "exit_error":
        assert "cannot start a process" in done.detail
    else:
        assert "submitted (exit_" in done.exit_status
    assert (done.reward, done.failure) == (0.0 if done.exit_status == "exit_error" else 1.0, None)


def test_an_agent_that_sends_no_request_for_long_is_stopped(smith: Task, smith_image: Image) -> None:
    done = run(smith, smith_image, recipe("waits", idle=1.0), ScriptedModel([FIX, DONE]))
    assert (done.exit_status, done.detail, done.reward) == ("submitted (exit_idle)", "no request for 1 s", 1.0)


@pytest.mark.parametrize("fault", ["early", "key"])
def test_an_agent_that_never_reached_the_model_has_no_reward(smith: Task, smith_image: Image, fault: str) -> None:
    done = run(smith, smith_image, recipe(fault))
    assert (done.exit_status, done.reward, done.turns) == ("exit_no_request", None, ())
    assert done.failure is not None
    assert {"early": "I give up", "key": "401"}[fault] in done.failure.detail
    assert len(done.steps) == 1


@pytest.mark.parametrize(("script", "status"), [([FIX, {"fault": "server_error"}], "exit_api"), ([FIX], "exit_api")])
def test_a_failure_of_the_model_is_no_failure_of_the_agent(
    smith: Task, smith_image: Image, script: Sequence[object], status: str
) -> None:
    with serving(ScriptedServer(script)) as server:
        model = OpenAIModel("scripted", server.url, tokens="yes", timeouts=Timeouts(read=5.0, total=5.0), retries=0)
        done = run(smith, smith_image, recipe("none"), model)
    assert (done.exit_status, done.reward, len(done.turns)) == (status, None, 1)
    assert done.failure is not None
    assert done.failure.phase == "model"


def test_a_prompt_above_the_context_limit_is_refused_and_ends_the_agent(smith: Task, smith_image: Image) -> None:
    done = run(smith, smith_image, recipe("none"), ScriptedModel([FIX, call("seq 5000", 1), DONE]), context=5000)
    assert (done.exit_status, done.reward) == ("submitted (exit_context)", 1.0)


def test_a_program_is_one_layer_over_all_images_and_is_never_exported(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    program = '#!/bin/sh\nexec python3 /tmp/agent.py none "$1"\n'
    setup = f"cat > /opt/minisandbox/agent/bin/fake-agent <<'END'\n{program}END\nchmod +x /opt/minisandbox/agent/bin/*"
    installed = replace(recipe("none"), setup=(setup,), command=("fake-agent", "{message}"), version="setup")
    assert run(smith, smith_image, installed).reward == 1.0
    store = smith_image.store
    layers = install(CommandAgent(installed), store)
    assert not {store.layer_tree(key) for key in smith_image.layers} & set(layers)
    assert install(CommandAgent(installed), store) == layers
    agent = CommandAgent(installed)
    assert install(agent, store) == install(agent, store) == layers
    for private in (False, True):
        with pytest.raises(InvalidValue, match="the program of an agent"):
            export_images(store, ["agent-fake-setup"], tmp_path / "layout", private=private)
    exported = export_images(store, [smith_image.name], tmp_path / "task", private=True)
    assert exported.layers == len(smith_image.layers) + (smith_image.tests_layer is not None)
    shutil.rmtree(layers[-1].parent)  # as gc does
    assert install(agent, store) == layers
    assert layers[-1].is_dir()
