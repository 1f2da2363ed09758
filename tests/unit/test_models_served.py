"""Servers by token ids: conversations stay exact, and a server that does not fit is refused before the first answer."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.completions_server import CompletionsServer, Dialect
from tests.scripted_server import ScriptedServer
from tests.unit.model_servers import be_impatient, run
from tests.unit.tiny_model import TOOL, tiny_tokenizer

from minisandbox.errors import ContextExceeded, InvalidValue, ModelRefused, ModelUnavailable
from minisandbox.models import Message, ModelOptions, OpenAIModel, Request, Sampling, TokenGraph, Tokens, open_model
from minisandbox.models.dialect import for_history
from minisandbox.models.engine import recompute_logprobs
from minisandbox.models.renderer import Renderer
from minisandbox.models.served import ServedModel, ServerPolicy

pytestmark = pytest.mark.once
ASK = Request((Message("user", "the tests of the module fail"),), sampling=Sampling(max_tokens=12, seed=5))
HOT = Request(ASK.messages, sampling=Sampling(temperature=0.7, max_tokens=12, seed=5))
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


@asynccontextmanager
async def serving(server: CompletionsServer, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(server.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
        await server.engine.close()


def policy_of(url: str, *, retries: int = 8, context: int | None = None) -> ServerPolicy:
    return ServerPolicy(OpenAIModel("tiny", url, retries=retries), Renderer(tiny_tokenizer()), context=context)


def with_server(server: CompletionsServer, body: Callable[[ServerPolicy], Awaitable[None]], **options: int) -> None:
    async def served() -> None:
        async with serving(server) as url:
            policy = policy_of(url, **options)
            await body(policy)
            await policy.close()

    run(served)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_conversation_is_one_row(dialect: Dialect) -> None:
    server = CompletionsServer(dialect)

    async def converse(policy: ServerPolicy) -> None:
        graph, messages = TokenGraph(), list(ASK.messages)
        for turn in range(6):
            sampling = Sampling(temperature=0.7, max_tokens=12, seed=turn)
            answer = await policy.complete(Request(tuple(messages), (), sampling, "a"))
            assert answer.tokens is not None
            assert answer.usage.completion == len(answer.tokens.sampled)
            graph.add(answer.tokens)
            messages += [answer.message, Message("user", "and now")]
        (row,) = graph.rows()
        again = recompute_logprobs(server.engine.model, row, temperature=0.7)
        assert max(abs(a - b) for a, b, m in zip(row.logprobs, again, row.mask, strict=True) if m) < 1e-4
        assert row.turns == (0, 1, 2, 3, 4, 5)

    with_server(server, converse)
    text_bodies = [body for body in server.bodies if isinstance(body["prompt"], str)]
    assert len(text_bodies) == 1  # the tokenizer's check, once
    assert server.bodies[-1]["stop_token_ids"] == [1]


@pytest.mark.parametrize(
    ("server", "request_", "message"),
    [
        (CompletionsServer(shift=1), ASK, "tokenizer of .* differs"),
        (CompletionsServer(model={"id": "other"}), ASK, "does not serve 'tiny'.*it serves other"),
        (CompletionsServer(raw=True), HOT, "log-probabilities of the raw model"),
        (
            CompletionsServer("sglang"),
            Request(ASK.messages, sampling=Sampling(top_p=0.9, max_tokens=4)),
            "not top_p and top_k",
        ),
    ],
)
def test_a_server_that_does_not_fit_is_refused(server: CompletionsServer, request_: Request, message: str) -> None:
    async def ask(policy: ServerPolicy) -> None:
        for _ in range(2):
            with pytest.raises(ModelRefused, match=message):
                await policy.complete(request_)

    with_server(server, ask)


def test_raw_log_probabilities_do_not_matter_at_temperature_1() -> None:
    async def ask(policy: ServerPolicy) -> None:
        assert (await policy.complete(ASK)).tokens

    with_server(CompletionsServer(raw=True), ask)


def test_a_context_that_the_server_cannot_hold() -> None:
    async def ask(policy: ServerPolicy) -> None:
        with pytest.raises(ModelRefused, match=r"holds a context of 64 tokens, not of 128.*--max-model-len 128"):
            await policy.complete(ASK)

    with_server(CompletionsServer(model={"max_model_len": 64}), ask, context=128)

    async def too_long(policy: ServerPolicy) -> None:
        with pytest.raises(ContextExceeded, match="maximum context length is 64"):
            await policy.complete(Request((Message("user", "ab" * 64),), sampling=Sampling(max_tokens=8)))

    with_server(CompletionsServer(model={"max_model_len": 64}), too_long)


@pytest.mark.parametrize("entry", [{"id": "policy"}, {"id": "policy", "root": "tiny"}], ids=["only", "root"])
def test_a_server_that_names_the_model_differently(entry: dict[str, object]) -> None:
    server = CompletionsServer(model=entry)

    async def body() -> None:
        async with serving(server) as url:
            policy = ServerPolicy(OpenAIModel("tiny", url), Renderer(tiny_tokenizer()), alias=True)
            assert (await policy.complete(ASK)).tokens
            assert policy.name == server.bodies[-1]["model"] == "policy"
            await policy.close()

    run(body)


def test_calls_of_tools_do_not_fork() -> None:
    """The history has a call as the template writes it, the row as it was sampled, with other spaces."""
    text = 'I look.<tool_call> {"name":"bash","arguments":{"command":"ls"}}</tool_call>'
    renderer = Renderer(tiny_tokenizer())
    sampled = renderer.encode(text + "<|im_end|>")
    request = Request(ASK.messages, (TOOL,), session="a")
    prompt = renderer.prompt(request)
    message = renderer.response(request, Tokens(prompt, sampled, array("d", bytes(8 * len(sampled)))))
    assert message.tool_calls[0].arguments == '{"command": "ls"}'
    result = Message("tool", "x", tool_call_id=message.tool_calls[0].id)
    history = (*request.messages, for_history(message, (TOOL,)), result)
    assert text not in renderer.text(Request(history, (TOOL,)))
    later = renderer.prompt(Request(history, (TOOL,), session="a"))
    assert later[: len(prompt) + len(sampled)] == prompt + sampled


def test_no_token_ids() -> None:
    async def ask(policy: ServerPolicy) -> None:
        with pytest.raises(ModelRefused, match="reports no token ids"):
            await policy.complete(ASK)

    server = CompletionsServer()
    plain = {"choices": [{"index": 0, "text": "word", "finish_reason": "stop", "logprobs": None}]}
    server.fail = lambda: web.json_response(plain)
    with_server(server, ask)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_server_that_dies_and_comes_back(shift: int) -> None:
    """The request in flight is repeated; what comes back is checked again before its answer counts."""

    async def body() -> None:
        first, second = CompletionsServer(), CompletionsServer(shift=shift)
        async with serving(first) as url:
            policy = policy_of(url)
            answer = await policy.complete(ASK)
        running = asyncio.create_task(policy.complete(ASK))
        while not policy.client.disconnects:
            await asyncio.sleep(0.01)
        async with serving(second, int(url.split(":")[2].removesuffix("/v1"))):
            if shift:
                with pytest.raises(ModelRefused, match=r"tokenizer of .* differs"):
                    await running
            else:
                again = await running
                assert again.tokens == answer.tokens
                assert again.tries > 1
        await policy.close()

    run(body)


def test_a_server_that_stays_dead() -> None:
    async def body() -> None:
        policy = policy_of("http://127.0.0.1:1/v1", retries=1)
        with pytest.raises(ModelUnavailable):
            await policy.complete(ASK)
        await policy.close()

    run(body)


def saved_tokenizer(directory: Path, template: str | None = None) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(directory)
    return directory


def test_the_tokenizer_that_the_server_names_is_used(tmp_path: Path) -> None:
    async def body() -> None:
        server = CompletionsServer(model={"root": str(saved_tokenizer(tmp_path))})
        async with serving(server) as url:
            model = open_model(ModelOptions("tiny", api_base=url))
            assert isinstance(model, ServedModel)
            assert model.name == "tiny"
            assert await asyncio.to_thread(model.prompt_tokens, ASK) is None
            assert (await model.complete(ASK)).tokens
            assert server.prompts
            assert server.lists == 1
            await model.close()

    run(body)


def test_a_server_that_is_down_at_first_gets_token_ids_later(tmp_path: Path) -> None:
    server = CompletionsServer(model={"root": str(saved_tokenizer(tmp_path))})
    server.failing_lists = 1

    async def body() -> None:
        async with serving(server) as url:
            model = open_model(ModelOptions("tiny", api_base=url))
            assert [(await model.complete(ASK)).tokens is None for _ in range(3)] == [True, False, False]
            await model.close()

    run(body)
    assert server.lists == 2


def test_a_counted_prompt_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(policy: ServerPolicy) -> None:
        await policy.check(ASK.sampling)
        texts: list[str] = []
        render = policy.renderer.text

        def text(request: Request, *response: Message) -> str:
            texts.append(render(request, *response))
            return texts[-1]

        monkeypatch.setattr(policy.renderer, "text", text)
        count = policy.prompt_tokens(ASK)
        completion = await policy.complete(ASK)
        assert completion.usage.prompt == count
        assert len(texts) == 2, "the prompt, and the conversation with the response"
        other = Request((*ASK.messages, completion.message, Message("user", "and now")), sampling=ASK.sampling)
        assert policy.prompt_tokens(ASK) == count
        assert (await policy.complete(other)).usage.prompt > count

    with_server(CompletionsServer(), ask)


def test_a_server_whose_tokenizer_is_elsewhere_gets_text(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with ScriptedServer(["one", "two"]) as server:
            model = open_model(ModelOptions("scripted", api_base=server.url, tokens="yes"))
            for _ in range(2):
                assert (await model.complete(ASK)).message.content == "one"
            await model.close()
            plain = open_model(ModelOptions("scripted", api_base=server.url, tokenizer="server"))
            assert isinstance(plain, OpenAIModel)
            await plain.close()

    with caplog.at_level(logging.WARNING):
        run(body)
    assert [record.getMessage().count("give --tokenizer DIR") for record in caplog.records] == [1]


def test_the_tokenizer_option(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(CompletionsServer(shift=1)) as url:
            model = open_model(ModelOptions("tiny", api_base=url, tokenizer=str(saved_tokenizer(tmp_path))))
            with pytest.raises(ModelRefused, match=r"tokenizer of .* differs"):  # named, so there is no way around it
                await model.complete(ASK)
            await model.close()
            model = open_model(ModelOptions("tiny", api_base=url, tokenizer=str(tmp_path / "missing")))
            with pytest.raises(InvalidValue, match="the tokenizer cannot be loaded"):
                await model.complete(ASK)
            await model.close()

    run(body)


def test_a_template_that_changes_earlier_turns_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with serving(CompletionsServer()) as url:
            model = open_model(ModelOptions("tiny", api_base=url, tokenizer=str(saved_tokenizer(tmp_path, THINKING))))
            assert (await model.complete(ASK)).tokens
            await model.close()

    with caplog.at_level(logging.WARNING):
        run(body)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template of tiny changes earlier turns, so each turn becomes a row"
    ]


# --- the renderer ----------------------------------------------------------------------------------------------------


def renderer_of(template: str) -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def test_only_formats_of_calls_that_are_read_are_used() -> None:
    assert Renderer(tiny_tokenizer()).reads_calls
    other = "{% for message in messages %}{{ message.content }}[CALLS]{{ message.tool_calls }}{% endfor %}{{ tools }}"
    assert not renderer_of(other).reads_calls
    assert not renderer_of("{% for message in messages %}{{ message.content }}{% endfor %}").reads_calls


def test_thoughts_are_separated() -> None:
    renderer = renderer_of(THINKING)
    assert renderer.rewrites_history
    assert not Renderer(tiny_tokenizer()).rewrites_history
    request = Request(ASK.messages, (TOOL,))
    message = renderer.message('<think>\nhm\n</think>\n\n<tool_call>{"name": "bash"}</tool_call>', request)
    assert (message.reasoning, message.content, message.tool_calls[0].name) == ("hm", "", "bash")
    assert renderer.message("<think>\nno end", ASK) == Message("assistant", "", reasoning="no end")
    assert renderer.message("plain", ASK) == Message("assistant", "plain")
    opened = renderer_of(THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    assert opened.message("hm</think>done", ASK) == Message("assistant", "done", reasoning="hm")
    assert opened.message("no end", ASK) == Message("assistant", "", reasoning="no end")
