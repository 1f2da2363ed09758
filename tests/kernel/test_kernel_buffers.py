"""A socket keeps the buffers in which its data lies, whatever little that is: all of them together are limited."""

from __future__ import annotations

import pytest

from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel

LIMITS = Limits(memory="256M")
PAIRS = """
import socket, time

def pair():
    one = socket.create_connection(server.getsockname())
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, server.accept()[0]

server = socket.create_server(("127.0.0.1", 0))
(out, back), block = pair(), b"x" * 32700
def fill():
    "Use up the rest of the buffer that this process writes to."
    out.sendall(block)
    left = len(block)
    while left:
        left -= len(back.recv(left))
"""
BYTES = """
for _ in range(40000):
    one.send(b"y")
    fill()
"""
DATAGRAMS = """
kept = []
for _ in range(1500):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.connect(("127.0.0.1", 9))
    for _ in range(16):
        one.send(b"y", socket.MSG_MORE)
        fill()
    kept.append(one)
"""
UNREAD = """
kept = [pair() for _ in range(60)]
for one, _ in kept:
    one.send(b"y")
print(len(kept), flush=True)
time.sleep(1)
"""
START = "one, other = pair()\nother.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)\n"


@pytest.mark.parametrize("code", [START + BYTES, DATAGRAMS], ids=["bytes", "datagrams"])
def test_buffers_of_which_a_byte_is_kept_are_limited(spec: ImageSpec, code: str) -> None:
    with Sandbox.create(spec, limits=LIMITS) as box:
        result = box.exec(["python3", "-c", f"{PAIRS}{code}\ntime.sleep(3)\nprint('held')"], timeout=60)
    assert result.limits_hit == ("memory",), result
    assert "held" not in result.stdout


def test_packets_that_nobody_has_read_yet_are_no_offence(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=LIMITS) as box:
        result = box.exec(["python3", "-c", PAIRS + UNREAD], timeout=60).check()
    assert result.stdout == "60\n"
