"""The session: what it records, and where it ends an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.agent_tools import Scripted, in_session

from minisandbox.agents import AgentLimits, Create, LimitReached, Session
from minisandbox.agents.record import KEPT_OUTPUT
from minisandbox.errors import InvalidValue
from minisandbox.models import Completion, Message, Request, Sampling
from minisandbox.testing import AsyncFakeSandbox


def test_a_pending_answer_is_cut_off_when_the_time_is_over() -> None:
    async def body(session: Session) -> None:
        session.say(Message("user", "?"))
        with pytest.raises(LimitReached) as caught:
            await session.ask()
        assert caught.value.limit == "seconds"
        assert session.record.turns == []
        assert session.record.messages == [Message("user", "?")]

    in_session(body, Scripted(600.0, "late"), limits=AgentLimits(seconds=0.3))


def test_a_time_out_of_the_models_own_is_no_limit() -> None:
    async def body(session: Session) -> None:
        with pytest.raises(TimeoutError):
            await session.ask()

    in_session(body, Scripted(TimeoutError("mine")), limits=AgentLimits(seconds=600))


@pytest.mark.parametrize("stateful", [False, True])
def test_a_command_has_no_longer_than_is_left(stateful: bool) -> None:
    async def body(session: Session) -> None:
        with pytest.raises(LimitReached):
            await session.perform("echo begun; sleep 600", timeout=500, stateful=stateful)
        (step,) = session.record.steps
        assert (step.result.outcome.value, step.result.stdout, step.stateful) == ("timeout", "begun\n", stateful)
        for further in (session.perform("true", timeout=None), session.edit(Create("x", ""))):
            with pytest.raises(LimitReached):
                await further
        assert len(session.record.steps) == 1
        await session.close()

    in_session(body, limits=AgentLimits(seconds=1.0))


@pytest.mark.parametrize("written", [65_536, 65_537, 500_000, 3_000_000])
def test_a_record_keeps_the_ends_of_an_output_and_the_agent_has_it_all(written: int) -> None:
    async def body(session: Session) -> None:
        result = await session.perform(f"seq -w 9999999 | head -c {written}; echo x >&2", timeout=60)
        (step,) = session.record.steps
        kept = step.result
        assert len(result.stdout_bytes) >= min(written, 1 << 20)
        assert (kept.exit_code, kept.stderr, kept.dropped_stderr) == (0, "x\n", 0)
        if written <= KEPT_OUTPUT:
            assert kept == result
            return
        assert kept.dropped_stdout == written - KEPT_OUTPUT
        line = b"\n[... %d bytes dropped ...]\n" % kept.dropped_stdout
        head, found, tail = kept.stdout_bytes.partition(line)
        assert (len(head), found, len(tail)) == (KEPT_OUTPUT // 2, line, KEPT_OUTPUT // 2)
        assert result.stdout_bytes.startswith(head)
        assert result.stdout_bytes.endswith(tail)

    in_session(body)


def test_a_commands_own_timeout_is_no_limit() -> None:
    async def body(session: Session) -> None:
        assert (await session.perform("sleep 600", timeout=0.3)).outcome.value == "timeout"

    in_session(body, limits=AgentLimits(seconds=600))


@pytest.mark.parametrize(
    "call",
    [lambda session: session.ask(), lambda session: session.perform("true", timeout=3)],
    ids=["ask", "perform"],
)
def test_nothing_begins_when_the_time_is_over(call: Callable[[Session], Awaitable[object]]) -> None:
    now = [0.0]

    async def body() -> None:
        async with await AsyncFakeSandbox.create() as box:
            model = Scripted("x")
            session = Session(box, model=model, limits=AgentLimits(seconds=5), clock=lambda: now[0])
            now[0] = 5.0
            with pytest.raises(LimitReached):
                await call(session)
            assert model.requests == []

    asyncio.run(body())


class Queueing(Scripted):
    """A model whose engine takes 100 s, of which its queue takes some.

    Args:
        now: the clock, which moves when the model works.
        queued: seconds in the queue.
    """

    def __init__(self, now: list[float], queued: float) -> None:
        super().__init__("x", "x")
        self._now, self._queued = now, queued

    async def complete(self, request: Request) -> Completion:
        request.queue.add(self._queued)
        self._now[0] += 100.0
        await asyncio.sleep(0.1)  # the session looks at its deadline every 20 ms
        return await super().complete(request)


def test_waiting_for_the_engine_is_no_time_of_the_agent() -> None:
    async def body() -> None:
        now = [0.0]
        async with await AsyncFakeSandbox.create() as box:
            session = Session(box, model=Queueing(now, 99.0), limits=AgentLimits(seconds=2.0), clock=lambda: now[0])
            await session.ask()
            assert (session.elapsed, session.charged, session.record.turns[0].queued) == (100.0, 1.0, 99.0)
            async with session.deadline(1.5):
                await session.ask()
            assert session.left()["seconds"] == 0.0
            with pytest.raises(LimitReached):
                await session.ask()

    asyncio.run(body())


def test_time_outside_of_the_queue_ends_a_pending_answer() -> None:
    async def body() -> None:
        now = [0.0]
        async with await AsyncFakeSandbox.create() as box:
            limits = AgentLimits(seconds=0.01)
            session = Session(box, model=Queueing(now, 50.0), limits=limits, clock=lambda: now[0])
            with pytest.raises(LimitReached):
                await session.ask()
            assert (session.charged, session.record.turns) == (50.0, [])

    asyncio.run(body())


class Counting(Scripted):
    """A model that counts a token per character."""

    def prompt_tokens(self, request: Request) -> int:
        return sum(len(message.content) for message in request.messages)


@pytest.mark.parametrize(("observation", "sent"), [("y" * 84, True), ("y" * 85, False)])
def test_an_observation_that_overflows_the_context_is_not_sent(observation: str, sent: bool) -> None:
    async def body(session: Session) -> None:
        session.say(Message("user", "a" * 14))
        await session.ask()  # answers with one character
        session.say(Message("user", observation))
        if sent:
            await session.ask()
            return
        with pytest.raises(LimitReached, match="the limit of 100 tokens of context is reached") as caught:
            await session.ask()
        assert caught.value.exit_status == "exit_context"

    model = Counting("x", "x")
    in_session(body, model, limits=AgentLimits(context=100))
    assert len(model.requests) == 1 + sent


@pytest.mark.parametrize(("observation", "sent"), [("y" * 200, True), ("y" * 500, False), ("é" * 250, False)])
def test_tokens_that_the_model_cannot_count_are_estimated(observation: str, sent: bool) -> None:
    async def body(session: Session) -> None:
        session.say(Message("user", "a" * 19))
        await session.ask()  # by the usage, 15 tokens in 20 bytes
        session.say(Message("user", observation))
        if sent:
            await session.ask()
            return
        with pytest.raises(LimitReached):
            await session.ask()

    model = Scripted("x", "x")
    in_session(body, model, limits=AgentLimits(context=200))
    assert len(model.requests) == 1 + sent


def test_an_answer_gets_no_more_tokens_than_are_left() -> None:
    async def body(session: Session) -> None:
        for _ in range(3):
            await session.ask()
        with pytest.raises(LimitReached):
            await session.ask()

    model = Scripted(*["x"] * 4)  # 5 tokens each
    in_session(body, model, limits=AgentLimits(tokens=13), sampling=Sampling(temperature=0.5, max_tokens=9))
    assert [(one.sampling.max_tokens, one.sampling.temperature) for one in model.requests] == [
        (9, 0.5),
        (8, 0.5),
        (3, 0.5),
    ]


def test_each_answer_of_each_rollout_is_drawn_by_a_seed_of_its_own() -> None:
    async def seeds(name: str, seed: int | None) -> list[int | None]:
        async with await AsyncFakeSandbox.create() as box:
            model = Scripted("x", "x")
            session = Session(box, model=model, sampling=Sampling(seed=seed), name=name)
            await session.ask()
            await session.ask()
            return [one.sampling.seed for one in model.requests]

    async def body() -> None:
        drawn = [await seeds(name, seed) for name in ("task__0", "task__1") for seed in (7, 8)]
        assert len({one for pair in drawn for one in pair}) == 8
        assert await seeds("task__0", 7) == drawn[0]
        assert await seeds("task__0", None) == [None, None]

    asyncio.run(body())


def test_what_is_left() -> None:
    async def body(session: Session) -> None:
        await session.ask()
        assert session.left() == {"steps": 74, "tokens": 95, "context": 185, "cost": 0.75}

    limits = AgentLimits(tokens=100, context=200, cost=1.0)
    in_session(body, Scripted("x"), limits=limits)


def test_an_agent_that_asks_needs_a_model() -> None:
    async def body(session: Session) -> None:
        with pytest.raises(InvalidValue, match="needs a model"):
            await session.ask()

    in_session(body)


def test_a_shell_takes_text() -> None:
    async def body(session: Session) -> None:
        with pytest.raises(InvalidValue, match="stateful"):
            await session.perform(["ls"], timeout=3, stateful=True)
        await session.perform("cd /", timeout=3, stateful=True)
        assert (await session.perform("pwd", timeout=3, stateful=True)).stdout == "/\n"
        await session.close()
        await session.close()

    in_session(body)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_are_more_than_nothing(value: float) -> None:
    with pytest.raises(InvalidValue, match="seconds"):
        AgentLimits(seconds=value)
