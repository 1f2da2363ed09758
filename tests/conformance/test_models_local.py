"""The engine keeps the promises of ``cases_models``: in this process, behind HTTP, and behind the capture proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from tests.conformance.cases_models import CASES, Case
from tests.unit.tiny_model import tiny_engine

from minisandbox.models import Model, OpenAIModel
from minisandbox.models.capture import CaptureProxy
from minisandbox.models.engine import EngineServer

pytestmark = pytest.mark.once
DEADLINE = 120.0
Open = Callable[[], AbstractAsyncContextManager[Model]]


@asynccontextmanager
async def engine() -> AsyncIterator[Model]:
    model = tiny_engine()
    try:
        yield model
    finally:
        await model.close()


@asynccontextmanager
async def served() -> AsyncIterator[Model]:
    async with engine() as model, EngineServer(model) as server:
        client = OpenAIModel("tiny", server.base_url, tokens="yes")
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def captured() -> AsyncIterator[Model]:
    async with engine() as model, EngineServer(model) as server, CaptureProxy(server.base_url) as proxy:
        access = proxy.session()
        client = OpenAIModel("tiny", access.base_url, api_key=access.key, tokens="yes")
        try:
            yield client
        finally:
            await client.close()


HOLDS = [
    pytest.param(case, opener, id=f"{opener.__name__}-{case.name}")
    for opener in (engine, served, captured)
    for case in CASES
    if case.needs <= {"tokens", "context"}
]


@pytest.mark.parametrize(("case", "opener"), HOLDS)
def test_promise(case: Case, opener: Open) -> None:
    async def keep() -> None:
        async with opener() as model:
            await case.run(model)

    asyncio.run(asyncio.wait_for(keep(), DEADLINE))
