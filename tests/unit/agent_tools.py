"""What the tests of agents share: a model that says what it was given, and a session in a fake sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from minisandbox.agents import FORMATS, Action, AgentLimits, AgentOptions, BashAgent, Ending, Record, Session
from minisandbox.models import Completion, FinishReason, Message, Model, Request, Sampling, TokenUsage
from minisandbox.tasks import Task
from minisandbox.testing import AsyncFakeSandbox

T = TypeVar("T")
Reply = Message | str | Completion | BaseException | float
TASK = Task(
    instance_id="a__b-1",
    repo="a/b",
    base_commit="0" * 40,
    problem_statement="It {breaks} for $HOME, `id`, {{workdir}} and {workdir}.",
    patch="--- a/secret.py\n+++ b/secret.py\n@@ -1 +1 @@\n-PATCH_LINE\n+FIX_LINE\n",
    test_patch="--- a/test_secret.py\n+++ b/test_secret.py\n@@ -1 +1 @@\n-x\n+TEST_LINE\n",
    FAIL_TO_PASS=("test_secret.py::test_hidden",),
    PASS_TO_PASS=(),
)


class Scripted:
    """A model that gives its answers one after the other.

    Args:
        replies: answers; errors are raised, numbers are seconds to be silent for.
    """

    name = "scripted"

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, float):
            await asyncio.sleep(reply)
            reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, Completion):
            return reply
        assert not isinstance(reply, float)
        return completion(reply)

    async def close(self) -> None:
        pass


def completion(reply: Message | str, *, finish: FinishReason = "stop") -> Completion:
    """An answer of 5 tokens to a prompt of 10."""
    message = reply if isinstance(reply, Message) else Message("assistant", reply)
    return Completion(message, finish, TokenUsage(10, 5), cost=0.25)


def said(action_format: str, *actions: Action) -> Message:
    return FORMATS[action_format].render(*actions)


def in_session(
    body: Callable[[Session], Awaitable[T]],
    model: Model | None = None,
    *,
    limits: AgentLimits | None = None,
    sampling: Sampling | None = None,
    files: Iterable[tuple[str, bytes]] = (),
) -> T:
    """Run something in a session of its own. The fake isolates nothing: paths in tests are relative."""

    async def run() -> T:
        async with await AsyncFakeSandbox.create() as box:
            for path, data in files:
                await box.files.write_bytes(path, data)
            return await body(Session(box, model=model, limits=limits, sampling=sampling))

    return asyncio.run(run())


def work(
    *replies: Reply,
    options: AgentOptions | None = None,
    limits: AgentLimits | None = None,
    files: Iterable[tuple[str, bytes]] = (),
) -> tuple[Ending, Record, Scripted]:
    """Have a bash agent work with a scripted model; returns how it ended, the record and the model."""
    model = Scripted(*replies)

    async def body(session: Session) -> tuple[Ending, Record]:
        return await BashAgent(options).run(TASK, session), session.record

    ending, record = in_session(body, model, limits=limits, files=files)
    return ending, record, model
