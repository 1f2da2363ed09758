"""The controller's half of processes and shells: bytes in, values out, wherever the bytes are cut."""

from __future__ import annotations

import signal
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import FileAccessError, InvalidValue, NotFound, SandboxGone
from minisandbox.launch.jobs import frames
from minisandbox.launch.jobs.frames import STDIN_CREDIT
from minisandbox.sandbox.protocol.channels import Lifetime, ProcessChannel, ShellChannel
from minisandbox.sandbox.protocol.wire import ExecCall, environment_for
from minisandbox.types import ExecResult, Outcome, Output, ShellResult, Terminal

EXIT: frames.Header = {
    "event": "exit",
    "status": 3 << 8,
    "timed_out": False,
    "duration": 1.5,
    "usage": [0.1, 0.2, 300],
    "left_running": 2,
    "dropped": [5, 0],
    "stdout_size": 0,
}
STARTED: frames.Header = {"event": "started", "pid": 7, "dropped": [0, 0], "credit": STDIN_CREDIT}
ATTACHED: frames.Header = {**STARTED, "command": ["cat", "-u"], "pty": False, "closed": False, "state": "running"}


def process(
    *, pty: Terminal | None = None, lifetime: Lifetime = "handle", output: int = 1000, user: str | int | None = None
) -> ProcessChannel:
    return ProcessChannel(
        "cmd", id="p", env={"A": "b"}, cwd="/", timeout=None, user=user, pty=pty, lifetime=lifetime, output=output
    )


def shell(output: int = 1000) -> ShellChannel:
    return ShellChannel(env={}, cwd="/start", user=None, output=output)


def said(data: bytes) -> list[tuple[frames.Header, bytes]]:
    return list(frames.Decoder().feed(data))


def output(stream: int, data: bytes) -> bytes:
    return frames.encode({"event": "output", "stream": stream}, data)


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "env"),
    [("x" * 9_000_000, {}), (["echo", "\U0001f600" * 800_000], {}), ("true", {"A": "\u00e4" * 1_500_000})],
)
def test_what_is_too_large_to_be_sent_is_refused(command: str | list[str], env: dict[str, str]) -> None:
    with pytest.raises(InvalidValue, match=r"bytes.*8323072 at most.*write it to a file inside"):
        ExecCall(command, env=env, cwd="/", timeout=None, stdin=None, output=1000)


def test_what_is_just_small_enough_is_sent_whole() -> None:
    call = ExecCall("x" * 8_300_000, env={}, cwd="/" + "d" * 4000, timeout=1.0, stdin=b"", output=1000, user="somebody")
    ((header, _),) = said(b"".join(call.outgoing()))
    assert len(str(header["script"])) == 8_300_000


# --- processes -------------------------------------------------------------------------------------------------------


def test_the_request_says_what_is_to_be_started() -> None:
    ((header, _),) = said(process(pty=Terminal(3, 4), lifetime="sandbox", user="ann").start())
    assert header == {
        "verb": "start", "script": "cmd", "env": [["A", "b"]], "cwd": "/", "timeout": None, "user": "ann",
        "output": 1000, "pty": [3, 4], "lifetime": "sandbox", "id": "p",
    }  # fmt: skip


STREAM = (
    frames.encode(STARTED)
    + output(0, b"out\xff")
    + output(1, b"err")
    + frames.encode({"event": "credit", "size": 1})
    + output(0, b"more")
    + frames.encode(EXIT)
)


def test_a_process_may_come_in_any_two_pieces() -> None:
    for cut in range(len(STREAM)):
        takes_a_process_in_two_pieces(cut)


def takes_a_process_in_two_pieces(cut: int) -> None:
    channel = process()
    channel.write(b"x")
    channel.feed(STREAM[:cut])
    channel.feed(STREAM[cut:])
    assert (channel.pid, channel.started, channel.done) == (7, True, True)
    *pieces, result = channel.events
    assert [(piece.stream, piece.data) for piece in pieces if isinstance(piece, Output)] == [
        ("stdout", b"out\xff"), ("stderr", b"err"), ("stdout", b"more"),
    ]  # fmt: skip
    assert isinstance(result, ExecResult)
    assert result is channel.result
    assert (result.stdout_bytes, result.stderr_bytes, result.dropped_stdout) == (b"out\xffmore", b"err", 5)
    assert (result.outcome, result.exit_code, result.command) == (Outcome.EXITED, 3, "cmd")
    assert (result.duration, result.usage.max_rss, result.left_running) == (1.5, 300, 2)


@given(st.lists(st.integers(1, 40)))
def test_a_process_may_come_in_any_pieces(sizes: list[int]) -> None:
    channel, rest = process(), STREAM
    for size in sizes:
        channel.feed(rest[:size])
        rest = rest[size:]
    channel.feed(rest)
    assert channel.result is not None
    assert channel.result.stdout_bytes == b"out\xffmore"


def test_what_a_handle_saw_is_kept_head_and_tail() -> None:
    channel = process(output=10)
    channel.feed(frames.encode(STARTED) + output(0, b"0123456789") + output(0, b"abcdefghij") + frames.encode(EXIT))
    assert channel.result is not None
    assert channel.result.stdout_bytes == b"01234\n[... 10 bytes dropped ...]\nfghij"
    assert channel.result.dropped_stdout == 15


def test_input_is_sent_as_far_as_the_credit_goes() -> None:
    channel = process()
    channel.write(bytes(STDIN_CREDIT + 100_000))
    channel.close_stdin()
    first = said(channel.outgoing())
    assert sum(len(data) for _, data in first) == STDIN_CREDIT
    assert all(header["verb"] == "stdin" for header, _ in first)
    assert channel.outgoing() == b""
    channel.signal(signal.SIGINT)
    channel.kill()
    assert [header["verb"] for header, _ in said(channel.outgoing())] == ["signal", "kill"]
    assert channel.unsent == 100_000
    channel.feed(frames.encode({"event": "credit", "size": 60_000}))
    assert sum(len(data) for _, data in said(channel.outgoing())) == 60_000
    channel.feed(frames.encode({"event": "credit", "size": 60_000}))
    last = said(channel.outgoing())
    assert [(header["verb"], len(data)) for header, data in last] == [("stdin", 40_000), ("close_stdin", 0)]
    assert channel.unsent == 0
    channel.feed(frames.encode({"event": "credit", "size": 60_000}))
    channel.close_stdin()
    assert channel.outgoing() == b""
    with pytest.raises(InvalidValue, match="closed"):
        channel.write(b"more")


def test_a_terminal_is_told_an_end_and_a_size() -> None:
    channel = process(pty=Terminal())
    channel.close_stdin()
    channel.resize(Terminal(5, 6))
    assert said(channel.outgoing()) == [({"verb": "stdin"}, b"\x04"), ({"verb": "resize", "size": [5, 6]}, b"")]
    with pytest.raises(InvalidValue, match="no terminal"):
        process().resize(Terminal())
    with pytest.raises(InvalidValue, match="does not exist"):
        process().signal(1 << 20)


def test_attaching_waits_for_the_credit_that_is_left() -> None:
    channel = ProcessChannel.attach("p", output=100)
    assert said(channel.start()) == [({"verb": "attach"}, b"")]
    channel.write(b"xyz")
    assert channel.outgoing() == b""
    channel.feed(frames.encode({**ATTACHED, "credit": 2, "dropped": [3, 4]}))
    assert (channel.command, channel.pid) == (("cat", "-u"), 7)
    assert said(channel.outgoing()) == [({"verb": "stdin"}, b"xy")]
    channel.feed(frames.encode(EXIT))
    assert channel.result is not None
    assert (channel.result.dropped_stdout, channel.result.dropped_stderr) == (8, 4)


def test_a_result_is_acknowledged_once_and_only_where_it_would_be_kept() -> None:
    for channel, expected in ((process(lifetime="sandbox"), ["seen"]), (process(), [])):
        channel.acknowledge()
        channel.feed(frames.encode(STARTED) + frames.encode(EXIT))
        assert channel.outgoing() == b""
        channel.acknowledge()
        channel.acknowledge()
        assert [header["verb"] for header, _ in said(channel.outgoing())] == expected


def test_a_supervisor_that_is_killed_before_it_answers_is_a_kill() -> None:
    channel = process(lifetime="sandbox")
    channel.start()
    channel.hung_up()
    channel.check()
    assert channel.result is not None
    assert channel.result.outcome is Outcome.SIGNALED


def test_who_attaches_to_a_held_process_is_told_so() -> None:
    channel = ProcessChannel.attach("p", output=100)
    channel.feed(frames.encode({"event": "error", "errno": 16, "message": "", "operation": "attach", "path": ""}))
    channel.hung_up()
    assert (channel.done, channel.result) == (True, None)
    with pytest.raises(InvalidValue, match="p is held by another handle"):
        channel.check()


def test_who_attaches_to_a_process_whose_result_was_taken_is_told_so() -> None:
    channel = ProcessChannel.attach("p", output=100)
    channel.hung_up()
    assert (channel.done, channel.result) == (True, None)
    with pytest.raises(NotFound, match="its result was taken"):
        channel.check()


def test_a_hang_up_is_a_kill() -> None:
    channel = process()
    channel.feed(frames.encode(STARTED) + output(0, b"some"))
    channel.write(bytes(2 * STDIN_CREDIT))
    channel.hung_up()
    channel.hung_up()
    assert channel.result is not None
    assert (channel.result.outcome, channel.result.signal, channel.result.stdout) == (Outcome.SIGNALED, 9, "some")
    assert (list(channel.events)[1:], channel.unsent) == ([channel.result], 0)


ERRORS = [
    ({"errno": 2, "message": "No such file", "operation": "exec", "path": "/x"}, FileAccessError, "cannot enter /x"),
    ({"errno": 2, "message": "no", "operation": "user", "path": "ann"}, InvalidValue, "'ann' does not exist"),
    ({"errno": 1, "message": "no", "operation": "user", "path": 5}, InvalidValue, "one id only.*newuidmap"),
    ({"errno": 34, "message": "no", "operation": "user", "path": 5}, InvalidValue, "not one of the sandbox.s"),
    ({"errno": "x", "operation": ["odd"]}, FileAccessError, "cannot"),
]


@pytest.mark.parametrize(("error", "kind", "text"), ERRORS)
def test_what_cannot_be_started(error: frames.Header, kind: type[Exception], text: str) -> None:
    for channel in (process(), shell()):
        channel.start()
        channel.feed(frames.encode({"event": "error", **error}))
        assert (channel.done, channel.started) == (True, False)
        with pytest.raises(kind, match=text):
            channel.check()
        channel.hung_up()
        with pytest.raises(kind, match=text):
            channel.check()


NONSENSE = [
    b"\xff" * 100,
    frames.encode({}),
    frames.encode({"event": "output", "stream": 2}, b"x"),
    frames.encode({"event": "output", "stream": "0"}, b"x"),
    frames.encode({"event": "output", "stream": 0}, bytes(1 << 20)),
    frames.encode({"event": "credit", "size": -1}),
    frames.encode({"event": "credit", "size": 1 << 40}),
    frames.encode({**STARTED, "pid": "7"}),
    frames.encode({**STARTED, "dropped": [1, 2, 3]}),
    frames.encode({**STARTED, "dropped": None}),
    frames.encode({**EXIT, "status": None}),
    frames.encode({**EXIT, "usage": {}}),
    frames.encode({**EXIT, "usage": ["much", 0.2, 300]}),
    frames.encode({**EXIT, "dropped": ["x", "y"]}),
]


@pytest.mark.parametrize("data", NONSENSE)
def test_nonsense_of_a_process_ends_the_trust(data: bytes) -> None:
    with pytest.raises(SandboxGone, match=r"malformed.*create another"):
        process().feed(data)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidValue, match="lifetime"):
        process(lifetime="forever")  # type: ignore[arg-type] # what the test is about
    for user in ("", "a:b:c", "a\n", "a\0", -1, True, 1 << 32):
        with pytest.raises(InvalidValue, match="neither a name nor a uid"):
            process(user=user)


def test_the_environment_of_a_user_is_filled_in_inside() -> None:
    base = {"HOME": "/root", "USER": "root", "PATH": "/bin"}
    assert environment_for(base, {"A": "b"}) == {**base, "A": "b"}
    assert environment_for(base, None, "ann") == {"PATH": "/bin"}
    assert environment_for(base, {"HOME": "/x"}, 5) == {"PATH": "/bin", "HOME": "/x"}


# --- shells ----------------------------------------------------------------------------------------------------------

BEGUN = frames.encode({"event": "started", "pid": 3, "cwd": "/start"})


def answer(number: int, payload: bytes = b"", **changes: object) -> bytes:
    header = {
        **EXIT,
        "run": number,
        "restarted": False,
        "cwd": "/there",
        "dropped": [0, 0],
        "stdout_size": len(payload),
    }
    return frames.encode({**header, **changes}, payload)


def test_the_requests_of_a_shell() -> None:
    channel = shell()
    ((header, _),) = said(channel.start())
    assert (header["verb"], header["cwd"], header["again"]) == ("shell", "/start", False)
    assert channel.run("echo \udcff", timeout=3.0) == 1
    assert channel.run("", timeout=None) == 2
    channel.interrupt(1)
    channel.interrupt(17)
    assert said(channel.outgoing()) == [
        ({"verb": "run", "run": 1, "timeout": 3.0}, b"echo \xff"),
        ({"verb": "run", "run": 2, "timeout": None}, b""),
        ({"verb": "interrupt", "run": 1}, b""),
    ]


SHELL_STREAM = BEGUN + answer(1, b"outerr", stdout_size=3) + answer(2, restarted=True, cwd="/new\udcff")


def test_a_shell_may_come_in_any_two_pieces() -> None:
    for cut in range(len(SHELL_STREAM)):
        takes_a_shell_in_two_pieces(cut)


def takes_a_shell_in_two_pieces(cut: int) -> None:
    channel = shell()
    channel.start()
    first, second = channel.run("one", timeout=None), channel.run("two", timeout=None)
    channel.feed(SHELL_STREAM[:cut])
    channel.feed(SHELL_STREAM[cut:])
    result = channel.take(first)
    assert isinstance(result, ShellResult)
    assert (result.command, result.stdout, result.stderr, result.exit_code) == ("one", "out", "err", 3)
    assert (result.restarted, result.cwd) == (False, PurePosixPath("/there"))
    assert channel.take(first) is None
    result = channel.take(second)
    assert result is not None
    assert (result.restarted, result.cwd, channel.cwd) == (True, PurePosixPath("/new\udcff"), result.cwd)


def test_a_late_answer_is_nobodys() -> None:
    channel = shell()
    channel.start()
    channel.feed(BEGUN)
    old, new = channel.run("old", timeout=None), channel.run("new", timeout=None)
    channel.forget(old)
    channel.feed(answer(old) + answer(99) + answer(new) + answer(new, b"again"))
    assert channel.take(old) is None
    result = channel.take(new)
    assert result is not None
    assert result.stdout == ""
    assert channel.take(new) is None


def test_a_shell_begins_again_on_another_connection() -> None:
    channel = shell()
    channel.start()
    channel.feed(BEGUN)
    first = channel.run("one", timeout=None)
    channel.feed(answer(first) + b"\0\0\0\4\0")
    second = channel.run("two", timeout=None)
    channel.hung_up()
    result = channel.take(second)
    assert result is not None
    assert (result.outcome, result.restarted, channel.done) == (Outcome.SIGNALED, True, True)
    ((header, _),) = said(channel.start())
    assert (header["cwd"], header["again"], channel.done, channel.started) == ("/there", True, False, False)
    assert channel.outgoing() == b""
    channel.feed(BEGUN)
    third = channel.run("three", timeout=None)
    channel.feed(answer(third))
    assert channel.take(third) is not None


@pytest.mark.parametrize(
    "data",
    [
        frames.encode({"event": "started", "cwd": "relative"}),
        frames.encode({"event": "started"}),
        answer(1, cwd=5),
        answer(1, run="1"),
        answer(1, duration=None),
        answer(1, bytes(10_000)),
    ],
)
def test_nonsense_of_a_shell_ends_the_trust(data: bytes) -> None:
    channel = shell()
    channel.start()
    channel.run("one", timeout=None)
    with pytest.raises(SandboxGone, match=r"malformed.*create another"):
        channel.feed(data)


@pytest.mark.parametrize(("script", "timeout"), [("a\0", None), ("x", -1.0), ("x", float("inf"))])
def test_bad_runs(script: str, timeout: float | None) -> None:
    with pytest.raises(InvalidValue):
        shell().run(script, timeout=timeout)
