"""What is sent to servers, and what their answers and refusals mean, in the words of each."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from aiohttp import web
from tests.scripted_server import ScriptedServer
from tests.unit.model_servers import ASK, KEY, answering, be_impatient, canned, opened, run

from minisandbox.errors import BadAnswer, ContextExceeded, InvalidValue, ModelRefused, ModelUnavailable
from minisandbox.models import Message, Request, Sampling, TokenUsage
from minisandbox.models.dialect import read_answer, read_usage

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


# --- refusals in the words of servers --------------------------------------------------------------------------------


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
    "vLLM of 2026": (
        400,
        {"error": {"message": "You passed 1193 input tokens and requested 7000 output tokens. However, the model's "
                   "context length is only 8192 tokens, resulting in a maximum input length of 1192."}},
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
    assert sum("does not support" in one.message for one in caplog.records) == 1


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


WARM = replace(ASK, sampling=Sampling(temperature=0.7))


def test_raw_log_probabilities_are_no_training_data() -> None:
    """vLLM without processed_logprobs gives -0.19 where top_k=1 leaves one token: its probability is 1."""

    async def body() -> None:
        raw = ScriptedServer(["a", "b", "c"], processed=False)
        async with raw as server, opened(server.url, tokens="yes") as model:
            assert (await model.complete(ASK)).tokens is not None, "at temperature 1 they are the same"
            with pytest.raises(ModelRefused, match="raw model") as caught:
                await model.complete(WARM)
            assert "--logprobs-mode processed_logprobs" in str(caught.value)
        async with ScriptedServer(["a", "b"]) as server, opened(server.url, tokens="yes") as model:
            assert (await model.complete(WARM)).tokens is not None

    run(body)


def test_raw_log_probabilities_are_left_out_where_tokens_are_not_insisted_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        raw = ScriptedServer(["a", "b", "c"], processed=False)
        async with raw as server, opened(server.url, tokens="auto") as model:
            found = await asyncio.gather(model.complete(WARM), model.complete(WARM))
            assert [one.tokens for one in found] == [None, None]
            cold = await model.complete(replace(ASK, sampling=Sampling(temperature=0)))
            assert cold.tokens is not None

    run(body)
    assert sum("processed_logprobs" in one.message for one in caplog.records) == 1


FORCING: list[dict[str, object]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"structured_outputs": {"regex": "a*"}},
]


@pytest.mark.parametrize("extra", FORCING, ids=str)
def test_what_is_forced_is_no_training_data(extra: dict[str, object]) -> None:
    forced = replace(ASK, sampling=Sampling(extra=extra))

    async def body() -> None:
        async with ScriptedServer(["a", "b", "c"]) as server:
            async with opened(server.url, tokens="yes") as model:
                with pytest.raises(InvalidValue, match=f"{next(iter(extra))} cannot be combined with tokens=yes"):
                    await model.complete(forced)
            async with opened(server.url, tokens="auto") as model:
                assert (await model.complete(forced)).tokens is None
                free = replace(ASK, sampling=Sampling(extra={"tool_choice": "auto"}))
                assert (await model.complete(free)).tokens is not None

    run(body)


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


def test_counts_that_no_answer_can_have_are_not_believed() -> None:
    usage = {"prompt_tokens": 10**30, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": "many"}}
    assert read_usage({"usage": usage}) == TokenUsage()


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


# --- token ids and reasoning -----------------------------------------------------------------------------------------


def test_sglang_s_chat_api_has_the_ids_in_the_choice() -> None:
    """``ChatCompletionResponseChoice`` of sglang/srt/entrypoints/openai/protocol.py, 0.5.23."""
    logprobs = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}] * 2}
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "a", "reasoning_content": None, "tool_calls": None},
        "logprobs": logprobs, "finish_reason": "stop", "matched_stop": 2, "prompt_token_ids": [5, 6, 7],
        "response_token_ids": [8, 2],
    }  # fmt: skip
    tokens = read_answer({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).tokens
    assert tokens is not None
    assert (tokens.prompt.tolist(), tokens.sampled.tolist()) == ([5, 6, 7], [8, 2])
    assert tokens.logprobs.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_back_in_the_field_in_which_it_came(name: str) -> None:
    bodies: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = {"role": "assistant", "content": "yes", name: "hm"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}})

    async def body() -> None:
        app = web.Application()
        app.router.add_post("/chat/completions", answer)
        async with answering(app) as url, opened(url, tokens="no") as model:
            first = await model.complete(ASK)
            await model.complete(Request((*ASK.messages, first.message, Message("user", "go on"))))

    run(body)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "yes", name: "hm"}  # type: ignore[index]
