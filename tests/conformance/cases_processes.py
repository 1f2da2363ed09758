"""Started processes: output as it comes, input, signals, waiting."""

from __future__ import annotations

import hashlib
import signal
import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, count, ended, raises, runs, until

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone, WaitTimeout
from minisandbox.types import ExecResult, Limits, Outcome, Output
from minisandbox.values import MiB

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncProcess, AsyncSandbox


async def collect(process: AsyncProcess) -> tuple[bytes, bytes, ExecResult]:
    """Everything a process prints, by its events, and its result."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    results: list[ExecResult] = []
    async for event in process.events():
        if isinstance(event, Output):
            assert not results, "output after the result"
            assert event.data, "an empty piece"
            streams[event.stream] += event.data
        else:
            results.append(event)
    assert len(results) == 1
    return bytes(streams["stdout"]), bytes(streams["stderr"]), results[0]


@case("events are pieces of output, and at last the result")
async def case_events(box: AsyncSandbox) -> None:
    async with await box.start("echo out; echo err >&2; exit 3") as process:
        out, err, result = await collect(process)
    assert (out, err) == (b"out\n", b"err\n")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (Outcome.EXITED, 3, "out\n", "err\n")
    assert result.command == process.command == "echo out; echo err >&2; exit 3"


@case("output comes while the process runs")
async def case_output_as_it_comes(box: AsyncSandbox) -> None:
    async with await box.start("echo first; read line; echo second $line") as process:
        seen = b""
        async for event in process.events():
            if isinstance(event, Output):
                seen += event.data
                if event.data.endswith(b"first\n"):
                    await process.write("given\n")
        assert seen == b"first\nsecond given\n"


@case("stdin is an open pipe until it is closed")
async def case_stdin(box: AsyncSandbox) -> None:
    async with await box.start(["cat"]) as process:
        await process.write("text é\n")
        await process.write(b"\xff\0bytes")
        with raises(WaitTimeout):
            await process.wait(0.3)
        await process.close_stdin()
        result = await process.wait(60)
    assert result.stdout_bytes == "text é\n".encode() + b"\xff\0bytes"
    assert result.ok


@case("wait() takes what is printed and returns the result, again and again")
async def case_wait(box: AsyncSandbox) -> None:
    async with await box.start("echo out; sleep 0.2; exit 7") as process:
        first = await process.wait(60)
        assert (first.stdout, first.exit_code) == ("out\n", 7)
        assert first.duration >= 0.19  # its clock begins when the shell runs already
        assert await process.wait() == first


@case("wait() gives up in time, and the process runs on")
async def case_wait_timeout(box: AsyncSandbox) -> None:
    async with await box.start("echo before; read x; echo after") as process:
        started = time.monotonic()
        with raises(WaitTimeout) as caught:
            await process.wait(0.3)
        assert 0.3 <= time.monotonic() - started < 60
        assert isinstance(caught.value, TimeoutError)
        await process.write("\n")
        assert (await process.wait(60)).stdout == "before\nafter\n"


@case("wait() of no time takes what has come")
async def case_wait_of_no_time(make: World, box: AsyncSandbox) -> None:
    async with await box.start("read line; exit 3") as process:
        for nothing in (0, -1.0):
            with raises(WaitTimeout):
                await process.wait(nothing)
        await process.write("\n")

        async def has_ended() -> bool:
            try:
                return (await process.wait(0)).exit_code == 3
            except WaitTimeout:
                return False

        await until(make, has_ended)


@case("a result has what events saw before")
async def case_wait_after_events(box: AsyncSandbox) -> None:
    async with await box.start("echo out; echo err >&2; exit 1") as process:
        out, _, result = await collect(process)
        assert await process.wait(60) == result
    assert out == result.stdout_bytes


@case("a signal goes to the leader")
async def case_signal(box: AsyncSandbox) -> None:
    async with await box.start("trap 'echo got it; exit 5' USR1; echo ready; while :; do sleep 0.05; done") as process:
        async for event in process.events():
            if isinstance(event, Output) and event.data == b"ready\n":
                await process.signal(10)
        result = await process.wait(60)
    assert (result.exit_code, result.stdout) == (5, "ready\ngot it\n")
    async with await box.start(["sleep", "60"]) as process:
        await process.signal(15)
        result = await process.wait(60)
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, 15)


@case("signals that do not exist are refused")
async def case_bad_signal(box: AsyncSandbox) -> None:
    async with await box.start(["cat"]) as process:
        for number in (-1, 65, 1000):
            with raises(InvalidValue):
                await process.signal(number)
        await process.close_stdin()
        assert (await process.wait(60)).ok


@case("kill() ends the whole tree")
async def case_kill(box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(f"setsid sleep {mark} & sleep {mark} & echo on; wait") as process:
        async for event in process.events():
            if isinstance(event, Output):
                await process.kill()
        result = await process.wait(60)
    assert (result.outcome, result.signal) == (Outcome.SIGNALED, 9)
    assert not await runs(box, f"sleep {mark}")


@case("leaving the block ends the process and what it started")
async def case_close(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(f"setsid sleep {mark} & sleep {mark} & wait") as process:
        while await count(box, f"sleep {mark}") < 2:
            await make.pause(0.05)
    await ended(make, box, f"sleep {mark}")
    await process.close()
    await process.close()


@case("pid is the process's own inside, and ids are unique")
async def case_pid(box: AsyncSandbox) -> None:
    async with await box.start("echo $$; read x") as one, await box.start(["cat"]) as two:
        await one.write("\n")
        assert (await one.wait(60)).stdout == f"{one.pid}\n"
        assert one.id != two.id


@case("bytes that are not text, split anywhere, arrive as they are")
async def case_bytes(box: AsyncSandbox) -> None:
    async with await box.start(r"printf '\xe2\x82'; sleep 0.1; printf '\xac\0\xff' ") as process:
        out, _, result = await collect(process)
    assert out == result.stdout_bytes == b"\xe2\x82\xac\0\xff"


@case("twenty megabytes by events are whole; the result keeps head and tail")
async def case_large_output(make: World) -> None:
    box = await make(limits=Limits(output=1000))
    program = "import sys, hashlib; sys.stdout.buffer.write(hashlib.shake_256(b'seed').digest(20_000_000))"
    async with await box.start(["python3", "-c", program]) as process:
        digest, size = hashlib.sha256(), 0
        async for event in process.events():
            if isinstance(event, Output):
                digest.update(event.data)
                size += len(event.data)
        result = await process.wait(60)
    assert size == 20_000_000
    assert digest.digest() == hashlib.sha256(hashlib.shake_256(b"seed").digest(20_000_000)).digest()
    assert result.dropped_stdout == 20_000_000 - 1000


@case("a process whose output nobody reads waits; nothing is lost")
async def case_flow_control(make: World, box: AsyncSandbox) -> None:
    program = "import os\nfor n in range(400): os.write(1, b'x' * 100_000)\nopen('done', 'w').close()"
    async with await box.start(["python3", "-S", "-c", program]) as process:
        await make.pause(1.0)
        assert not await box.files.exists("done")
        out, _, _ = await collect(process)
    assert len(out) == 40_000_000
    assert await box.files.exists("done")


@case("input that is not read waits, and never keeps signals, output or kill() waiting", deadline=240.0)
async def case_unread_input(make: World, box: AsyncSandbox) -> None:
    written: list[int] = []
    async with await box.start("trap 'echo got it' USR1; echo on; while :; do sleep 0.05; done") as process:

        async def write() -> None:
            await process.write(b"x" * (16 * MiB))
            written.append(16 * MiB)

        async def kill() -> None:
            events = process.events()
            assert await anext(events) == Output("stdout", b"on\n")
            await make.pause(0.3)
            assert not written
            await process.signal(signal.SIGUSR1)
            assert await anext(events) == Output("stdout", b"got it\n")
            await process.kill()
            assert (await process.wait(60)).signal == 9

        await make.together(write(), kill())


@case("five megabytes through cat, written and read at the same time", deadline=240.0)
async def case_both_ways(make: World, box: AsyncSandbox) -> None:
    data = hashlib.shake_256(b"both").digest(5_000_000)
    async with await box.start(["cat"]) as process:

        async def write() -> bytes:
            for start in range(0, len(data), 70_000):
                await process.write(data[start : start + 70_000])
            await process.close_stdin()
            return b""

        async def read() -> bytes:
            return (await collect(process))[0]

        _, back = await make.together(write(), read())
    assert back == data


@case("processes do not disturb each other or commands")
async def case_side_by_side(make: World, box: AsyncSandbox) -> None:
    async def run(number: int) -> str:
        async with await box.start("read x; echo $x; sleep 0.1; exit $x") as process:
            await process.write(f"{number}\n")
            result = await process.wait(60)
            assert result.exit_code == number
            return result.stdout

    assert await make.together(*map(run, range(12))) == [f"{number}\n" for number in range(12)]


@case("env and cwd as for a command; a cwd that cannot be entered is an error")
async def case_env_and_cwd(box: AsyncSandbox) -> None:
    await box.files.mkdir("sub")
    async with await box.start("echo $A; pwd", env={"A": "1"}, cwd="sub") as process:
        assert (await process.wait(60)).stdout == f"1\n{box.image.workdir}/sub\n"
    with raises(FileAccessError, "no/such"):
        await box.start("true", cwd="no/such")


@case("arguments that cannot be used are refused")
async def case_bad_arguments(box: AsyncSandbox) -> None:
    for command in ("", "a\0b"):
        with raises(InvalidValue):
            await box.start(command)
    with raises(InvalidValue):
        await box.start([])
    with raises(InvalidValue):
        await box.start("true", env={"A=B": "1"})
    with raises(ValueError):
        await box.start("true", lifetime="for ever")  # type: ignore[arg-type]


@case("a program that is not there is status 127")
async def case_not_found(box: AsyncSandbox) -> None:
    async with await box.start(["no-such-program"]) as process:
        result = await process.wait(60)
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr


@case("a background child does not hold the result")
async def case_background_child(box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(f"sleep {mark} & echo on") as process:
        result = await process.wait(60)
    assert (result.stdout, result.left_running) == ("on\n", 1)


@case("writing to a process that has ended is no harm")
async def case_write_after_the_end(box: AsyncSandbox) -> None:
    async with await box.start(["true"]) as process:
        assert (await process.wait(60)).ok
        await process.write("too late")
        await process.close_stdin()
        await process.kill()


@case("a sandbox that ends takes its processes along, and those who wait are told")
async def case_stopped_sandbox(make: World) -> None:
    box = await make()
    process = await box.start(["sleep", "60"])

    async def wait() -> None:
        with raises(SandboxGone):
            await process.wait(60)

    async def stop() -> None:
        await make.pause(0.3)
        await box.stop()

    await make.together(wait(), stop())
    await process.close()
    with raises(SandboxGone):
        await box.start("true")


@case("writing to a process that does not read, and whose output nobody reads, is over with its timeout")
async def case_write_past_the_timeout(box: AsyncSandbox) -> None:
    async with await box.start(["yes"], timeout=1) as process:
        await process.write(b"x" * (4 << 20))  # more than may be under way; nobody else is there to read
        result = await process.wait(20)
    assert result.outcome is Outcome.TIMEOUT
