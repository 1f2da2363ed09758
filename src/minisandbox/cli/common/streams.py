"""Forward input and output between a command in a sandbox and this process's pipes or terminal."""

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

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import say
from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox import Process
from minisandbox.types import ExecResult, Outcome, Terminal

_CHUNK_BYTES = 1 << 16
_STDIN = 0
_RESIZE, _END = b"r", b"e"
_WINSIZE = struct.Struct("HHHH")  # ioctl_tty(2)


def has_terminal() -> bool:
    """Return whether stdin and stdout are terminals."""
    return os.isatty(_STDIN) and sys.stdout.isatty()


def window() -> Terminal:
    """Return the size of the terminal at stdin, or the default size if stdin is not a terminal."""
    with contextlib.suppress(OSError):
        rows, columns, _, _ = _WINSIZE.unpack(fcntl.ioctl(_STDIN, termios.TIOCGWINSZ, bytes(_WINSIZE.size)))
        if rows and columns:
            return Terminal(rows, columns)
    return Terminal()


def follow(process: Process, *, stdin: bool, terminal: bool) -> int:
    """Forward input and output of a process until it exits.

    Args:
        process: the process; the caller closes it.
        stdin: whether to forward stdin; otherwise the process's input is empty.
        terminal: whether the process runs on a terminal. If stdin is a terminal too, all keys are forwarded unchanged,
            even Ctrl-C.

    Returns:
        The exit status for the outcome of the process.
    """
    raw_terminal = _raw_terminal(keys=stdin) if terminal and has_terminal() else contextlib.nullcontext()
    with raw_terminal, _relay(process, stdin=stdin, resize=terminal):
        result = _forward_output(process)
    _report_outcome(result)
    return _status(result)


def _forward_output(process: Process) -> ExecResult:
    files: dict[str, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    sys.stdout.flush()
    for event in process.events():
        if isinstance(event, ExecResult):
            return event
        files[event.stream].write(event.data)
        files[event.stream].flush()
    raise AssertionError("a process's events end with its result")


# --- input -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _relay(process: Process, *, stdin: bool, resize: bool) -> Iterator[None]:
    """Forward input and window sizes to a process in a thread."""
    if not stdin and not resize:
        process.close_stdin()
        yield
        return
    notes, notes_writer = os.pipe()
    thread = threading.Thread(target=_feed, args=(process, notes, stdin), name="input", daemon=True)
    thread.start()
    try:
        with _on_resize(notes_writer) if resize else contextlib.nullcontext():
            yield
    finally:
        os.write(notes_writer, _END)
        thread.join(1.0)  # the thread may block in a write until the caller closes the process
        if not thread.is_alive():
            os.close(notes)
            os.close(notes_writer)


def _feed(process: Process, notes: int, stdin: bool) -> None:
    descriptors = [notes, _STDIN] if stdin else [notes]
    with contextlib.suppress(MiniSandboxError):  # the process has exited, which follow() reports
        while True:
            readable, _, _ = select.select(descriptors, [], [])
            if notes in readable and not _handle_notes(process, os.read(notes, 64)):
                return
            if _STDIN in readable and not _forward_input(process):
                descriptors = [notes]


def _handle_notes(process: Process, notes: bytes) -> bool:
    if _RESIZE in notes:
        process.resize(window())
    return _END not in notes


def _forward_input(process: Process) -> bool:
    """Forward available input; return False at the end of stdin."""
    try:
        data = os.read(_STDIN, _CHUNK_BYTES)
    except OSError:  # stdin or its terminal is closed
        data = b""
    if data:
        process.write(data)
    else:
        process.close_stdin()
    return bool(data)


# --- the terminal ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _raw_terminal(*, keys: bool) -> Iterator[None]:
    """Disable the terminal's output processing, and with ``keys`` also its input processing, while the body runs.

    The command's pty already processes output and input.
    """
    previous_settings = termios.tcgetattr(_STDIN)
    try:
        if keys:
            tty.setraw(_STDIN, termios.TCSADRAIN)
        else:
            settings = termios.tcgetattr(_STDIN)
            settings[1] &= ~termios.OPOST  # output flags, termios(3)
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, settings)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may have been closed
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, previous_settings)


@contextlib.contextmanager
def _on_resize(notes_writer: int) -> Iterator[None]:
    def note(_signal: int, _frame: FrameType | None) -> None:
        os.write(notes_writer, _RESIZE)  # let the thread resize the pty, because a signal handler must not take locks

    previous_handler = signal.signal(signal.SIGWINCH, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, previous_handler)


# --- the outcome -----------------------------------------------------------------------------------------------------


def _report_outcome(result: ExecResult) -> None:
    if result.outcome is not Outcome.EXITED:
        verb = "was" if result.outcome is Outcome.SIGNALED else ""
        say(" ".join(f"minisandbox: the command {verb} {result.fate}".split()))


def _status(result: ExecResult) -> int:
    if result.outcome is Outcome.TIMEOUT:
        return exits.TIMEOUT
    return exits.INTERNAL if result.shell_status is None else result.shell_status
