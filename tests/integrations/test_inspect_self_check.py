"""Inspect's own conformance suite for sandbox providers, unmodified: its tests are imported, the fixture is ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.integrations.extras import needs_inspect

from minisandbox.images import host_image
from minisandbox.sandbox import AsyncSandbox
from minisandbox.store import Store

with contextlib.suppress(ImportError):  # then all of this is skipped
    from inspect_ai.util import SandboxEnvironment
    from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the tests

    from minisandbox.integrations.inspect import MiniSandboxConfig, MiniSandboxProvider

pytestmark = [pytest.mark.kernel, needs_inspect, pytest.mark.anyio]

# adduser(8) sets the comment by chfn(1), which asks PAM: an image has rules for it, the host's /usr alone has none
_PAM = "/etc/pam.d/chfn"
_RULES = "auth sufficient pam_rootok.so\naccount required pam_permit.so\nsession required pam_permit.so\n"
_ONE_ID = "sandboxes have one id here: no newuidmap, or no range in /etc/subuid"
_NEEDS_IDS = "test_exec_as_user"
_ROOT = "root reads and writes whatever the permission bits say, as in a container"
EXPECTED_FAILURES = {
    "root": {
        "test_read_file_not_allowed": _ROOT,
        "test_write_text_file_without_permissions": _ROOT,
        "test_write_binary_file_without_permissions": _ROOT,
    },
    "user": {},
}
"""For each default user, the tests that fail, with the reason."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def has_one_id() -> bool:
    """Whether there is nobody but root in sandboxes here."""
    async with await AsyncSandbox.create(host_image(Store.open()).spec()) as box:
        return (await box.exec("awk '{n += $3} END {exit n != 1}' /proc/self/uid_map")).ok


@pytest.fixture(params=["root", "user"])
async def sandbox_env(has_one_id: bool, request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    name = request.node.originalname
    reason = EXPECTED_FAILURES[request.param].get(name) or (_ONE_ID if has_one_id and name == _NEEDS_IDS else None)
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if request.param == "user" and has_one_id:
        pytest.skip(_ONE_ID)
    user = {"user": "user", "workdir": "/home/user"} if request.param == "user" else {}
    config = MiniSandboxConfig(**user)
    environments = await MiniSandboxProvider.sample_init("self-check", config, {})
    env = environments["default"].as_type(MiniSandboxProvider)
    await env.sandbox.files.write_text(_PAM, _RULES)
    yield env
    await MiniSandboxProvider.sample_cleanup("self-check", config, environments, interrupted=False)
