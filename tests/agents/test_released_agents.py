"""The bundled recipes: each installs a released agent, which solves a quickstart task against a scripted model.

`make test-agents` runs these. AGENTS='codex' chooses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.scripted_server import ScriptedServer, serving

from minisandbox.agents import CommandAgent, load_recipe, recipe_names
from minisandbox.images import build
from minisandbox.models import Message, Request
from minisandbox.models.protocol import ToolCall
from minisandbox.rollouts import RunReader
from minisandbox.rollouts.rollout import install
from minisandbox.store import Store
from minisandbox.tasks import TaskSet

CHOSEN = os.environ.get("MINISANDBOX_TEST_AGENTS", "")
pytestmark = [
    pytest.mark.kernel, pytest.mark.index, pytest.mark.slow,
    pytest.mark.skipif(not CHOSEN, reason="installs agents of several hundred megabytes: make test-agents"),
]  # fmt: skip
TASK = "jpvanhal__inflection-0.5.1.ordinal_hundreds"
SHELLS = {"bash": "command", "Bash": "command", "run_shell_command": "command", "exec_command": "cmd"}
"""Each agent's tool for commands, and the name of its argument."""


def answer(request: Request) -> Message:
    """Look around, repair the code, and end as the agent expects it; a request without tools is for a title."""
    tools = {str(tool["function"]["name"]) for tool in request.tools}  # type: ignore[index]
    shell = next(iter(tools & SHELLS.keys()), None)
    turn = sum(len(message.tool_calls) for message in request.messages)
    patch = TaskSet.load("quickstart")[TASK].patch.rstrip()
    commands = ["git status --short; ls", f"git apply -R - <<'END'\n{patch}\nEND"]
    if tools == {"bash"}:  # mini-swe-agent
        commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    if shell is None or turn >= len(commands):
        return Message("assistant", "Done.")
    arguments = {SHELLS[shell]: commands[turn]} | ({"is_background": False} if shell == "run_shell_command" else {})
    return Message("assistant", "The next step:", (ToolCall(f"call_{turn}", shell, json.dumps(arguments)),))


def installed_versions(layer: Path) -> list[str]:
    """The names and versions of the packages that a layer has, from their metadata."""
    modules = layer / "opt/minisandbox/agent/lib/node_modules"
    manifests = (*modules.glob("*/package.json"), *modules.glob("@*/*/package.json"))
    tables = [json.loads(path.read_text()) for path in manifests]
    packages = layer.glob("opt/minisandbox/agent/python/lib/python3*/site-packages/*.dist-info")
    return [f"{table['name']} {table['version']}" for table in tables] + [path.stem for path in packages]


@pytest.mark.parametrize("name", [name for name in recipe_names() if CHOSEN in ("", "1") or name in CHOSEN.split()])
def test_a_released_agent_solves_a_task(name: str, tmp_path: Path) -> None:
    recipe, store = load_recipe(name), Store.open()
    began = time.monotonic()
    [layer, *_] = install(CommandAgent(recipe), store, print)
    print(f"\n{recipe.title}: installed in {time.monotonic() - began:.1f} s")
    print("\n".join(line for line in installed_versions(layer) if any(part in line for part in ("mini", "@"))))
    with serving(ScriptedServer(answer)) as server:
        options = ["--model", "scripted", "--api-base", server.url, "--time-limit", "300"]
        words = ["rollout", "quickstart", "--only", TASK, "--agent", f"command:{name}", *options, "-o", "run"]
        done = subprocess.run(
            [sys.executable, "-m", "minisandbox", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    with RunReader(tmp_path / "run") as run:
        trajectory = run.trajectory(TASK, 0)
    assert trajectory is not None
    assert trajectory.grade is not None
    print(
        f"{recipe.title}: {trajectory.grade.verdict}, {trajectory.exit_status}, {len(trajectory.turns)} turns in "
        f"{len(trajectory.rows)} rows, agent {trajectory.timings.agent:.1f} s, {trajectory.detail}"
    )
    assert (trajectory.exit_status, trajectory.reward) == ("submitted", 1.0)
    main = max(trajectory.rows, key=lambda row: len(row.turns))
    assert len(main.turns) >= 3  # the history is one row
    assert sum(sum(row.mask) for row in trajectory.rows) == sum(turn.usage.completion for turn in trajectory.turns)


def test_an_agent_over_a_second_image_is_ready_in_a_second(tmp_path: Path) -> None:
    store, tasks = Store.open(), TaskSet.load("quickstart")
    agent = CommandAgent(load_recipe(CHOSEN.split()[0] if CHOSEN != "1" else "codex"))
    layers = install(agent, store)
    for task in list(tasks)[:2]:
        image = build(task.recipe(), store=store, name=task.instance_id)
        began = time.monotonic()
        assert install(agent, store) == layers
        seconds = time.monotonic() - began
        print(f"\n{task.instance_id}, {len(image.layers)} layers: {agent.name} is ready in {seconds:.3f} s")
