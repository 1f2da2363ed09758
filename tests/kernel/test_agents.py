"""Agents in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pytest
from tests.unit.agent_tools import TASK, Scripted

from minisandbox.agents import (
    FORMATS,
    Action,
    AgentLimits,
    AgentOptions,
    Bash,
    BashAgent,
    Create,
    Insert,
    LimitReached,
    OracleAgent,
    Session,
    StrReplace,
    Submit,
    View,
)
from minisandbox.sandbox import AsyncSandbox
from minisandbox.types import ImageSpec, Limits
from minisandbox.values import MiB

pytestmark = pytest.mark.kernel

T = TypeVar("T")
REPOSITORY = r"""
set -e
cd /testbed; git init -q; git config user.email a@b; git config user.name n
printf '%s\n' 'def total(numbers):' '    result = 0' '    for number in numbers[1:]:' > sums.py
echo '        result += number' >> sums.py
echo '    return result' >> sums.py
printf 'PATCH_LINE\n' > secret.py
git add -A; git commit -qm base
"""
SOLUTION = (
    Bash('python3 -c "import sums; print(sums.total([1, 2]))"'),
    View("sums.py", (3, 3)),
    StrReplace("/testbed/sums.py", "numbers[1:]", "numbers"),
    Insert("sums.py", 1, '    """Add up."""'),
    Create("docs/notes.md", "Sums start with the first number."),
    Bash('python3 -B -c "import sums; print(sums.total([1, 2]))"; rm -rf __pycache__'),
    Submit(),
)


def in_repository(
    spec: ImageSpec,
    body: Callable[[Session], Awaitable[T]],
    *actions: Action,
    name: str = "text",
    limits: AgentLimits | None = None,
    box_limits: Limits | None = None,
) -> T:
    async def run() -> T:
        image = ImageSpec("repo", spec.layers, workdir=PurePosixPath("/testbed"))
        async with await AsyncSandbox.create(image, limits=box_limits) as box:
            (await box.exec(REPOSITORY)).check()
            replies = [FORMATS[name].render(action) for action in actions]
            return await body(Session(box, model=Scripted(*replies), limits=limits))

    return asyncio.run(run())


def told(session: Session) -> list[str]:
    return [one.content for one in session.record.messages[2:] if one.role in ("user", "tool")]


@pytest.mark.parametrize("shell", ["stateless", "stateful"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_scripted_agent_solves_a_repository(spec: ImageSpec, name: str, shell: str) -> None:
    async def body(session: Session) -> bytes:
        ending = await BashAgent(AgentOptions(action_format=name, shell=shell)).run(TASK, session)
        assert ending.exit_status == "submitted"
        assert told(session)[0] == "[exit status 0]\n<stdout>\n2\n</stdout>"
        assert told(session)[1] == "     3\t    for number in numbers[1:]:"
        assert told(session)[5] == "[exit status 0]\n<stdout>\n3\n</stdout>"
        assert "in /testbed" in session.record.messages[0].content
        return await session.box.patch()

    patch = in_repository(spec, body, *SOLUTION, name=name).decode()
    assert "-    for number in numbers[1:]:\n+    for number in numbers:\n" in patch
    assert '+    """Add up."""\n' in patch
    assert "+++ b/docs/notes.md\n" in patch


def test_the_oracle_works_through_a_session(spec: ImageSpec) -> None:
    async def body(session: Session) -> bytes:
        assert (await OracleAgent().run(TASK, session)).exit_status == "submitted"
        return await session.box.patch()

    assert b"-PATCH_LINE\n+FIX_LINE\n" in in_repository(spec, body)


def test_paths_stay_inside(spec: ImageSpec, tmp_path: Path) -> None:
    """Whatever path a model names is one of the sandbox: absolute, above the root, or behind a link of its own."""
    (tmp_path / "host").write_text("host\n")
    up = "../" * 30 + str(tmp_path).lstrip("/")

    async def body(session: Session) -> list[str]:
        await BashAgent().run(TASK, session)
        return told(session)

    observations = in_repository(
        spec,
        body,
        View(f"{tmp_path}/host"),
        Create(f"{up}/new", "x"),
        Bash(f"ln -s {up}/host link"),
        StrReplace("link", "host", "agent"),
        Create("/etc/new", "x"),
        View("/proc/self/root/etc/shadow"),
        View("/dev/zero"),
        Submit(),
    )
    assert "No such file" in observations[0]
    assert "was created" in observations[1]
    assert "No such file" in observations[3]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["host"]
    assert (tmp_path / "host").read_text() == "host\n"
    assert not Path("/etc/new").exists()
    assert observations[5].startswith("[not done]")
    assert observations[6].startswith("[not done]")


def test_limits_of_the_sandbox_are_told(spec: ImageSpec) -> None:
    async def body(session: Session) -> str:
        await BashAgent().run(TASK, session)
        return told(session)[0]

    fill = Bash("head -c 100000000 /dev/zero > big")
    assert "limit on disk was reached" in in_repository(spec, body, fill, Submit(), box_limits=Limits(disk=32 * MiB))


def test_the_end_of_time_ends_the_command_and_nothing_else(spec: ImageSpec) -> None:
    async def body(session: Session) -> None:
        with pytest.raises(LimitReached) as caught:
            await BashAgent().run(TASK, session)
        assert caught.value.exit_status == "exit_total_execution_time"
        assert session.record.steps[-1].result.outcome.value == "timeout"
        assert (await session.box.exec("cat kept; pgrep sleep")).stdout == "kept\n"

    in_repository(spec, body, Bash("echo kept > kept; sleep 600 & sleep 600"), limits=AgentLimits(seconds=3.0))
