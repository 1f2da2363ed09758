"""A server of vLLM: rollouts over it, and the capture proxy before it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.vllm.conftest import CONTEXT, Agreement, Served, vllm_server

from minisandbox.agents import AgentLimits, BashAgent
from minisandbox.errors import ContextExceeded, ModelRefused
from minisandbox.images import Image
from minisandbox.models import (
    Completion,
    Message,
    Model,
    ModelOptions,
    OpenAIModel,
    Request,
    Sampling,
    TokenGraph,
    open_model,
)
from minisandbox.models.capture import CaptureProxy
from minisandbox.rollouts import Budgets, RunReader, Setup, run_batch
from minisandbox.tasks import Task

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]
LONG = 600.0
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"times": {"enum": [1]}}, "required": ["times"]},
    },
}


def opened(server: Served) -> Model:
    """The server by token ids, with the tokenizer that it names."""
    return open_model(ModelOptions(server.name, api_base=server.url, tokens="yes"))


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), LONG)

    asyncio.run(bounded())


@pytest.mark.kernel
def test_rows_of_rollouts_can_be_trained_on(
    server: Served, agreement: Agreement, smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    tasks = [replace(smith, instance_id=f"calc__smith-{number}") for number in range(6)]
    setup = Setup(
        agent=BashAgent(), model=opened(server),
        sampling=Sampling(temperature=0.8, max_tokens=48), agent_limits=AgentLimits(steps=3),
    )  # fmt: skip
    summaries = run_batch(tasks, setup, tmp_path, image_of=lambda _: smith_image, budgets=Budgets(workers=6))
    assert [one.verdict is not None for one in summaries] == [True] * 6
    assert {one.tries for one in summaries} == {1}
    with RunReader(tmp_path) as reader:
        for task in tasks:
            trajectory = reader.trajectory(task.instance_id, 0)
            assert trajectory is not None
            assert len(trajectory.turns) > 1
            assert sum(sum(row.mask) for row in trajectory.rows) == sum(
                one.usage.completion for one in trajectory.turns
            )
            assert len(trajectory.rows) == 1
            agreement.check("rollouts", trajectory.rows, temperature=0.8)


async def converse(model: Model, name: str, turns: int, tokens: int = 24) -> TokenGraph:
    """Hold a conversation, and return what was captured."""
    graph, messages = TokenGraph(), [Message("user", f"the tests of module {name} fail")]
    for _ in range(turns):
        sampling = Sampling(temperature=0.7, max_tokens=tokens)
        answer = await model.complete(Request(tuple(messages), sampling=sampling, session=name))
        assert answer.tokens is not None
        graph.add(answer.tokens)
        messages += [answer.message, Message("user", "grüße, 世界 🙂\n  exit 1")]
    return graph


def test_at_most_one_turn_in_a_hundred_forks(server: Served, agreement: Agreement) -> None:
    conversations, turns = 20, 6

    async def ask(model: Model) -> list[TokenGraph]:
        try:
            return list(await asyncio.gather(*(converse(model, str(n), turns) for n in range(conversations))))
        finally:
            await model.close()

    forks: dict[str, int] = {}
    for name in ("token ids", "chat"):
        model = opened(server) if name == "token ids" else OpenAIModel(server.name, server.url, tokens="yes")
        rows = [row for graph in asyncio.run(ask(model)) for row in graph.rows()]
        forks[name] = len(rows) - conversations
        print(f"{name}: {forks[name]} of {conversations * (turns - 1)} following turns fork")
        agreement.check(f"conversations, {name}", rows, temperature=0.7)
    assert forks["token ids"] <= 1


@pytest.mark.parametrize("count", [64, 128])
def test_many_requests_in_flight(server: Served, agreement: Agreement, count: int) -> None:
    async def ask() -> None:
        model = opened(server)
        began = time.monotonic()
        graphs = await asyncio.gather(*(converse(model, f"{count}.{n}", 1, 40) for n in range(count)))
        seconds = time.monotonic() - began
        await model.close()
        rows = [row for graph in graphs for row in graph.rows()]
        tokens = sum(sum(row.mask) for row in rows)
        print(f"{count} in flight: {tokens} tokens, {tokens / seconds:.0f} tokens/s")
        assert len(rows) == count
        agreement.check(f"{count} in flight", rows, temperature=0.7)

    run(ask)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_each_temperature_has_its_own_distribution(server: Served, agreement: Agreement, temperature: float) -> None:
    async def ask() -> None:
        model, graph = OpenAIModel(server.name, server.url, tokens="yes"), TokenGraph()
        sampling = Sampling(temperature=temperature, max_tokens=40)
        for number in range(4):
            answer = await model.complete(Request((Message("user", f"task {number}"),), sampling=sampling))
            assert answer.tokens is not None
            graph.add(answer.tokens)
        await model.close()
        agreement.check(f"temperature {temperature}", graph.rows(), temperature=temperature)

    run(ask)


@pytest.mark.parametrize("by_ids", [True, False])
def test_too_long_a_conversation_is_told_apart(server: Served, by_ids: bool) -> None:
    async def ask() -> None:
        model = opened(server) if by_ids else OpenAIModel(server.name, server.url, tokens="yes")
        with pytest.raises(ContextExceeded):
            await model.complete(Request((Message("user", "word " * CONTEXT),), sampling=Sampling(max_tokens=8)))
        await model.close()

    run(ask)


def test_a_server_with_raw_log_probabilities_is_refused(policy: Path, tmp_path: Path) -> None:
    async def ask(temperature: float, model: Model) -> Completion:
        sampling = Sampling(temperature=temperature, max_tokens=8)
        try:
            return await model.complete(Request((Message("user", "the tests fail"),), sampling=sampling))
        finally:
            await model.close()

    with vllm_server(policy, tmp_path / "vllm.log") as raw:
        by_ids = ModelOptions(raw.name, api_base=raw.url, tokens="yes", tokenizer=str(policy))
        openings: tuple[Callable[[], Model], ...] = (
            lambda: OpenAIModel(raw.name, raw.url, tokens="yes"),
            lambda: open_model(by_ids),
        )
        for opening in openings:
            assert asyncio.run(ask(1.0, opening())).tokens is not None  # the same with and without processing
            with pytest.raises(ModelRefused, match="--logprobs-mode processed_logprobs"):
                asyncio.run(ask(0.7, opening()))


# --- the capture proxy -----------------------------------------------------------------------------------------------


async def post(client: aiohttp.ClientSession, url: str, key: str, body: Mapping[str, object]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"}
    async with client.post(f"{url}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.text()


def through_proxy(server: Served, body: Mapping[str, object], turns: int = 1) -> tuple[list[str], tuple[Any, ...]]:
    """What an agent is answered in a conversation, and the rows that the proxy captured."""
    texts: list[str] = []
    rows: list[tuple[Any, ...]] = []

    async def converse() -> None:
        async with CaptureProxy(server.url, model=server.name) as proxy, aiohttp.ClientSession() as client:
            access = proxy.session("one")
            messages: list[object] = [{"role": "user", "content": "the tests fail"}]
            for _ in range(turns):
                whole = {"model": "any", "messages": messages, "temperature": 0.7, "max_tokens": 30, **body}
                status, text = await post(client, access.base_url, access.key, whole)
                assert status == 200, text
                texts.append(text)
                if turns > 1:
                    messages += [json.loads(text)["choices"][0]["message"], {"role": "user", "content": "and now"}]
            rows.append(proxy.rows(access.key))

    run(converse)
    return texts, rows[0]


def events(text: str) -> list[Any]:
    """The chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_proxy_captures_a_conversation(server: Served, agreement: Agreement) -> None:
    texts, rows = through_proxy(server, {}, turns=3)
    answers = [json.loads(text) for text in texts]
    assert not any("token_ids" in one["choices"][0] for one in answers)  # the agent did not ask for them
    assert sum(sum(row.mask) for row in rows) == sum(one["usage"]["completion_tokens"] for one in answers)
    agreement.check("proxy", rows, temperature=0.7)


def test_the_proxy_streams(server: Served, agreement: Agreement) -> None:
    (text,), rows = through_proxy(server, {"stream": True, "stream_options": {"include_usage": True}})
    chunks = events(text)
    said = "".join(choice["delta"].get("content") or "" for one in chunks for choice in one["choices"])
    assert said
    assert chunks[-1]["usage"]["completion_tokens"] == sum(sum(row.mask) for row in rows)
    agreement.check("proxy, streaming", rows, temperature=0.7)


FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "bash"}}, "max_tokens": 200}


def test_the_proxy_passes_on_tool_calls(server: Served) -> None:
    """A forced call is drawn from a constrained distribution: its log-probabilities are not the model's."""
    (text,), rows = through_proxy(server, FORCED)
    (choice,) = json.loads(text)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "bash"
    assert [len(row.ids) for row in rows] == [json.loads(text)["usage"]["total_tokens"]]

    (text,), rows = through_proxy(server, {**FORCED, "stream": True})
    calls = [
        call for one in events(text) for choice in one["choices"] for call in choice["delta"].get("tool_calls") or ()
    ]
    assert calls[0]["function"]["name"] == "bash"
    assert rows


def test_errors_of_the_engine_reach_the_agent(server: Served) -> None:
    async def ask() -> None:
        async with CaptureProxy(server.url, model=server.name) as proxy, aiohttp.ClientSession() as client:
            access = proxy.session("one")
            long = {"model": "any", "messages": [{"role": "user", "content": "word " * CONTEXT}]}
            status, text = await post(client, access.base_url, access.key, long)
            assert status == 400
            assert str(CONTEXT) in text
            assert not proxy.rows(access.key)

    run(ask)
