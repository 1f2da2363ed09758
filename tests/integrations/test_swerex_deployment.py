"""SWE-ReX's deployment: its configuration, its start and end, and the list of deployments that it is added to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
from typing import Any

import pytest
from tests.integrations.conftest import TASK
from tests.integrations.extras import needs_swerex
from tests.waiting import until

from minisandbox.sandbox import live_sandboxes

with contextlib.suppress(ImportError):  # then all of this is skipped
    from swerex.deployment.hooks.status import SetStatusDeploymentHook
    from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
    from swerex.runtime.abstract import Command

    from minisandbox.integrations.swerex import MiniSandboxDeployment, MiniSandboxDeploymentConfig

pytestmark = [pytest.mark.kernel, needs_swerex]


def live() -> set[str]:
    return {info.id for info in live_sandboxes(labels={"by": "swe-rex"})}


def test_from_its_start_to_its_end() -> None:
    async def body() -> None:
        deployment = MiniSandboxDeploymentConfig(env={"WHO": "rex"}).get_deployment()
        told: list[str] = []
        deployment.add_hook(SetStatusDeploymentHook("id", lambda _, message: told.append(message)))
        assert not await deployment.is_alive()
        with pytest.raises(DeploymentNotStartedError):
            _ = deployment.runtime
        for _ in range(2):  # again after it was stopped, and over one that runs
            await deployment.start()
            assert await deployment.is_alive()
            assert len(live()) == 1
            done = await deployment.runtime.execute(Command(command="echo $WHO", shell=True))
            assert done.stdout == "rex\n"
        await deployment.stop()
        await deployment.stop()
        assert not await deployment.is_alive()
        assert told == ["Finding image host", "Making sandbox"] * 2

    asyncio.run(body())
    assert live() == set()


def test_it_ends_with_the_object() -> None:
    deployment = MiniSandboxDeployment()
    asyncio.run(deployment.start())
    (name,) = live()
    del deployment
    gc.collect()
    until(lambda: name not in live())


def test_a_task_is_built_and_knows_its_base_commit(tasks: str) -> None:
    """SWE-agent's own commands for resetting a repository, by the commit that the data set names."""

    async def body() -> None:
        deployment = MiniSandboxDeployment(tasks=tasks, image=f"sweb.eval.x86_64.{TASK.replace('__', '_1776_')}:latest")
        await deployment.start()
        reset = ["git fetch", "git status", "git restore .", "git reset --hard", "git clean -fdq"]
        base = "c0ffee" * 6 + "cafe"
        command = " && ".join([*reset, f"git checkout {base}", "git diff --quiet", "git log --oneline"])
        done = await deployment.runtime.execute(Command(command=command, shell=True, cwd="/testbed", check=True))
        assert done.stdout.splitlines()[-1] == f"{base[:7]} Initial commit"
        assert await deployment.runtime.sandbox.patch() == b""
        await deployment.stop()

    asyncio.run(body())


def test_what_cannot_be_started(tasks: str) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"image": "example__broken-1"}, "example__broken-1"),
        ({"image": "python:3.11"}, "no image 'python:3.11'"),
        ({"limits": {"processes": 0}}, "Limits.processes"),
        ({"network": "host", "allow": ["example.org"]}, "leave out one"),
    )
    for settings, said in cases:
        deployment = MiniSandboxDeployment(**{"tasks": tasks, **settings})
        with pytest.raises(DeploymentStartupError, match=said):
            asyncio.run(deployment.start())
        assert not asyncio.run(deployment.is_alive())
    assert live() == set()


REGISTERED = """
import minisandbox.integrations.swerex as ours
import sys, types
known = ours.register() or sys.modules["swerex.deployment.config"]
ours.register()
from pydantic import TypeAdapter
read = TypeAdapter(known.DeploymentConfig).validate_python
print(type(read({"type": "minisandbox", "image": "x"})).__name__, type(read({"type": "local"})).__name__)
print(type(read({"type": "docker", "image": "x"})).__name__, type(read({"type": "minisandbox"})).__name__)
known.DeploymentConfig = known.LocalDeploymentConfig | known.DummyDeploymentConfig
sys.modules["sweagent"] = types.ModuleType("sweagent")
try:
    ours.register()
except ValueError as error:
    print(error)
"""


def test_it_becomes_one_of_the_deployments() -> None:
    """In a process of its own: the list is SWE-ReX's, and stays changed."""
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "MiniSandboxDeploymentConfig LocalDeploymentConfig"
    assert lines[1] == "DockerDeploymentConfig MiniSandboxDeploymentConfig"
    assert "was called after 'import sweagent'" in lines[2]
