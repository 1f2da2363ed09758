"""Anthropic's Messages and OpenAI's Responses, with the official clients, on the engine's server and the proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import aiohttp
import pytest
from tests.scripted_model import SimulatedModel
from tests.scripted_server import ScriptedServer
from tests.unit.model_servers import run

from minisandbox.errors import BudgetExceeded, ContextExceeded, ModelRefused, ModelUnavailable
from minisandbox.models import Completion, Message, Request, ScriptedModel, serving
from minisandbox.models.anthropic_messages import MESSAGES
from minisandbox.models.apis import seal, unseal
from minisandbox.models.capture import CaptureProxy
from minisandbox.models.engine import EngineServer
from minisandbox.models.openai_responses import RESPONSES
from minisandbox.models.protocol import ToolCall

pytestmark = pytest.mark.once
MISSING = [name for name in ("anthropic", "openai") if find_spec(name) is None]
CLIENTS = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
anthropic: Any = None if MISSING else import_module("anthropic")
openai: Any = None if MISSING else import_module("openai")

CALLS = Message(
    "assistant",
    "I look.",
    (ToolCall("call_1", "run", '{"command": "ls"}'), ToolCall("call_2", "note", '{"input": "a\\nb"}')),
    reasoning="Files first.",
)
USER: Any = {"role": "user", "content": "Fix it."}
RUN: Any = {"name": "run", "description": "Run a command.", "input_schema": {"type": "object", "properties": {}}}
TOOLS: Any = [
    {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "note", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "web_search"},
]


@asynccontextmanager
async def engine_server(script: Any, **options: Any) -> AsyncIterator[tuple[str, str]]:
    async with EngineServer(SimulatedModel(script, **options), key="k") as server:
        yield server.base_url, "k"


@asynccontextmanager
async def proxy_server(script: Any, **options: Any) -> AsyncIterator[tuple[str, str]]:
    async with ScriptedServer(script, **options) as engine, CaptureProxy(engine.url, model="scripted") as proxy:
        yield proxy.session()


SERVERS = pytest.mark.parametrize("serve", [engine_server, proxy_server])
Serve = Callable[..., Any]


@asynccontextmanager
async def clients(serve: Serve, script: Any, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    async with serve(script, **options) as (url, key):
        root = url.removesuffix("/v1")
        async with (
            anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as messages,
            openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as responses,
        ):
            yield messages, responses


def refuse_long_prompts(request: Request) -> str:
    if len(request.messages[-1].content) > 1000:
        raise ContextExceeded("This model's maximum context length is 1000 tokens.")
    return "one"


async def ask(client: Any, messages: Sequence[Any] = (USER,), **options: Any) -> Any:
    return await client.messages.create(**{"model": "scripted", "max_tokens": 1000, "messages": messages, **options})


async def stream(client: Any, **options: Any) -> Any:
    options = {"model": "scripted", "max_tokens": 20_000, "messages": [USER], **options}
    async with client.messages.stream(**options) as events:
        return await events.get_final_message()


async def stream_response(client: Any, **options: Any) -> tuple[list[Any], Any]:
    async with client.responses.stream(**{"model": "scripted", "input": "Fix it.", **options}) as events:
        return [event async for event in events], await events.get_final_response()


def plain(value: Any) -> Any:
    """Return a client's object as JSON, without ids and parsed copies."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    fields = value if isinstance(value, dict) else value.model_dump(exclude_none=True)
    return {name: field for name, field in fields.items() if name not in ("id", "parsed_arguments", "parsed")}


@CLIENTS
@SERVERS
def test_messages_text_tools_thinking(serve: Serve) -> None:
    async def body() -> None:
        async with clients(serve, [CALLS, "Done."]) as (client, _):
            answer = await ask(client, tools=[RUN], system=[{"type": "text", "text": "Be brief."}])
            thinking, text, call, _ = answer.content
            assert (thinking.thinking, text.text, call.name, call.input) == (
                "Files first.", "I look.", "run", {"command": "ls"},
            )  # fmt: skip
            assert unseal(thinking.signature) == "Files first."
            assert answer.stop_reason == "tool_use"
            assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
            streamed = await stream(client, tools=[RUN], system="Be brief.")
            assert plain(streamed.content) == plain(answer.content)
            assert (streamed.stop_reason, streamed.usage.input_tokens) == ("tool_use", answer.usage.input_tokens)
            assert streamed.id != answer.id
            hidden = await stream(client, thinking={"type": "adaptive", "display": "omitted"})
            assert hidden.content[0].thinking == ""
            result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "a.py"}]}
            history = [USER, {"role": "assistant", "content": hidden.content}, {"role": "user", "content": [result]}]
            last = await client.beta.messages.create(model="scripted", max_tokens=9, messages=history)
            assert (last.content[0].text, last.stop_reason) == ("Done.", "end_turn")
            assert (await client.messages.count_tokens(model="scripted", messages=[USER])).input_tokens > 0
            listed = await client.models.list()
            assert [model.id for model in listed.data] == ["scripted"]

    run(body)


@CLIENTS
@SERVERS
def test_responses_text_tools_reasoning(serve: Serve) -> None:
    async def body() -> None:
        async with clients(serve, [CALLS, "Done."]) as (_, client):
            answer = await client.responses.create(
                model="scripted", input="Fix it.", instructions="Be brief.", tools=TOOLS, store=False
            )
            reasoning, message, call, custom = answer.output
            assert (reasoning.content[0].text, message.content[0].text) == ("Files first.", "I look.")
            assert (call.type, call.name, call.arguments, call.call_id) == (
                "function_call", "run", '{"command": "ls"}', "call_1",
            )  # fmt: skip
            assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "note", "a\nb")
            assert (answer.status, answer.store) == ("completed", False)
            events, final = await stream_response(client, tools=TOOLS, instructions="Be brief.")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert [plain(item)["type"] for item in final.output] == [item.type for item in answer.output]
            assert final.output_text == answer.output_text == "I look."
            assert final.usage == answer.usage
            assert final.id != answer.id
            outputs = [
                {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
                {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
            ]
            history = [USER, *(item.model_dump(exclude_none=True) for item in answer.output), *outputs]
            last = await client.responses.create(model="scripted", input=history, tools=TOOLS)
            assert last.output_text == "Done."
            assert [model.id async for model in client.models.list()] == ["scripted"]

    run(body)


@CLIENTS
@SERVERS
def test_long_streams_and_limits(serve: Serve) -> None:
    long = "word é\U0001f600 " * 2000

    async def body() -> None:
        async with clients(serve, [long], context=100_000) as (messages, responses):
            assert (await stream(messages, max_tokens=90_000)).content[0].text == long
            events, final = await stream_response(responses)
            assert final.output_text == long
            assert sum(event.type == "response.output_text.delta" for event in events) > 10
            short = await ask(messages, max_tokens=5)
            assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
            cut = await responses.responses.create(model="scripted", input="Fix it.", max_output_tokens=16)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    run(body)


@CLIENTS
@SERVERS
@pytest.mark.filterwarnings("ignore:Sending a large body")  # aiohttp, of the proxy's requests over 1 MB
def test_errors_have_the_shape_of_the_api(serve: Serve) -> None:
    async def body() -> None:
        async with clients(serve, refuse_long_prompts) as (messages, responses):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await ask(messages, [{"role": "user", "content": [{"type": "image", "source": {}}]}])
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.AuthenticationError):
                await ask(messages.with_options(api_key="wrong"))
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await messages.post("/v1/messages/batches", body={}, cast_to=object)
            assert unknown.value.body["type"] == "error"
            large = "x" * 20_000_000
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await ask(messages, [{"role": "user", "content": large}])
            with pytest.raises(openai.BadRequestError, match="context"):
                await responses.responses.create(model="scripted", input=large)
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await responses.responses.create(model="scripted", input="x", previous_response_id="resp_1")
            with pytest.raises(openai.AuthenticationError):
                await responses.with_options(api_key="wrong").responses.create(model="scripted", input="x")
            with pytest.raises(openai.NotFoundError) as missing:
                await responses.responses.retrieve("resp_1")
            assert "GET /v1/responses/resp_1" in missing.value.message

    run(body)


@SERVERS
def test_malformed_json(serve: Serve) -> None:
    async def body() -> None:
        async with serve(["one"]) as (url, key), aiohttp.ClientSession() as client:
            for data in (b"{", b"[1]", b'{"model": "scripted"}', b"[" * 100_000):
                async with client.post(f"{url}/messages?beta=true", data=data, headers={"x-api-key": key}) as response:
                    assert (response.status, (await response.json())["type"]) == (400, "error"), data[:30]
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(f"{url}/responses", data=data, headers=headers) as response:
                    assert (response.status, "message" in (await response.json())["error"]) == (400, True)

    run(body)


@CLIENTS
@SERVERS
def test_cancelling_in_mid_stream(serve: Serve) -> None:
    async def body() -> None:
        async with clients(serve, ["word " * 4_000]) as (messages, responses):
            async with messages.messages.stream(model="scripted", max_tokens=30_000, messages=[USER]) as events:
                async for event in events:
                    if event.type == "text":
                        break
            async with responses.responses.stream(model="scripted", input="Fix it.") as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        break
            assert (await ask(messages, max_tokens=4)).content[0].text == "word"

    run(body)


@CLIENTS
def test_a_cancelled_request_stops_the_sampling() -> None:
    """The engine's server and the proxy; the tokens sampled so far are dropped."""

    async def body() -> None:
        model = SimulatedModel(["one"], latency=60.0)
        async with EngineServer(model) as server, CaptureProxy(server.base_url, model="scripted") as proxy:
            access = proxy.session()
            for url in (server.base_url, access.base_url):
                root = url.removesuffix("/v1")
                client = anthropic.AsyncAnthropic(base_url=root, api_key=access.key, max_retries=0)
                for question in (ask, stream):
                    asking = asyncio.create_task(question(client))
                    await _until(lambda: model.in_flight == 1)
                    asking.cancel()
                    await _until(lambda: model.in_flight == 0)
                await client.close()
            session = proxy.captured(access.key)
            await _until(lambda: len(session.errors) == 2)
            assert ([error.status for error in session.errors], session.rows()) == ([499, 499], ())

    run(body)


@asynccontextmanager
async def model_proxy(script: Any, **options: Any) -> AsyncIterator[tuple[str, str]]:
    async with CaptureProxy(SimulatedModel(script, **options)) as proxy:
        yield proxy.session()


SLOW_SERVERS = pytest.mark.parametrize("serve", [engine_server, model_proxy])


@CLIENTS
@SLOW_SERVERS
def test_pings_while_a_stream_waits(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PING", 0.01)

    async def body() -> None:
        async with clients(serve, [CALLS], latency=0.1) as (messages, responses):
            assert (await stream(messages)).content[1].text == "I look."
            assert (await stream_response(responses))[1].output_text == "I look."
            chunks = await responses.chat.completions.create(model="scripted", messages=[USER], stream=True)
            assert [chunk.choices[0].delta.content async for chunk in chunks] == ["I look.", None]
        async with serve([CALLS], latency=0.1) as (url, key), aiohttp.ClientSession() as client:
            for path, ping in (("messages", b"event: ping\n"), ("responses", b": ping\n")):
                fields = {"model": "scripted", "stream": True, "max_tokens": 99, "messages": [USER], "input": "x"}
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(f"{url}/{path}", json=fields, headers=headers) as response:
                    assert await response.content.readline() == ping

    run(body)


@CLIENTS
@SLOW_SERVERS
def test_an_error_after_a_ping_is_an_event(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PING", 0.01)

    def refuse(_: Request) -> str:
        raise ModelUnavailable("The engine has stopped.")

    async def body() -> None:
        async with clients(serve, refuse, latency=0.1) as (messages, responses):
            with pytest.raises(anthropic.APIStatusError, match="engine has stopped") as failed:
                await stream(messages)
            assert failed.value.body["error"]["type"] == "overloaded_error"
            events = await responses.responses.create(model="scripted", input="x", stream=True)
            (event,) = [event async for event in events]
            assert (event.type, event.response.status) == ("response.failed", "failed")
            assert "engine has stopped" in event.response.error.message
            chunks = await responses.chat.completions.create(model="scripted", messages=[USER], stream=True)
            with pytest.raises(openai.APIError, match="engine has stopped"):
                _ = [chunk async for chunk in chunks]

    run(body)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@CLIENTS
def test_the_proxy_captures_every_api_and_clamps_limits() -> None:
    async def body() -> None:
        def refuse_long_limits(request: Any) -> str:
            limit = request.sampling.max_tokens
            if limit and limit > 1000:
                raise ContextExceeded("This model's maximum context length is 1000 tokens.")
            return "Done."

        async with ScriptedServer(refuse_long_limits) as engine, CaptureProxy(engine.url, model="scripted") as proxy:
            access = proxy.session("task")
            client = anthropic.AsyncAnthropic(base_url=access.base_url.removesuffix("/v1"), api_key=access.key)
            assert (await stream(client, max_tokens=32_000)).content[0].text == "Done."
            assert "max_tokens" not in engine.received[-1].body
            other = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key)
            await other.responses.create(model="m", input=[{"role": "developer", "content": "x"}, USER])
            await client.messages.count_tokens(model="m", messages=[USER])
            session = proxy.captured(access.key)
            assert len(session.turns) == 2
            assert len(proxy.rows(access.key)) == 2
            assert session.messages[0] == {"role": "system", "content": "x"}
            await client.close()
            await other.close()

    run(body)


def chat_of(api: Any, **body: Any) -> Any:
    chat = api.read(json.loads(json.dumps({"model": "m", **body})))
    return chat, [Message.from_json(message) for message in chat["messages"]]


def test_messages_of_claude_code_2_1_332() -> None:
    blocks = [
        {"type": "thinking", "thinking": "", "signature": seal("Why.")},
        {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "a", "name": "run", "input": {"command": "ls"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "a", "is_error": True},
        {"type": "text", "text": "reminder"},
    ]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Fix"}, {"type": "text", "text": "it."}]},
        {"role": "system", "content": "Mind the date."},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    tools = [RUN, {"type": "web_search_20250305", "name": "web_search"}]
    chat, messages = chat_of(
        MESSAGES, messages=history, tools=tools, max_tokens=32_000, tool_choice={"type": "any"},
        stop_sequences=["END"], context_management={}, metadata={},
    )  # fmt: skip
    assert messages == [
        Message("user", "Fix\nit."),
        Message("system", "Mind the date."),
        Message("assistant", "I look.", (ToolCall("a", "run", '{"command": "ls"}'),), reasoning="Why."),
        Message("tool", "no", tool_call_id="b"),
        Message("tool", "error", tool_call_id="a"),
        Message("user", "reminder"),
    ]
    assert chat["tool_choice"] == "required"
    assert (chat["stop"], chat["max_tokens"], len(chat["tools"])) == (["END"], 32_000, 1)
    assert "context_management" not in chat


def test_responses_of_codex_0_171() -> None:
    namespace = {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find", "parameters": {}}]}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Fix it."},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": seal("Why.")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "find", "namespace": "mcp", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "note", "input": "é"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
    ]
    chat, messages = chat_of(RESPONSES, input=items, tools=[namespace, *TOOLS], include=["x"], prompt_cache_key="y")
    calls = (ToolCall("a", "mcp__find", "{}"), ToolCall("b", "note", '{"input": "é"}'))
    assert messages == [
        Message("system", "Be brief."),
        Message("user", "Fix it."),
        Message("assistant", "I look.", calls, reasoning="Why."),
        Message("tool", "x", tool_call_id="a"),
        Message("tool", "ok", tool_call_id="b"),
    ]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["mcp__find", "run", "note"]
    answer = RESPONSES.answer(Completion(Message("assistant", "", calls), "tool_calls"), {"tools": [namespace]})
    item = cast("list[dict[str, object]]", answer["output"])[0]
    assert item | {"id": ""} == {
        "id": "", "type": "function_call", "arguments": "{}", "call_id": "a", "name": "find", "namespace": "mcp",
        "status": "completed",
    }  # fmt: skip


def test_errors_of_a_model_have_a_status() -> None:
    async def body() -> None:
        statuses = {BudgetExceeded: 402, ModelUnavailable: 503, ContextExceeded: 400, ModelRefused: 400}
        for error, status in statuses.items():

            def refuse(_: Request, error: Any = error) -> str:
                raise error("No.")

            async with model_proxy(refuse) as (url, key), aiohttp.ClientSession() as client:
                fields = {"model": "m", "messages": [USER], "max_tokens": 9, "input": "x"}
                for path in ("messages", "responses", "chat/completions"):
                    headers = {"Authorization": f"Bearer {key}"}
                    async with client.post(f"{url}/{path}", json=fields, headers=headers) as response:
                        assert (response.status, (await response.json())["error"]["message"][-3:]) == (status, "No.")

    run(body)


def test_a_limit_above_the_context_is_clamped_in_process() -> None:
    async def body() -> None:
        def refuse_long_limits(request: Request) -> str:
            if request.sampling.max_tokens:
                raise ContextExceeded("This model's maximum context length is 1000 tokens.")
            return "Done."

        async with model_proxy(refuse_long_limits) as (url, key), aiohttp.ClientSession() as client:
            fields = {"model": "m", "messages": [USER], "max_tokens": 32_000}
            for path in ("messages", "chat/completions"):
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(f"{url}/{path}", json=fields, headers=headers) as response:
                    assert response.status == 200

    run(body)


def test_a_model_without_token_ids_gives_turns_without_rows() -> None:
    async def body() -> None:
        async with CaptureProxy(ScriptedModel(["one", "two"], tokens=False)) as proxy:
            access = proxy.session("other", model=SimulatedModel(["three"]))
            fields = {"model": "m", "messages": [USER]}
            async with aiohttp.ClientSession() as client:
                for key in (proxy.session("task").key, access.key):
                    headers = {"Authorization": f"Bearer {key}"}
                    url = f"{proxy.base_url}/chat/completions"
                    async with client.post(url, json=fields, headers=headers) as response:
                        assert response.status == 200
            task, other = proxy.sessions()[::-1]
            assert [(s.name, len(s.turns), len(s.rows())) for s in (task, other)] == [("task", 1, 0), ("other", 1, 1)]

    run(body)
