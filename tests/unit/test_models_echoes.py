"""A server that sends back the key it was asked with: the key gets into no answer, and into no error in pieces."""

from __future__ import annotations

import json
import logging

import pytest
from aiohttp import web
from tests.unit.model_servers import ASK, KEY, answering, be_impatient, canned, opened, run

from minisandbox.errors import BadAnswer, ModelRefused
from minisandbox.models.capture import CaptureProxy
from minisandbox.models.http import Answer, clean
from minisandbox.redaction import REPEATS_KEY, redact

SPELT = "".join(f"\\u{ord(sign):04X}" for sign in KEY)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


def _said(content: object, **message: object) -> dict[str, object]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {"choices": [choice]}


def _calling(number: str, name: str, arguments: str) -> dict[str, object]:
    return _said("", tool_calls=[{"id": number, "function": {"name": name, "arguments": arguments}}])


ECHOES = {
    "content": json.dumps(_said(f"of {KEY}.")),
    "parts": json.dumps(_said([{"type": "text", "text": KEY}])),
    "reasoning": json.dumps(_said("x", reasoning=KEY)),
    "older reasoning": json.dumps(_said("x", reasoning_content=KEY)),
    "tool": json.dumps(_calling("1", KEY, "{}")),
    "call": json.dumps(_calling(KEY, "bash", "{}")),
    "arguments": json.dumps(_calling("1", "bash", json.dumps({"command": KEY}))),
    "model": json.dumps(_said("x") | {"model": KEY}),
    "id": json.dumps(_said("x") | {"id": f"chatcmpl-{KEY}"}),
    "name": json.dumps(_said("x") | {KEY: 1}),
    "capitals": json.dumps(_said(KEY.upper())),
    "escapes": json.dumps(_said("HERE")).replace("HERE", SPELT),
    "escapes of escapes": json.dumps(_calling("1", "bash", f'{{"command": "{SPELT}"}}')),
    "no choice": json.dumps({"choices": [KEY]}),
    "a role": json.dumps({"choices": [{"message": {"role": KEY, "content": "x"}, "finish_reason": "stop"}]}),
}


@pytest.mark.parametrize("text", ECHOES.values(), ids=ECHOES.keys())
def test_an_answer_that_repeats_the_key_is_none(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def body() -> None:
        async with answering(canned(200, text)) as url, opened(url, api_key=KEY) as model:
            with pytest.raises(BadAnswer, match="repeats the API key") as caught:
                await model.complete(ASK)
            told = f"{caught.value} {caught.value!r}"
            assert caught.value.hint
            assert KEY.casefold() not in told.casefold()
            assert caught.value.__context__ is None

    run(body)
    assert KEY.casefold() not in caplog.text.casefold()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
def test_an_answer_in_another_encoding_of_json_is_none_either(encoding: str) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=json.dumps(_said(KEY)).encode(encoding))

    async def body() -> None:
        app = web.Application()
        app.router.add_post("/chat/completions", answer)
        async with answering(app) as url, opened(url, api_key=KEY, retries=0) as model:
            with pytest.raises(BadAnswer, match="repeats the API key"):
                await model.complete(ASK)

    run(body)


@pytest.mark.parametrize(("key", "said"), [("not-needed", "it is not-needed"), (KEY, KEY[:-1]), ("", "x")])
def test_what_models_say_by_themselves_is_an_answer(key: str, said: str) -> None:
    async def body() -> None:
        async with answering(canned(200, _said(said))) as url, opened(url, api_key=key) as model:
            assert (await model.complete(ASK)).message.content == said

    run(body)


def test_an_answer_that_cannot_be_read_tells_no_half_of_the_key() -> None:
    ends = {"choices": [{"message": {"content": "x"}, "finish_reason": "p" * 190 + KEY[:-1]}]}

    async def body() -> None:
        async with answering(canned(200, ends)) as url, opened(url, api_key=KEY, retries=0) as model:
            with pytest.raises(BadAnswer, match="malformed response: it contains") as caught:
                await model.complete(ASK)
            assert KEY[:6] not in str(caught.value)

    run(body)


def _pieces(joint: str, length: int = 11) -> str:
    return joint.join(KEY[start : start + length] for start in range(0, len(KEY), length))


JOINTS = ["\n", "\r\n", " ", "\t", "\0", "\u200b", "\u2028", "|", '", "', " + ", "\\n", "\\\\n"]


@pytest.mark.parametrize("length", [1, 5, 11])
@pytest.mark.parametrize("joint", JOINTS, ids=map(ascii, JOINTS))
def test_pieces_of_which_the_key_can_be_put_together_are_not_told(joint: str, length: int) -> None:
    said = f"bad key {_pieces(joint, length)}!"
    assert clean(said, KEY) == redact(json.dumps({"error": said}), KEY) == REPEATS_KEY


@pytest.mark.parametrize("joint", ["\n", " ", "\u200b"])
def test_a_short_key_is_looked_for_between_blanks_only(joint: str) -> None:
    assert clean(f"bad key to{joint}ken-a{joint}bc123", "token-abc123") == REPEATS_KEY
    assert clean("a token abc123 is not needed", "token-abc123") == "a token abc123 is not needed"


def test_lines_of_the_key_are_in_no_error_of_client_or_proxy() -> None:
    error = {"error": {"message": _pieces("\n"), "type": "x"}}

    async def body() -> None:
        async with answering(canned(401, error)) as url, opened(url, api_key=KEY) as model:
            with pytest.raises(ModelRefused, match=REPEATS_KEY) as caught:
                await model.complete(ASK)
            assert KEY[11:20] not in str(caught.value)

    run(body)
    proxy = CaptureProxy("http://127.0.0.1:9/v1", api_key=KEY)
    with pytest.raises(Exception, match=rf"{REPEATS_KEY}$"):
        proxy._read(Answer(401, {}, json.dumps(error).encode()))
