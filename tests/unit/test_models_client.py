"""The client of chat completions APIs against a real server that misbehaves on order."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from tests.scripted_model import ENDS_WITH, FAULTS, Fault
from tests.scripted_server import ScriptedServer, serving
from tests.unit.model_servers import ASK, KEY, LONG, answering, be_impatient, canned, opened, run

from minisandbox.errors import BadAnswer, BudgetExceeded, ContextExceeded, InvalidValue, ModelRefused, ModelUnavailable
from minisandbox.models import (
    Budget,
    Completion,
    Gate,
    Meter,
    ModelOptions,
    OpenAIModel,
    Prices,
    Timeouts,
    TokenUsage,
    client,
    open_model,
)
from minisandbox.models.http import Failed

pytestmark = pytest.mark.once
SHORT = Timeouts(connect=10.0, total=0.5)  # of tries that must run into it


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


def test_a_server_that_is_down_is_reported_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> int:
        return sum("3 times in a row" in one.message and one.levelno == logging.WARNING for one in caplog.records)

    async def body() -> None:
        async with ScriptedServer(["answer"]) as server, opened(server.url, retries=8) as model:
            server.fail("reset", "reset")
            await model.complete(ASK)
            assert warnings() == 0
            down: list[Fault] = ["reset"] * 8
            for outage in (1, 2):
                server.fail(*down)
                await asyncio.gather(model.complete(ASK), model.complete(ASK))
                assert warnings() == outage

    run(body)


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


def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE", 1.0)
    model, call = OpenAIModel("scripted", "http://127.0.0.1:1/v1", retries=10), client._Call(frozenset(), "max_tokens")
    failed = Failed(ModelUnavailable("down"), "often")
    for longest in (1, 2, 4, 8, 16, 32, 60, 60, 60, 60):
        assert longest / 2 <= model._pause(failed, call, 0.0) <= longest
    with pytest.raises(ModelUnavailable):
        model._pause(failed, call, 0.0)


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


def test_half_of_the_key_is_not_shown_either() -> None:
    async def body() -> None:
        async with answering(canned(200, "x" * 180 + KEY)) as url, opened(url, api_key=KEY, retries=0) as model:
            with pytest.raises(BadAnswer) as caught:
                await model.complete(ASK)
            assert KEY[:8] not in str(caught.value)

    run(body)


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
