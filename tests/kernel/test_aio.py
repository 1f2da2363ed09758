"""The asynchronous sandbox: many things at once, and cancellation that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE

from minisandbox.errors import InvalidValue, SandboxGone, WaitTimeout
from minisandbox.sandbox import AsyncProcess, AsyncSandbox, AsyncShell, core, live_sandboxes
from minisandbox.sandbox.protocol.connection import MOST_UNREAD
from minisandbox.types import ExecResult, ImageSpec, Limits, Outcome, Output, Terminal

pytestmark = pytest.mark.kernel


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 2 * PATIENCE))


@contextlib.asynccontextmanager
async def sandbox(spec: ImageSpec, **options: Any) -> AsyncIterator[AsyncSandbox]:
    async with await AsyncSandbox.create(spec, **options) as box:
        yield box


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


async def runs(box: AsyncSandbox, command: str) -> bool:
    return command in (await box.exec("ps -eo args")).stdout.splitlines()


async def are_waiting(handle: AsyncProcess | AsyncShell, tasks: int) -> bool:
    return len(handle._connection._waiting) >= tasks


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_five_hundred_commands_at_once(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec, limits=Limits(processes=4096)) as box:
            beats = [0]

            async def beat() -> None:
                while True:
                    beats[0] += 1
                    await asyncio.sleep(0.01)

            pulse = asyncio.create_task(beat())
            results = await asyncio.gather(*(box.exec(f"sleep 0.2; echo {n}") for n in range(500)))
            await cancelled(pulse)
            assert [r.stdout for r in results] == [f"{n}\n" for n in range(500)]
            assert beats[0] > 10, "the loop was blocked"

    run(body())


def test_many_sandboxes_at_once(spec: ImageSpec) -> None:
    async def body() -> None:
        async with contextlib.AsyncExitStack() as stack:
            boxes = await asyncio.gather(*(AsyncSandbox.create(spec) for _ in range(24)))
            for box in boxes:
                await stack.enter_async_context(box)
            results = await asyncio.gather(*(box.exec("echo $$") for box in boxes))
            assert all(result.ok for result in results)
        assert not any(box.alive for box in boxes)

    run(body())


def test_a_handle_outlives_its_loop(spec: ImageSpec) -> None:
    box = asyncio.run(AsyncSandbox.create(spec))
    try:
        assert asyncio.run(box.exec("echo one")).stdout == "one\n"
        assert asyncio.run(box.exec("echo two")).stdout == "two\n"
    finally:
        asyncio.run(box.stop())


def test_no_thread_stays(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box:
            async with await box.start("cat") as process:
                await process.write("x")
                assert isinstance(await anext(process.events()), Output)
            async with await box.shell() as shell:
                assert (await shell.run("true")).ok

    before = set(threading.enumerate())
    run(body())
    assert set(threading.enumerate()) == before


# --- cancellation ----------------------------------------------------------------------------------------------------


def test_a_cancelled_exec_ends_its_tree_and_nothing_else(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box:
            other = asyncio.create_task(box.exec("sleep 61; echo other"))
            task = asyncio.create_task(box.exec("setsid sleep 62 & sleep 63"))
            for command in ("sleep 61", "sleep 62", "sleep 63"):
                await until(lambda command=command: runs(box, command))  # type: ignore[misc] # mypy cannot infer it
            await cancelled(task)
            await until(lambda: gone(box, "sleep 62", "sleep 63"))
            assert await runs(box, "sleep 61")
            await cancelled(other)
            assert (await box.exec("echo on")).stdout == "on\n"

    async def gone(box: AsyncSandbox, *commands: str) -> bool:
        return not any([await runs(box, command) for command in commands])

    run(body())


def test_a_cancelled_create_stops_what_it_made(spec: ImageSpec) -> None:
    async def body() -> None:
        for delay in (0.0, 0.001, 0.003, 0.01):
            task = asyncio.create_task(AsyncSandbox.create(spec, labels={"test": "cancelled"}))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).stop()  # it was quicker
            assert live_sandboxes(labels={"test": "cancelled"}) == ()

    run(body())


def test_stop_runs_to_its_end_though_cancelled(spec: ImageSpec) -> None:
    async def body() -> None:
        box = await AsyncSandbox.create(spec)
        task = asyncio.create_task(box.stop())
        await asyncio.sleep(0)
        await cancelled(task)
        assert not box.alive
        assert box.id not in [one.id for one in live_sandboxes()]

    run(body())


def test_leaving_a_block_by_cancellation_stops_the_sandbox(spec: ImageSpec) -> None:
    made: list[AsyncSandbox] = []

    async def work() -> None:
        async with sandbox(spec) as box:
            made.append(box)
            await box.exec("sleep 60")

    async def body() -> None:
        task = asyncio.create_task(work())
        await until(ready)
        await cancelled(task)
        assert not made[0].alive

    async def ready() -> bool:
        return bool(made) and await runs(made[0], "sleep 60")

    run(body())


def test_a_cancelled_wait_loses_nothing(spec: ImageSpec) -> None:
    async def body() -> None:
        async with (
            sandbox(spec) as box,
            await box.start("for i in $(seq 300); do echo $i; sleep 0.001; done") as process,
        ):
            seen, events = b"", process.events()
            while True:
                try:
                    event = await asyncio.wait_for(anext(events), 0.001)
                except TimeoutError:
                    continue
                if isinstance(event, ExecResult):
                    break
                seen += event.data
            assert seen.decode().split() == [str(n) for n in range(1, 301)]
            assert event.stdout_bytes == seen

    run(body())


def test_a_cancelled_start_leaves_no_process(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box:
            for lifetime in ("handle", "sandbox"):
                for delay in (0.0, 0.0005, 0.002):
                    task: asyncio.Task[AsyncProcess] = asyncio.create_task(box.start("sleep 77", lifetime=lifetime))
                    await asyncio.sleep(delay)
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        async with await task as process:
                            await process.kill()
            await until(lambda: none_left(box))

    async def none_left(box: AsyncSandbox) -> bool:
        return not await runs(box, "sleep 77")

    run(body())


def test_a_cancelled_look_at_a_process_closes_its_connection(spec: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[socket.socket] = []
    reach = core.reach_process

    def slow(*arguments: Any) -> socket.socket:
        connection = reach(*arguments)
        time.sleep(0.2)
        reached.append(connection)
        return connection

    async def body() -> None:
        async with sandbox(spec) as box, await box.start("sleep 79", lifetime="sandbox") as process:
            monkeypatch.setattr(core, "reach_process", slow)
            task = asyncio.create_task(box.process(process.id))
            await asyncio.sleep(0.05)
            await cancelled(task)
            assert [connection.fileno() for connection in reached] == [-1]

    run(body())


def test_a_cancelled_run_leaves_the_shell_usable(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box, await box.shell() as shell:
            await shell.run("cd /tmp; A=kept")
            task = asyncio.create_task(shell.run("sleep 78"))
            await until(lambda: runs(box, "sleep 78"))
            await cancelled(task)
            result = await shell.run("pwd; echo $A")
            assert result.stdout == "/tmp\n\n"
            assert not await runs(box, "sleep 78")

    run(body())


def test_a_cancelled_download_leaves_nothing_on_the_host(spec: ImageSpec, tmp_path: Path) -> None:
    async def body() -> None:
        async with sandbox(spec) as box:
            await box.exec("head -c 300M /dev/zero > /tmp/big")
            task = asyncio.create_task(box.files.download("/tmp/big", tmp_path / "big"))
            await until(under_way)
            await cancelled(task)
            assert list(tmp_path.iterdir()) == []
            assert (await box.files.stat("/tmp/big")).size == 300 << 20

    async def under_way() -> bool:
        return any(tmp_path.iterdir())

    run(body())


# --- processes -------------------------------------------------------------------------------------------------------


def test_wait_with_a_timeout(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box, await box.start("read line; exit 3") as process:
            with pytest.raises(WaitTimeout, match="still runs after"):
                await process.wait(0.2)
            await process.write("\n")
            assert (await process.wait(PATIENCE)).exit_code == 3

    run(body())


def test_several_tasks_wait_for_one_process(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box, await box.start("read line; seq 1000; exit 3") as process:
            waiters = [asyncio.create_task(process.wait()) for _ in range(5)]

            async def read() -> bytes:
                return b"".join([event.data async for event in process.events() if isinstance(event, Output)])

            reader = asyncio.create_task(read())
            await until(lambda: are_waiting(process, 6))
            await process.write("\n")
            assert {(await waiter).exit_code for waiter in waiters} == {3}
            assert len((await reader).split()) == 1000

    run(body())


def test_a_reader_that_leaves_holds_no_waiter_up(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box, await box.start("head -c 100M /dev/zero") as process:
            leave = asyncio.Event()

            async def read_one() -> None:
                events = process.events()
                await anext(events)
                await leave.wait()

            async def is_full() -> bool:
                return len(process._channel.events) >= MOST_UNREAD

            reader = asyncio.create_task(read_one())
            waiter = asyncio.create_task(process.wait())
            await until(is_full)
            leave.set()
            await reader
            assert (await waiter).ok

    run(body())


def test_a_shell_goes_on_for_all_tasks_when_its_bash_was_killed(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box, await box.shell() as shell:
            for number in range(3):
                killed = shell.run("kill -KILL $PPID; sleep 96")
                results = await asyncio.gather(killed, *(shell.run(f"echo {number}") for _ in range(4)))
                assert all(result.restarted for result in results)
                again = await asyncio.gather(*(shell.run(f"echo {number}") for _ in range(4)))
                assert [result.stdout for result in again] == [f"{number}\n"] * 4

    run(body())


def test_a_closed_process_is_over_and_says_so(spec: ImageSpec) -> None:
    async def body() -> None:
        async with sandbox(spec) as box:
            process = await box.start("sleep 79")
            await process.close()
            await process.close()
            assert not await runs(box, "sleep 79")
            assert (await process.wait()).outcome is Outcome.SIGNALED
            kept = await box.start("sleep 79", lifetime="sandbox")
            waiter = asyncio.create_task(kept.wait())
            await until(lambda: are_waiting(kept, 1))
            await kept.close()
            with pytest.raises(InvalidValue, match="closed"):
                await waiter
            assert await runs(box, "sleep 79")
            async with await box.process(kept.id) as again:
                await again.kill()
                assert (await again.wait()).signal == signal.SIGKILL

    run(body())


def test_a_terminal(spec: ImageSpec) -> None:
    async def body() -> None:
        async with (
            sandbox(spec) as box,
            await box.start("stty size; read x; stty size", pty=Terminal(40, 100)) as process,
        ):
            await until(lambda: has_printed(process, b"40 100"))
            await process.resize(Terminal(41, 101))
            await process.write("\n")
            assert "41 101" in (await process.wait()).stdout

    async def has_printed(process: AsyncProcess, text: bytes) -> bool:
        event = await anext(process.events())
        return isinstance(event, Output) and text in event.data

    run(body())


def test_a_sandbox_that_ends_under_a_process(spec: ImageSpec) -> None:
    async def body() -> None:
        box = await AsyncSandbox.create(spec)
        process, shell = await box.start("sleep 60"), await box.shell()
        waiter, runner = asyncio.create_task(process.wait()), asyncio.create_task(shell.run("sleep 60"))
        await until(lambda: are_waiting(process, 1))
        await until(lambda: are_waiting(shell, 1))
        await box.stop()
        for task in (waiter, runner):
            with pytest.raises(SandboxGone):
                await task
        with pytest.raises(SandboxGone):
            await process.signal(signal.SIGTERM)
        await process.close()
        await shell.close()

    run(body())


def test_threads_of_the_loop_that_are_busy_keep_nobody_waiting(spec: ImageSpec, tmp_path: Path) -> None:
    """The caller's own code may take them all."""
    release = threading.Event()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, release.wait)
        late = loop.call_later(PATIENCE, release.set)
        async with await AsyncSandbox.create(spec) as box:
            await box.files.write_text("/testbed/file", "text")
            await box.files.download("/testbed/file", tmp_path / "file")
        assert not release.is_set()
        late.cancel()
        release.set()
        await busy

    run(body())
    assert (tmp_path / "file").read_text(encoding="ascii") == "text"


def test_an_abandoned_one_is_stopped_with_a_warning(spec: ImageSpec) -> None:
    async def body() -> None:
        await AsyncSandbox.create(spec, labels={"test": "abandoned"})

    with pytest.warns(ResourceWarning, match="never stopped"):
        run(body())
    assert live_sandboxes(labels={"test": "abandoned"}) == ()
