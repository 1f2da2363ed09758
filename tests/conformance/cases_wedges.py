"""What gets other shells stuck: ours answers, and says when it was restarted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, runs

from minisandbox.types import Outcome

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox, AsyncShell


async def check_usable(shell: AsyncShell, after: str = "") -> None:
    """It answers, with the right output for each command."""
    for word in ("one", "two"):
        result = await shell.run(f"echo {word}; echo e{word} >&2; bash -c 'exit 6' 2>/dev/null", timeout=60)
        assert (result.outcome, result.stdout, result.stderr) == (Outcome.EXITED, f"{word}\n", f"e{word}\n"), after
        assert result.exit_code == 6


@case("syntax errors and unclosed quotes, brackets and here-documents are a status; state is kept")
async def case_syntax(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("x=kept")
        for script in (
            "if",
            "echo 'unclosed",
            'echo "unclosed',
            "echo $(",
            "{ echo",
            "fi",
            "case",
            "f() {",
            ")",
            "`",
            "a=(",
        ):
            result = await shell.run(script, timeout=60)
            assert result.outcome is Outcome.EXITED, script
            assert result.exit_code != 0, script
            assert result.stderr, script
            assert not result.restarted, script
        assert (await shell.run("cat <<E\nno end", timeout=60)).stdout == "no end\n"
        assert (await shell.run("echo $x")).stdout == "kept\n"
        await check_usable(shell)


@case("exit is the command's status; the shell says that it was restarted, and keeps its directory alone")
async def case_exit(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("mkdir sub; cd sub; x='a b'; export y=2; f() { echo in f; }; shopt -s nullglob")
        result = await shell.run("echo before; exit 9; echo after", timeout=60)
        assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 9, "before\n")
        assert result.restarted
        assert result.cwd == box.image.workdir / "sub"
        state = await shell.run('pwd; echo "$x$y"; type -t f; shopt -q nullglob; echo $?; env | grep ^y=')
        assert state.stdout == f"{box.image.workdir}/sub\n\n1\n"
        assert not state.restarted
        await check_usable(shell)


@case("exec takes the shell's place and ends; the next command has a new one in the same directory")
async def case_exec(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("mkdir sub; cd sub")
        result = await shell.run("exec sh -c 'echo in sh; exit 4'", timeout=60)
        assert (result.outcome, result.stdout, result.exit_code) == (Outcome.EXITED, "in sh\n", 4)
        assert result.restarted
        assert (await shell.run("pwd")).stdout == f"{box.image.workdir}/sub\n"
        await check_usable(shell)


@case("set -e and set -u that fail are a status, and the next command runs")
async def case_set_e(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        result = await shell.run("set -e; echo before; false; echo after", timeout=60)
        assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 1, "before\n")
        assert (await shell.run("set +e; echo on", timeout=60)).stdout == "on\n"
        unset = await shell.run("set -u; echo $no_such_variable; echo after", timeout=60)
        assert unset.exit_code not in (0, None)
        assert "no_such_variable" in unset.stderr
        await shell.run("set +eu", timeout=60)
        await check_usable(shell)


@case("prompts, PROMPT_COMMAND, traps and set -x do not come between")
async def case_prompts(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("PS1='$(sleep 99)$ '; PS2='more '; PS4='+ '; PROMPT_COMMAND='echo prompt'; PS0=before")
        await check_usable(shell)
        await shell.run("trap 'echo err trap >/dev/null' ERR; trap 'true' DEBUG; trap 'true' RETURN")
        await check_usable(shell)
        traced = await shell.run("set -x; echo traced; { set +x; } 2>/dev/null", timeout=60)
        assert traced.stdout == "traced\n"
        await check_usable(shell)


@case("a trap of the command's own on EXIT runs, and the shell goes on")
async def case_exit_trap(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("trap 'echo bye' EXIT", timeout=60)
        result = await shell.run("exit 3", timeout=60)
        assert result.exit_code == 3
        await check_usable(shell)


@case("closing or redirecting its descriptors does what it says, and statuses arrive all the same")
async def case_descriptors(box: AsyncSandbox) -> None:
    for script in ("exec >&- 2>&-", "exec > /dev/null 2>&1", 'for fd in {0..63}; do eval "exec $fd>&-"; done'):
        async with await box.shell() as shell:
            assert (await shell.run(script, timeout=60)).outcome in (Outcome.EXITED, Outcome.SIGNALED), script
            result = await shell.run("mkdir -p sub; cd sub; echo unheard; (exit 6)", timeout=60)
            assert (result.outcome, result.exit_code) == (Outcome.EXITED, 6), script
            assert result.cwd == box.image.workdir / "sub", script
    async with await box.shell() as shell:
        await shell.run("exec > out; exec < /dev/zero", timeout=60)
        await shell.run("echo into the file", timeout=60)
    assert await box.files.read_text("out") == "into the file\n"


@case("a command that reads its stdin meets the end of it")
async def case_stdin(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        assert (await shell.run("cat; read x; echo $?; python3 -c 'input()' 2>&1 | tail -n 1", timeout=60)).stdout == (
            "1\nEOFError: EOF when reading a line\n"
        )
        await check_usable(shell)


@case("after a timeout the tree of the command is gone, partial output is there, and the shell answers")
async def case_timeout(box: AsyncSandbox) -> None:
    mark = a_while()
    async with await box.shell() as shell:
        await shell.run("mkdir sub; cd sub; x=kept")
        result = await shell.run(f"echo before; sleep {mark}; echo after", timeout=0.5)
        assert (result.outcome, result.stdout, result.exit_code) == (Outcome.TIMEOUT, "before\n", None)
        assert not await runs(box, f"sleep {mark}")
        assert (result.restarted, result.cwd) == (True, box.image.workdir / "sub")
        state = await shell.run("pwd; echo $x", timeout=60)
        assert state.stdout == f"{box.image.workdir}/sub\n\n"
        await check_usable(shell)


@case("commands that hang in every way end by their timeout; none is answered by another's answer", deadline=270.0)
async def case_hanging(box: AsyncSandbox) -> None:
    mark = a_while()
    scripts = (
        "while :; do :; done",
        "trap '' INT TERM; while :; do sleep 1; done",
        f"setsid sleep {mark} & wait",
        "cat < <(sleep 100)",
        "read x < <(sleep 100); echo late",
        "python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(300)'",
        "sleep 100 | sleep 100",
        "f() { while true; do f2; done; }; f2() { sleep 0.01; }; f",
        "exec sleep 100",
    )
    async with await box.shell() as shell:
        for script in scripts:
            started = time.monotonic()
            result = await shell.run(script, timeout=0.4)
            assert result.outcome is Outcome.TIMEOUT, script
            assert time.monotonic() - started < 60, script
            await check_usable(shell)
    assert not await runs(box, mark)


@case("a shell that is stopped from inside goes on, or times out")
async def case_stopped(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        result = await shell.run("kill -STOP $$; echo on", timeout=2)
        assert result.outcome in (Outcome.EXITED, Outcome.TIMEOUT)
        assert result.outcome is Outcome.TIMEOUT or result.stdout == "on\n"
        await check_usable(shell)


@case("a shell that is killed from inside is restarted")
async def case_killed(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run("mkdir sub; cd sub")
        result = await shell.run("kill -9 $$; sleep 5", timeout=60)
        assert (result.outcome, result.signal, result.restarted) == (Outcome.SIGNALED, 9, True)
        assert (await shell.run("pwd")).stdout == f"{box.image.workdir}/sub\n"
        await check_usable(shell)


@case("return, break and a readonly variable outside of their place are no harm")
async def case_odd_words(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        for script in (
            "return 3",
            "break",
            "continue 2",
            "readonly x=1; x=2",
            "shift 9",
            "local y",
            "unset PATH; PATH=/usr/bin:/bin",
        ):
            assert (await shell.run(script, timeout=60)).outcome is Outcome.EXITED, script
            await check_usable(shell)


@case("a directory that is removed under it, or cannot be entered, is no harm")
async def case_removed_directory(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run('mkdir gone; cd gone; rmdir "$PWD"', timeout=60)
        await check_usable(shell)
        await shell.run("exit 1", timeout=60)
        await check_usable(shell)
        assert (await shell.run("cd /usr && pwd")).stdout == "/usr\n"


@case("redefined builtins and functions do not come between")
async def case_redefined(box: AsyncSandbox) -> None:
    async with await box.shell() as shell:
        await shell.run(
            'eval() { builtin echo mine; }; read() { sleep 99; }; printf() { false; }; echo() { command echo "$@"; }'
        )
        await check_usable(shell)
        await shell.run('exit() { true; }; command() { builtin echo "${@:2}"; }; trap() { false; }; set() { false; }')
        await check_usable(shell)
