"""SWE-ReX's runtime over a sandbox, asked as SWE-ReX's own tests ask theirs, and where sandboxes have more to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.extras import needs_swerex
from tests.waiting import PATIENCE

from minisandbox.sandbox import AsyncSandbox
from minisandbox.types import ImageSpec

with contextlib.suppress(ImportError):  # then all of this is skipped
    from swerex.exceptions import (
        BashIncorrectSyntaxError,
        CommandTimeoutError,
        NonZeroExitCodeError,
        SessionDoesNotExistError,
        SessionExistsError,
        SwerexException,
    )
    from swerex.runtime.abstract import (
        BashAction,
        BashInterruptAction,
        BashObservation,
        CloseBashSessionRequest,
        Command,
        CreateBashSessionRequest,
        ReadFileRequest,
        UploadRequest,
        WriteFileRequest,
    )

    from minisandbox.integrations.swerex import MiniSandboxRuntime
    from minisandbox.integrations.swerex.program import PROMPT, Program

pytestmark = [pytest.mark.kernel, needs_swerex]


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 2 * PATIENCE))


@contextlib.asynccontextmanager
async def runtime(spec: ImageSpec) -> AsyncIterator[MiniSandboxRuntime]:
    """A runtime with a session called default."""
    async with await AsyncSandbox.create(spec) as box:
        made = MiniSandboxRuntime(box)
        await made.create_session(CreateBashSessionRequest())
        yield made
        await made.close()


async def bash(rex: MiniSandboxRuntime, command: str, **options: Any) -> BashObservation:
    return await rex.run_in_session(BashAction(command=command, **{"timeout": PATIENCE, **options}))


# --- commands by themselves ------------------------------------------------------------------------------------------

EXECUTED: list[tuple[str | list[str], bool, str]] = [
    (["echo", "hello world"], False, "hello world\n"),
    (["printf", "%s", "\nhello"], False, "\nhello"),
    ("echo 'a  b'; echo c", True, "a  b\nc\n"),
    ("printf '\\n \\nx'", True, "\n \nx"),
    (["echo $0 $1; :", "zero", "one"], True, "zero one\n"),
    ("", True, ""),
    ("\n", True, ""),
]


def test_execute(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            for command, shell, output in EXECUTED:
                done = await rex.execute(Command(command=command, shell=shell, check=True))
                assert (done.stdout, done.stderr, done.exit_code) == (output, "", 0)

    run(body())


def test_execute_ends_otherwise(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            assert (await rex.execute(Command(command=["false"]))).exit_code == 1
            assert (await rex.execute(Command(command=["no such program"]))).exit_code == 127
            assert (await rex.execute(Command(command="kill -9 $$", shell=True))).exit_code == -9
            with pytest.raises(NonZeroExitCodeError, match=r"because: .*exit code 3"):
                await rex.execute(Command(command="exit 3", shell=True, check=True, error_msg="because"))
            with pytest.raises(CommandTimeoutError):
                await rex.execute(Command(command=["sleep", "1000"], timeout=0.2))
            with pytest.raises(FileNotFoundError):
                await rex.execute(Command(command=["true"], cwd="/nowhere"))

    run(body())


def test_execute_takes_streams_variables_and_a_directory(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            script = ["bash", "-c", "echo out; echo err >&2; echo out"]
            apart = await rex.execute(Command(command=script))
            merged = await rex.execute(Command(command=script, merge_output_streams=True))
            assert (apart.stdout, apart.stderr) == ("out\nout\n", "err\n")
            assert (merged.stdout, merged.stderr) == ("out\nerr\nout\n", "")
            alone = await rex.execute(Command(command=["/usr/bin/env"], env={"A": "1", "B": "x y"}, cwd="/tmp"))
            assert sorted(alone.stdout.splitlines()) == ["A=1", "B=x y"]
            assert (await rex.execute(Command(command=["pwd"], cwd="/tmp"))).stdout == "/tmp\n"

    run(body())


# --- sessions --------------------------------------------------------------------------------------------------------


def test_sessions_have_names(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            with pytest.raises(SessionExistsError):
                await rex.create_session(CreateBashSessionRequest())
            with pytest.raises(SessionDoesNotExistError):
                await bash(rex, "true", session="other")
            for name in ("one", "two"):
                await rex.create_session(CreateBashSessionRequest(session=name))
            await asyncio.gather(bash(rex, "x=42", session="one"), bash(rex, "cd /tmp; x=24", session="two"))
            assert (await bash(rex, "echo $x $PWD", session="two")).output == "24 /tmp\n"
            assert (await bash(rex, "echo $x", session="one")).output == "42\n"
            assert (await bash(rex, "echo $x")).output == "\n"
            await rex.close_session(CloseBashSessionRequest(session="one"))
            for _ in range(2):
                with pytest.raises(SessionDoesNotExistError):
                    await rex.close_session(CloseBashSessionRequest(session="one"))

    run(body())


def test_files_are_sourced_at_the_start(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            await rex.write_file(WriteFileRequest(path="/etc/start.sh", content="export A=1; echo said; PS1=x"))
            request = CreateBashSessionRequest(session="s", startup_source=["/etc/start.sh"], startup_timeout=PATIENCE)
            assert (await rex.create_session(request)).output == "said\n"
            assert (await bash(rex, "echo $A", session="s")).output == "1\n"
            with pytest.raises(CommandTimeoutError):
                await bash(rex, "sleep 1000", session="s", timeout=0.5)
            assert (await bash(rex, "echo $A", session="s")).output == "1\n"  # a new bash has sourced it again
            missing = CreateBashSessionRequest(session="m", startup_source=["/none"], startup_timeout=PATIENCE)
            assert "No such file" in (await rex.create_session(missing)).output
            await rex.write_file(WriteFileRequest(path="/etc/late.sh", content="sleep 1000"))
            late = CreateBashSessionRequest(session="late", startup_source=["/etc/late.sh"], startup_timeout=0.2)
            with pytest.raises(CommandTimeoutError):
                await rex.create_session(late)
            with pytest.raises(SessionDoesNotExistError):
                await bash(rex, "true", session="late")

    run(body())


SAID = [
    ("echo ''", "\n"),
    ("printf '\\nx'", "\nx"),
    ("printf '\n\nx\n\n\n'", "\n\nx\n\n\n"),
    ("printf '  x'", "  x"),
    ("echo '\n \nhello\nworld'", "\n \nhello\nworld\n"),
    ("", ""),
    ("\n\n \n", ""),
    ("# nothing", ""),
    ("\n echo 'a' \n  \n \n echo 'b' \n\n", "a\nb\n"),
    ("cat <<EOF\n'a\nb'\nEOF\ncat <<EOF\nc\nEOF", "'a\nb'\nc\n"),
    ("for i in {1..3};\n do echo x;\n done", "x\nx\nx\n"),
    ("echo a; echo b >&2; echo c", "a\nb\nc\n"),
    ("echo a && \\\necho b", "a\nb\n"),
    ("[[ $env == $env ]]", ""),
    ("A=(); echo ${#A[@]}", "0\n"),
    ("(sleep 1000) &", ""),
    ("printf '\\e[31mred\\e[0m\\n'", "red\n"),
    ("echo SHELLPS1PREFIX", "SHELLPS1PREFIX\n"),
    ("echo \\", "\\\n"),
]


def test_what_commands_say(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            for command, output in SAID:
                seen = await bash(rex, command, check="raise")
                assert (seen.output, seen.exit_code) == (output, 0), command
            assert "never ended\n" in (await bash(rex, "cat <<EOF\nnever ended")).output  # and a warning
            assert (await bash(rex, "echo on")).output == "on\n"

    run(body())


def test_statuses_and_how_they_are_checked(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            for command, status in (("nosuchcommand", 127), ("false && true", 1), ("A=(); false", 1), ("(exit 7)", 7)):
                assert (await bash(rex, command, check="silent")).exit_code == status
                assert (await bash(rex, command, check="ignore")).exit_code is None
                with pytest.raises(NonZeroExitCodeError, match="because"):
                    await bash(rex, command, check="raise", error_msg="because")
            assert (await bash(rex, "echo $?", check="raise")).output == "7\n"
            assert (await bash(rex, "false || true", check="raise")).exit_code == 0
            for broken in ("(a", "a='", "for"):
                with pytest.raises(BashIncorrectSyntaxError) as caught:
                    await bash(rex, broken)
                assert caught.value.extra_info["bash_stdout"] == ""
                assert "syntax error" in caught.value.extra_info["bash_stderr"] or "EOF" in str(caught.value)

    run(body())


def test_a_session_outlives_its_bash(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            await bash(rex, "cd /tmp; export A=1")
            assert (await bash(rex, "echo bye >&2; exit 4", check="silent")).exit_code == 4
            assert (await bash(rex, "echo ${A-lost} $PWD >&2")).output == "lost /tmp\n"

    run(body())


def test_expected_text_is_looked_for_in_what_was_said(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            seen = await bash(rex, "echo one; echo two; echo three", expect=["nothing", "t[w]o"])
            assert (seen.output, seen.expect_string, seen.exit_code) == ("one\n", "t[w]o", 0)

    run(body())


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_timeout_ends_the_command_and_keeps_the_session(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            await bash(rex, "A=1; cd /tmp")
            with pytest.raises(CommandTimeoutError, match="sleep 1000"):
                await bash(rex, "echo begun; sleep 1000", timeout=0.5)
            interrupted = await rex.run_in_session(BashInterruptAction())
            assert (interrupted.output, interrupted.exit_code) == ("begun", 0)
            assert (await rex.run_in_session(BashInterruptAction())).output == ""
            assert (await bash(rex, "echo ${A-lost} $PWD")).output == "lost /tmp\n"
            assert (await rex.sandbox.exec(["pgrep", "sleep"])).exit_code == 1

    run(body())


def test_another_task_can_interrupt(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            waiting = asyncio.create_task(bash(rex, "touch /tmp/begun; sleep 1000", check="silent"))
            while not await rex.sandbox.files.exists("/tmp/begun"):
                await asyncio.sleep(0.02)
            await rex.run_in_session(BashInterruptAction())
            assert (await waiting).exit_code == 130
            assert (await bash(rex, "echo on")).output == "on\n"

    run(body())


def test_it_works_from_one_event_loop_after_another(spec: ImageSpec) -> None:
    """SWE-agent runs each request in a loop of its own."""
    box = asyncio.run(AsyncSandbox.create(spec))
    rex = MiniSandboxRuntime(box)
    asyncio.run(rex.create_session(CreateBashSessionRequest()))
    asyncio.run(bash(rex, "cd /tmp"))
    with pytest.raises(CommandTimeoutError):
        asyncio.run(bash(rex, "sleep 1000", timeout=0.2))
    asyncio.run(rex.run_in_session(BashInterruptAction()))
    assert asyncio.run(bash(rex, "pwd")).output == "/tmp\n"
    asyncio.run(bash(rex, "cat", is_interactive_command=True, expect=["^"]))
    assert asyncio.run(bash(rex, "echoed", is_interactive_command=True, expect=["(?m)^echoed$"])).expect_string
    asyncio.run(rex.close())
    asyncio.run(box.stop())
    assert not asyncio.run(rex.is_alive())


# --- programs that are talked to -------------------------------------------------------------------------------------

PYTHON = "python3 -q"


def test_talking_to_a_program(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            await bash(rex, "export A=7; cd /tmp; f() { echo f; }; export -f f")
            for _ in range(2):
                begun = await bash(rex, PYTHON, is_interactive_command=True, expect=[">>> "])
                assert begun.expect_string == ">>> "
                code = "import os; print(int(os.environ['A']) * 6, os.getcwd())"
                told = await bash(rex, code, is_interactive_command=True, expect=[">>> "])
                assert told.output.endswith("42 /tmp")
                gone = await bash(rex, "quit()\n", is_interactive_quit=True, check="raise")
                assert gone.exit_code == 0
                assert (await bash(rex, "echo again; echo $A")).output == "again\n7\n"

    run(body())


def test_a_program_that_says_something_else(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            with pytest.raises(CommandTimeoutError):
                await bash(rex, PYTHON, is_interactive_command=True, expect=["NEVER SAID"], timeout=0.3)
            ended = await rex.run_in_session(BashInterruptAction(timeout=0.3, n_retry=1))
            assert ended.exit_code == 0
            assert (await bash(rex, "echo on")).output == "on\n"

    run(body())


@pytest.mark.slow
def test_a_program_that_prints_without_end_leaves_time_for_others(spec: ImageSpec) -> None:
    """All that it had printed was searched again for each piece."""

    async def body() -> None:
        async with await AsyncSandbox.create(spec) as box, await box.shell() as shell:
            program = await Program.start(box, "yes " + "y" * 200, shell)
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            other = asyncio.create_task(count())
            with pytest.raises(TimeoutError):
                await program.expect(["NEVER SAID"], 2)
            other.cancel()
            assert turns > 200
            async with asyncio.timeout(PATIENCE):
                while len(program._unread) < 1 << 20:  # how soon depends on the machine
                    with pytest.raises(TimeoutError):
                        await program.expect(["NEVER SAID"], 1)
            with pytest.raises(TimeoutError):
                await program.expect(["NEVER SAID"], 1)
            assert len(program._unread) == 1 << 20
            await program.write("\x03")
            assert (await program.expect(["NEVER SAID"], PATIENCE))[1] == PROMPT
            await program.close()

    run(body())


def test_interrupting_a_program(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            await bash(rex, PYTHON, is_interactive_command=True, expect=[">>> "])
            with pytest.raises(CommandTimeoutError):
                await bash(rex, "while True: pass\n", is_interactive_command=True, expect=[">>> "], timeout=0.5)
            stopped = await rex.run_in_session(BashInterruptAction(expect=[">>> "], timeout=PATIENCE))
            assert "KeyboardInterrupt" in stopped.output
            await bash(rex, "quit()", is_interactive_quit=True)
            assert (await bash(rex, "echo on")).output == "on\n"

    run(body())


# --- files -----------------------------------------------------------------------------------------------------------


def test_files(spec: ImageSpec, tmp_path: Path) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            content = "é\n" * 500_000
            await rex.write_file(WriteFileRequest(path="/new/below/x.txt", content=content))
            assert (await rex.read_file(ReadFileRequest(path="/new/below/x.txt"))).content == content
            await rex.write_file(WriteFileRequest(path="/crlf", content="a\r\nb"))
            assert (await rex.read_file(ReadFileRequest(path="/crlf"))).content == "a\nb"  # as Path.read_text has it
            for path in ("/none", "none.txt"):
                with pytest.raises(FileNotFoundError, match="none"):
                    await rex.read_file(ReadFileRequest(path=path))
            with pytest.raises(IsADirectoryError):
                await rex.read_file(ReadFileRequest(path="/tmp"))
            await rex.execute(Command(command="printf '\\351' > /latin", shell=True))
            latin = ReadFileRequest(path="/latin", encoding="latin-1")
            assert (await rex.read_file(latin)).content == "é"
            with pytest.raises(UnicodeDecodeError):
                await rex.read_file(ReadFileRequest(path="/latin"))
            assert (await rex.read_file(ReadFileRequest(path="/latin", errors="replace"))).content == "\ufffd"

    run(body())


def test_upload(spec: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "tree" / "bin").mkdir(parents=True)
    (tmp_path / "tree" / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "tree" / "bin" / "tool").chmod(0o755)

    async def body() -> None:
        async with runtime(spec) as rex:
            await rex.upload(UploadRequest(source_path=str(tmp_path / "tree"), target_path="/opt/tools/tree"))
            assert (await bash(rex, "/opt/tools/tree/bin/tool", check="raise")).output == "tool\n"
            one = str(tmp_path / "tree" / "bin" / "tool")
            await rex.upload(UploadRequest(source_path=one, target_path="/opt/renamed"))
            await rex.upload(UploadRequest(source_path=one, target_path="/tmp"))
            assert (await bash(rex, "/opt/renamed; /tmp/tool", check="raise")).output == "tool\ntool\n"
            with pytest.raises(FileNotFoundError):
                await rex.upload(UploadRequest(source_path=str(tmp_path / "none"), target_path="/x"))

    run(body())


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_sandbox_that_has_ended(spec: ImageSpec) -> None:
    async def body() -> None:
        async with runtime(spec) as rex:
            assert await rex.is_alive()
            await rex.sandbox.stop()
            dead = await rex.is_alive()
            assert not dead
            assert rex.sandbox.id in dead.message
            for asked in (
                bash(rex, "true"),
                rex.execute(Command(command=["true"])),
                rex.read_file(ReadFileRequest(path="/x")),
            ):
                with pytest.raises(SwerexException, match="stopped"):
                    await asked

    run(body())
