"""What SWE-ReX's tests import from their ``conftest``, and their two fixtures, over a sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, Command, CreateBashSessionRequest

from minisandbox.images import host_image
from minisandbox.integrations.swerex import MiniSandboxRuntime
from minisandbox.sandbox import AsyncSandbox
from minisandbox.store import Store


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def remote_runtime() -> AsyncIterator[MiniSandboxRuntime]:
    async with await AsyncSandbox.create(host_image(Store.open()).spec()) as box:
        # the tests call it python, as images do
        (await box.exec("command -v python || ln -s python3 /usr/bin/python")).check()
        runtime = MiniSandboxRuntime(box)
        yield runtime
        await runtime.close()


@pytest.fixture
async def runtime_with_default_session(remote_runtime: MiniSandboxRuntime) -> AsyncIterator[MiniSandboxRuntime]:
    await remote_runtime.create_session(CreateBashSessionRequest())
    yield remote_runtime
    await remote_runtime.close_session(CloseBashSessionRequest())


class _Action(BashAction):
    timeout: float | None = 5


class _Command(Command):
    timeout: float | None = 5
