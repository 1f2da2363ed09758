"""The end of a sandbox: complete, said to those who wait, and harmless to repeat."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, raises, until

from minisandbox.errors import NotFound, SandboxGone
from minisandbox.types import Limits

if TYPE_CHECKING:
    from tests.conformance.contract import World


@case("stop() can be called again, from several places at once, and after the block")
async def case_stop_twice(make: World) -> None:
    async with await make() as box:
        assert box.alive
        await make.together(box.stop(), box.stop(), box.stop())
        assert not box.alive
        await box.stop()
    await box.stop()


@case("leaving the block stops the sandbox, also by an error")
async def case_block(make: World) -> None:
    with raises(KeyError):
        async with await make() as box:
            raise KeyError
    assert not box.alive
    with raises(SandboxGone):
        await box.exec("true")


@case("every process of the sandbox has ended when stop() returns")
async def case_nothing_is_left(make: World) -> None:
    mark = a_while()
    box = await make()
    script = f"trap '' TERM HUP; setsid sleep {mark} & nohup sleep {mark} & sleep {mark} & sleep 0.1"
    await box.exec(script)
    pid = (await box.info()).pid
    await box.stop()
    assert alive_on_host(mark) == []

    async def gone() -> bool:
        return not os.path.exists(f"/proc/{pid}") or state_of(pid) in ("Z", "X")

    await until(make, gone)


def state_of(pid: int) -> str:
    """A process's state, or X."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as source:
            return source.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive_on_host(words: str) -> list[int]:
    """Live processes of this machine whose command line has ``words`` in it."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as source:
                if words.encode() in source.read().replace(b"\0", b" ") and state_of(int(name)) not in ("Z", "X"):
                    found.append(int(name))
        except OSError:
            continue
    return found


@case("stop() during commands: each is told that the sandbox is gone, soon")
async def case_stop_during_commands(make: World) -> None:
    box = await make()

    async def command(number: int) -> float:
        with raises(SandboxGone):
            await box.exec(f"touch started-{number}; sleep 600", timeout=600)
        return time.monotonic()

    async def stop() -> float:
        while (await box.exec("ls -d started-* | wc -l")).stdout != "5\n":
            await make.pause(0.02)
        started = time.monotonic()
        await box.stop()
        return started

    *ends, started = await make.together(*map(command, range(5)), stop())
    assert all(end - started < 60 for end in ends)


@case("stop() during file transfers is said too")
async def case_stop_during_transfers(make: World) -> None:
    box = await make()
    (await box.exec("truncate -s 90M large")).check()

    async def read() -> int:
        try:
            for _ in range(1000):
                await box.files.read_bytes("large")
        except SandboxGone:
            return 1
        return 0

    async def stop() -> int:
        await make.pause(0.3)
        await box.stop()
        return 0

    assert await make.together(read(), stop()) == [1, 0]


@case("after the end every verb says so")
async def case_every_verb(make: World) -> None:
    box = await make()
    await box.stop()
    for call in (box.processes, box.patch, box.usage, box.info, box.shell):
        with raises(SandboxGone):
            await call()
    for verb in (box.exec, box.start, box.files.read_bytes):
        with raises(SandboxGone):
            await verb("x")
    with raises((SandboxGone, NotFound)):
        await box.process("x")


@case("what does not fit is refused before anything is made")
async def case_refused_creation(make: World) -> None:
    with raises(ValueError):
        await make(limits=Limits(disk=-1))
    with raises(ValueError):
        await make(limits=Limits(processes=0))


@case("fifty sandboxes come and go without leaving descriptors", deadline=270.0)
async def case_come_and_go(make: World) -> None:
    async def once() -> None:
        async with await make() as box:
            assert (await box.exec("echo x")).stdout == "x\n"

    for _ in range(3):
        await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await once()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@case("calls leave no descriptors", deadline=240.0)
async def case_no_descriptors(make: World) -> None:
    box = await make()

    async def everything() -> None:
        await box.exec("cat", stdin="x")
        await box.exec("sleep 9", timeout=0.02)
        await box.files.write_text("f", "x")
        await box.files.read_text("f")
        async with await box.start(["cat"]) as process:
            await process.write("x")
        async with await box.shell() as shell:
            await shell.run("true")
        with raises(OSError):
            await box.files.read_text("no")

    await everything()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await everything()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@case("ten sandboxes at once", deadline=240.0)
async def case_ten_at_once(make: World) -> None:
    async def once(number: int) -> str:
        async with await make() as box:
            await box.exec(f"echo {number} > f; sleep 0.2")
            return (await box.exec("cat f")).stdout

    assert await make.together(*map(once, range(10))) == [f"{number}\n" for number in range(10)]
