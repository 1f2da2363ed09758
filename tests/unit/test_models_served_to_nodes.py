"""A model that other nodes ask: under a name of its own, with a key that was made for them, at another address."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from minisandbox.errors import ModelRefused
from minisandbox.models import Message, ModelOptions, Request, Script, ScriptedModel, open_model
from minisandbox.models.capture import CaptureProxy
from minisandbox.models.engine import EngineServer

pytestmark = pytest.mark.once
ASKED = Request((Message("user", "who"),))


def test_only_who_has_the_key_is_answered_with_tokens() -> None:
    async def run() -> None:
        model = ScriptedModel(Script.of(["me"]), name="local", tokens=True)
        async with EngineServer(model, name="policy", key="for-nodes") as server:
            options = ModelOptions("policy", server.base_url, tokens="yes", retries=0)
            asked = open_model(options, None, "for-nodes")
            answer = await asked.complete(ASKED)
            assert answer.message.content == "me"
            assert answer.tokens is not None
            await asked.close()
            for key in ("", "another"):
                refused = open_model(options, None, key)
                with pytest.raises(ModelRefused, match="key"):
                    await refused.complete(ASKED)
                await refused.close()
            async with aiohttp.ClientSession() as client, client.get(f"{server.base_url}/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"

    asyncio.run(run())


def test_agents_are_given_the_address_that_they_reach() -> None:
    async def run() -> None:
        async with CaptureProxy("http://localhost:1/v1", host="0.0.0.0", address="fe80::1") as proxy:
            base, _ = proxy.session("one")
            assert base.startswith("http://[fe80::1]:")
        async with CaptureProxy("http://localhost:1/v1") as proxy:
            assert proxy.session("one").base_url.startswith("http://127.0.0.1:")

    asyncio.run(run())
