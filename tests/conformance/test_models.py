"""Every model keeps every promise of ``cases_models``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from tests.conformance.cases_models import CASES, NEEDS, Case
from tests.scripted_model import SimulatedModel
from tests.scripted_server import ScriptedServer

from minisandbox.models import Model, OpenAIModel

pytestmark = pytest.mark.once
DEADLINE = 120.0
CONTEXT = 4000


@dataclass(frozen=True, slots=True)
class Implementation:
    """A model to be held to the promises.

    Attributes:
        name: of the implementation.
        open: opens one; a scripted one says what the case says. What it gives is closed with the block.
        has: which needs of cases it meets.
    """

    name: str
    open: Callable[[Sequence[object]], AbstractAsyncContextManager[Model]]
    has: frozenset[str]


@asynccontextmanager
async def scripted(answers: Sequence[object]) -> AsyncIterator[Model]:
    yield SimulatedModel(answers, context=CONTEXT)


@asynccontextmanager
async def served(answers: Sequence[object]) -> AsyncIterator[Model]:
    async with ScriptedServer(answers, context=CONTEXT) as server:
        model = OpenAIModel("scripted", server.url, tokens="yes")
        try:
            yield model
        finally:
            await model.close()


@asynccontextmanager
async def served_without_tokens(answers: Sequence[object]) -> AsyncIterator[Model]:
    async with ScriptedServer(answers, context=CONTEXT, tokens=False) as server:
        model = OpenAIModel("scripted", server.url, tokens="auto")
        try:
            yield model
        finally:
            await model.close()


IMPLEMENTATIONS = [
    Implementation("scripted", scripted, NEEDS),
    Implementation("client", served, NEEDS),
    Implementation("client without tokens", served_without_tokens, NEEDS - {"tokens"}),
]


HOLDS = [
    pytest.param(case, one, id=f"{one.name}-{case.name}")
    for one in IMPLEMENTATIONS
    for case in CASES
    if case.needs <= one.has
]


@pytest.mark.parametrize(("case", "implementation"), HOLDS)
def test_promise(case: Case, implementation: Implementation) -> None:
    async def keep() -> None:
        async with implementation.open(case.answers) as model:
            await case.run(model)

    asyncio.run(asyncio.wait_for(keep(), DEADLINE))
