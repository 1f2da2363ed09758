"""What every model does, whoever answers. A case is a coroutine over an open model and knows no implementation.

What a case needs beyond a model that answers is in its ``needs``; a model is held to the cases whose needs it has:
``script`` (it answers what the case says), ``tokens`` (it tells them), ``context`` (it reads a few thousand tokens and
no more), ``tools`` (it takes tools and messages of tools).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

from minisandbox.errors import ContextExceeded
from minisandbox.models import Completion, FinishReason, Message, Model, Request, Sampling, TokenGraph

NEEDS = frozenset({"script", "tokens", "context", "tools"})
SHORT = Sampling(temperature=0.0, max_tokens=8)
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A promise.

    Attributes:
        name: of the case.
        run: keeps it, or fails.
        needs: what the model must have.
        answers: what a scripted model says, in order.
    """

    name: str
    run: Callable[[Model], Awaitable[None]]
    needs: frozenset[str]
    answers: Sequence[object]


CASES: list[Case] = []


def case(*needs: str, answers: Sequence[object] = ("Yes.", "No.", "Perhaps.", "Never.")) -> Callable[..., object]:
    def keep(run: Callable[[Model], Awaitable[None]]) -> Callable[[Model], Awaitable[None]]:
        assert NEEDS.issuperset(needs)
        CASES.append(Case(run.__name__, run, frozenset(needs), answers))
        return run

    return keep


def ask(text: str = "Is it so?", *, sampling: Sampling = SHORT, session: str = "task-1.0") -> Request:
    return Request((Message("system", "Answer."), Message("user", text)), sampling=sampling, session=session)


def going_on(request: Request, completion: Completion, text: str = "And now?") -> Request:
    return replace(request, messages=(*request.messages, completion.message, Message("user", text)))


async def talk(model: Model, turns: int) -> list[Completion]:
    request, found = ask(), []
    for _ in range(turns):
        found.append(await model.complete(request))
        request = going_on(request, found[-1])
    return found


@case()
async def has_a_name(model: Model) -> None:
    assert model.name


@case()
async def answers_as_the_assistant(model: Model) -> None:
    found = await model.complete(ask())
    assert found.message.role == "assistant"
    assert found.finish_reason in get_args(FinishReason)
    assert found.tries == 1
    assert found.seconds >= 0
    assert found.cost == 0


@case()
async def counts_tokens(model: Model) -> None:
    usage = (await model.complete(ask())).usage
    assert usage.prompt > 0
    assert usage.completion > 0
    assert 0 <= usage.cached <= usage.prompt


@case(answers=["a long answer, much longer than the bound"])
async def stops_at_the_bound(model: Model) -> None:
    found = await model.complete(ask(sampling=Sampling(temperature=0.0, max_tokens=2)))
    assert found.usage.completion <= 2
    assert found.finish_reason == "length" or found.usage.completion < 2


@case()
async def takes_any_text(model: Model) -> None:
    for text in ("Grüße 🙂 漢字", "\x1b[31m\x00\t\r\n", "<|im_end|></s>", "{'a': \"b\"}", ""):
        assert (await model.complete(ask(text))).message.role == "assistant"


@case()
async def answers_the_same_at_no_temperature(model: Model) -> None:
    first, second = await model.complete(ask()), await model.complete(ask())
    assert first.message == second.message


@case()
async def answers_many_at_once(model: Model) -> None:
    found = await asyncio.gather(*(model.complete(ask(f"{n}?", session=f"task-{n}.0")) for n in range(16)))
    assert len(found) == 16
    assert all(one.usage.completion for one in found)


@case()
async def goes_on_when_one_is_cancelled(model: Model) -> None:
    tasks = [asyncio.create_task(model.complete(ask(f"{n}?", session=f"task-{n}.0"))) for n in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert all(isinstance(one, Completion) for n, one in enumerate(found) if n != 1)
    assert isinstance(await model.complete(ask()), Completion)


@case()
async def closes_twice(model: Model) -> None:
    await model.complete(ask())
    await model.close()
    await model.close()


@case("context")
async def says_when_a_conversation_is_too_long(model: Model) -> None:
    try:
        await model.complete(ask("word " * 20_000))
    except ContextExceeded:
        pass
    else:
        raise AssertionError("it has answered")
    assert isinstance(await model.complete(ask()), Completion)


@case("tokens")
async def tells_every_token(model: Model) -> None:
    for found in await talk(model, 2):
        assert found.tokens is not None
        assert len(found.tokens.prompt) == found.usage.prompt
        assert len(found.tokens.sampled) == found.usage.completion == len(found.tokens.logprobs)
        assert all(math.isfinite(value) and value <= 0 for value in found.tokens.logprobs)


@case("tokens")
async def reads_what_it_sampled(model: Model) -> None:
    tokens = [found.tokens for found in await talk(model, 3)]
    for before, after in pairwise(tokens):
        assert before is not None
        assert after is not None
        begin = before.prompt + before.sampled
        assert after.prompt[: len(begin)] == begin


@case("tokens")
async def makes_a_row_of_a_conversation(model: Model) -> None:
    graph = TokenGraph()
    found = await talk(model, 3)
    for one in found:
        assert one.tokens is not None
        graph.add(one.tokens)
    (row,) = graph.rows()
    assert sum(row.mask) == sum(one.usage.completion for one in found)
    assert len(row.ids) == len(row.logprobs) == len(row.mask)


@case("script", answers=["Grüße 🙂\n\x00end", "second"])
async def says_what_the_script_says(model: Model) -> None:
    free = Sampling()
    first = await model.complete(ask(sampling=free))
    assert first.message == Message("assistant", "Grüße 🙂\n\x00end")
    assert first.finish_reason == "stop"
    assert (await model.complete(going_on(ask(sampling=free), first))).message.content == "second"


CALL = {"id": "call-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls'}}


@case("script", "tools", answers=[{"content": None, "tool_calls": [CALL], "reasoning": "a thought"}, "done"])
async def calls_tools(model: Model) -> None:
    request = replace(ask(sampling=Sampling()), tools=(TOOL,))
    found = await model.complete(request)
    assert found.finish_reason == "tool_calls"
    assert found.message.reasoning == "a thought"
    (call,) = found.message.tool_calls
    assert (call.id, call.name, call.arguments) == ("call-1", "bash", '{"command": "ls')
    told = Message("tool", "a file", tool_call_id="call-1")
    last = await model.complete(replace(request, messages=(*request.messages, found.message, told)))
    assert last.message.content == "done"
    if found.tokens and last.tokens:
        begin = found.tokens.prompt + found.tokens.sampled
        assert last.tokens.prompt[: len(begin)] == begin
