"""What released agents do to their history, in the form in which they send it: each sampled token stays in one row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.scripted_model import SimulatedModel
from tests.unit.model_servers import run

from minisandbox.cli.model import write_rows
from minisandbox.models import Message, Request
from minisandbox.models.capture import Access, CaptureProxy, CaptureSession
from minisandbox.models.protocol import ToolCall
from minisandbox.train.rows import read_rows

pytestmark = pytest.mark.once
SPACED = '{ "command": "ls é",\n "timeout": 1e1 }'  # an agent that parses and writes it again spells it differently
RUN = {"type": "object", "properties": {"command": {"type": "string"}}}


def work(request: Request) -> Message:
    """Call two tools at once for six turns with thoughts, then end; answer requests without tools in words."""
    turn = sum(message.role == "assistant" for message in request.messages)
    if not request.tools or turn == 6:
        return Message("assistant", f" Done after {turn}.\n", reasoning=" Enough. \n" if request.tools else "")
    calls = tuple(ToolCall(f"call_{turn}_{name}", "run", SPACED) for name in "ab")
    return Message("assistant", f"I look {turn}. \n", calls, reasoning=f"Why {turn}?\n\n")


@dataclass(frozen=True, slots=True)
class Agent:
    client: aiohttp.ClientSession
    access: Access

    async def post(self, path: str, body: object, **headers: str) -> Any:
        key = {"x-api-key": self.access.key} if "messages" in path else {"Authorization": f"Bearer {self.access.key}"}
        async with self.client.post(f"{self.access.base_url}{path}", json=body, headers=headers | key) as response:
            text = await response.text()
            assert response.status == 200, text
            return text if text.startswith("event:") else json.loads(text)

    async def claude(self, messages: list[Any], system: str = "You are Claude Code.", **fields: Any) -> Any:
        body = {
            "model": "claude", "max_tokens": 32_000, "messages": messages,
            "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "run", "input_schema": RUN}], "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": []}, "output_config": {"effort": "high"}, **fields,
        }  # fmt: skip
        return await self.post("/messages?beta=true", body, **{"anthropic-version": "2023-06-01"})

    async def codex(self, items: list[Any], *, tools: bool = True) -> Any:
        offered = [
            {"type": "function", "name": "run", "parameters": RUN},
            {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find", "parameters": RUN}]},
            {"type": "web_search"},
        ]
        body = {
            "model": "gpt", "input": items, "store": False, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k", "reasoning": {"effort": "high", "summary": "auto"}, "parallel_tool_calls": True,
        }  # fmt: skip
        return await self.post("/responses", body | ({"tools": offered} if tools else {}))

    async def chat(self, messages: list[Any], *, tools: bool = True, **fields: Any) -> Any:
        offered = {"tools": [{"type": "function", "function": {"name": "run", "parameters": RUN}}]} if tools else {}
        answer = await self.post("/chat/completions", {"model": "m", "messages": messages, **offered, **fields})
        return answer["choices"][0]["message"]


@asynccontextmanager
async def capturing(script: Callable[[Request], Message] = work) -> AsyncIterator[tuple[Agent, CaptureSession]]:
    async with CaptureProxy(SimulatedModel(script, context=20_000)) as proxy, aiohttp.ClientSession() as client:
        access = proxy.session("task")
        yield Agent(client, access), proxy.captured(access.key)


def check(session: CaptureSession, *, rows: int, forks: int = 0) -> None:
    """Check that each sampled token carries loss in exactly one row."""
    assert [len(session.rows()), session.forks] == [rows, forks]
    assert sum(sum(row.mask) for row in session.rows()) == session.usage.completion
    assert {turn for row in session.rows() for turn in row.turns} == set(range(len(session.turns)))


def results(answer: Any) -> list[Any]:
    """Return Claude Code's results of an answer's calls, in the order of completion: the second call ended first."""
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call["id"], "content": "a.py"} for call in reversed(calls)]


async def claude_turns(agent: Agent, messages: list[Any], **fields: Any) -> list[Any]:
    """Work until the model ends, as Claude Code does; the mark for the cache moves to the latest message."""
    while True:
        last = messages[-1]["content"]
        blocks = [{"type": "text", "text": last}] if isinstance(last, str) else last
        marked = [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]
        answer = await agent.claude([*messages[:-1], {**messages[-1], "content": marked}], **fields)
        messages.append({"role": "assistant", "content": answer["content"]})
        if answer["stop_reason"] == "end_turn":
            return messages
        messages.append({"role": "user", "content": results(answer)})


def prompt_of_claude() -> list[Any]:
    return [{"role": "user", "content": "Fix it."}, {"role": "system", "content": "Today is Friday."}]


def test_claude_code_2_1_332_one_row() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            messages = await claude_turns(agent, [*prompt_of_claude(), {"role": "user", "content": "Begin."}])
            assert messages[3]["content"][0] | {"signature": ""} == {
                "type": "thinking",
                "thinking": "",
                "signature": "",
            }
            assert len(session.turns) == 7
            check(session, rows=1)

    run(body)


def test_claude_code_2_1_332_each_answer_has_its_own_id() -> None:
    """It joins answers with the same id."""

    async def body() -> None:
        async with capturing() as (agent, _):
            assert len({(await agent.claude([{"role": "user", "content": "Fix it."}]))["id"] for _ in range(3)}) == 3

    run(body)


def test_claude_code_2_1_332_repeats_a_short_stream_without_streaming() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            messages: list[Any] = [{"role": "user", "content": "Fix it."}]
            events = await agent.claude(messages, stream=True)
            assert events.startswith("event: message_start\n")
            await claude_turns(agent, messages)
            assert len(session.turns) == 8
            check(session, rows=2)  # the first answer is a row of its own

    run(body)


def test_claude_code_2_1_332_subagents_share_the_route(tmp_path: Path) -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            main = [*prompt_of_claude(), {"role": "user", "content": "Begin."}]
            subagents = [claude_turns(agent, [{"role": "user", "content": f"Find {n}."}], system="S") for n in range(3)]
            title = agent.claude([{"role": "user", "content": "Fix it."}], system="Write a title.", tools=[])
            await asyncio.gather(claude_turns(agent, main), *subagents, title)
            messages = [*main, {"role": "user", "content": "A subagent has ended."}]
            await agent.claude(messages, tools=[])
            check(session, rows=6, forks=1)  # without tools the prompt begins differently
            path = tmp_path / "rows.jsonl"
            assert write_rows(path, [session]) == 6
            rows = list(read_rows(path))  # for training
            assert sum(row.loss_tokens for row in rows) == session.usage.completion
            assert {(row.rollout, row.task) for row in rows} == {(f"task#{number}", "task") for number in range(6)}

    run(body)


def test_a_row_without_loss_is_not_trained_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            await agent.chat([*SYSTEM_AND_USER], response_format={"type": "json_object"})
            assert write_rows(tmp_path / "rows.jsonl", [session]) == 1
            assert list(read_rows(tmp_path / "rows.jsonl")) == []

    run(body)


async def codex_turns(agent: Agent, items: list[Any]) -> list[Any]:
    """Work until the model ends, as Codex does: it keeps reasoning and ids, and gives its own items new ids."""
    while True:
        answer = await agent.codex(items)
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if not calls:
            return items
        for call in calls:
            output = f"Chunk ID: 1a\nWall time: 0.1 seconds\nOutput:\n{call['call_id']}"
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


def prompt_of_codex() -> list[Any]:
    text = [{"type": "input_text", "text": "You are Codex."}]
    user = [{"type": "input_text", "text": "<environment>"}, {"type": "input_text", "text": "Fix it."}]
    return [{"type": "message", "role": "developer", "content": text}, {"role": "user", "content": user}]


def test_codex_0_171_0_one_row() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            items = await codex_turns(agent, prompt_of_codex())
            assert sum(item.get("type") == "reasoning" and bool(item["encrypted_content"]) for item in items) == 7
            check(session, rows=1)

    run(body)


def test_codex_0_171_0_drops_the_readable_thoughts() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            items = await codex_turns(agent, prompt_of_codex())
            for item in items:
                if item.get("type") == "reasoning":
                    item["content"], item["id"] = None, "rs_new"
            await agent.codex([*items, {"role": "user", "content": "Go on."}])
            check(session, rows=1)

    run(body)


def test_codex_0_171_0_compaction_starts_a_row() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            items = await codex_turns(agent, prompt_of_codex())
            summary = await agent.codex([*items, {"role": "user", "content": "Summarize."}], tools=False)
            text = summary["output"][-1]["content"][0]["text"]
            await codex_turns(agent, [*prompt_of_codex(), {"role": "user", "content": f"Summary: {text}"}])
            check(session, rows=3, forks=1)  # the summary is a fork, because its prompt has no tools

    run(body)


async def chat_turns(agent: Agent, messages: list[Any], rewrite: Callable[[Any], Any], **fields: Any) -> list[Any]:
    """Work until the model ends; ``rewrite`` changes each answer as the agent does before it sends it back."""
    while True:
        answer = await agent.chat(messages, **fields)
        messages.append(rewrite(answer))
        if not answer.get("tool_calls"):
            return messages
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py\n"} for call in answer["tool_calls"]]


def rewritten(answer: Any, **fields: Any) -> Any:
    """Return an answer with arguments that were parsed and written again."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(
            json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False)}}
        for call in answer.get("tool_calls", ())
    ]  # fmt: skip
    return {**answer, **({"tool_calls": calls} if calls else {}), **fields}


SYSTEM_AND_USER = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Fix it."}]


def of_qwen(answer: Any) -> Any:
    reasoning = {"reasoning_content": answer["reasoning_content"].strip()} if "reasoning_content" in answer else {}
    return rewritten(answer, content=answer["content"].strip(), **reasoning)


def test_qwen_code_0_24_4_one_row_and_one_of_the_memory_subagent() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            await chat_turns(agent, [*SYSTEM_AND_USER], of_qwen, max_tokens=32_000)
            memory = [{"role": "system", "content": "Save memories."}, {"role": "user", "content": "Fix it."}]
            await chat_turns(agent, memory, of_qwen)
            check(session, rows=2)

    run(body)


def test_qwen_code_0_24_4_compaction_invents_an_answer() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            messages = await chat_turns(agent, [*SYSTEM_AND_USER], of_qwen)
            summary = await agent.chat([*messages, {"role": "user", "content": "Summarize."}], tools=False)
            history = [*SYSTEM_AND_USER[:1], {"role": "user", "content": summary["content"]}]
            history += [{"role": "assistant", "content": "Got it."}, {"role": "user", "content": "Go on."}]
            await chat_turns(agent, history, of_qwen)
            check(session, rows=3, forks=1)

    run(body)


def test_opencode_1_18_33_asks_for_a_title_before_with_or_after() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            title = agent.chat([{"role": "user", "content": "Write a title."}], tools=False, max_tokens=32_000)
            await asyncio.gather(title, chat_turns(agent, [*SYSTEM_AND_USER], rewritten, tool_choice="auto"))
            check(session, rows=2)

    run(body)


def test_mini_swe_agent_2_4_6_drops_an_answer_without_calls() -> None:
    def forget_once(request: Request) -> Message:
        is_first = len(request.messages) == 2
        return Message("assistant", "I think.") if is_first else work(request)

    async def body() -> None:
        async with capturing(forget_once) as (agent, session):
            await agent.chat([*SYSTEM_AND_USER])
            error = {"role": "user", "content": "No tool calls found in the response."}
            await chat_turns(agent, [*SYSTEM_AND_USER, error], lambda answer: answer)
            check(session, rows=2)

    run(body)


def test_openhands_1_16_0_drops_thoughts() -> None:
    def of_openhands(answer: Any) -> Any:
        return {name: value for name, value in answer.items() if name != "reasoning_content"}

    async def body() -> None:
        async with capturing() as (agent, session):
            text = [{"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}]
            first = [SYSTEM_AND_USER[0], {"role": "user", "content": text}]
            await chat_turns(agent, first, of_openhands, reasoning_effort="high", prompt_cache_key="k")
            check(session, rows=1)

    run(body)


def test_other_thoughts_of_an_agent_are_not_replaced() -> None:
    async def body() -> None:
        async with capturing() as (agent, session):
            await chat_turns(agent, [*SYSTEM_AND_USER], lambda answer: answer | {"reasoning_content": "Mine."})
            check(session, rows=7, forks=6)

    run(body)


def test_arguments_that_are_no_object_are_a_fork() -> None:
    def call_badly(request: Request) -> Message:
        if any(message.role == "assistant" for message in request.messages):
            return Message("assistant", "Done.")
        return Message("assistant", "", (ToolCall("call_1", "run", "ls"),))

    async def body() -> None:
        async with capturing(call_badly) as (agent, session):
            messages = await claude_turns(agent, [{"role": "user", "content": "Fix it."}])
            assert messages[1]["content"][0]["input"] == {"INVALID_JSON": "ls"}
            check(session, rows=2, forks=1)  # engines reject such arguments in a history

    run(body)
