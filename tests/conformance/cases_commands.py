"""Commands: how they are started, and how their end becomes a value."""

from __future__ import annotations

import os
import signal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tests.conformance.contract import case, raises

from minisandbox.errors import CommandFailed, FileAccessError, InvalidValue
from minisandbox.types import ExecResult, Outcome

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("a string is run by bash, which is no login shell and not interactive")
async def case_a_string_is_bash(box: AsyncSandbox) -> None:
    result = await box.exec("shopt -q login_shell; echo $?; [[ $- = *i* ]]; echo $?; echo ${BASH_VERSION:+bash}")
    assert result.stdout == "1\n1\nbash\n"
    assert result.ok
    assert result.check() is result


@case("a list is an argument vector that nothing expands")
async def case_a_list_is_arguments(box: AsyncSandbox) -> None:
    words = ["a b", "$HOME", "*", "", "~", "`id`", "-n", "new\nline", "q\"'"]
    result = await box.exec(["printf", "%s|", *words])
    assert result.stdout == "".join(f"{word}|" for word in words)


@case("a result names its command as it was given")
async def case_the_command_is_in_the_result(box: AsyncSandbox) -> None:
    assert (await box.exec("true")).command == "true"
    assert tuple((await box.exec(["true", "x"])).command) == ("true", "x")


@case("stdout and stderr stay apart, and a non-zero exit is a value")
async def case_streams_and_status(box: AsyncSandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert (result.outcome, result.signal, result.ok) == (Outcome.EXITED, None, False)
    assert result.fate == "exit status 3"


@case("every exit status from 0 to 255 arrives", deadline=240.0)
async def case_exit_statuses(make: World, box: AsyncSandbox) -> None:
    async def status(code: int) -> int | None:
        return (await box.exec(["bash", "-c", f"exit {code}"])).exit_code

    for start in range(0, 256, 16):
        codes = list(range(start, start + 16))
        assert await make.together(*map(status, codes)) == codes


@case("every signal that ends a command is a value with its number")
async def case_signals(make: World, box: AsyncSandbox) -> None:
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 24, 31, int(signal.SIGRTMIN), int(signal.SIGRTMAX)]

    program = (
        "import os, signal as s, sys; n = int(sys.argv[1]); n == 9 or s.signal(n, s.SIG_DFL); os.kill(os.getpid(), n)"
    )

    async def fate(number: int) -> ExecResult:
        return await box.exec(["python3", "-S", "-c", program, str(number)], timeout=60)

    for number, result in zip(numbers, await make.together(*map(fate, numbers)), strict=True):
        assert (result.outcome, result.signal, result.exit_code) == (Outcome.SIGNALED, number, None), number
    segfault = await fate(11)
    assert segfault.fate == "killed by SIGSEGV"


@case("check() raises with the whole result")
async def case_check(box: AsyncSandbox) -> None:
    with raises(CommandFailed, "exit status 3") as caught:
        (await box.exec("echo out; echo why >&2; exit 3")).check()
    assert (caught.value.result.exit_code, caught.value.result.stdout) == (3, "out\n")
    assert "why" in str(caught.value)


@case("a program that is not there is status 127, one that cannot be run 126; stderr names it")
async def case_not_runnable(box: AsyncSandbox) -> None:
    await box.files.write_text("plain", "echo no\n", mode=0o644)
    for program, code in (("no-such-program", 127), ("./no-such", 127), ("./plain", 126), ("/etc", 126)):
        result = await box.exec([program])
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, code), program
        assert program in result.stderr


@case("a script whose interpreter is missing is status 127")
async def case_missing_interpreter(box: AsyncSandbox) -> None:
    await box.files.write_text("script", "#!/no/such/interpreter\n", mode=0o755)
    assert (await box.exec(["./script"])).exit_code == 127


@case("programs are found on the PATH that the command gets, relative ones below its directory")
async def case_search_path(box: AsyncSandbox) -> None:
    await box.files.write_text("bin/tool", "#!/bin/sh\necho mine\n", mode=0o755)
    found = await box.exec(["tool"], env={"PATH": f"{box.image.workdir}/bin:/usr/bin:/bin"})
    assert found.stdout == "mine\n"
    assert (await box.exec(["tool"])).exit_code == 127
    assert (await box.exec(["./tool"], cwd="bin")).stdout == "mine\n"


@case("a command starts in the image's workdir; cwd is absolute or below it")
async def case_cwd(box: AsyncSandbox) -> None:
    await box.files.mkdir("sub/deeper")
    workdir = str(box.image.workdir)
    assert (await box.exec("pwd")).stdout == f"{workdir}\n"
    assert (await box.exec("pwd", cwd="sub")).stdout == f"{workdir}/sub\n"
    assert (await box.exec("pwd", cwd=PurePosixPath("sub/deeper"))).stdout == f"{workdir}/sub/deeper\n"
    assert (await box.exec("pwd", cwd="/usr/bin")).stdout == "/usr/bin\n"


@case("a cwd that cannot be entered is an error with path and number, not a fate")
async def case_bad_cwd(box: AsyncSandbox) -> None:
    await box.files.write_text("file", "")
    for path, number in (("no/such", 2), ("file", 20)):
        with raises(FileAccessError, "cannot enter") as caught:
            await box.exec("pwd", cwd=path)
        assert caught.value.errno == number
        assert path in caught.value.path


@case("cwd may have an odd name")
async def case_odd_cwd(box: AsyncSandbox) -> None:
    for name in ("with space", "new\nline", "-rf", "quote'\"", "caf\udce9", "日本"):
        await box.files.mkdir(name)
        result = await box.exec(["pwd"], cwd=name)
        assert result.stdout_bytes == f"{box.image.workdir}/{name}\n".encode("utf-8", "surrogateescape")


@case("a workdir that the command before removed is an error, and the sandbox lives on")
async def case_removed_cwd(box: AsyncSandbox) -> None:
    await box.exec('mkdir sub; cd sub; rmdir "$PWD"')
    with raises(FileAccessError):
        await box.exec("pwd", cwd="sub")
    assert (await box.exec("echo fine")).stdout == "fine\n"


@case("an argument may have 100,000 bytes; a longer one than the kernel takes is status 126")
async def case_long_argument(box: AsyncSandbox) -> None:
    assert (await box.exec(["printf", "%s", "x" * 100_000])).stdout == "x" * 100_000
    refused = await box.exec(["true", "x" * 200_000])
    assert refused.exit_code == 126
    assert "too long" in refused.stderr


@case("a script may be longer than an argument, and keeps its status and stdin")
async def case_long_script(box: AsyncSandbox) -> None:
    script = "true\n" * 60_000 + "read line; echo got $line; exit 5"
    result = await box.exec(script, stdin="input\n")
    assert (result.stdout, result.exit_code) == ("got input\n", 5)
    unicode = await box.exec("# ünïcode\n" * 20_000 + "echo ok")
    assert unicode.stdout == "ok\n"


@case("scripts may be of many lines, with here-documents, comments and Unicode")
async def case_script_shapes(box: AsyncSandbox) -> None:
    result = await box.exec("# a comment\ncat <<'E'\nhéllo $HOME\nE\nf() {\n  echo in f\n}\nf # trailing\n")
    assert result.stdout == "héllo $HOME\nin f\n"
    assert (await box.exec("if")).exit_code == 2


@case("arguments that are not UTF-8 arrive as the bytes that they are")
async def case_arguments_not_utf8(box: AsyncSandbox) -> None:
    assert (await box.exec(["printf", "%s", "caf\udce9"])).stdout_bytes == b"caf\xe9"
    assert (await box.exec("printf %s 'caf\udce9'")).stdout_bytes == b"caf\xe9"


@case("a command starts with default signals, an empty mask, umask 022, and descriptors 0 to 2 only")
async def case_fresh_start(box: AsyncSandbox) -> None:
    signals = (await box.exec(["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"])).stdout.split()
    standard = 0x7FFFFFFF  # of those above, glibc keeps two for itself and ignores them where it spawns
    assert [int(mask, 16) & standard for mask in signals[1::2]] == [0, 0]
    assert (await box.exec("umask")).stdout == "0022\n"
    assert (await box.exec(["ls", "/proc/self/fd"])).stdout.split() == ["0", "1", "2", "3"]  # 3 is ls's own


@case("a command leads a session of its own, without a terminal")
async def case_own_session(box: AsyncSandbox) -> None:
    result = await box.exec(
        "read -r _ _ _ _ _ session terminal _ < /proc/$$/stat; [ $session = $$ ]; echo $? $terminal"
    )
    assert result.stdout == "0 0\n"
    assert not (await box.exec("exec 3< /dev/tty", timeout=60)).ok


@case("duration and usage are those of the command")
async def case_usage(box: AsyncSandbox) -> None:
    program = "import time; x = bytearray(50_000_000); sum(range(2_000_000)); time.sleep(0.2)"
    result = await box.exec(["python3", "-S", "-c", program])
    assert 0.2 <= result.duration < 30
    assert 0.01 < result.usage.user + result.usage.system < 30
    assert result.usage.max_rss > 50_000_000


@case("fifty commands run at the same time in one sandbox", deadline=270.0)
async def case_fifty_at_once(make: World, box: AsyncSandbox) -> None:
    script = "n=$N; mkdir meet-$n; until set -- meet-*; [ $# = 50 ]; do sleep 0.5; done; echo $n; exit $n"

    async def meet(number: int) -> ExecResult:
        return await box.exec(script, env={"N": str(number)}, timeout=200)

    results = await make.together(*(meet(number) for number in range(50)))
    assert [(r.stdout, r.exit_code) for r in results] == [(f"{n}\n", n) for n in range(50)]


@case("two hundred commands one after the other", deadline=240.0)
async def case_many_in_sequence(box: AsyncSandbox) -> None:
    for number in range(200):
        assert (await box.exec(["echo", str(number)])).stdout == f"{number}\n"


@case("a command may kill everything that it sees; the sandbox lives on", needs="kernel")
async def case_kill_everything(box: AsyncSandbox) -> None:
    result = await box.exec("kill -9 -1", timeout=60)
    assert result.outcome in (Outcome.SIGNALED, Outcome.EXITED)
    assert (await box.exec("echo still here", timeout=60)).stdout == "still here\n"


@case("arguments that cannot be used are refused before anything runs")
async def case_bad_arguments(box: AsyncSandbox) -> None:
    for command in ("", [], [""], ["touch", "ran", "a\0b"], "touch ran; \0"):
        with raises(InvalidValue):
            await box.exec(command)
    for timeout in (0, -1.0, float("inf"), float("nan"), 1e10):
        with raises(InvalidValue):
            await box.exec("touch ran", timeout=timeout)
    for env in ({"A=B": "c"}, {"": "c"}, {"A": "\0"}, {"A\0": "b"}):
        with raises(InvalidValue):
            await box.exec("touch ran", env=env)
    assert not (await box.exec(["test", "-e", "ran"])).ok


@case("half of a surrogate pair, which JSON can spell, is refused, and said to be no fate of the command")
async def case_half_a_pair(box: AsyncSandbox) -> None:
    half = "a\ud800"
    for command in (f"touch ran; {half}", ["touch", "ran", half]):
        with raises(InvalidValue, "surrogate"):
            await box.exec(command)
        with raises(InvalidValue, "surrogate"):
            await box.start(command)
    for options in ({"cwd": half}, {"env": {"A": half}}, {"env": {half: "a"}}, {"stdin": half}):
        with raises(InvalidValue, "surrogate"):
            await box.exec("touch ran", **options)
    async with await box.shell() as shell:
        with raises(InvalidValue, "surrogate"):
            await shell.run(f"touch ran; {half}")
        assert (await shell.run("echo fine")).stdout == "fine\n"
    async with await box.start("cat") as process:
        with raises(InvalidValue, "surrogate"):
            await process.write(half)
    with raises(InvalidValue, "surrogate"):
        await box.files.write_text("ran", half)
    assert not (await box.exec(["test", "-e", "ran"])).ok
    assert (await box.exec(["printf", "%s", "\udcff"])).stdout_bytes == b"\xff"


@case("a command of bytes, or with something else in it, is refused")
async def case_bad_types(box: AsyncSandbox) -> None:
    for command in (b"true", ["a", 1], [b"true"], 5, None):
        with raises((InvalidValue, TypeError)):
            await box.exec(command)  # type: ignore[arg-type]


@case("variables of the host do not reach a command")
async def case_no_host_variables(box: AsyncSandbox) -> None:
    os.environ["SECRET_OF_THE_HOST"] = "s3cret"
    try:
        assert "s3cret" not in (await box.exec(["env"])).stdout
    finally:
        del os.environ["SECRET_OF_THE_HOST"]
