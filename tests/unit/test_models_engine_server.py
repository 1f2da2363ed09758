"""The engine behind HTTP, alone and behind the capture proxy: a foreign client's tokens are the engine's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.unit.tiny_model import TOOL, tiny_engine

from minisandbox.errors import ContextExceeded
from minisandbox.models import Message, OpenAIModel, Request, Sampling
from minisandbox.models.capture import CaptureProxy
from minisandbox.models.engine import EngineServer, TransformersEngine, recompute_logprobs
from minisandbox.models.protocol import SeededModel, prompt_tokens

pytestmark = pytest.mark.once
USER = {"role": "user", "content": "Fix it."}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[TransformersEngine, EngineServer, aiohttp.ClientSession]]:
    engine = tiny_engine()
    try:
        async with EngineServer(engine) as server, aiohttp.ClientSession() as client:
            yield engine, server, client
    finally:
        await engine.close()


async def post(client: aiohttp.ClientSession, base_url: str, key: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny", "messages": [USER], "max_tokens": 8, "seed": 1, **body}
    async with client.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
        return response.status, json.loads(await response.text())


def test_vllms_dialect() -> None:
    async def run() -> None:
        async with served() as (_, server, client):
            status, plain = await post(client, server.base_url)
            assert status == 200
            assert "prompt_token_ids" not in plain
            assert plain["choices"][0]["logprobs"] is None
            tokens: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
            _, full = await post(client, server.base_url, **tokens)
            (choice,) = full["choices"]
            assert len(full["prompt_token_ids"]) == full["usage"]["prompt_tokens"]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == full["usage"]["completion_tokens"]
            assert choice["message"] == plain["choices"][0]["message"]  # the seed's
            async with client.get(f"{server.base_url}/models") as response:
                assert (await response.json())["data"][0]["id"] == "tiny"
            async with client.get(server.base_url.replace("/v1", "/health")) as response:
                assert response.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": "ab " * 4000}]}, "maximum context length is 4096 tokens"),
        ({"model": "other"}, "does not exist"), ({"n": 2}, "one response"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": 3}, "messages"), ({"temperature": -1}, "temperature"), ({"messages": [{"role": "x"}]}, "role"),
    ],
)  # fmt: skip
def test_refusals_have_vllms_form(fields: dict[str, Any], words: str) -> None:
    async def run() -> None:
        async with served() as (_, server, client):
            status, body = await post(client, server.base_url, **fields)
            assert status == 400
            assert words in body["error"]["message"]
            assert body["error"]["code"] == 400

    asyncio.run(run())


def test_our_client_knows_its_errors_and_reads_its_tokens() -> None:
    async def run() -> None:
        async with served() as (engine, server, _):
            model = OpenAIModel("tiny", server.base_url, tokens="yes")
            request = Request((Message("user", "x"),), (TOOL,), Sampling(max_tokens=8, seed=3), "rollout")
            there, here = await model.complete(request), await engine.complete(request)
            assert there.tokens is not None
            assert here.tokens is not None
            assert there.tokens.prompt == here.tokens.prompt
            assert there.tokens.sampled == here.tokens.sampled
            assert there.message == here.message
            with pytest.raises(ContextExceeded):
                await model.complete(Request((Message("user", "ab" * 5000),)))
            await model.close()

    asyncio.run(run())


def test_the_time_in_the_queue_is_measured_and_reported() -> None:
    async def run() -> None:
        async with served() as (engine, server, _):
            model = OpenAIModel("tiny", server.base_url)
            entered, leave = threading.Event(), threading.Event()

            def hold() -> None:
                with engine.paused():
                    entered.set()
                    leave.wait(60)

            holding = asyncio.create_task(asyncio.to_thread(hold))
            await asyncio.to_thread(entered.wait, 60)
            requests = [Request((Message("user", "x"),), (), Sampling(max_tokens=2, seed=3)) for _ in range(2)]
            calls = (model.complete(requests[0]), engine.complete(requests[1]))
            answers = [asyncio.create_task(call) for call in calls]
            while requests[1].queue.seconds < 0.1:  # readable while it waits
                await asyncio.sleep(0.01)
            leave.set()
            await asyncio.gather(holding, *answers)
            assert all(request.queue.seconds >= 0.05 for request in requests)
            await model.close()

    asyncio.run(run())


def test_the_engine_counts_a_prompt_before_it_reads_it() -> None:
    async def run() -> None:
        async with served() as (engine, _, _client):
            messages: tuple[Message, ...] = (Message("user", "how are you?"),)
            for _ in range(3):
                request = Request(messages, (TOOL,), Sampling(max_tokens=8, seed=3), "rollout")
                counted = prompt_tokens(SeededModel(engine, 3), request)
                completion = await engine.complete(request)
                assert counted == completion.usage.prompt
                messages = (*messages, completion.message, Message("user", "and now?"))

    asyncio.run(run())


async def talk(client: aiohttp.ClientSession, base_url: str, key: str, messages: list[object], turns: int) -> None:
    for turn in range(turns):
        status, body = await post(client, base_url, key, messages=messages, max_tokens=16, seed=turn, stream=False)
        assert status == 200, body
        messages += [body["choices"][0]["message"], {"role": "tool", "content": f"exit {turn}: grüße 🙂\n"}]


def test_a_foreign_client_through_the_proxy() -> None:
    async def run() -> None:
        async with served() as (engine, server, client), CaptureProxy(server.base_url, model="tiny") as proxy:
            access = [proxy.session(str(n)) for n in range(8)]
            await asyncio.gather(*(talk(client, *one, [{"role": "user", "content": f"{one}"}], 4) for one in access))
            for one in access:
                (row,) = proxy.rows(one.key)
                assert row.turns == (0, 1, 2, 3)
                again = recompute_logprobs(engine.model, row)
                assert max(abs(a - b) for a, b in zip(again, row.logprobs, strict=True)) < 1e-4
            fork = proxy.session("fork")
            history: list[object] = [USER]
            await talk(client, *fork, history, 2)
            await talk(client, *fork, [*history[:2], {"role": "user", "content": "another way"}], 1)
            assert [row.turns for row in proxy.rows(fork.key)] == [(0, 1), (0, 2)]

    asyncio.run(run())


def test_agents_of_three_apis_on_the_engine_keep_one_row_each() -> None:
    """Eight turns; each agent trims the sampled text, which is mostly no text, before it sends the text back."""

    async def run() -> None:
        async with served() as (engine, _, client), CaptureProxy(engine) as proxy:

            async def work(path: str, field: str) -> str:
                access, history = proxy.session(path), [{"role": "user", "content": path}]
                for _ in range(8):
                    limit = "max_output_tokens" if path == "responses" else "max_tokens"
                    body = {"model": "any", field: history, limit: 24, "seed": 1}
                    headers = {"Authorization": f"Bearer {access.key}"}
                    async with client.post(f"{access.base_url}/{path}", json=body, headers=headers) as response:
                        assert response.status == 200
                        answer = await response.json()
                    if path == "chat/completions":
                        text = answer["choices"][0]["message"]["content"]
                    else:
                        item = answer if path == "messages" else answer["output"][-1]
                        text = item["content"][0]["text"]
                    history += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": "on"}]
                return access.key

            paths = (("chat/completions", "messages"), ("messages", "messages"), ("responses", "input"))
            for key in await asyncio.gather(*(work(*path) for path in paths)):
                session = proxy.captured(key)
                (row,) = session.rows()
                assert (len(row.turns), session.forks, sum(row.mask)) == (8, 0, session.usage.completion)
                again = recompute_logprobs(engine.model, row)
                assert max(abs(a - b) for a, b in zip(again, row.logprobs, strict=True)) < 1e-4

    asyncio.run(run())


def test_a_client_that_goes_away_frees_its_place() -> None:
    async def run() -> None:
        async with served() as (engine, server, client):
            engine._decoder._ends = frozenset()  # type: ignore[attr-defined] # of our own decoder
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(post(client, server.base_url, max_tokens=4000), 0.5)
            async with asyncio.timeout(60):
                while engine._running:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_directory_is_loaded(tmp_path: Path) -> None:
    engine = tiny_engine()
    engine.model.save_pretrained(tmp_path)
    engine.renderer._tokenizer.save_pretrained(tmp_path)

    async def run() -> None:
        loaded = TransformersEngine.load(tmp_path, name="tiny")
        request = Request((Message("user", "x"),), (), Sampling(max_tokens=8, seed=3))
        there, here = await loaded.complete(request), await engine.complete(request)
        assert there.tokens == here.tokens
        await loaded.close()
        await engine.close()

    asyncio.run(run())
