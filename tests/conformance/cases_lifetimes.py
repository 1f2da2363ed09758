"""Processes that live as long as the sandbox: released, attached to again, their results kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, ended, raises, runs, until

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.types import Limits, Outcome, Output, Terminal

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("it outlives the handle that started it, is listed, and can be attached to by its id", needs="attach")
async def case_attach_again(box: AsyncSandbox) -> None:
    async with await box.start("read x; echo got $x; exit 4", lifetime="sandbox") as process:
        assert process.id in await box.processes()
    assert process.id in await box.processes()
    async with await box.process(process.id) as again:
        assert (again.id, again.pid) == (process.id, process.pid)
        await again.write("input\n")
        result = await again.wait(60)
    assert (result.exit_code, result.stdout) == (4, "got input\n")


@case("one handle holds it at a time; another one is refused until that is closed", needs="attach")
async def case_one_holder(box: AsyncSandbox) -> None:
    process = await box.start("read x; echo got $x", lifetime="sandbox")
    with raises(InvalidValue, "another handle"):
        await box.process(process.id)
    await process.close()
    async with await box.process(process.id) as again:
        with raises(InvalidValue, "another handle"):
            await box.process(process.id)
        await again.write("input\n")
        assert (await again.wait(60)).stdout == "got input\n"


@case("a process with the handle's lifetime is not among them", needs="attach")
async def case_only_those(box: AsyncSandbox) -> None:
    async with await box.start(["cat"]) as process:
        assert process.id not in await box.processes()
        with raises(NotFound):
            await box.process(process.id)


@case("an id that is nobody's is NotFound", needs="attach")
async def case_unknown(box: AsyncSandbox) -> None:
    assert await box.processes() == ()
    for name in ("no-such-process", "", "../x", "a/b"):
        with raises(NotFound):
            await box.process(name)


@case("output of a process without a handle is kept, and delivered to the next holder", needs="attach")
async def case_kept_output(make: World, box: AsyncSandbox) -> None:
    process = await box.start("echo one; sleep 0.3; echo two; touch two; read x; echo three", lifetime="sandbox")
    await process.close()

    async def printed() -> bool:
        return await box.files.exists("two")

    await until(make, printed)
    async with await box.process(process.id) as again:
        await again.write("\n")
        seen = b"".join([event.data async for event in again.events() if isinstance(event, Output)])
        result = await again.wait(60)
    assert seen.replace(b"one\n", b"", 1) == b"two\nthree\n"
    assert result.exit_code == 0


@case("kept output is bounded, and what was dropped is counted", needs="attach")
async def case_bounded_output(make: World) -> None:
    box = await make(limits=Limits(output=1000))
    process = await box.start("read x; head -c 5000000 /dev/zero; touch done; read x", lifetime="sandbox")
    await process.write("\n")
    await process.close()

    async def done() -> bool:
        return await box.files.exists("done")

    await until(make, done)
    async with await box.process(process.id) as again:
        await again.close_stdin()
        result = await again.wait(60)
    assert result.dropped_stdout >= 5_000_000 - 1000 - (1 << 20)
    assert len(result.stdout_bytes) < 1200


@case("a result is kept until somebody has waited for it", needs="attach")
async def case_kept_result(make: World, box: AsyncSandbox) -> None:
    process = await box.start("echo last words; exit 9", lifetime="sandbox")
    await process.close()
    await make.pause(0.5)
    async with await box.process(process.id) as again:
        result = await again.wait(60)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 9)

    async def forgotten() -> bool:
        return process.id not in await box.processes()

    await until(make, forgotten)


@case("kill() ends it, whoever started it", needs="attach")
async def case_kill(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    process = await box.start(f"setsid sleep {mark} & sleep {mark}", lifetime="sandbox")
    await process.close()
    assert await runs(box, f"sleep {mark}")
    async with await box.process(process.id) as again:
        await again.kill()
        assert (await again.wait(60)).signal == 9
    await ended(make, box, f"sleep {mark}")


@case("a terminal can be released and attached to again", needs=("terminal", "attach"))
async def case_terminal(box: AsyncSandbox) -> None:
    process = await box.start("read x; echo got $x; stty size", pty=Terminal(30, 100), lifetime="sandbox")
    await process.close()
    async with await box.process(process.id) as again:
        await again.resize(Terminal(40, 120))
        await again.write("line\n")
        result = await again.wait(60)
    assert "got line\r\n40 120\r\n" in result.stdout


@case("several of them live side by side", needs="attach")
async def case_several(box: AsyncSandbox) -> None:
    ids = []
    for number in range(4):
        process = await box.start(f"read x; exit {number}", lifetime="sandbox")
        await process.close()
        ids.append(process.id)
    assert set(ids) == set(await box.processes())
    for number, name in enumerate(ids):
        async with await box.process(name) as process:
            await process.write("\n")
            assert (await process.wait(60)).exit_code == number
