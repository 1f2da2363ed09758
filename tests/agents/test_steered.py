"""The bundled recipes' agents against a model that really samples: each token is in one row, with its log-probability.

`make test-agents` runs these with the released agents, AGENTS='codex' chooses. It needs the extra local:
ENVIRONMENT=full.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import compress

import aiohttp
import pytest
from tests.agents.test_released_agents import CHOSEN, SHELLS, TASK
from tests.unit.test_models_capture_agents import (
    SYSTEM_AND_USER,
    Agent,
    chat_turns,
    claude_turns,
    codex_turns,
    of_qwen,
    prompt_of_claude,
    prompt_of_codex,
)

from minisandbox.agents import AgentLimits, CommandAgent, Ending, Session, load_recipe, recipe_names
from minisandbox.images import build
from minisandbox.models import Sampling
from minisandbox.models.capture import CaptureProxy, CaptureSession
from minisandbox.models.engine import TransformersEngine, recompute_logprobs
from minisandbox.models.graph import TokenRow
from minisandbox.rollouts import Setup, rollout_async
from minisandbox.store import Store
from minisandbox.tasks import TaskSet
from minisandbox.types import ExecResult

steered_engine = pytest.importorskip(
    "tests.agents.steered_model", reason="the extra [local] is not installed"
).steered_engine

LOOK = [
    "ls", "git log --oneline | head -3", "ls tests*", "echo 'é 世界'", "wc -l *.*", "git branch", "git status --short",
]  # fmt: skip
TOOLS = {"claude-code": "Bash", "codex": "exec_command", "mini-swe-agent": "bash", "qwen-code": "run_shell_command"}


def calls(tool: str, argument: str, commands: Sequence[str]) -> list[str]:
    """Return a response for each command, in the format of the tiny model's template, and a last one without a call."""
    more = {"is_background": False} if tool == "run_shell_command" else {}
    bodies = [
        json.dumps({"name": tool, "arguments": {argument: command, **more}}, ensure_ascii=False) for command in commands
    ]
    return [*(f"\n<tool_call>{body}</tool_call>" for body in bodies), " Done."]


def check(engine: TransformersEngine, rows: Sequence[TokenRow], forks: int, title: str) -> None:
    """Check that each sampled token has loss in one row, and that the model gives it the captured log-probability."""
    again = [recompute_logprobs(engine.model, row) for row in rows]
    pairs = [
        (before, after)
        for row, values in zip(rows, again, strict=True)
        for before, after, has_loss in zip(row.logprobs, values, row.mask, strict=True)
        if has_loss
    ]
    worst = max(abs(before - after) for before, after in pairs)
    turns = len({turn for row in rows for turn in row.turns})
    texts = (engine.renderer.decode([*compress(row.ids, row.mask)]) for row in rows)
    shortest = sum(len(engine.renderer.encode(text)) for text in texts)
    print(
        f"\n{title}: {turns} turns in {len(rows)} rows, {forks} of {turns} responses are forks, {len(pairs)} sampled "
        f"tokens of {sum(len(row.ids) for row in rows)}, log-probabilities differ by {worst:.1e}; the tokenizer needs "
        f"{shortest} tokens for the sampled texts"
    )
    assert shortest < len(pairs) - 8 * turns  # so the texts do not determine the sampled tokens
    assert len(pairs) == engine.sampled
    assert worst < 1e-4
    assert sum(before < -0.5 for before, _ in pairs) > 8 * turns  # the model had choices


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
def test_steered_responses_are_captured(api: str) -> None:
    async def body() -> None:
        engine = steered_engine(calls("run", "command", LOOK * 2))
        async with CaptureProxy(engine) as proxy, aiohttp.ClientSession() as client:
            access = proxy.session("task")
            agent = Agent(client, access)
            if api == "messages":
                await claude_turns(agent, [*prompt_of_claude(), {"role": "user", "content": "Begin."}])
            elif api == "responses":
                await codex_turns(agent, prompt_of_codex())
            else:
                await chat_turns(agent, [*SYSTEM_AND_USER], of_qwen)
            session = proxy.close_session(access.key)
        await engine.close()
        check(engine, session.rows(), session.forks, api)
        assert [len(session.turns), len(session.rows()), session.forks] == [15, 1, 0]

    asyncio.run(body())


class ObservedAgent(CommandAgent):
    """A command-line agent whose last capture session stays readable."""

    captured: CaptureSession

    async def _ending(self, result: ExecResult | None, session: Session, captured: CaptureSession) -> Ending:
        self.captured = captured
        return await super()._ending(result, session, captured)


@pytest.mark.kernel
@pytest.mark.index
@pytest.mark.slow
@pytest.mark.skipif(not CHOSEN, reason="installs agents of several hundred megabytes: make test-agents")
@pytest.mark.parametrize("name", [name for name in recipe_names() if CHOSEN in ("", "1") or name in CHOSEN.split()])
def test_a_released_agent_is_sampled(name: str) -> None:
    task, agent, store = TaskSet.load("quickstart")[TASK], ObservedAgent(load_recipe(name)), Store.open()
    commands = [*LOOK, f"git apply -R - <<'END'\n{task.patch.rstrip()}\nEND", "git diff"]
    if name == "mini-swe-agent":
        commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    engine = steered_engine(calls(TOOLS[name], SHELLS[TOOLS[name]], commands))
    setup = Setup(agent=agent, model=engine, sampling=Sampling(temperature=1.0), agent_limits=AgentLimits(seconds=900))
    image = build(task.recipe(), store=store, name=task.instance_id)

    async def body() -> None:
        try:
            trajectory = await rollout_async(task, image, setup)
        finally:
            await engine.close()
        assert trajectory.failure is None, trajectory.failure
        print(trajectory.exit_status, trajectory.detail)
        check(engine, trajectory.rows, agent.captured.forks, agent.recipe.title)
        assert trajectory.rows == agent.captured.rows()
        assert (trajectory.exit_status, trajectory.reward) == ("submitted", 1.0)
        assert len(trajectory.turns) >= len(commands) >= 8

    asyncio.run(body())
