"""Channels of processes and shells on real sockets, driven to and fro by the tests."""

from __future__ import annotations

import array
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Self

from tests.waiting import PATIENCE

from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.protocol.channels import ProcessChannel, ShellChannel
from minisandbox.sandbox.protocol.wire import environment_for
from minisandbox.types import ExecResult, Output, ShellResult


def send(channel: ProcessChannel | ShellChannel, connection: socket.socket) -> None:
    """Send what a channel has to say."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said last is still to be read
        connection.sendall(channel.outgoing())


def receive(channel: ProcessChannel | ShellChannel, connection: socket.socket) -> None:
    """Receive something, or the end."""
    try:
        data = connection.recv(1 << 16)
    except ConnectionResetError:
        data = b""
    if data:
        channel.feed(data)
        send(channel, connection)
    else:
        channel.hung_up()


class Driver:
    """A process."""

    def __init__(self, channel: ProcessChannel, connection: socket.socket, door: socket.socket | None = None) -> None:
        self.channel = channel
        self.connection = connection
        connection.settimeout(PATIENCE)
        try:
            self._start(door)
        except BaseException:
            connection.close()
            raise

    def _start(self, door: socket.socket | None) -> None:
        first = self.channel.start()
        if door is not None:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [door.fileno()]).tobytes())
            self.connection.sendmsg([first[:1]], [rights])
            first = first[1:]
        with contextlib.suppress(BrokenPipeError):  # refused: the reason is still to be read
            self.connection.sendall(first)
        self.until(lambda: self.channel.started or self.channel.done)
        self.channel.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self) -> None:
        send(self.channel, self.connection)

    def until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < give_up
            receive(self.channel, self.connection)

    def output(self, stream: str = "stdout") -> bytes:
        events = self.channel.events
        return b"".join(event.data for event in events if isinstance(event, Output) and event.stream == stream)

    def until_output(self, expected: bytes) -> None:
        self.until(lambda: expected in self.output())

    def write(self, data: bytes) -> None:
        self.channel.write(data)
        self.send()

    def close_stdin(self) -> None:
        self.channel.close_stdin()
        self.send()

    def wait(self) -> ExecResult:
        self.until(lambda: self.channel.done)
        self.channel.check()
        assert self.channel.result is not None
        self.channel.acknowledge()
        self.send()
        return self.channel.result


class Shell:
    """A shell."""

    def __init__(
        self,
        box: Sandbox,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        output: int = 1 << 20,
    ) -> None:
        self.box = box
        environment = environment_for(box._core.environment, env, user)
        self.channel = ShellChannel(env=environment, cwd=cwd, user=user, output=output)
        self.connection = socket.socket()
        try:
            self.connect()
        except BaseException:
            self.connection.close()
            raise

    def connect(self) -> None:
        self.connection.close()
        self.connection = self.box._core.open_job()
        self.connection.settimeout(PATIENCE)
        self.connection.sendall(self.channel.start())
        while not (self.channel.started or self.channel.done):
            receive(self.channel, self.connection)
        self.channel.check()

    def close(self) -> None:
        self.connection.close()

    def begin(self, script: str, *, timeout: float | None = None) -> int:
        if self.channel.done:
            self.connect()
        number = self.channel.run(script, timeout=timeout)
        send(self.channel, self.connection)
        return number

    def interrupt(self, number: int) -> None:
        self.channel.interrupt(number)
        send(self.channel, self.connection)

    def end(self, number: int) -> ShellResult:
        while (result := self.channel.take(number)) is None:
            receive(self.channel, self.connection)
        return result

    def run(self, script: str, *, timeout: float | None = None) -> ShellResult:
        return self.end(self.begin(script, timeout=timeout))
