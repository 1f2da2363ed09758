# Generated from _async/shell.py by tools/make_sync.py: change that file, then run the tool.
"""Handles on stateful shells of a sandbox."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Self

from minisandbox.sandbox.backend import SandboxCore, mark_unresponsive
from minisandbox.sandbox.io_sync import SharedConnection, call_blocking, open_job
from minisandbox.sandbox.protocol.channels import ShellChannel
from minisandbox.sandbox.protocol.connection import Queue
from minisandbox.types import ShellResult


class Shell:
    """A bash that keeps its state from one :meth:`run` to the next. Create it with :meth:`.Sandbox.shell`.

    It is a context manager. Threads may share it; their scripts run one after the other.

    Args:
        connection: connection to the supervisor of bash, which has answered.
    """

    def __init__(self, connection: SharedConnection[ShellChannel]) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._queue = Queue()

    @classmethod
    def _opened(cls, core: SandboxCore, channel: ShellChannel) -> Self:
        connection = SharedConnection(core, channel, open_job(core), "shell")
        try:
            connection.begin()
            connection.answered()
            return cls(connection)
        except BaseException:  # even on an interrupt; closing kills bash
            connection.close()
            raise

    @property
    def cwd(self) -> PurePosixPath:
        """Working directory of the next script, as last reported."""
        return self._channel.cwd

    def run(self, script: str, *, timeout: float | None = None) -> ShellResult:
        """Run a script in the shell. Ctrl-C stops the script as a timeout does; the shell stays usable.

        The script's standard input is empty. The next script inherits its working directory, variables, functions,
        options and aliases. A timeout kills bash and the commands that the script started, but not those of earlier
        scripts. After a timeout, and after ``exit``, ``exec`` or a failure under ``set -e``, the next script runs in a
        new bash. The new bash keeps only the working directory, and the result has ``restarted`` set.

        Args:
            script: text for bash, of any number of lines.
            timeout: wall-clock seconds from the start of the script; None: no limit.

        Returns:
            The exit status and output of the script.

        Raises:
            InvalidValue: an argument cannot be used, or the shell was closed.
            SandboxGone: the sandbox has ended.
        """
        with self._connection.lock:
            self._connection.check_open()
            if self._channel.done:
                self._begin_again()
            number = self._channel.run(script, timeout=timeout)
            deadline = self._queue.join(timeout)
            try:
                self._connection.flush()
                return self._result(number, deadline)
            except BaseException:  # even on an interrupt, because nobody reads the result
                self._channel.interrupt(number)
                self._channel.forget(number)
                self._connection.send()
                raise
            finally:
                self._queue.leave()

    def _begin_again(self) -> None:
        socket = open_job(self._connection.core)
        if self._channel.done and not self._connection.closed:
            self._connection.begin_again(socket)
        else:  # another caller has already restarted it
            socket.close()
        self._connection.check_open()

    def _result(self, number: int, deadline: float | None) -> ShellResult:
        while (result := self._channel.take(number)) is None:
            self._channel.check()
            if not self._connection.wait(deadline):
                raise call_blocking(mark_unresponsive, self._connection.core)
        return result

    def close(self) -> None:
        """Kill bash and its commands; calling it again does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Use the shell in a ``with`` block, which closes it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the shell."""
        self.close()
