"""Cancelling a call: what it started ends, and the sandbox stays usable."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tests.conformance.contract import Steps, a_while, case, ended, raises, runs, until

from minisandbox.errors import SandboxGone
from minisandbox.values import MiB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


async def cancel_when(steps: Steps[object], condition: Callable[[], Awaitable[bool]], make: World) -> None:
    """Begin something, cancel it when a condition has come true, and see that it ends as cancelled."""
    task = asyncio.create_task(steps)
    try:
        await until(make, condition)
    finally:
        task.cancel()
    with raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


@case("cancelling exec() ends its whole tree and nothing else", needs="cancel")
async def case_exec(make: World, box: AsyncSandbox) -> None:
    mark, other = a_while(), a_while()
    await box.exec(f"sleep {other} >/dev/null 2>&1 &")
    await cancel_when(box.exec(f"setsid sleep {mark} & sleep {mark}"), lambda: runs(box, mark), make)
    await ended(make, box, mark)
    assert await runs(box, other)
    assert (await box.exec("echo next")).stdout == "next\n"


@case("a deadline of asyncio around exec() is a cancellation", needs="cancel")
async def case_wait_for(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    with raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await box.exec(["sleep", mark])
    await ended(make, box, mark)


@case("cancelling one of many commands leaves the others alone", needs="cancel")
async def case_one_of_many(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    script = "until [ -e go ]; do sleep 0.05; done; echo {} # {}-{}"
    tasks = [asyncio.create_task(box.exec(script.format(number, mark, number))) for number in range(8)]
    for number in range(8):
        await until(make, partial(runs, box, f"{mark}-{number}"))
    tasks[3].cancel()
    await box.files.write_text("go", "")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results.pop(3), asyncio.CancelledError)
    assert [result.stdout for result in results if not isinstance(result, BaseException)] == [
        f"{number}\n" for number in (0, 1, 2, 4, 5, 6, 7)
    ]


@case("cancelling a command that is given a large stdin", needs="cancel")
async def case_large_stdin(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    await cancel_when(box.exec(["sleep", mark], stdin=b"x" * (20 * MiB)), lambda: runs(box, mark), make)
    await ended(make, box, mark)


@case("cancelling a shell's command interrupts it; the shell answers the next one rightly", needs="cancel")
async def case_shell(make: World, box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        for number in range(3):
            mark = a_while()
            begun = partial(runs, box, mark)
            await cancel_when(shell.run(f"echo late; sleep {mark}; echo later"), begun, make)
            result = await asyncio.wait_for(shell.run(f"echo {number}"), 60)
            assert result.stdout == f"{number}\n"
            assert not await runs(box, mark)


@case("cancelling wait() leaves the process alone", needs="cancel")
async def case_wait(make: World, box: AsyncSandbox) -> None:
    async with await box.start("echo before; read x; echo after") as process:
        task = asyncio.create_task(process.wait())
        await asyncio.sleep(0.3)
        task.cancel()
        with raises(asyncio.CancelledError):
            await task
        await process.write("\n")
        assert (await process.wait(60)).stdout == "before\nafter\n"


@case("cancelling file transfers leaves no half of them on the host, and the sandbox usable", needs="cancel")
async def case_transfers(make: World, box: AsyncSandbox) -> None:
    (await box.exec("mkdir tree; head -c 100000000 /dev/zero | tr '\\0' x > tree/large")).check()
    cancelled = 0
    for number, delay in enumerate((0.0, 0.005, 0.01, 0.02, 0.04)):
        for path in ("tree", "tree/large"):
            local = make.directory / f"{number}-{path.replace('/', '-')}"
            task = asyncio.create_task(box.files.download(path, local))
            await asyncio.sleep(delay)
            task.cancel()
            [result] = await asyncio.gather(task, return_exceptions=True)
            cancelled += isinstance(result, asyncio.CancelledError)
            assert local.exists() is not isinstance(result, asyncio.CancelledError)
    assert cancelled
    assert not [path for path in make.directory.iterdir() if path.name.startswith(".")]
    assert (await box.exec("echo fine")).stdout == "fine\n"


@case("a cancelled creation leaves no sandbox", needs="cancel")
async def case_create(make: World) -> None:
    mark = a_while()
    for delay in (0.0, 0.001, 0.004):
        task = asyncio.create_task(make(labels={"mark": mark}))
        await asyncio.sleep(delay)
        task.cancel()
        for result in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.stop()

    async def none() -> bool:
        return not await make.live({"mark": mark})

    await until(make, none)


@case("a cancelled stop() stops all the same", needs="cancel")
async def case_stop(make: World) -> None:
    box = await make()
    task = asyncio.create_task(box.stop())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async def gone() -> bool:
        return not box.alive

    await until(make, gone)
    await box.stop()
    with raises(SandboxGone):
        await box.exec("true")


@case("a cancelled block stops its sandbox", needs="cancel")
async def case_block(make: World) -> None:
    boxes: list[AsyncSandbox] = []

    async def block() -> None:
        async with await make() as box:
            boxes.append(box)
            await box.exec("sleep 60")

    async def under_way() -> bool:
        return bool(boxes)

    await cancel_when(block(), under_way, make)
    assert not boxes[0].alive


@case("a cancelled snapshot leaves a sandbox that works or is gone, never one that hangs", needs="cancel")
async def case_snapshot(box: AsyncSandbox) -> None:
    await box.exec("echo 1 > f")
    task = asyncio.create_task(box.snapshot())
    await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await box.exec("cat f")).stdout == "1\n"
                break
            except SandboxGone:
                assert not box.alive
                break


@case("a hundred commands, each cancelled at another moment, leave nothing", needs="cancel", deadline=240.0)
async def case_any_moment(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    for number in range(100):
        task = asyncio.create_task(box.exec(f"sleep {mark} & sleep {mark}"))
        await asyncio.sleep(number / 10_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await ended(make, box, mark)
    assert (await box.exec("echo fine")).stdout == "fine\n"
