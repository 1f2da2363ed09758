"""Memory that the kernel holds for whoever asks, and charges to nobody: what sockets and open directories keep."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import struct
import time
from typing import Callable, Iterator

from .core import Finding, attempts, canary, in_child, judge, probe
from .kernel import LIBC
from .limits import BOMB, KIND, MIB

PATIENCE = 2.0  # seconds within which whoever watches looks
BLOCK = b"x" * 65536
FLOW_LABEL = socket.inet_pton(socket.AF_INET6, "::1") + struct.pack("=IBBHHHI", 0, 0, 255, 1, 60, 60, 0)


def hold(take: Callable[[], Iterator[int]]) -> Finding:
    """Take until it is as much as the limit of memory; blocked if something refuses, or ends us in time.

    ``take`` gives the bytes of each thing that it has taken and keeps.
    """
    allowed = int(canary("limits")["memory"])

    def attempt() -> bool:
        held = 0
        for size in take():
            held += size
            if held > allowed:
                time.sleep(PATIENCE)
                return True
        return False

    return attempts([(f"{allowed // MIB} MiB", in_child(attempt))])


def fill(out: socket.socket) -> int:
    """Send until nobody takes any more."""
    out.setblocking(False)
    sent = 0
    with contextlib.suppress(OSError):
        while True:
            sent += out.send(BLOCK)
    return sent


@probe(KIND, "memory-of-connections", without=BOMB + " memory", patience=60.0, may_die=True)
def unaccepted() -> Finding:
    """Keep more in the kernel's memory than the limit: data of connections that nobody accepts"""

    def take() -> Iterator[int]:
        kept = []
        while True:
            with contextlib.suppress(OSError):
                listener = socket.socket()
                listener.bind(("127.0.0.1", 0))
                listener.listen(4096)
                kept.append(listener)
                for _ in range(120):
                    out = socket.socket()
                    out.connect(listener.getsockname())
                    kept.append(out)
                    yield fill(out)

    return hold(take)


@probe(KIND, "memory-of-netlink", without=BOMB + " memory", patience=90.0, may_die=True)
def unread() -> Finding:
    """Keep more in the kernel's memory than the limit: answers of netlink that nobody reads"""
    question = struct.pack("=IHHIIBBHiII", 32, 18, 1, 1, 0, 0, 0, 0, 1, 0, 0)  # RTM_GETLINK, the first interface

    def take() -> Iterator[int]:
        kept = []
        while True:
            link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
            link.setblocking(False)
            kept.append(link)
            with contextlib.suppress(OSError):
                for _ in range(400):
                    link.send(question)
            yield link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    return hold(take)


@probe(KIND, "memory-of-errors", without=BOMB + " memory", patience=60.0, may_die=True)
def errors() -> Finding:
    """Keep more in the kernel's memory than the limit: what was sent, with the time at which it was"""

    def take() -> Iterator[int]:
        kept = []
        while True:
            out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            out.setsockopt(socket.SOL_SOCKET, 37, 1 << 1 | 1 << 4)  # SO_TIMESTAMPING, by software
            kept.append(out)
            with contextlib.suppress(OSError):
                for _ in range(20):
                    out.sendto(BLOCK[:60000], ("127.0.0.1", 9))
            yield out.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    return hold(take)


@probe(KIND, "memory-of-disconnected", without=BOMB + " memory", patience=60.0, may_die=True)
def disconnected() -> Finding:
    """Keep more in the kernel's memory than the limit: datagrams of sockets that lost their port with them unread"""

    def held(one: socket.socket) -> int:
        return int(struct.unpack("=9I", one.getsockopt(socket.SOL_SOCKET, 55, 36))[0])  # SO_MEMINFO

    def take() -> Iterator[int]:
        out, kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
        while True:
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 212992)
            one.sendto(b"", ("127.0.0.1", 9))
            before = -1
            while held(one) > before:
                before = held(one)
                out.sendto(BLOCK[:60000], ("127.0.0.1", one.getsockname()[1]))
            LIBC.connect(one.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16)
            kept.append(one)
            yield held(one)

    return hold(take)


def copies_of_a_directory(keep: Callable[[int], None]) -> Iterator[int]:
    """Open a directory of an image with many long names again and again, each time as it has never been."""
    place, names = os.getcwd(), 8000
    for number in range(names):
        os.close(os.open(f"{place}/{number:0200}", os.O_CREAT | os.O_WRONLY))
    while True:
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        os.close(os.open(place + "/new", os.O_CREAT | os.O_WRONLY))
        os.unlink(place + "/new")
        os.listdir(directory)
        keep(directory)
        yield names * 400


@probe(KIND, "memory-of-directories", without=BOMB + " memory", patience=90.0, may_die=True)
def directories() -> Finding:
    """Keep more in the kernel's memory than the limit: names of directories that are open and were changed"""
    os.chdir("/")
    return hold(lambda: copies_of_a_directory(lambda directory: None))


@probe(KIND, "memory-of-directories-under-way", without=BOMB + " memory", patience=90.0, may_die=True)
def directories_under_way() -> Finding:
    """Keep more in the kernel's memory than the limit: directories that are open in a message nobody receives"""
    os.chdir("/")
    return hold(lambda: copies_of_a_directory(send_away()))


def send_away() -> Callable[[int], None]:
    """Put descriptors into messages that nobody receives, one into each."""
    left, right = socket.socketpair()

    def send(descriptor: int) -> None:
        assert right.fileno() != -1
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        os.close(descriptor)

    return send


@probe(KIND, "memory-of-directories-out-of-sight", without=BOMB + " memory", patience=90.0, may_die=True)
def directories_out_of_sight() -> Finding:
    """Keep more in the kernel's memory than the limit: directories of a process that nobody may look into"""
    os.chdir("/")

    def take() -> Iterator[int]:
        LIBC.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        return copies_of_a_directory(lambda directory: None)

    return hold(take)


@probe(KIND, "memory-of-directories-under-way-out-of-sight", without=BOMB + " memory", patience=90.0, may_die=True)
def directories_under_way_out_of_sight() -> Finding:
    """Keep more in the kernel's memory than the limit: directories in messages of one that nobody may look into"""
    os.chdir("/")

    def take() -> Iterator[int]:
        LIBC.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        return copies_of_a_directory(send_away())

    return hold(take)


@probe(KIND)
def labels_that_all_share() -> Finding:
    """Take of what the whole machine has one number of: flow labels (IPV6_FLOWLABEL_MGR)"""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as one:
        try:
            one.setsockopt(socket.IPPROTO_IPV6, 32, FLOW_LABEL)
        except OSError:
            return judge(False)
        return judge(True)


@probe(KIND)
def sources_of_multicast() -> Finding:
    """Have the kernel look through a list of multicast's sources for each that is left (MCAST_JOIN_SOURCE_GROUP)"""
    group, here, source = (socket.inet_aton(text) for text in ("239.1.2.3", "127.0.0.1", "127.0.0.2"))
    address = struct.pack("=HH4s120x", socket.AF_INET, 0, group), struct.pack("=HH4s120x", socket.AF_INET, 0, source)
    for level, name, value in ((0, 39, group + here + source), (0, 46, struct.pack("@I4x128s128s", 1, *address))):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            try:
                one.setsockopt(level, name, value)
            except OSError:
                continue
            return judge(True)
    return judge(False)


@probe(KIND)
def options_that_nobody_counts() -> Finding:
    """Have the kernel keep 20 KB of options for a socket (IPV6_2292PKTOPTIONS)"""
    option = struct.pack("NiiiI", 20, 41, 52, 1, 0)
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as one:
        try:
            one.setsockopt(socket.IPPROTO_IPV6, 6, option * 800)
        except OSError:
            return judge(False)
        return judge(True)


@probe(KIND)
def pages_moved_to_pipes() -> Finding:
    """Keep memory in pipes that nobody counts: a byte of each 32 KiB that a socket has, or pages of /dev/zero"""
    out, sockets = os.pipe()[1], socket.socketpair()
    zero = os.open("/dev/zero", os.O_RDONLY)
    sockets[0].send(BLOCK[:1000])

    def moves(call: Callable[..., int], source: int) -> Callable[[], bool]:
        return lambda: call(out, source, None, 1) > 0

    def splices() -> bool:
        return int(LIBC.splice(sockets[1].fileno(), None, out, None, ctypes.c_size_t(1), 0)) == 1

    return attempts(
        [
            ("splice", splices),
            ("sendfile of a socket", moves(os.sendfile, sockets[1].fileno())),
            ("sendfile of /dev/zero", moves(os.sendfile, zero)),
        ]
    )


@probe(KIND)
def what_was_received_mapped() -> Finding:
    """Map pages of what was received, which nobody counts from then on (TCP_ZEROCOPY_RECEIVE)"""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        try:
            one.getsockopt(socket.IPPROTO_TCP, 35, 64)
        except OSError as error:
            # asked for no address, the kernel says EINVAL
            return judge(error.errno == errno.EINVAL, str(error))
        return judge(True)
