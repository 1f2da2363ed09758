"""Processes on a pty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, ended, raises, runs, until

from minisandbox.errors import InvalidValue
from minisandbox.types import Output, Terminal

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncProcess, AsyncSandbox


async def read_until(process: AsyncProcess, words: bytes) -> bytes:
    """Read on until ``words`` have been printed."""
    seen = b""
    async for event in process.events():
        assert isinstance(event, Output), f"ended after {seen!r}"
        assert event.stream == "stdout"
        seen += event.data
        if words in seen:
            break
    return seen


@case("the three standard descriptors are the terminal, which controls the process", needs="terminal")
async def case_is_a_terminal(box: AsyncSandbox) -> None:
    script = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty; echo err >&2; echo here > /dev/tty"
    async with await box.start(script, pty=Terminal()) as process:
        result = await process.wait(60)
    assert result.stdout == "tty\r\nerr\r\nhere\r\n"
    assert result.stderr == ""


@case("it has the size that was asked for, and a new one when resized", needs="terminal")
async def case_size(box: AsyncSandbox) -> None:
    script = "trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.05; done"
    async with await box.start(script, pty=Terminal(31, 99)) as process:
        assert b"31 99" in await read_until(process, b"99")
        await process.resize(Terminal(50, 160))
        assert b"50 160\r\n" in (await process.wait(60)).stdout_bytes


@case("^C interrupts, ^D ends the input", needs="terminal")
async def case_control_characters(box: AsyncSandbox) -> None:
    async with await box.start("trap 'echo caught; exit 3' INT; echo on; sleep 60 & wait", pty=Terminal()) as process:
        await read_until(process, b"on")
        await process.write(b"\x03")
        result = await process.wait(60)
    assert result.exit_code == 3
    assert "caught" in result.stdout
    async with await box.start(["cat"], pty=Terminal()) as process:
        await process.write("line\n")
        await read_until(process, b"line\r\nline\r\n")
        await process.write(b"\x04")
        assert (await process.wait(60)).ok


@case("closing stdin is ^D on a terminal", needs="terminal")
async def case_close_stdin(box: AsyncSandbox) -> None:
    async with await box.start("cat; echo end", pty=Terminal()) as process:
        await process.write("line\n")
        await process.close_stdin()
        result = await process.wait(60)
    assert result.stdout.endswith("end\r\n")


@case("a question on /dev/tty can be answered", needs="terminal")
async def case_password(box: AsyncSandbox) -> None:
    program = "import getpass; print('got', getpass.getpass('Password: '))"
    async with await box.start(["python3", "-c", program], pty=Terminal()) as process:
        assert b"secret" not in await read_until(process, b"Password: ")
        await process.write("secret\n")
        result = await process.wait(60)
    assert result.stdout.endswith("got secret\r\n")


@case("an interactive bash with job control can be talked to", needs="terminal")
async def case_interactive_shell(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(["bash", "--norc", "-i"], pty=Terminal(), env={"PS1": "ready> "}) as process:
        await read_until(process, b"ready> ")
        await process.write(f"sleep {mark}\n")
        await until(make, lambda: runs(box, f"sleep {mark}"))
        await process.write("\x1a")
        await read_until(process, b"ready> ")
        # until it has noticed the death, bash calls the job stopped, and does not exit because of it
        await process.write("jobs; kill -9 %1; disown %1; echo $((6 * 7))-\n")
        await read_until(process, b"42-")
        await process.write("exit 5\n")
        assert (await process.wait(60)).exit_code == 5


@case("closing the handle hangs up and ends everything on the terminal", needs="terminal")
async def case_close(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(f"trap '' HUP; sleep {mark}", pty=Terminal()):

        async def started() -> bool:
            return await runs(box, f"sleep {mark}")

        await until(make, started)
    await ended(make, box, f"sleep {mark}")


@case("what is printed last is there, also when a background child holds the terminal", needs="terminal")
async def case_last_words(box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.start(f"sleep {mark} & seq 5000; echo end", pty=Terminal()) as process:
        result = await process.wait(60)
    assert result.stdout.endswith("5000\r\nend\r\n")
    assert result.stdout.startswith("1\r\n2\r\n")


@case("sizes that no terminal has are refused", needs="terminal")
async def case_bad_size(box: AsyncSandbox) -> None:
    for rows, columns in ((0, 80), (24, -1), (24, 1 << 20)):
        with raises(InvalidValue):
            Terminal(rows, columns)
    async with await box.start(["cat"]) as process:
        with raises(InvalidValue):
            await process.resize(Terminal())
