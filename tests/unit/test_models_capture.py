"""The capture proxy: foreign agents speak plain OpenAI to it, and what was sampled is all there."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.scripted_model import Fault
from tests.scripted_server import ScriptedServer

from minisandbox.cli.model import write_rows
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.models import Completion, Message, Timeouts, Tokens, TokenUsage
from minisandbox.models.capture import Access, CaptureProxy
from minisandbox.models.capture.captured import CaptureSession
from minisandbox.models.capture.proxy import _completions
from minisandbox.models.http import SESSION_HEADER, clean
from minisandbox.models.serving import has_key
from minisandbox.redaction import REPEATS_KEY

pytestmark = pytest.mark.once
SECRET = "sk-upstream-secret"
USER = {"role": "user", "content": "Fix it."}


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def body(self) -> Any:
        return json.loads(self.text)


class Foreign:
    """An agent of others: plain HTTP, no token in sight."""

    def __init__(self, client: aiohttp.ClientSession, access: Access) -> None:
        self.client, self.access = client, access

    async def post(self, messages: Sequence[object], **fields: object) -> Said:
        headers = {"Authorization": f"Bearer {self.access.key}"}
        body = {"model": "any", "messages": messages, **fields}
        url = f"{self.access.base_url}/chat/completions"
        async with self.client.post(url, json=body, headers=headers) as response:
            return Said(response.status, await response.text(), dict(response.headers))

    async def talk(self, messages: list[object], observations: Sequence[str]) -> list[object]:
        """Ask, observe, ask again ...; the history only grows."""
        for observation in observations:
            said = await self.post(messages)
            assert said.status == 200, said.text
            messages += [said.body["choices"][0]["message"], {"role": "user", "content": observation}]
        return messages


@asynccontextmanager
async def world(
    answers: Sequence[object] = ("one", "two", "three"), **options: Any
) -> AsyncIterator[tuple[ScriptedServer, CaptureProxy, aiohttp.ClientSession]]:
    async with (
        ScriptedServer(answers, context=4000, tokens=options.pop("tokens", True)) as server,
        CaptureProxy(server.url, api_key=SECRET, **options) as proxy,
        aiohttp.ClientSession() as client,
    ):
        yield server, proxy, client


def test_an_agent_sees_an_ordinary_api_and_everything_is_captured() -> None:
    async def run() -> None:
        async with world() as (server, proxy, client):
            access = proxy.session("task-1")
            agent = Foreign(client, access)
            said = await agent.post([USER], temperature=0.5, max_tokens=9)
            (choice,) = said.body["choices"]
            assert choice["message"] == {"role": "assistant", "content": "one"}
            assert choice["logprobs"] is None
            assert "token_ids" not in said.text
            got = server.received[-1]
            assert got.session == "task-1"
            assert got.headers["Authorization"] == f"Bearer {SECRET}"
            assert access.key not in json.dumps([got.headers, got.body])
            wanted = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
            assert got.body == {"model": "any", "messages": [USER], "temperature": 0.5, "max_tokens": 9, **wanted}
            session = proxy.captured(access.key)
            (row,) = proxy.rows(access.key)
            assert len(row.ids) == len(row.logprobs) == len(row.mask)
            assert sum(row.mask) == session.usage.completion == said.body["usage"]["completion_tokens"]
            assert session.messages == (USER, choice["message"])

    asyncio.run(run())


def test_what_the_agent_asks_for_it_gets() -> None:
    async def run() -> None:
        async with world() as (_, proxy, client):
            agent = Foreign(client, proxy.session())
            said = await agent.post([USER], logprobs=True)
            assert len(said.body["choices"][0]["logprobs"]["content"]) == said.body["usage"]["completion_tokens"]
            assert "token_ids" not in said.text
            said = await agent.post([USER], return_token_ids=True)
            assert said.body["prompt_token_ids"]
            assert said.body["choices"][0]["token_ids"]

    asyncio.run(run())


def test_one_row_for_a_history_that_grows_and_two_for_a_fork() -> None:
    async def run() -> None:
        async with world() as (_, proxy, client):
            straight, forked = proxy.session(), proxy.session()
            await Foreign(client, straight).talk([USER], ["grüße 🙂", "<|im_end|>", ""])
            assert [row.turns for row in proxy.rows(straight.key)] == [(0, 1, 2)]
            history = await Foreign(client, forked).talk([USER], ["a", "b"])
            await Foreign(client, forked).talk([*history[:2], {"role": "user", "content": "summary"}], ["c"])
            rows = proxy.rows(forked.key)
            assert [row.turns for row in rows] == [(0, 1), (0, 2)]
            trained = sum(sum(row.mask) for row in rows)
            assert trained == proxy.captured(forked.key).usage.completion  # each sampled token once

    asyncio.run(run())


def test_a_stream_is_given_though_none_is_asked_for() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}

    async def run() -> None:
        async with world([{"content": "I look.", "tool_calls": [call]}]) as (server, proxy, client):
            agent = Foreign(client, proxy.session())
            said = await agent.post([USER], stream=True, stream_options={"include_usage": True})
            assert said.headers["Content-Type"] == "text/event-stream"
            events = [line.removeprefix("data: ") for line in said.text.split("\n\n") if line]
            assert events.pop() == "[DONE]"
            first, last, usage = map(json.loads, events)
            assert first["choices"][0]["delta"]["content"] == "I look."
            assert first["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **call}]
            assert last["choices"][0]["finish_reason"] == "tool_calls"
            assert usage["usage"]["completion_tokens"] > 0
            assert "stream" not in server.received[-1].body
            assert len(proxy.rows(agent.access.key)) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("rate_limit", 429), ("rate_limit_retry_after", 429), ("server_error", 500), ("context_length", 400),
        ("wrong_key", 401), ("unknown_model", 404), ("redirect", 502), ("reset", 502), ("reset_mid_answer", 502),
        ("invalid_json", 502), ("empty_choices", 502), ("wrong_token_counts", 502), ("no_tokens", 502),
    ],
)  # fmt: skip
def test_errors_are_passed_on_and_recorded(fault: Fault, status: int) -> None:
    async def run() -> None:
        async with world() as (server, proxy, client):
            agent = Foreign(client, proxy.session())
            server.fail(fault)
            said = await agent.post([USER])
            assert said.status == status
            assert SECRET not in said.text + str(said.headers)
            assert "Location" not in said.headers
            assert ("Retry-After" in said.headers) == (fault == "rate_limit_retry_after")
            session = proxy.captured(agent.access.key)
            assert [error.status for error in session.errors] == [status]
            assert said.body["error"]["message"]
            assert proxy.rows(agent.access.key) == ()
            assert (await agent.post([USER])).status == 200  # the agent's second try is an answer like any
            assert len(proxy.rows(agent.access.key)) == 1

    asyncio.run(run())


def test_an_engine_that_does_not_answer() -> None:
    async def run() -> None:
        async with world(timeouts=Timeouts(total=0.2)) as (server, proxy, client):
            agent = Foreign(client, proxy.session())
            server.fail("timeout")
            assert (await agent.post([USER])).status == 502
            assert proxy.captured(agent.access.key).errors

    asyncio.run(run())


def test_an_agent_that_does_not_wait() -> None:
    async def run() -> None:
        async with world() as (server, proxy, client):
            agent = Foreign(client, proxy.session())
            server.fail("timeout")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(agent.post([USER]), 0.3)
            session = proxy.captured(agent.access.key)
            async with asyncio.timeout(60):
                while not session.errors:
                    await asyncio.sleep(0.01)
            assert session.errors[0].status == 499
            assert session.rows() == ()

    asyncio.run(run())


SPELT = "".join(f"\\u{ord(letter):04x}" for letter in SECRET)
TELLING = {
    "in escapes": f'{{"error": {{"message": "bad key {SPELT}"}}}}',
    "in escapes of escapes": json.dumps({"error": {"message": f"bad key {SPELT}"}}),
    "an event": f'data: {{"error": {{"message": "bad key {SPELT}"}}}}\n\n',
    "two documents": f'{{"error": {{"message": "bad key {SPELT}"}}}}\n{{}}',
    "behind a mark": f'\ufeff{{"error": {{"message": "bad key {SPELT}"}}}}',
    "deep": f'["bad key {SPELT}", ' + "[" * 20000 + "]" * 20000 + "]",
    "as a name": json.dumps({"error": {SECRET: SECRET}}),
    "to wait for": "{}",
}


@pytest.mark.parametrize("text", TELLING.values(), ids=TELLING.keys())
def test_an_error_that_spells_the_key_does_not_tell_it(text: str) -> None:
    """As encoders of JSON do that escape ``+`` and ``/``."""

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=401, text=text, headers={"Retry-After": SECRET, "retry-after-ms": "1500"})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", refuse)
        async with (
            TestServer(app) as server,
            CaptureProxy(str(server.make_url("/v1")), api_key=SECRET) as proxy,
            aiohttp.ClientSession() as client,
        ):
            said = await Foreign(client, proxy.session()).post([USER])
            assert said.status in (401, 502)
            told = f"{json.dumps(said.body, ensure_ascii=False)} {dict(said.headers)}"
            assert SECRET not in told
            assert SPELT.replace("\\", "") not in told.replace("\\", "")
            assert ("***" in told) == ("key" in text or SECRET in text)
            assert said.headers["retry-after-ms"] == "1500"

    asyncio.run(run())


UNREADABLE = {
    "a role": [{"message": {"role": SECRET, "content": "x"}, "finish_reason": "stop"}],
    "an end": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "p" * 180 + SECRET}],
    "two ends": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "p" * 180 + SECRET}] * 2,
    "a text": [SECRET],
    "texts": [SECRET, SECRET],
}


@pytest.mark.parametrize("choices", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_answer_that_cannot_be_read_does_not_tell_the_key(choices: list[object]) -> None:
    """Nor a part of it, where what is shown was cut."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"choices": choices})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with (
            TestServer(app) as server,
            CaptureProxy(str(server.make_url("/v1")), api_key=SECRET) as proxy,
            aiohttp.ClientSession() as client,
        ):
            access = proxy.session()
            said = await Foreign(client, access).post([USER])
            assert said.status == 502
            assert "contains the API key" in said.text
            assert SECRET[:5] not in said.text
            assert SECRET[:5] not in proxy.captured(access.key).errors[0].message

    asyncio.run(run())


def test_half_of_a_key_at_the_end_of_what_was_read_is_not_told() -> None:
    """Control characters become one blank, so that the end of a long text may be shown."""
    assert SECRET[:8] not in clean("\n" * 4000 + SECRET[: len(SECRET) // 2], SECRET)
    assert clean(json.dumps({"error": {"message": f"bad key {SECRET[:6]}"}, "code": 1}), SECRET) == REPEATS_KEY
    assert clean(json.dumps({"error": f'"bad \\"key {SECRET[:11]}"'}), SECRET) == REPEATS_KEY
    assert clean(f"{SECRET[:11]}... is no key", SECRET) == f"{SECRET[:11]}... is no key"
    assert clean("short", SECRET) == "short"


def test_keys() -> None:
    async def run() -> None:
        async with world() as (_, proxy, client):
            stranger = Foreign(client, Access(proxy.base_url, "ms-stranger"))
            assert (await stranger.post([USER])).status == 401
            assert (await Foreign(client, Access(proxy.base_url, "")).post([USER])).status == 401
            access = proxy.session("a")
            await Foreign(client, access).post([USER])
            assert len(proxy.close_session(access.key).rows()) == 1
            assert (await Foreign(client, access).post([USER])).status == 401
            with pytest.raises(NotFound):
                proxy.rows(access.key)
        async with world(open_unknown=True) as (server, proxy, client):
            await Foreign(client, Access(proxy.base_url, "ms-mine")).post([USER])
            await Foreign(client, Access(proxy.base_url, "sk-foreign")).post([USER])
            assert [session.name for session in proxy.sessions()] == ["mine", "key:sk-foreign"]
            assert not any("foreign" in str(got.headers) for got in server.received)
            made = proxy.session("made")
            for key in ("mine", "key:mine", "ms-key:mine", "ms-made", "made"):
                assert (await Foreign(client, Access(proxy.base_url, key)).post([USER])).status == 200
            names = [session.name for session in proxy.sessions()]
            assert len(set(names)) == len(names) == 8
            assert proxy.captured(made.key).name == "made"

    asyncio.run(run())


def test_a_late_answer_is_not_taken() -> None:
    async def run() -> None:
        async with ScriptedServer(["late"], latency=0.3) as server, CaptureProxy(server.url) as proxy:
            access = proxy.session()
            async with aiohttp.ClientSession() as client:
                asked = asyncio.create_task(Foreign(client, access).post([USER]))
                while not server.in_flight:
                    await asyncio.sleep(0.01)
                session = proxy.close_session(access.key)
                assert (await asked).status == 401
                assert session.rows() == ()

    asyncio.run(run())


DEEP = b'{"messages": [%s]}' % (b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 3}', DEEP], ids=["cut off", "a list", "none", "deep"])
def test_requests_that_are_none(body: bytes) -> None:
    async def run() -> None:
        async with world() as (server, proxy, client):
            access = proxy.session()
            headers = {"Authorization": f"Bearer {access.key}"}
            async with client.post(f"{access.base_url}/chat/completions", data=body, headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "BadRequestError"
            assert server.count == 0

    asyncio.run(run())


def test_half_a_character_loses_no_rows(tmp_path: Path) -> None:
    """No row of any session was written."""

    async def run() -> None:
        async with world(["fine"] * 2) as (_, proxy, client):
            await Foreign(client, proxy.session("good")).post([USER])
            await Foreign(client, proxy.session("bad")).post([{"role": "user", "content": "an emoji, cut: \ud83d"}])
            assert write_rows(tmp_path / "rows.jsonl", proxy.sessions()) == 2

    asyncio.run(run())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[1]["messages"][0]["content"] == "an emoji, cut: ?"


def test_a_session_holds_no_more_than_it_may() -> None:
    async def run() -> None:
        async with world(["x" * 500] * 99, session_bytes=20_000) as (_, proxy, client):
            agent = Foreign(client, proxy.session())
            said, history, count = None, [USER], 0
            while said is None or said.status == 200:
                said = await agent.post(history)
                count += said.status == 200
                history += [{"role": "assistant", "content": "x" * 500}, {"role": "user", "content": "on"}]
                assert count < 30
            assert said.body["error"]["type"] == "session_full"
            assert count > 1
            assert len(proxy.captured(agent.access.key).turns) == count  # what was taken is kept
            assert (await Foreign(client, proxy.session()).post([USER])).status == 200  # others go on

    asyncio.run(run())


async def send(client: aiohttp.ClientSession, access: Access, data: object, **headers: str) -> tuple[int, str]:
    url = f"{access.base_url}/chat/completions"
    headers["Authorization"] = f"Bearer {access.key}"
    async with client.post(url, data=data, headers=headers) as response:
        return response.status, (await response.json())["error"]["type"]


async def never_ending() -> AsyncIterator[bytes]:
    yield b'{"messages": ['
    while True:
        yield b" " * 50_000
        await asyncio.sleep(0)


def test_a_body_larger_than_what_a_session_has_left_is_not_read() -> None:
    """Four of 30 MiB took 2.9 GB."""

    async def run() -> None:
        async with world(session_bytes=100_000) as (server, proxy, client):
            access = proxy.session()
            full = (400, "session_full")
            assert await send(client, access, io.BytesIO(b" " * 30_000_000)) == full
            assert await asyncio.wait_for(send(client, access, never_ending()), 60) == full
            assert server.count == 0
            assert (await Foreign(client, access).post([USER])).status == 200  # what they took was given back

    asyncio.run(run())


def test_a_body_larger_than_any_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.models.capture.proxy.LARGEST_REQUEST", 100_000)

    async def run() -> None:
        async with world() as (server, proxy, client):
            access = proxy.session()
            assert await asyncio.wait_for(send(client, access, never_ending()), 60) == (413, "BadRequestError")
            assert [error.status for error in proxy.captured(access.key).errors] == [413]
            assert server.count == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "piece", ["[],", '{"a":1},', '"ab",', "🙂", "\x7f"], ids=["lists", "objects", "texts", "wide", "DEL"]
)
def test_a_body_that_takes_many_times_its_bytes_is_not_unpacked(piece: str) -> None:
    """10 million lists are 30 MB as JSON, and 640 in memory."""
    quoted = '"' if len(piece) == 1 else ""

    async def run() -> None:
        async with world(session_bytes=1_000_000) as (_, proxy, client):
            access = proxy.session()
            body = f'{{"messages": [{quoted}{piece * (400_000 // len(piece.encode()))}'.encode()
            assert await send(client, access, body) == (400, "session_full")
            assert (await Foreign(client, access).post([USER])).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_a_body_in_another_encoding_is_not_read(encoding: str) -> None:
    """What takes half as many bytes so is not what is counted."""

    async def run() -> None:
        async with world() as (_, proxy, client):
            body = '{"messages": [{"role": "user", "content": "é"}]}'
            access = proxy.session()
            assert await send(client, access, body.encode(encoding)) == (400, "BadRequestError")
            assert (await Foreign(client, access).post([USER])).status == 200

    asyncio.run(run())


def test_a_full_session_reads_no_body() -> None:
    async def run() -> None:
        async with world(session_bytes=1000) as (server, proxy, client):
            agent = Foreign(client, proxy.session())
            assert (await agent.post([USER])).status == 200
            assert proxy.captured(agent.access.key).full
            assert await send(client, agent.access, b"{") == (400, "session_full")
            assert server.count == 1

    asyncio.run(run())


def test_requests_at_once_take_no_more_than_their_session_has_left() -> None:
    long = [{"role": "user", "content": "x" * 40_000}]

    async def run() -> None:
        async with (
            ScriptedServer(["late"] * 9, latency=1.0, context=400_000) as server,
            CaptureProxy(server.url, session_bytes=100_000) as proxy,
            aiohttp.ClientSession() as client,
        ):
            access, other = proxy.session(), proxy.session()
            said = await asyncio.gather(*(Foreign(client, access).post(long) for _ in range(6)))
            refused = [one.body["error"]["type"] for one in said if one.status == 400]
            assert 4 <= len(refused) < 6
            assert set(refused) == {"session_full"}
            assert (await Foreign(client, other).post([USER])).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("limit", "kept"), [(100_000, 45), (10_000_000, 200)], ids=["no room", "many"])
def test_refused_requests_are_kept_up_to_a_number_and_as_far_as_there_is_room(limit: int, kept: int) -> None:
    """5,000 were all kept, also by a session that was full."""
    session = CaptureSession("refused", limit)
    for _ in range(5000):
        session.fail(400, "x" * 3000, 0.0)
    assert (len(session.errors), session.errors_left_out) == (kept, 5000 - kept)
    assert session.errors[0].message == "x" * 2000


def test_asking_the_same_again_fills_a_session_too() -> None:
    """The graph keeps each such prompt: 379 MiB were held, and 0.6 counted."""
    session = CaptureSession("again", 200_000)
    tokens = Tokens(array("i", range(5000)), array("i", [1]), array("d", [-1.0]))
    answer = Completion(Message("assistant", "x"), "stop", TokenUsage(5000, 1, 0), tokens)
    taken = 0
    while not session.full:
        session.add(session.restore({"messages": [USER]}, ""), {"role": "assistant", "content": "x"}, answer, 0.0)
        taken += 1
    assert taken == 4


def test_messages_count_as_the_objects_that_they_are() -> None:
    """2.2 million numbers for messages took 215 MiB of a session with 32; a smile has each letter take four bytes."""
    tokens = Tokens(array("i", [1]), array("i", [1]), array("d", [-1.0]))
    answer = Completion(Message("assistant", "x"), "stop", TokenUsage(1, 1, 0), tokens)
    for messages in (list(range(10**6, 10**6 + 10_000)), ["\N{SLIGHTLY SMILING FACE}" + "x" * 100_000]):
        session = CaptureSession("small", 10_000_000)
        session.add(session.restore({"messages": messages}, ""), {"role": "assistant", "content": "x"}, answer, 0.0)
        assert 10_000_000 - session.left >= sum(sys.getsizeof(json.dumps(one, ensure_ascii=False)) for one in messages)


def test_equal_messages_are_held_once() -> None:
    async def run() -> None:
        async with world(["x"] * 20) as (_, proxy, client):
            agent = Foreign(client, proxy.session())
            await agent.talk([USER], ["an observation"] * 10)
            turns = proxy.captured(agent.access.key).turns
            assert len({id(text) for turn in turns for text in turn.messages}) == 3

    asyncio.run(run())


def test_sessions_keep_to_one_of_several_engines() -> None:
    async def run() -> None:
        async with world(["x"] * 9) as (first, _, client), ScriptedServer(["x"] * 9) as second:
            async with CaptureProxy([first.url, second.url]) as proxy:
                for name in "abcd":
                    await Foreign(client, proxy.session(name)).talk([USER], ["1", "2"])
            assert {got.session for got in first.received} == {"a", "c"}
            assert {got.session for got in second.received} == {"b", "d"}

    asyncio.run(run())
    with pytest.raises(InvalidValue, match="has no engine"):
        CaptureProxy([])


def test_several_choices_are_answers_each() -> None:
    logprobs = {"content": [{"logprob": -1.0}]}
    common = {"finish_reason": "stop", "logprobs": logprobs}
    choices = [
        {"message": {"role": "assistant", "content": text}, "token_ids": [n], **common} for n, text in enumerate("ab")
    ]
    found = _completions({"prompt_token_ids": [7], "choices": choices, "usage": {"completion_tokens": 2}})
    assert [message for message, _ in found] == [choice["message"] for choice in choices]
    assert [completion.tokens.sampled.tolist() for _, completion in found if completion.tokens] == [[0], [1]]


def test_rows_are_for_whoever_runs_the_proxy(tmp_path: Any) -> None:
    async def run() -> None:
        async with world(admin_key="admin", model="served") as (server, proxy, client):
            for name in ("a", "b"):
                await Foreign(client, proxy.session(name)).talk([USER], ["1", "2"])
            assert server.received[-1].body["model"] == "served"
            url = proxy.base_url.removesuffix("/v1") + "/capture/rows"
            async with client.get(url, headers={"Authorization": "Bearer ms-x"}) as refused:
                assert refused.status == 401
            async with client.get(f"{url}?session=b", headers={"Authorization": "Bearer admin"}) as response:
                (row,) = map(json.loads, (await response.text()).splitlines())
            assert (row["version"], row["session"], row["turns"]) == (1, "b", [0, 1])
            assert len(row["ids"]) == len(row["logprobs"]) == len(row["mask"])
            assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
            assert write_rows(tmp_path / "rows.jsonl", proxy.sessions()) == 2
            lines = (tmp_path / "rows.jsonl").read_text().splitlines()
            assert json.loads(lines[1]) == row
            async with client.get(f"{proxy.base_url}/models") as models:
                assert (await models.json())["data"][0]["id"] == "served"

    asyncio.run(run())


@pytest.mark.parametrize(("key", "is_it"), [("admin", True), ("admin ", True), ("admi", False), ("\udcff", False)])
def test_a_key_that_is_no_text_is_none(key: str, is_it: bool) -> None:
    request = SimpleNamespace(headers={"Authorization": f"Bearer {key}"})
    assert has_key(cast("web.Request", request), "admin") is is_it


def test_the_header_of_a_session_survives_any_name() -> None:
    async def run() -> None:
        async with world() as (server, proxy, client):
            await Foreign(client, proxy.session("grüße/1 🙂")).post([USER])
            assert server.received[-1].session == "grüße/1 🙂"
            assert server.received[-1].headers[SESSION_HEADER].isascii()

    asyncio.run(run())
