"""The stateful shell of the synchronous sandbox."""

from __future__ import annotations

import types
from pathlib import PurePosixPath
from typing import Self

from minisandbox.sandbox.handles import SandboxCore, give_up
from minisandbox.sandbox.lines import Line, Queue
from minisandbox.sandbox.processes import ShellChannel
from minisandbox.sandbox.sync_lines import SyncLine, answered
from minisandbox.types import ShellResult


class Shell:
    """A bash that keeps its state from one :meth:`run` to the next. Made by :meth:`.Sandbox.shell`.

    It is a context manager. Several threads may use it; their scripts run one after the other.

    Args:
        line: the connection to whoever supervises bash, which has answered.
    """

    def __init__(self, line: SyncLine[ShellChannel]) -> None:
        self._line = line
        self._channel = line.channel
        self._queue = Queue()

    @classmethod
    def _opened(cls, core: SandboxCore, channel: ShellChannel) -> Self:
        line = Line(core, channel, core.open_job(), "shell")
        try:
            line.begin()
            return cls(answered(line))
        except BaseException:  # a Ctrl-C too: closing ends bash
            line.close()
            raise

    @property
    def cwd(self) -> PurePosixPath:
        """Where the next script starts, as far as is known."""
        return self._channel.cwd

    def run(self, script: str, *, timeout: float | None = None) -> ShellResult:
        """Run a script in the shell.

        Its standard input is empty. The working directory, variables, functions, options and aliases that it leaves
        are there for the next script. After a timeout the commands it started are killed; where bash itself does not
        answer then, and after ``exit`` or ``exec``, bash is started anew in the last known directory, and the result
        says so. After ``exit`` and a failure under ``set -e`` the new one takes over the state of the old, as far as
        bash can tell it. An exception that interrupts the wait, such as the KeyboardInterrupt of Ctrl-C, interrupts
        the script as a timeout does.

        Args:
            script: text for bash, of any number of lines.
            timeout: wall seconds from its start; None: no limit.

        Returns:
            How it ended and what it printed.

        Raises:
            InvalidValue: an argument cannot be used, or the shell was closed.
            SandboxGone: the sandbox has ended.
        """
        with self._line.lock:
            self._line.line.check_open()
            if self._channel.done:
                self._line.line.begin_again(self._line.line.core.open_job())
            number = self._channel.run(script, timeout=timeout)
            deadline = self._queue.join(timeout)
            try:
                self._line.say()
                return self._result(number, deadline)
            except BaseException:  # a Ctrl-C too: nobody will take the result
                self._channel.interrupt(number)
                self._channel.forget(number)
                self._line.line.send()
                raise
            finally:
                self._queue.leave()

    def _result(self, number: int, deadline: float | None) -> ShellResult:
        while (result := self._channel.take(number)) is None:
            self._channel.check()
            if not self._line.wait(deadline):
                raise give_up(self._line.line.core)
        return result

    def close(self) -> None:
        """End bash and what runs in it; calling it again does nothing."""
        self._line.close()

    def __enter__(self) -> Self:
        """Use the shell in a ``with`` block; it is closed at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the shell."""
        self.close()
