"""The stateful shell: state lasts as long as its bash, the directory longer, and no script wedges it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from tests.kernel.driving import Shell
from tests.waiting import PATIENCE, until

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits, Outcome

pytestmark = pytest.mark.kernel


@pytest.fixture
def shell(box: Sandbox) -> Iterator[Shell]:
    made = Shell(box)
    yield made
    made.close()


def works(shell: Shell) -> None:
    result = shell.run("echo fine; (exit 42)", timeout=PATIENCE)
    assert (result.stdout, result.exit_code, result.restarted) == ("fine\n", 42, False)


def kept(shell: Shell) -> None:
    """The state that :data:`STATE` made is there."""
    script = """
    echo $plain $exported ${array[1]} ${assoc[key]} "$quoted"; greet you; loud; pwd; env | grep ^exported
    shopt -q extglob && echo extglob; [[ $- == *f* ]] && echo noglob; echo ${unset_one-unset}
    """
    assert shell.run(script, timeout=PATIENCE).stdout.splitlines() == [
        "1 2 b v it's", "line", "hello you", "aloud", "/usr/bin", "exported=2", "extglob", "noglob", "unset",
    ]  # fmt: skip


STATE = r"""
plain=1; export exported=2; array=(a b); declare -A assoc=([key]=v); quoted=$'it\'s\nline'
greet() { echo hello $1; }
alias loud='echo aloud'
cd /usr/bin; shopt -s extglob; set -f; unset unset_one
"""


# --- state -----------------------------------------------------------------------------------------------------------


def test_state_is_kept(box: Sandbox) -> None:
    shell = Shell(box, env={"unset_one": "x"})
    with contextlib.closing(shell):
        result = shell.run(STATE)
        assert (result.cwd, result.restarted, result.exit_code) == (PurePosixPath("/usr/bin"), False, 0)
        kept(shell)


def test_what_a_result_says(shell: Shell) -> None:
    result = shell.run("echo out; echo err >&2; (exit 3)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert (result.outcome, result.command) == (Outcome.EXITED, "echo out; echo err >&2; (exit 3)")
    assert 0 < result.duration < PATIENCE
    assert shell.run("echo $?").stdout == "3\n"
    assert shell.run("echo $?").stdout == "0\n"
    burn = shell.run("for ((i = 0; i < 300000; i++)); do :; done")
    assert burn.usage.user > 0.05


def test_output_of_any_kind(shell: Shell) -> None:
    assert shell.run("printf 'no newline'").stdout == "no newline"
    assert shell.run("head -c 256000 /dev/zero | tr '\\0' '\\377'").stdout_bytes == b"\xff" * 256000
    assert shell.run("printf '\\0\\1\\303'").stdout_bytes == b"\0\1\xc3"
    assert shell.run("").exit_code == 0
    assert shell.run("echo 'größe \udcff\udcfe'").stdout_bytes == "größe ".encode() + b"\xff\xfe\n"


def test_output_is_kept_head_and_tail_of_each_run(box: Sandbox) -> None:
    with contextlib.closing(Shell(box, output=1000)) as shell:
        result = shell.run("yes | head -c 3000000; echo err >&2")
        assert (result.dropped_stdout, result.dropped_stderr, result.stderr) == (3_000_000 - 1000, 0, "err\n")
        works(shell)


def test_a_shell_starts_where_it_is_told_and_says_what_is_wrong(box: Sandbox) -> None:
    with contextlib.closing(Shell(box, cwd="/usr/lib")) as shell:
        assert shell.run("pwd").stdout == "/usr/lib\n"
    with pytest.raises(FileAccessError, match="cannot enter /no/such"):
        Shell(box, cwd="/no/such")
    with pytest.raises(FileAccessError, match=r"cannot start a shell in /.*not found"):
        Shell(box, env={"PATH": "/nowhere"})


@pytest.mark.parametrize(("script", "timeout"), [("a\0b", None), ("true", 0.0), ("true", float("nan"))])
def test_bad_arguments(shell: Shell, script: str, timeout: float | None) -> None:
    with pytest.raises(InvalidValue):
        shell.channel.run(script, timeout=timeout)
    works(shell)


# --- nothing wedges it -----------------------------------------------------------------------------------------------

SURVIVED = [
    "if", "echo 'open", 'echo "open', "echo `open", "echo $(", "f() {", "case x in", "((", "[[ -z", "echo ${x", ")",
    "}", "fi", ";;", "cat <<EOF\nhello", "cat <<'EOF'\n$x\n", "echo \\", "# comment", "\n\n", "!", "echo $((1/0))",
    "PS1='$(sleep 100)'; PS2=; PS4='x'; PROMPT_COMMAND='exit 9'", "trap 'echo d' DEBUG; trap - DEBUG",
    "trap 'echo e' ERR; false; trap - ERR", "trap 'echo bye' EXIT", "trap '' INT TERM HUP", "exec 3>&-; exec 200>&-",
    "cat", "read x", "python3", "python3 -i", "while read x; do echo $x; done", "bash", "sleep 100 & disown",
    "sleep 100 &\njobs", "wait", "sleep 0.1 & wait", "return 3", "break", "continue 2", "local x",
    "IFS=abcdefghijklmnopqrstuvwxyz0123456789",
    "eval() { :; }; printf() { :; }; read() { :; }; trap() { :; }; exit() { :; }",
    "alias builtin=false eval=false printf=false", "readonly REPLY IFS PATH _ PWD; readonly x=1; x=2",
    "unset PWD DIRSTACK BASH", "PATH=", "mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone", "TMOUT=1", "set -v; set +v",
    "set -f; set -C; set -a; set -k; set +k", "set -m", "set -o posix; echo 'open", "shopt -s extdebug",
    "kill -STOP $$", "kill -CONT $$", "kill -WINCH $$", "(kill -9 $BASHPID)", "exit() { :; }",
    "for i in $(seq 300); do sleep 0.5 & done", "ulimit -n 20", "umask 777", "echo 1\r\necho 2", "less /etc/passwd",
    "git log", "man ls", "stty -a", "LC_ALL=de_DE.ISO-8859-1", "set -- a b c; shift 7",
    "shopt -s nullglob dotglob globstar failglob; ls nothing*", "set -- 'x'; coproc cat", "exec 0<&-", "exec 2>&1",
    "hash -p /nowhere printf", "command_not_found_handle() { exit 3; }; nosuch", "set -T; set -E", "suspend",
    "logout", "history", "fc -l",
]  # fmt: skip


@pytest.mark.parametrize("script", SURVIVED)
def test_it_goes_on_as_it_was(shell: Shell, script: str) -> None:
    shell.run("mine=here")
    result = shell.run(script, timeout=PATIENCE)
    assert result.outcome is Outcome.EXITED
    assert result.duration < 10
    assert not result.restarted
    again = shell.run('\\builtin echo "$mine"', timeout=PATIENCE)
    assert "here" in again.stdout
    assert again.exit_code == 0


ENDED = [
    ("exit 3", 3), ("exit", 0), ("set -e; (exit 4); echo no", 4), ("set -u; echo $nope", 1), ("echo ${x?no}", 1),
    ("f() { g; }; g() { exit 5; }; f", 5), ("set -eu -o pipefail; false | cat", 1), ("exec 201>&-; (exit 6)", 6),
    ("set -t; (exit 7)", 7), ("enable -n printf; (exit 9)", 9), ("set -o posix; . /no/such", 1),
    ("kill -TERM $$; sleep 10", None),
    ("for fd in /proc/$$/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && exec {n}>&-; done; (exit 8)", None),
]  # fmt: skip


@pytest.mark.parametrize(("script", "code"), ENDED)
def test_bash_that_ends_is_restarted(shell: Shell, script: str, code: int | None) -> None:
    result = shell.run("cd /usr/lib; " + script, timeout=PATIENCE)
    assert result.restarted
    if code is not None:
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, code)
    assert "echo no" not in result.stdout
    again = shell.run("echo back", timeout=PATIENCE)
    assert (again.stdout, again.restarted) == ("back\n", False)


@pytest.mark.parametrize("script", ["exit 3", "no() { exit 3; }; no", "(exit 3) || exit 3", "set -e; (exit 3); :"])
def test_an_exit_keeps_the_directory_and_loses_the_rest(box: Sandbox, script: str) -> None:
    with contextlib.closing(Shell(box, env={"unset_one": "x"})) as shell:
        shell.run(STATE)
        result = shell.run(script)
        assert (result.restarted, result.exit_code, result.cwd) == (True, 3, PurePosixPath("/usr/bin"))
        show = "pwd; echo ${plain-gone} ${exported-gone} $unset_one; type -t greet; alias loud 2>/dev/null; echo $-"
        lines = shell.run(show).stdout.splitlines()
        assert lines[:2] == ["/usr/bin", "gone gone x"]
        assert len(lines) == 3
        assert not set("ef") & set(lines[2])
        works(shell)


def test_a_directory_that_is_entered_by_the_script_that_exits_survives(shell: Shell) -> None:
    assert shell.run("cd /usr; exit 3").cwd == PurePosixPath("/usr")
    assert shell.run("cd lib; set -u; echo $nope").cwd == PurePosixPath("/usr/lib")
    assert shell.run("pwd").stdout == "/usr/lib\n"
    result = shell.run("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; exit 4")
    assert (result.exit_code, result.restarted) == (4, True)
    assert shell.run("pwd").stdout == "/\n"


def test_exec_replaces_it_and_keeps_the_directory(shell: Shell) -> None:
    shell.run("cd /usr; x=1")
    result = shell.run("exec sleep 0.2")
    assert (result.exit_code, result.restarted, result.cwd) == (0, True, PurePosixPath("/usr"))
    assert shell.run("pwd; echo -$x-").stdout == "/usr\n--\n"
    assert shell.run("exec true").restarted
    result = shell.run("exec sh -c 'echo $0 there; exit 3'")
    assert (result.stdout, result.exit_code) == ("sh there\n", 3)
    works(shell)


def test_exec_of_redirections_stays(shell: Shell) -> None:
    shell.run("exec >/tmp/out")
    result = shell.run("echo text; echo err >&2")
    assert (result.stdout, result.stderr, result.restarted) == ("", "err\n", False)
    assert shell.run("cat /tmp/out >&2").stderr == "text\n"


@pytest.mark.parametrize("number", ["KILL", "SEGV", "STOP"])
def test_bash_may_be_killed_or_stopped(shell: Shell, number: str) -> None:
    result = shell.run(f"cd /usr; kill -{number} $$; echo after")
    assert result.stdout == ("after\n" if number == "STOP" else "")
    assert result.restarted is (number != "STOP")
    works(shell)


@pytest.mark.parametrize("script", ["set -n", "exec 201>/dev/null", "builtin() { :; }"])
def test_a_bash_that_reports_no_more_is_restarted_at_its_timeout(shell: Shell, script: str) -> None:
    result = shell.run(script, timeout=0.5)
    assert (result.outcome, result.restarted) == (Outcome.TIMEOUT, True)
    works(shell)


def test_a_readonly_and_poisoned_state(shell: Shell) -> None:
    shell.run("readonly x=1 IFS=; export BASH_ENV=/x; POSIXLY_CORRECT=1; set -o posix; set -T; shopt -s extdebug")
    assert shell.run("x=2; echo no").stdout == ""  # POSIX: it ends the shell
    assert shell.run("x=2; echo $x").stdout == "2\n"
    works(shell)


def test_false_reports_are_not_believed(shell: Shell) -> None:
    script = r"printf '\0%s\0/etc\0%s\0' 71 7 72 7 99 7 x y 5 >&201; printf '\0half' >&201; cd /usr; echo real"
    for _ in range(3):
        result = shell.run(script, timeout=PATIENCE)
        assert (result.stdout, result.exit_code, result.cwd) == ("real\n", 0, PurePosixPath("/usr"))
    assert shell.run("exit").restarted
    works(shell)


def test_a_script_of_a_megabyte(shell: Shell) -> None:
    result = shell.run("x='" + "y" * 1_000_000 + "'; echo ${#x}", timeout=PATIENCE)
    assert result.stdout == "1000000\n"
    result = shell.run("\n".join(f"v{n}={n}" for n in range(20_000)) + "\necho $v19999", timeout=PATIENCE)
    assert result.stdout == "19999\n"
    assert shell.run("echo ${#x}", timeout=PATIENCE).stdout == "1000000\n"


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "sleep 100; touch /tmp/bad", "while :; do :; done; touch /tmp/bad", "cat <(sleep 100); touch /tmp/bad",
        "x=$(sleep 100); touch /tmp/bad", "read x < <(sleep 100); touch /tmp/bad", "sleep 100 & wait; touch /tmp/bad",
        "trap '' INT TERM HUP; sleep 100; touch /tmp/bad", "f() { sleep 100; touch /tmp/bad; }; f; touch /tmp/bad",
        "sleep 100 | sleep 100; touch /tmp/bad", "(sleep 100; touch /tmp/bad); touch /tmp/bad",
        "for i in 1 2 3; do sleep 100; touch /tmp/bad; done", "set -m; sleep 100; touch /tmp/bad",
        "python3 -c 'import time; time.sleep(100)'", "yes >/dev/null", "trap 'sleep 50' DEBUG; true",
        "while sleep 0.01; do (sleep 100 &); done", "kill -STOP $BASHPID & wait", "(kill -STOP $BASHPID)",
        "bash -c 'sleep 100; touch /tmp/bad'; touch /tmp/bad", ": ${x:=$(sleep 100)}; touch /tmp/bad",
    ],
)  # fmt: skip
def test_a_timeout(shell: Shell, script: str) -> None:
    shell.run("mine=here; cd /usr")
    result = shell.run("echo before; at=here; " + script, timeout=0.3)
    assert result.outcome is Outcome.TIMEOUT
    assert result.stdout.startswith("before\n")
    assert (result.restarted, result.cwd) == (True, PurePosixPath("/usr"))
    assert 0.3 <= result.duration < PATIENCE
    again = shell.run("pwd; echo $mine; test -e /tmp/bad", timeout=PATIENCE)
    assert again.stdout == "/usr\n\n"
    assert again.exit_code == 1
    assert "sleep 100" not in shell.run("ps -eo args | grep -v grep", timeout=PATIENCE).stdout


def test_a_timeout_that_bash_would_not_answer(shell: Shell) -> None:
    shell.run("cd /usr")
    result = shell.run("trap '' TERM VTALRM; while :; do :; done", timeout=0.2)
    assert (result.outcome, result.restarted, result.cwd) == (Outcome.TIMEOUT, True, PurePosixPath("/usr"))
    result = shell.run("trap 'sleep 100' EXIT; sleep 100", timeout=0.2)
    assert (result.outcome, result.restarted) == (Outcome.TIMEOUT, True)
    result = shell.run("cd /usr/bin; exec sleep 100", timeout=0.2)
    assert (result.outcome, result.restarted, result.cwd) == (Outcome.TIMEOUT, True, PurePosixPath("/usr/bin"))
    works(shell)


def test_a_timeout_spares_what_earlier_runs_started(shell: Shell) -> None:
    shell.run("sleep 71 &\nsetsid -f sleep 72")
    assert shell.run("sleep 73 & sleep 74", timeout=0.2).outcome is Outcome.TIMEOUT
    alive = shell.run("ps -eo args").stdout
    assert ["sleep 7" + n in alive for n in "1234"] == [True, True, False, False]


def test_a_timeout_beside_an_earlier_run_that_makes_ever_more_orphans(shell: Shell) -> None:
    shell.run("(while :; do (sleep 0.05 &); done) &")
    result = shell.run("sleep 100", timeout=0.2)
    assert result.outcome is Outcome.TIMEOUT
    assert result.duration < PATIENCE
    assert shell.run("echo on", timeout=PATIENCE).stdout == "on\n"


def test_an_interrupt(shell: Shell) -> None:
    shell.run("x=1")
    number = shell.begin("echo before; sleep 100; echo after")
    late = shell.begin("echo late")
    waiting = shell.begin("echo never")
    until(lambda: "sleep 100" in shell.box.exec("ps -eo args").stdout.splitlines())
    shell.interrupt(waiting)
    shell.interrupt(number)
    result = shell.end(number)
    assert (result.outcome, result.signal, result.stdout) == (Outcome.SIGNALED, signal.SIGINT, "before\n")
    assert shell.end(late).stdout == "late\n"
    assert shell.end(waiting).signal == signal.SIGINT
    shell.interrupt(number)
    assert shell.run("echo $x").stdout == "\n"


def test_a_run_that_was_interrupted_before_its_turn_does_not_hold_the_next(shell: Shell) -> None:
    number = shell.channel.run("echo never", timeout=None)
    shell.channel.interrupt(number)
    assert shell.run("echo next").stdout == "next\n"  # all three arrive at once
    assert shell.end(number).signal == signal.SIGINT


def test_a_forgotten_run_is_not_the_next_ones_answer(shell: Shell) -> None:
    for _ in range(20):
        number = shell.begin("echo old; sleep 0.02")
        time.sleep(0.02)
        shell.interrupt(number)
        shell.channel.forget(number)
        assert shell.run("echo new").stdout == "new\n"


# --- background ------------------------------------------------------------------------------------------------------


def test_background_children_do_not_hold_a_run_and_write_into_a_later_one(shell: Shell) -> None:
    result = shell.run("(until [ -e /tmp/on ]; do sleep 0.05; done; echo late) &\necho now")
    assert (result.stdout, result.left_running >= 1) == ("now\n", True)
    assert shell.run("touch /tmp/on; wait; echo then").stdout == "late\nthen\n"


def test_background_children_of_a_bash_that_exits_live_on(shell: Shell) -> None:
    assert shell.run("sleep 75 & exit 3", timeout=PATIENCE).exit_code == 3
    assert "sleep 75" in shell.run("ps -eo args").stdout


def test_a_bash_that_dies_between_runs_is_restarted_and_the_next_run_says_so(shell: Shell) -> None:
    bash = shell.run("x=1; echo $$; (until [ -e /tmp/on ]; do sleep 0.05; done; kill -9 $$) &").stdout.strip()
    shell.box.files.write_text("/tmp/on", "")
    until(lambda: shell.box.exec(f"ps -o stat= -p {bash}").stdout.strip() in ("", "Z", "Zs"))
    result = shell.run("echo ${x-lost}")
    assert (result.stdout, result.restarted) == ("lost\n", True)
    works(shell)


def test_a_fork_bomb(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(processes=60)) as box, contextlib.closing(Shell(box)) as shell:
        counted = dict(box.info().enforced)["processes"].startswith("cgroup")  # a limit of setrlimit(2) counts nothing
        hit = ("processes",) if counted else ()
        result = shell.run("for i in $(seq 200); do sleep 100 & done; echo end", timeout=3)
        assert (result.outcome, result.limits_hit) == (Outcome.TIMEOUT, hit)
        result = shell.run("b() { b | b & }; b; sleep 100", timeout=1)
        assert (result.outcome, result.limits_hit) == (Outcome.TIMEOUT, hit)
        until(lambda: shell.run("echo here", timeout=PATIENCE).stdout == "here\n")
        shell.close()
        until(lambda: box.exec(["echo", "usable"], timeout=PATIENCE).ok)


def test_hanging_up_ends_everything_it_started(box: Sandbox) -> None:
    shell = Shell(box)
    shell.run("sleep 76 &\nsetsid -f sleep 77; exit")
    shell.close()
    until(lambda: "sleep 7" not in box.exec("ps -eo args").stdout)


def test_killing_everything_ends_the_supervisor_and_a_new_one_goes_on_in_the_same_place(shell: Shell) -> None:
    shell.run("cd /usr")
    result = shell.run("kill -9 -1; sleep 100", timeout=PATIENCE)
    assert (result.outcome, result.restarted) == (Outcome.SIGNALED, True)
    assert shell.run("pwd", timeout=PATIENCE).stdout == "/usr\n"
    works(shell)


def test_several_shells_and_commands_beside_them(box: Sandbox) -> None:
    shells = [Shell(box) for _ in range(4)]
    for number, shell in enumerate(shells):
        shell.run(f"x={number}")
    assert box.exec("echo beside").stdout == "beside\n"
    assert [shell.run("echo $x").stdout for shell in shells] == [f"{n}\n" for n in range(4)]
    for shell in shells:
        shell.close()


@pytest.mark.slow  # the launcher's own patience: 30 s
def test_a_bash_that_does_not_come_up_is_given_up(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        box.files.write_text("/tmp/bin/bash", "#!/bin/sh\nexec sleep 600\n")
        box.exec("chmod +x /tmp/bin/bash").check()
        with pytest.raises(FileAccessError, match="bash does not come up within 30 s"):
            box.shell(env={"PATH": "/tmp/bin:/usr/bin:/bin"})
        with box.shell() as shell:
            assert shell.run("pgrep -c sleep").stdout == "0\n"
