"""The client of chat completions APIs against a real server that misbehaves on order."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from minisandbox.errors import BadAnswer, BudgetExceeded, ContextExceeded, InvalidValue, ModelRefused, ModelUnavailable
from minisandbox.models import (
    Budget,
    Completion,
    Gate,
    Message,
    Meter,
    ModelOptions,
    OpenAIModel,
    Prices,
    Request,
    Sampling,
    Timeouts,
    TokenUsage,
    client,
    open_model,
)
from minisandbox.models.faults import ENDS_WITH, FAULTS, Fault
from minisandbox.models.testing import ScriptedServer, serving

pytestmark = pytest.mark.once
KEY = "sk-very-secret-0123456789"
LONG = 60.0
ASK = Request((Message("user", "Is it so?"),), session="task-1.0")
SHORT = Timeouts(connect=10.0, total=0.5)  # of tries that must run into it


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed tries are repeated at once, and no proxy of this machine is asked."""
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.01)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), LONG)

    asyncio.run(bounded())


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[OpenAIModel]:
    model = OpenAIModel("scripted", url, **{"retries": 2, "timeouts": Timeouts(total=LONG), **options})  # type: ignore[arg-type]
    try:
        yield model
    finally:
        await model.close()


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_ends_in_its_error(fault: Fault) -> None:
    async def body() -> None:
        async with ScriptedServer([{"fault": fault}]) as server:
            server.orders.retry_after = 0.01
            timeouts = SHORT if fault in ("timeout", "drip") else Timeouts(total=LONG)
            async with opened(server.url, tokens="yes", api_key=KEY, timeouts=timeouts) as model:
                with pytest.raises(ENDS_WITH[fault]) as caught:
                    await model.complete(ASK)
            assert type(caught.value) is ENDS_WITH[fault]
            said = str(caught.value)
            assert KEY not in said
            assert said.isprintable()
            assert len(said) < 1500
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
            refused = ENDS_WITH[fault] in (ModelRefused, ContextExceeded)
            assert server.count == (1 if refused else 3)

    run(body)


PASSING: list[Fault] = [fault for fault in FAULTS if ENDS_WITH[fault] in (ModelUnavailable, BadAnswer)]


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_costs_a_try(fault: Fault) -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            server.orders.retry_after = 0.01
            server.fail(fault)
            # the answer must come in this time too, on a busy machine
            timeouts = Timeouts(total=5.0) if fault in ("timeout", "drip") else Timeouts(total=LONG)
            async with opened(server.url, tokens="yes", timeouts=timeouts) as model:
                found = await model.complete(ASK)
            assert found.message.content == "fine"
            assert found.tries == 2
            assert found.tokens is not None

    run(body)


def test_nobody_listens() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            url = server.url
        async with opened(url) as model:
            with pytest.raises(ModelUnavailable, match="try 3") as caught:
                await model.complete(ASK)
        assert caught.value.hint is not None

    run(body)


def test_a_server_that_comes_back_is_found() -> None:
    async def body() -> None:
        first = ScriptedServer(["fine"])
        async with first:
            url = first.url
        async with opened(url, retries=1000) as model:
            asked = asyncio.create_task(model.complete(ASK))
            await asyncio.sleep(0.05)
            async with ScriptedServer(["fine"], port=int(url.rsplit(":", 1)[1].split("/")[0])):
                assert (await asked).tries > 1

    run(body)


def test_retry_after_is_waited_for_by_all() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            server.orders.retry_after = 0.5
            server.fail("rate_limit_retry_after")
            async with opened(server.url) as model:
                began = time.monotonic()
                first = asyncio.create_task(model.complete(ASK))
                while not server.count:
                    await asyncio.sleep(0.001)
                while model._gate._closed_until < began:
                    await asyncio.sleep(0.001)
                await model.complete(ASK)
                assert time.monotonic() - began >= 0.5
                assert (await first).tries == 2

    run(body)


def test_who_asks_for_a_day_is_not_waited_for() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            server.orders.retry_after = 86400
            server.fail("rate_limit_retry_after")
            async with opened(server.url) as model:
                with pytest.raises(ModelUnavailable, match="86400 s"):
                    await model.complete(ASK)

    run(body)


def test_a_cancelled_request_leaves_the_server() -> None:
    async def body() -> None:
        async with ScriptedServer([{"fault": "timeout"}]) as server, opened(server.url) as model:
            asked = asyncio.create_task(model.complete(ASK))
            while not server.in_flight:
                await asyncio.sleep(0.001)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            while server.in_flight:
                await asyncio.sleep(0.001)

    run(body)


# --- refusals in the words of servers --------------------------------------------------------------------------------


def canned(status: int, body: object) -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    return app


@asynccontextmanager
async def answering(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


LENGTHS = {
    "OpenAI": (400, {"error": {"message": "too many", "type": "x", "code": "context_length_exceeded"}}),
    "vLLM": (
        400,
        {
            "object": "error",
            "message": "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens "
            "(112946 in the messages, 10000 in the completion). Please reduce the length of the messages.",
            "type": "BadRequestError",
            "code": 400,
        },
    ),
    "vLLM, answer": (
        400,
        {"error": {"message": "'max_tokens' or 'max_completion_tokens' is too large: 9. This model's maximum context "
                   "length is 10 tokens and your request has 3 input tokens (9 > 10 - 3)."}},
    ),
    "vLLM, no room": (400, {"object": "error", "message": "max_tokens must be at least 1, got -186.", "code": 400}),
    "vLLM, below": (
        400,
        {"error": {"message": "The decoder prompt (length 19) is longer than the maximum model length of 8."}},
    ),
    "SGLang": (
        400,
        {"object": "error", "type": "BadRequestError", "param": None, "code": 400,
         "message": "The input (61709 tokens) is longer than the model's context length (40960 tokens)."},
    ),
    "llama.cpp": (
        400,
        {"error": {"code": 400, "message": "request (9 tokens) exceeds the available context size (8 tokens)",
                   "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}},
    ),
    "llama.cpp of 2025": (500, {"error": {"code": 500, "message": "...", "type": "exceed_context_size_error"}}),
    "llama.cpp, status 200": (
        200,
        {"error": {"code": 400, "message": "the request exceeds the available context size. try increasing it",
                   "type": "exceed_context_size_error"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("server", LENGTHS)
def test_too_long_in_every_servers_words(server: str) -> None:
    async def body() -> None:
        async with answering(canned(*LENGTHS[server])) as url, opened(url) as model:
            with pytest.raises(ContextExceeded):
                await model.complete(ASK)

    run(body)


REFUSALS: list[tuple[int, object, type[Exception]]] = [
    (400, {"error": {"message": "temperature must be non-negative"}}, ModelRefused),
    (403, "forbidden\x00\x1b[2J here", ModelRefused),
    (404, {"detail": "Not Found"}, ModelRefused),
    (405, "", ModelRefused),
    (413, "<html>too large</html>", ModelRefused),
    (422, {"detail": [{"loc": ["body", "messages"], "msg": "field required"}]}, ModelRefused),
    (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}, ModelRefused),
    (503, "no healthy upstream", ModelUnavailable),
    (599, [1, 2], ModelUnavailable),
    (200, {"error": {"message": "provider down", "code": 502}}, ModelUnavailable),
    (200, {"object": "error", "message": "no such model", "code": 404}, ModelRefused),
    (200, "null", BadAnswer),
    (200, '{"choices": [{"message": {"role": "user", "content": "x"}, "finish_reason": "stop"}]}', BadAnswer),
    (200, '{"choices": [{"message": {"content": [{"type": "image_url"}]}, "finish_reason": "stop"}]}', BadAnswer),
    (200, '{"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]}', BadAnswer),
    (200, '{"choices": [{"message": {"content": "x"}}]}', BadAnswer),
    (200, "[" * 100_000, BadAnswer),
    (200, b"\xff\xfe".decode("latin-1"), BadAnswer),
]


@pytest.mark.parametrize(("status", "body", "error"), REFUSALS, ids=range(len(REFUSALS)))
def test_other_refusals(status: int, body: object, error: type[Exception]) -> None:
    async def check() -> None:
        async with answering(canned(status, body)) as url, opened(url, retries=0) as model:
            with pytest.raises(error) as caught:
                await model.complete(ASK)
        assert type(caught.value) is error
        assert str(caught.value).isprintable()

    run(check)


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_the_request_is_as_the_sampling_says() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, max_tokens=7, seed=3, stop=("a",), extra={"min_p": 0.1})

    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            async with opened(server.url, api_key=KEY) as model:
                await model.complete(replace(ASK, sampling=sampling, session="täsk/1\n"))
            received = server.received[0]
            assert received.session == "täsk/1\n"
            assert received.headers["Authorization"] == f"Bearer {KEY}"
            wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 7, "seed": 3, "stop": ["a"]}
            assert received.body == wanted | {
                "model": "scripted",
                "messages": [{"role": "user", "content": "Is it so?"}],
                "min_p": 0.1,
                "repetition_penalty": 1.0,
                "logprobs": True,
                "top_logprobs": 0,
                "return_token_ids": True,
            }

    run(body)


def test_an_engines_own_defaults_are_switched_off() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            async with opened(server.url, tokens="no") as model:
                await model.complete(ASK)
            sent = server.received[0].body
            assert {name: sent[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            }  # fmt: skip
            assert "return_token_ids" not in sent
            assert "Authorization" not in server.received[0].headers

    run(body)


def strict(known: set[str], refusal: str) -> tuple[web.Application, list[dict[str, object]]]:
    """A server that refuses fields it does not know."""
    seen: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        unknown = sorted(body.keys() - known)
        if unknown:
            return web.json_response({"error": {"message": refusal.format(unknown[0])}}, status=400)
        choice = {"message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    return app, seen


def test_a_server_that_knows_fewer_fields_gets_fewer(caplog: pytest.LogCaptureFixture) -> None:
    app, seen = strict({"model", "messages", "temperature"}, "Unsupported parameter: '{}'.")

    caplog.set_level(logging.WARNING)

    async def body() -> None:
        async with answering(app) as url, opened(url) as model:
            for _ in range(2):
                assert (await model.complete(ASK)).message.content == "fine"

    run(body)
    assert seen[-1].keys() == {"model", "messages", "temperature"}
    assert seen[-2].keys() == seen[-1].keys()
    assert sum("does not take" in one.message for one in caplog.records) == 1


def test_the_answers_length_goes_by_its_newer_name_where_it_must() -> None:
    app, seen = strict(
        {"model", "messages", "temperature", "top_p", "max_completion_tokens"},
        "Unsupported parameter: '{}'. Use 'max_completion_tokens' instead.",
    )

    async def body() -> None:
        async with answering(app) as url, opened(url) as model:
            await model.complete(replace(ASK, sampling=Sampling(max_tokens=9)))

    run(body)
    assert seen[-1]["max_completion_tokens"] == 9


def test_what_was_asked_for_is_never_left_out() -> None:
    app, seen = strict({"model", "messages"}, "Unknown parameter: '{}'.")

    async def body() -> None:
        async with answering(app) as url, opened(url) as model:
            with pytest.raises(ModelRefused, match="top_k"):
                await model.complete(replace(ASK, sampling=Sampling(top_k=5)))

    run(body)
    assert all("top_k" in one for one in seen)


@pytest.mark.parametrize("name", ["model", "messages", "stream", "n", "return_token_ids"])
def test_extra_fields_cannot_be_ours(name: str) -> None:
    async def body() -> None:
        async with opened("http://127.0.0.1:1/v1") as model:
            with pytest.raises(InvalidValue, match=name):
                await model.complete(replace(ASK, sampling=Sampling(extra={name: 1})))

    run(body)


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_insisted_on() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"], tokens=False) as server, opened(server.url, tokens="yes") as model:
            with pytest.raises(ModelRefused, match="token ids") as caught:
                await model.complete(ASK)
            assert "vLLM" in str(caught.value.hint)

    run(body)


def test_an_engine_without_tokens_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def body() -> None:
        async with ScriptedServer(["fine"], tokens=False) as server, opened(server.url, tokens="auto") as model:
            for _ in range(3):
                assert (await model.complete(ASK)).tokens is None
            asked = ["return_token_ids" in one.body for one in server.received]
            assert asked == [True, False, False]

    run(body)
    assert sum("no token ids" in one.message for one in caplog.records) == 1


def token_answer(**changes: object) -> dict[str, object]:
    """An answer as vLLM gives it, with changes to its choice."""
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}
    choice: dict[str, object] = {"message": {"content": ""}, "finish_reason": "stop", "token_ids": [5, 6]}
    body: dict[str, object] = {
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    return body | {"choices": [choice | {"logprobs": logprobs} | changes]}


def test_an_empty_text_of_tokens_is_an_answer() -> None:
    async def body() -> None:
        async with answering(canned(200, token_answer())) as url, opened(url, tokens="yes") as model:
            found = await model.complete(ASK)
        assert found.message.content == ""
        assert found.tokens is not None
        assert list(found.tokens.sampled) == [5, 6]
        assert list(found.tokens.logprobs) == [-0.5, -1.0]
        assert found.usage == TokenUsage(3, 2, 1)

    run(body)


WRONG_TOKENS: list[dict[str, object]] = [
    {"token_ids": [5]},
    {"token_ids": ["5", "6"]},
    {"token_ids": [5, 1 << 40]},
    {"token_ids": 5},
    {"logprobs": None},
    {"logprobs": {"content": [{"logprob": -0.5}, {}]}},
    {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": float("nan")}]}},
    {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0.7}]}},
    {"token_ids": [5, 6, 7], "logprobs": {"content": [{"logprob": -0.5}] * 3}},
]


@pytest.mark.parametrize("changes", WRONG_TOKENS, ids=range(len(WRONG_TOKENS)))
def test_tokens_that_do_not_fit_are_no_answer(changes: dict[str, object]) -> None:
    async def body() -> None:
        async with answering(canned(200, token_answer(**changes))) as url, opened(url, tokens="yes") as model:
            with pytest.raises(BadAnswer):
                await model.complete(ASK)

    run(body)


# --- how much, how fast ----------------------------------------------------------------------------------------------


def test_concurrency_is_bounded() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"], latency=0.02) as server:
            async with opened(server.url, gate=Gate(3)) as model:
                await asyncio.gather(*(model.complete(ASK) for _ in range(20)))
            assert server.most_in_flight == 3

    run(body)


def test_requests_are_spaced() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server, opened(server.url, gate=Gate(100, per_minute=1200)) as model:
            began = time.monotonic()
            await asyncio.gather(*(model.complete(ASK) for _ in range(11)))
            assert time.monotonic() - began >= 10 * 60 / 1200

    run(body)


def test_a_budget_of_dollars_ends() -> None:
    prices = Prices(prompt=1e6, completion=1e6)

    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            budget = Budget(dollars=1.0)
            async with opened(server.url, meter=Meter(prices, budget)) as model:
                found = await model.complete(ASK)
                assert found.cost == found.usage.prompt + found.usage.completion == budget.spent_dollars
                with pytest.raises(BudgetExceeded, match=r"of 1\.00 dollars"):
                    await model.complete(ASK)
            assert server.count == 1

    run(body)


def test_a_budget_of_tokens_goes_on_where_it_was() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            budget = Budget(tokens=100)
            budget.charge(100, 0.0)
            async with opened(server.url, meter=Meter(Prices(), budget)) as model:
                with pytest.raises(BudgetExceeded, match="100 of 100 tokens"):
                    await model.complete(ASK)

    run(body)


def test_bad_answers_cost_too() -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as server:
            server.fail("aborted")
            budget = Budget(tokens=1000)
            async with opened(server.url, meter=Meter(Prices(prompt=1e6), budget)) as model:
                found = await model.complete(ASK)
            assert found.cost == found.usage.prompt + 3
            assert budget.spent_dollars == found.cost

    run(body)


def test_cached_tokens_have_their_price() -> None:
    usage = TokenUsage(prompt=1_000_000, completion=500_000, cached=400_000)
    assert Prices(3.0, 15.0, 0.3).cost(usage) == pytest.approx(0.6 * 3 + 0.4 * 0.3 + 7.5)
    assert Prices(3.0, 15.0).cost(usage) == pytest.approx(3 + 7.5)


def test_an_answer_larger_than_the_bound_is_not_read_to_its_end() -> None:
    sent = 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(4000):
                await response.write(b"x" * 65536)
                sent += 65536
        except ConnectionError:
            pass
        return response

    app = web.Application()
    app.router.add_post("/chat/completions", pour)

    async def body() -> None:
        async with answering(app) as url, opened(url, retries=0, tokens="no", largest=1 << 20) as model:
            with pytest.raises(BadAnswer, match="1048576 bytes"):
                await model.complete(ASK)

    run(body)
    assert sent < 100 << 20


# --- secrets, addresses, proxies -------------------------------------------------------------------------------------


def test_the_key_is_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def body() -> None:
        async with ScriptedServer(["fine"]) as server, opened(server.url, api_key=KEY) as model:
            server.fail("wrong_key")
            with pytest.raises(ModelRefused) as caught:
                await model.complete(ASK)
            assert "--api-key-env" in str(caught.value.hint)
            assert KEY not in repr(model) + repr(caught.value) + str(caught.value)
            assert "***" in str(caught.value)

    run(body)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "base",
    ["localhost:8000/v1", "ftp://host/v1", "http://u:secret@h/v1", "http://h/v1?key=secret", "http://h:x/v1", ""],
)
def test_addresses_that_are_none(base: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        OpenAIModel("scripted", base)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["one\ntwo", "schlüssel"])
def test_keys_that_are_none_are_not_shown(key: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        OpenAIModel("scripted", "http://localhost/v1", api_key=key)
    assert key not in str(caught.value)


def test_the_environments_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with ScriptedServer(["fine"]) as proxy:
            address = proxy.url.removesuffix("/v1").replace("://", "://user:p%40ss@")
            monkeypatch.setenv("http_proxy", address)
            async with opened("http://engine.invalid/v1", api_key=KEY) as model:
                assert (await model.complete(ASK)).message.content == "fine"
            headers = proxy.received[0].headers
            assert headers["Host"] == "engine.invalid"
            assert headers["Proxy-Authorization"] == "Basic dXNlcjpwQHNz"
            monkeypatch.setenv("no_proxy", "engine.invalid")
            async with opened("http://engine.invalid/v1", retries=0) as model:
                with pytest.raises(ModelUnavailable):
                    await model.complete(ASK)
            assert proxy.count == 1

    run(body)


def test_a_proxy_of_https_never_sees_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = b""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def body() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{port}")
            async with opened("https://engine.invalid/v1", api_key=KEY) as model:
                with pytest.raises(ModelRefused, match="proxy") as caught:
                    await model.complete(ASK)
            assert "secret" not in str(caught.value)

    run(body)
    assert heard.startswith(b"CONNECT engine.invalid:443 ")
    assert b"Basic dXNlcjpzZWNyZXQ=" in heard
    assert KEY.encode() not in heard


def test_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def body() -> None:
        async with ScriptedServer(["fine"]) as server, opened(server.url) as model:
            await model.complete(ASK)

    run(body)


def test_a_closed_model_says_so() -> None:
    async def body() -> None:
        model = OpenAIModel("scripted", "http://127.0.0.1:1/v1")
        await model.close()
        with pytest.raises(InvalidValue, match="closed"):
            await model.complete(ASK)

    run(body)


# --- options ---------------------------------------------------------------------------------------------------------


def test_open_model_takes_the_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")

    async def asked(options: ModelOptions) -> Completion:
        model = open_model(options)
        try:
            return await asyncio.wait_for(model.complete(ASK), LONG)
        finally:
            await model.close()

    with serving(ScriptedServer(["fine"])) as server:
        options = ModelOptions("scripted", api_base=server.url, api_key_env="MY_KEY")
        assert KEY not in repr(options)
        assert asyncio.run(asked(options)).message.content == "fine"
        assert server.received[0].headers["Authorization"] == f"Bearer {KEY}"
        with pytest.raises(InvalidValue, match="NO_SUCH_KEY"):
            open_model(replace(options, api_key_env="NO_SUCH_KEY"))


def test_open_model_reads_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('["one"]')
    model = open_model(ModelOptions(f"scripted:{script}", budget_tokens=10))

    async def body() -> None:
        assert (await model.complete(ASK)).message.content == "one"
        with pytest.raises(BudgetExceeded):
            await model.complete(ASK)
        await model.close()

    run(body)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"api_base": None},
        {"model": "local"},
        {"budget_dollars": 5.0},
        {"budget_tokens": 0},
        {"timeout": 0},
        {"concurrency": 0},
        {"requests_per_minute": -1},
        {"api_base": "localhost"},
    ],
    ids=str,
)
def test_options_that_do_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        replace(ModelOptions("name", api_base="http://localhost/v1"), **change)  # type: ignore[arg-type]
