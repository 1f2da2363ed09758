"""The connection of a channel among threads, without a sandbox at its other end."""

from __future__ import annotations

import socket
import threading
import time
from typing import cast

import pytest
from tests.waiting import PATIENCE

from minisandbox.launch.jobs.frames import STDIN_CREDIT
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.io_sync import SharedConnection
from minisandbox.sandbox.protocol.channels import ProcessChannel
from minisandbox.sandbox.protocol.connection import GRACE, Queue


def receive_all(connection: socket.socket) -> None:
    """Receive up to the end and say nothing."""
    while connection.recv(1 << 16):
        pass


def test_who_listens_sends_what_an_interrupted_writer_left() -> None:
    channel = ProcessChannel(
        "cat", id="p", env={}, cwd="/", timeout=None, user=None, pty=None, lifetime="handle", output=1
    )
    ours, theirs = socket.socketpair()
    shared = SharedConnection(cast("SandboxCore", None), channel, ours, "process p")
    reader = threading.Thread(target=receive_all, args=(theirs,), daemon=True)
    with theirs, ours:
        shared.begin()
        channel.write(b"x" * STDIN_CREDIT)
        shared.send()
        assert shared.unsent
        reader.start()
        deadline = time.monotonic() + PATIENCE
        with shared.lock:
            while shared.unsent:
                assert shared.wait(deadline), "it was never sent"
        shared.close()
        reader.join(PATIENCE)


def test_who_waits_in_line_knows_for_how_long() -> None:
    queue, now = Queue(), time.monotonic()
    first, second = queue.join(10.0), queue.join(5.0)
    assert first is not None
    assert second is not None
    assert now + 10 + GRACE <= first < second
    assert second - first == pytest.approx(5 + GRACE)
    assert queue.join(None) is None
    assert queue.join(1.0) is None, "nobody knows when the one before ends"
    for _ in range(4):
        queue.leave()
    again = queue.join(1.0)
    assert again is not None
    assert again < second
