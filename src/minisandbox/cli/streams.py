"""A command's streams, passed on as they come: pipes, and a terminal for those who sit at one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType
from typing import BinaryIO

from minisandbox.cli import exits
from minisandbox.cli.output import say
from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox import Process
from minisandbox.types import ExecResult, Outcome, Terminal

_PIECE = 1 << 16
_STDIN = 0
_RESIZE, _END = b"r", b"e"
_SIZE = struct.Struct("HHHH")  # struct winsize, ioctl_tty(2)


def has_terminal() -> bool:
    """Whether somebody sits at stdin and stdout."""
    return os.isatty(_STDIN) and sys.stdout.isatty()


def window() -> Terminal:
    """The size of the terminal at stdin, or a usual one."""
    with contextlib.suppress(OSError):
        rows, columns, _, _ = _SIZE.unpack(fcntl.ioctl(_STDIN, termios.TIOCGWINSZ, bytes(_SIZE.size)))
        if rows and columns:
            return Terminal(rows, columns)
    return Terminal()


def follow(process: Process, *, stdin: bool, terminal: bool) -> int:
    """Pass a process's output on until it ends, and input to it.

    Args:
        process: what runs; left to the caller to close.
        stdin: whether to give it what stdin holds; else its input is empty.
        terminal: whether it runs on a terminal. Where stdin is one too, keys go to it unchanged, Ctrl-C included.

    Returns:
        The exit status that tells its fate.
    """
    screen = _passing(keys=stdin) if terminal and has_terminal() else contextlib.nullcontext()
    with screen, _relay(process, stdin=stdin, resize=terminal):
        result = _pass_on(process)
    _say_fate(result)
    return _status(result)


def _pass_on(process: Process) -> ExecResult:
    outputs: dict[str, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    sys.stdout.flush()
    for event in process.events():
        if isinstance(event, ExecResult):
            return event
        outputs[event.stream].write(event.data)
        outputs[event.stream].flush()
    raise AssertionError("a process's events end with its result")


# --- input -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _relay(process: Process, *, stdin: bool, resize: bool) -> Iterator[None]:
    """Let a thread give input and window sizes to a process meanwhile."""
    if not stdin and not resize:
        process.close_stdin()
        yield
        return
    wake, waker = os.pipe()
    thread = threading.Thread(target=_feed, args=(process, wake, stdin), name="input", daemon=True)
    thread.start()
    try:
        with _on_resize(waker) if resize else contextlib.nullcontext():
            yield
    finally:
        os.write(waker, _END)
        thread.join(1.0)  # it may hang in a write to a process that does not read; its end is the caller's business
        if not thread.is_alive():
            os.close(wake)
            os.close(waker)


def _feed(process: Process, wake: int, stdin: bool) -> None:
    sources = [wake, _STDIN] if stdin else [wake]
    with contextlib.suppress(MiniSandboxError):  # it has ended; whoever reads its output says how
        while True:
            ready, _, _ = select.select(sources, [], [])
            if wake in ready and not _heed(process, os.read(wake, 64)):
                return
            if _STDIN in ready and not _forward(process):
                sources = [wake]


def _heed(process: Process, notes: bytes) -> bool:
    if _RESIZE in notes:
        process.resize(window())
    return _END not in notes


def _forward(process: Process) -> bool:
    """Pass some input on; returns whether there may be more."""
    try:
        data = os.read(_STDIN, _PIECE)
    except OSError:  # closed, or a terminal that has gone
        data = b""
    if data:
        process.write(data)
    else:
        process.close_stdin()
    return bool(data)


# --- the terminal ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _passing(*, keys: bool) -> Iterator[None]:
    """Let all that is printed, and every key if asked for, pass unchanged: the command's own terminal sees to them.

    The terminal is as before afterwards, whatever happens.
    """
    before = termios.tcgetattr(_STDIN)
    try:
        if keys:
            tty.setraw(_STDIN, termios.TCSADRAIN)
        else:
            settings = termios.tcgetattr(_STDIN)
            settings[1] &= ~termios.OPOST  # output flags, termios(3)
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, settings)
        yield
    finally:
        with contextlib.suppress(termios.error):  # it has gone
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _on_resize(waker: int) -> Iterator[None]:
    def note(_number: int, _frame: FrameType | None) -> None:
        os.write(waker, _RESIZE)  # whatever the main thread does right now, it must not be done in a handler

    previous = signal.signal(signal.SIGWINCH, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, previous)


# --- the fate --------------------------------------------------------------------------------------------------------


def _say_fate(result: ExecResult) -> None:
    if result.outcome is not Outcome.EXITED:
        verb = "was" if result.outcome is Outcome.SIGNALED else ""
        say(" ".join(f"minisandbox: the command {verb} {result.fate}".split()))


def _status(result: ExecResult) -> int:
    if result.outcome is Outcome.TIMEOUT:
        return exits.TIMEOUT
    if result.signal is not None:
        return 128 + result.signal
    return result.exit_code if result.exit_code is not None else exits.INTERNAL
