"""The stateful shell: what one command leaves is there for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, ended, raises, runs

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.types import Limits, Outcome, ShellResult

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("a command's streams, status and directory come back")
async def case_result(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        result = await shell.run("echo out; echo err >&2; (exit 3)")
        assert isinstance(result, ShellResult)
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        assert (result.outcome, result.restarted) == (Outcome.EXITED, False)
        assert result.cwd == box.image.workdir
        assert result.duration >= 0


@case("the working directory is kept")
async def case_directory(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        result = await shell.run("mkdir -p 'a b/c'; cd 'a b/c'")
        assert result.cwd == box.image.workdir / "a b/c"
        assert (await shell.run("pwd")).stdout == f"{box.image.workdir}/a b/c\n"
        assert (await shell.run("cd ..; pwd")).cwd == box.image.workdir / "a b"


@case("variables, exported and not, arrays, functions, options and aliases are kept")
async def case_state(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("x='a  b'; export y=2; list=(1 'two words'); f() { echo f of $1; }; shopt -s nullglob")
        await shell.run("shopt -s expand_aliases; alias hi='echo hello'; umask 027; set -o pipefail")
        result = await shell.run('echo "$x" $y "${list[1]}"; f me; echo *.none; umask; hi; false | true; echo $?')
        assert result.stdout == "a  b 2 two words\nf of me\n\n0027\nhello\n1\n"
        assert (await shell.run("env | grep ^y=")).stdout == "y=2\n"


@case("$? is the status of the command before")
async def case_last_status(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        assert (await shell.run("(exit 7)")).exit_code == 7
        assert (await shell.run("echo $?")).stdout == "7\n"


@case("scripts of many lines, here-documents and a script longer than an argument")
async def case_scripts(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        assert (
            await shell.run("cat <<'E'\nhéllo $x\nE\nfor i in 1 2\ndo\n  echo $i\ndone # end")
        ).stdout == "héllo $x\n1\n2\n"
        long = await shell.run("true\n" * 50_000 + "echo long")
        assert long.stdout == "long\n"
        assert (await shell.run("")).exit_code in (0, None)
        assert (await shell.run("# nothing\n")).ok


@case("output is bytes as they are, without a prompt, an echo or a mark of ours")
async def case_output(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        assert (await shell.run(r"printf 'a\0b\xff'; printf '\xe2\x82'")).stdout_bytes == b"a\0b\xff\xe2\x82"
        assert (await shell.run("printf 'no newline'")).stdout == "no newline"
        assert (await shell.run("true")).stdout_bytes == b""


@case("long output keeps head and tail and is counted; the next command's is its own")
async def case_long_output(make: World) -> None:
    box = await make(limits=Limits(output=1000))
    async with await box.shell() as shell:
        result = await shell.run("head -c 5000000 /dev/zero | tr '\\0' x; echo end", timeout=60)
        assert result.dropped_stdout == 5_000_004 - 1000
        assert result.stdout.endswith("xend\n")
        assert (await shell.run("echo next")).stdout == "next\n"


@case("two shells of a sandbox do not share state, and work at the same time")
async def case_two_shells(make: World, box: AsyncSandbox) -> None:
    async with await box.shell() as one, await box.shell() as two:
        await make.together(one.run("x=1; cd /; sleep 0.3"), two.run("x=2; sleep 0.3"))
        assert (await one.run("echo $x; pwd")).stdout == "1\n/\n"
        assert (await two.run("echo $x; pwd")).stdout == f"2\n{box.image.workdir}\n"


@case("it starts in the directory and with the variables that were asked for")
async def case_start(box: AsyncSandbox) -> None:
    await box.files.mkdir("sub")
    async with await box.shell(cwd="sub", env={"A": "given"}) as shell:
        assert (await shell.run("pwd; echo $A")).stdout == f"{box.image.workdir}/sub\ngiven\n"
    with raises(FileAccessError):
        async with await box.shell(cwd="no/such") as shell:
            await shell.run("true")


@case("a background child lives on between commands and does not hold a result")
async def case_background(box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.shell() as shell:
        result = await shell.run(f"sleep {mark} & echo on", timeout=60)
        assert (result.outcome, result.stdout) == (Outcome.EXITED, "on\n")
        assert await runs(box, f"sleep {mark}")
        assert (await shell.run("jobs | wc -l; kill $!; wait $! 2>/dev/null; echo $?", timeout=60)).stdout == "1\n143\n"


@case("closing the shell ends it and what it started; it can be closed again")
async def case_close(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.shell() as shell:
        await shell.run(f"setsid sleep {mark} >/dev/null 2>&1 &")
        assert await runs(box, f"sleep {mark}")
    await ended(make, box, f"sleep {mark}")
    await shell.close()


@case("scripts with a NUL byte and bad timeouts are refused, and the shell lives on")
async def case_bad_arguments(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("x=1")
        with raises(InvalidValue):
            await shell.run("echo a\0b")
        for timeout in (0, -1.0, float("nan")):
            with raises(InvalidValue):
                await shell.run("true", timeout=timeout)
        assert (await shell.run("echo $x")).stdout == "1\n"


@case("a sandbox that has ended is said")
async def case_stopped_sandbox(make: World) -> None:
    box = await make()
    shell = await box.shell()
    await box.stop()
    with raises(SandboxGone):
        await shell.run("true")
    await shell.close()
    with raises(SandboxGone):
        await box.shell()


@case("a closed shell stays closed, though its bash was killed before")
async def case_closed_after_a_kill(box: AsyncSandbox) -> None:
    shell = await box.shell()
    assert (await shell.run("kill -KILL $$")).restarted
    await shell.close()
    with raises(InvalidValue, "closed"):
        await shell.run(":")


@case("a hundred commands one after the other", deadline=240.0)
async def case_hundred(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("n=0")
        for number in range(1, 101):
            assert (await shell.run("n=$((n + 1)); echo $n")).stdout == f"{number}\n"
