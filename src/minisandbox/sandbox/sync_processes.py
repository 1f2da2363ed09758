"""Streaming processes of the synchronous sandbox."""

from __future__ import annotations

import contextlib
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Self

from minisandbox.errors import InvalidValue, NotFound, SandboxGone, WaitTimeout
from minisandbox.sandbox.arguments import check_wait
from minisandbox.sandbox.handles import SandboxCore
from minisandbox.sandbox.lines import KILL_PATIENCE, LOOK_AGAIN, Line, as_bytes, has_room, still_runs
from minisandbox.sandbox.processes import ProcessChannel
from minisandbox.sandbox.sync_lines import SyncLine, answered
from minisandbox.types import ExecResult, Output, Terminal


class Process:
    """A started process. Made by :meth:`.Sandbox.start` and :meth:`.Sandbox.process`.

    It is a context manager, and safe to use from several threads: one may read its output while another writes.

    Output that nobody reads makes the process wait. Its standard input is an open pipe until :meth:`close_stdin`. On a
    terminal there is but one output, ``stdout``. Every verb raises :class:`.SandboxGone` once the sandbox has ended,
    and :class:`.InvalidValue` once the handle was closed.

    Args:
        line: the connection to whoever supervises the process, which has answered.
        owned: whether the process ends with this handle.
    """

    def __init__(self, line: SyncLine[ProcessChannel], *, owned: bool) -> None:
        self._line = line
        self._channel = line.channel
        self._owned = owned
        self._deadline = None if self._channel.left is None else time.monotonic() + self._channel.left
        self._readers: weakref.WeakSet[_Events] = weakref.WeakSet()

    @classmethod
    def _started(cls, core: SandboxCore, channel: ProcessChannel, *, owned: bool) -> Self:
        with contextlib.ExitStack() as opened:
            door = None if owned else opened.enter_context(core.process_door(channel.id))
            line = Line(core, channel, core.open_job(), f"process {channel.id}")
            try:
                line.begin(door)
                return cls(answered(line), owned=owned)
            except BaseException:  # a Ctrl-C too: nobody would have hold of it
                channel.kill()
                line.send()
                line.close()
                raise

    @classmethod
    def _reached(cls, core: SandboxCore, process_id: str) -> Self:
        channel = ProcessChannel.attach(process_id, output=core.limits.output)
        line = Line(core, channel, core.connect_process(process_id), f"process {process_id}")
        try:
            line.begin()
            return cls(answered(line), owned=False)
        except BaseException:  # whatever it was, the connection is of no use
            line.close()
            raise

    @property
    def id(self) -> str:
        """Its name, unique in the sandbox: what :meth:`.Sandbox.process` takes."""
        return self._channel.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox."""
        return self._channel.pid

    @property
    def command(self) -> str | tuple[str, ...]:
        """What was run, as given."""
        return self._channel.command

    def events(self) -> Iterator[Output | ExecResult]:
        """Its output as it comes, and at last how it ended.

        Each piece goes to one reader. What was read is in the result too, head and tail.

        Returns:
            An iterator over pieces of output; the last item is the result.

        Raises:
            NotFound: another handle took hold of it.
            SandboxGone: the sandbox has ended.
        """
        events = _Events(self)
        with self._line.lock:
            self._readers.add(events)
        return events

    def write(self, data: bytes | str) -> None:
        """Write to its standard input; waits while it does not read, with at most 1 MiB under way.

        What is written after its end is dropped. An interrupt leaves what was not sent yet to be sent later.

        Args:
            data: bytes, or text as UTF-8.

        Raises:
            InvalidValue: its standard input was closed.
            SandboxGone: the sandbox has ended.
        """
        with self._line.lock:
            self._line.line.check_open()
            self._channel.write(as_bytes(data))
            self._line.say()
            while self._channel.unsent:
                room = has_room(self._channel, self._deadline)
                self._line.wait(None if room else self._deadline, listen=room)

    def close_stdin(self) -> None:
        """End its standard input; on a terminal, type ^D. Calling it again does nothing."""
        self._say(self._channel.close_stdin)

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, not to its children.

        Args:
            number: for instance ``signal.SIGINT``.

        Raises:
            InvalidValue: there is no such signal.
            SandboxGone: the sandbox has ended.
        """
        self._say(lambda: self._channel.signal(number))

    def resize(self, terminal: Terminal) -> None:
        """Give its terminal another size.

        Args:
            terminal: the size.

        Raises:
            InvalidValue: it has no terminal.
            SandboxGone: the sandbox has ended.
        """
        self._say(lambda: self._channel.resize(terminal))

    def kill(self) -> None:
        """End the process and everything that descends from it; :meth:`wait` tells when that is done."""
        self._say(self._channel.kill)

    def _say(self, verb: Callable[[], None]) -> None:
        with self._line.lock:
            self._line.line.check_open()
            verb()
            self._line.say()

    def wait(self, timeout: float | None = None) -> ExecResult:
        """Read on until the process has ended.

        Output that comes meanwhile is kept for the result, head and tail as :meth:`.Sandbox.exec` does; where another
        thread reads :meth:`events`, it gets its pieces all the same.

        Args:
            timeout: seconds after which to give up; the process runs on then. None: no limit.

        Returns:
            How it ended, and what this handle saw of its output.

        Raises:
            WaitTimeout: it had not ended in time.
            NotFound: another handle took hold of it.
            SandboxGone: the sandbox has ended.
        """
        check_wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._line.lock:
            while True:
                shared = self._has_other_readers()
                if not shared:
                    self._channel.events.clear()
                    self._line.tell()
                if self._channel.result is not None:
                    return self._seen(self._channel.result)
                self._channel.check()
                room = not shared or has_room(self._channel)
                if not self._wait(deadline, room=room) and self._channel.result is None:
                    raise still_runs(self._channel, timeout)

    def _wait(self, deadline: float | None, *, room: bool) -> bool:
        again = time.monotonic() + LOOK_AGAIN
        if room or (deadline is not None and deadline <= again):
            return self._line.wait(deadline, listen=room)
        self._line.wait(again, listen=False)
        return True

    def _has_other_readers(self) -> bool:
        me = threading.current_thread()
        return any(reader.thread is not me and reader.thread.is_alive() for reader in self._readers)

    def _seen(self, result: ExecResult) -> ExecResult:
        """Say that somebody has the result: it need not be kept for others."""
        self._channel.acknowledge()
        self._line.line.send()
        return result

    def _next_event(self) -> Output | ExecResult:
        with self._line.lock:
            while not self._channel.events:
                if self._channel.result is not None:
                    return self._seen(self._channel.result)
                self._channel.check()
                self._line.wait()
            self._line.tell()  # a writer may have waited for room
            event = self._channel.events.popleft()
            return self._seen(event) if isinstance(event, ExecResult) else event

    def close(self) -> None:
        """Let go of the process: with ``lifetime="handle"`` it is killed first; with ``"sandbox"`` it goes on.

        Calling it again does nothing.
        """
        try:
            if self._owned and not self._line.line.closed:
                with contextlib.suppress(SandboxGone, InvalidValue, NotFound, WaitTimeout):  # it is over anyway
                    self.kill()
                    self.wait(KILL_PATIENCE)
        finally:
            self._line.close()

    def __enter__(self) -> Self:
        """Use the process in a ``with`` block; it is closed at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the process."""
        self.close()


class _Events:
    """One reader of a process's output."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._over = False
        self.thread = threading.current_thread()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output | ExecResult:
        if self._over:
            raise StopIteration
        self.thread = threading.current_thread()
        event = self._process._next_event()
        if isinstance(event, ExecResult):
            self._over = True
            with self._process._line.lock:  # somebody may be looking through them
                self._process._readers.discard(self)
        return event
