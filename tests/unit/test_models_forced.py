"""What a model was forced to sample is captured, and carry no loss."""

from __future__ import annotations

import logging

import aiohttp
import pytest
from tests.scripted_server import ScriptedServer
from tests.unit.model_servers import run

from minisandbox.models.capture import CaptureProxy

USER = {"role": "user", "content": "Is it so?"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


def test_what_a_model_was_forced_to_sample_carries_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Its log-probabilities are of the constrained distribution."""
    caplog.set_level(logging.WARNING)
    asked: list[tuple[dict[str, object], bool]] = [
        ({"tool_choice": "required"}, False), ({"response_format": SCHEMA}, False), ({"guided_regex": "a*"}, False),
        ({"tool_choice": "auto"}, True), ({"response_format": {"type": "text"}}, True), ({}, True),
    ]  # fmt: skip

    async def body() -> None:
        async with ScriptedServer(lambda _: "fine") as server, CaptureProxy(server.url) as proxy:
            for more, loss in asked:
                access = proxy.session()
                request = {"model": "scripted", "messages": [USER], **more}
                headers = {"Authorization": f"Bearer {access.key}"}
                url = f"{access.base_url}/chat/completions"
                async with aiohttp.ClientSession() as client, client.post(url, json=request, headers=headers) as said:
                    assert said.status == 200, await said.text()
                (row,) = proxy.rows(access.key)
                assert any(row.mask) is loss, more
                assert any(row.logprobs) is loss, more

    run(body)
    assert sum("carry no loss" in one.message for one in caplog.records) == 1
