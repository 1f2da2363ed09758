"""What the sockets of a network namespace hold of the kernel's memory: no control group counts all of it.

Data of a connection that nobody has accepted, unread replies of netlink, and error queues are in no account; without
control groups nothing is. The kernel tells it of each socket (sock_diag(7)). Of those that it does not show, such as
one that was reset, or one of UDP that was disconnected (connect(2) with AF_UNSPEC), it tells how many there are.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLMSG_ERROR, _NLMSG_DONE, _DUMP_REQUEST = 2, 3, 0x301
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_TCP, _UDP, _EVERY_NETLINK = 6, 17, 0xFF
_LISTENS = 10
_OWN_PORT = struct.Struct("!4xH")  # of struct inet_diag_msg
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr
_MEMORY = struct.Struct("=9I")  # SK_MEMINFO_*, linux/sock_diag.h
_QUEUE = struct.Struct("=I")  # the first of struct unix_diag_rqlen
_UNIX_SIZE, _UNIX_QUEUE, _DGRAM = 16, 4, 2
_INTERNET_SIZE, _NETLINK_SIZE = 72, 28
_PORT = struct.Struct("=4xI")  # of struct netlink_diag_msg: 0 for the kernel's own, which no count has
_DATAGRAMS = 11
"""So many can wait for one reader (net.unix.max_dgram_qlen), of which the kernel tells the first one's size."""
_INODE = struct.Struct("=68xI")  # of struct inet_diag_msg: 0 for one that nobody has accepted, or holds any more
_NOBODYS = 3072
"""Bytes of such a socket itself, and of the request that waits with it: made as a packet came, in no account."""
_ANSWER = 1 << 15
_PATIENCE = 2.0
_FEW = 4
"""So many sockets are not looked at."""
_MOST_COUNTED = 5000
"""Memberships of groups of multicast, in a list."""
_UNSEEN = 32
"""So many that the kernel does not show do not count: they have just been made, or are just being closed."""
_FULL, _OPTIONS, _ERRORS = 6 << 20, 1 << 17, 212_992
"""Bytes of data, of options and of errors (half of them) that one may hold, where nobody has set other numbers."""


def _internet(family: int, protocol: int) -> bytes:
    """A struct inet_diag_req_v2: memory (INET_DIAG_SKMEMINFO) of all but TIME_WAIT and NEW_SYN_RECV."""
    return struct.pack("=BBBxI48x", family, protocol, 1 << 6, 0xFFFFFFFF & ~(1 << 6 | 1 << 12))


_Dump = tuple[bytes, int, int]
"""A request, the size of the message that answers, and the attribute in which memory comes."""
_DUMPS_WITHOUT_TCP: tuple[_Dump, ...] = (
    *((_internet(family, _UDP), _INTERNET_SIZE, 7) for family in _INTERNET),
    (struct.pack("=BBHIII8x", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 0x30), 16, 5),
    (struct.pack("=BBHII8x", socket.AF_NETLINK, _EVERY_NETLINK, 0, 0, 1), _NETLINK_SIZE, 0),
)
# these two look through a table of the whole machine, 0.25 ms each
_DUMPS = (*((_internet(family, _TCP), _INTERNET_SIZE, 7) for family in _INTERNET), *_DUMPS_WITHOUT_TCP)


class Sockets:
    """The sockets of the network namespace that this process is in; made before its filter refuses to.

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self) -> None:
        self._ports: set[tuple[int, int]] = set()
        self._diag: socket.SocketType | None = None
        with contextlib.suppress(OSError):  # a kernel without it: every socket counts as a full one
            self._diag = socket.SocketType(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
            self._diag.settimeout(_PATIENCE)
        self._questions = 0
        self.groups = 0
        """How often groups of multicast were joined, at the last look."""
        self.hidden = 0
        """How many the kernel did not show at the last look, but for a few: what they hold is guessed."""
        self._listening: collections.Counter[int] = collections.Counter()

    @property
    def netlink(self) -> int:
        """How many of netlink there were at the last look."""
        return len(self._ports)

    @property
    def sharing(self) -> int:
        """How many of UDP, or that listened, had one port at the last look."""
        return max(self._listening.values(), default=0)

    def held(self) -> int:
        """Bytes that they hold, or 0 for few.

        A socket that the kernel does not show has options and errors, and counts as a full one, but for a few; together
        they cannot hold more data than TCP and UDP do on the whole machine, and what unix sockets that are closed have
        sent.
        """
        self._ports.clear()
        self._listening.clear()
        self.groups = self.hidden = 0
        self.groups = _memberships("igmp") + _memberships("igmp6")
        used, data, here = _statistics()
        if used <= _FEW:
            return 0
        shown, unread, count = 0, 0, 0
        for memory, waiting in self._shown(_DUMPS if here else _DUMPS_WITHOUT_TCP):
            shown, unread, count = shown + memory, unread + waiting, count + 1
        hidden = max(0, min(used, _statistics()[0]) - count - _UNSEEN)  # those that were closed meanwhile are gone
        self.hidden = hidden
        largest = _number("core/rmem_max", _ERRORS)
        own = _number("core/optmem_max", _OPTIONS) + 2 * min(largest, _ERRORS)
        return shown + hidden * own + min(hidden * max(2 * largest, _FULL), data + unread)

    def _shown(self, dumps: tuple[_Dump, ...]) -> Iterator[tuple[int, int]]:
        for request, size, attribute in dumps if self._diag else ():
            assert self._diag is not None
            self._questions += 1
            length = _HEADER.size + len(request)
            header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, self._questions & 0xFFFFFFFF, 0)
            with contextlib.suppress(OSError):  # the kernel has no such table, or no memory for an answer
                self._diag.send(header + request)
                for message in self._answers():
                    if size == _NETLINK_SIZE and not self._is_new(message):
                        continue
                    if size == _INTERNET_SIZE and (request[1] == _UDP or message[1] == _LISTENS):
                        self._listening[request[1] << 16 | _OWN_PORT.unpack_from(message)[0]] += 1
                    unix = size == _UNIX_SIZE
                    itself = _NOBODYS if size == _INTERNET_SIZE and not _INODE.unpack_from(message)[0] else 0
                    several = _DATAGRAMS if unix and message[1] == _DGRAM else unix
                    for memory, waiting in _memory(message[size:], attribute, several):
                        yield memory + itself, waiting

    def _is_new(self, message: memoryview) -> bool:
        """Whether a socket of netlink is somebody's, and new: who listens to groups is told of twice."""
        port = _PORT.unpack_from(message)[0]
        if port == 0 or (message[2], port) in self._ports:
            return False
        self._ports.add((message[2], port))
        return True

    def _answers(self) -> Iterator[memoryview]:
        """The messages of one answer, without their headers."""
        assert self._diag is not None
        while True:
            data = memoryview(self._diag.recv(_ANSWER))
            while data:
                length, kind, _, question, _ = _HEADER.unpack_from(data)
                if question == self._questions & 0xFFFFFFFF:
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        return
                    yield data[_HEADER.size : length]
                data = data[length + 3 & ~3 :]


def _memory(attributes: memoryview, wanted: int, unread: int) -> Iterator[tuple[int, int]]:
    """What a socket holds, from the attributes of its message, and what waits for its reader.

    One that waits for its end (TIME_WAIT) is no socket any more, and holds nothing.
    """
    waiting = 0
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if unread and kind == _UNIX_QUEUE:
            waiting = _QUEUE.unpack_from(attributes, _ATTRIBUTE.size)[0] * 2 * unread
        if kind == wanted and length >= _ATTRIBUTE.size + _MEMORY.size:
            received, _, sent, _, spare, queued, options, backlog, _ = _MEMORY.unpack_from(attributes, _ATTRIBUTE.size)
            yield received + max(sent, queued) + (spare if spare < 1 << 31 else 0) + options + backlog, waiting
        attributes = attributes[max(length, _ATTRIBUTE.size) + 3 & ~3 :]


def _statistics() -> tuple[int, int, bool]:
    """How many sockets this network namespace has, open or not; bytes of TCP and UDP on the machine; if TCP is here."""
    here = False
    with contextlib.suppress(OSError), open("/proc/net/sockstat6", "rb") as source:
        here = source.readline().split()[2] != b"0"
    with contextlib.suppress(OSError), open("/proc/net/sockstat", "rb") as source:
        used, tcp, udp = (source.readline().split() for _ in range(3))
        here = here or tcp[2] != b"0"
        pages = sum(int(line[line.index(b"mem") + 1]) for line in (tcp, udp))
        return int(used[2]), pages * os.sysconf("SC_PAGESIZE"), here
    return 0, 0, True


def _memberships(name: str) -> int:
    """How often sockets have joined the groups of a list, as far as that is counted; each leaves each as it is closed.

    A row for each group of an interface tells that third to last (net/ipv4/igmp.c, net/ipv6/mcast.c).
    """
    count = 0
    with contextlib.suppress(OSError), open(f"/proc/net/{name}", "rb") as source:
        for line in source:
            fields = line.split()
            if len(fields) > 2 and fields[-3].isdigit():
                count += int(fields[-3])
            if count > _MOST_COUNTED:
                break
    return count


def _number(name: str, otherwise: int) -> int:
    """A setting of the network, if it shows here."""
    try:
        with open(f"/proc/sys/net/{name}", "rb") as source:
            return int(source.read())
    except OSError:
        return otherwise
