"""Devices and terminals: nodes of the host, other terminals, keystrokes for somebody else."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import stat
import termios
from functools import partial
from typing import Iterator

from .core import Attempt, Finding, Missing, attempts, can_open, canary, each, in_child, judge, probe
from .files import own_file
from .kernel import reaches

KIND = "device"
HARMLESS = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}  # null zero full random urandom tty ptmx
PTS_MAJORS = range(136, 144)
NODES = (
    "vda", "sda", "nvme0n1", "mem", "kmem", "port", "kmsg", "kvm", "fuse", "loop-control", "loop0", "net/tun",
    "vhost-net", "vhost-vsock", "vsock", "hwrng", "snapshot", "tty0", "tty1", "console", "hpet", "rtc0", "nvram",
    "uinput", "input/event0", "nvidiactl", "dri/card0", "userfaultfd", "cpu/0/msr", "btrfs-control",
    "mapper/control", "ppp", "nbd0", "watchdog", "autofs", "vfio/vfio", "udmabuf", "dma_heap/system", "rfkill",
    "mcelog", "raw/rawctl", "cuse",
)  # fmt: skip
DANGEROUS_TO_OPEN = ("watchdog", "watchdog0", "snapshot")  # opening them is an order
NUMBERS = ((1, 1), (1, 2), (1, 4), (1, 11), (7, 0), (8, 0), (10, 232), (10, 229), (10, 200), (10, 237))
TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS, TIOCVHANGUP, TIOCSCTTY = 0x5412, 0x541C, 0x5423, 0x541D, 0x5437, 0x540E


@probe(KIND, root=True)
def nodes_of_the_host() -> Finding:
    """Open a device of the host: disk, memory, kernel log, virtual machines, FUSE, loop, tun ..."""
    names = [name for name in NODES if name not in DANGEROUS_TO_OPEN]
    return each(names, lambda name: can_open("/dev/" + name, os.O_RDONLY))


@probe(KIND, root=True)
def nodes_of_any_name() -> Finding:
    """Open any device node but null, zero, full, random, urandom, tty and terminals of one's own"""

    def nodes() -> Iterator[str]:
        for directory, _, names in os.walk("/dev"):
            yield from (os.path.join(directory, name) for name in names if name not in DANGEROUS_TO_OPEN)

    def attempt(path: str) -> bool:
        status = os.stat(path)
        numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
        device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        if not device or numbers in HARMLESS or (stat.S_ISCHR(status.st_mode) and numbers[0] in PTS_MAJORS):
            return False
        return can_open(path, os.O_RDONLY)

    return each(nodes(), attempt)


@probe(KIND, root=True)
def nodes_of_its_own() -> Finding:
    """Make a device node and open it: the root disk, memory, the kernel log"""

    def attempt(kind: int, numbers: tuple[int, int], place: str) -> bool:
        path = own_file(place)
        os.unlink(path)
        os.mknod(path, 0o600 | kind, os.makedev(*numbers))
        try:
            return can_open(path, os.O_RDONLY)
        finally:
            os.unlink(path)

    disk = tuple(canary("root_device"))
    wanted = [(stat.S_IFBLK, (disk[0], disk[1])), *((stat.S_IFCHR, numbers) for numbers in NUMBERS)]
    return attempts(
        (f"{numbers} in {place}", partial(attempt, kind, numbers, place))
        for kind, numbers in wanted
        for place in ("/tmp", "/dev/shm", "/dev")
    )


def on_a_terminal(request: int, argument: bytes, high: int = 0) -> Attempt:
    """An ioctl on a terminal of one's own that controls the process; any error but a refusal is a success."""

    def attempt() -> bool:
        with contextlib.suppress(OSError):
            os.setsid()
        _, slave = pty.openpty()
        with contextlib.suppress(OSError):
            fcntl.ioctl(slave, TIOCSCTTY, 0)
        return reaches("ioctl", slave, high << 32 | request, ctypes.create_string_buffer(argument, 64))

    return in_child(attempt)


HIGHS = (0, 1, 0xDEADBEEF & 0x7FFFFFFF)


@probe(KIND, maybe=True)
def type_into_a_terminal() -> Finding:
    """Push a keystroke into the controlling terminal: TIOCSTI, with garbage in the high word (CVE-2019-10063)"""
    return attempts((f"{high:#x}", on_a_terminal(TIOCSTI, b"#", high)) for high in HIGHS)


@probe(KIND)
def paste_into_a_console() -> Finding:
    """Paste into a console: TIOCLINUX, with garbage in the high word"""
    return attempts((f"{high:#x}", on_a_terminal(TIOCLINUX, b"\2", high)) for high in HIGHS)


@probe(KIND)
def line_disciplines() -> Finding:
    """Have a line discipline set, which loads its module: TIOCSETD, with garbage in the high word"""
    return attempts((f"{high:#x}", on_a_terminal(TIOCSETD, b"\0\0\0\0", high)) for high in HIGHS)


@probe(KIND, without="it would take the host's console messages")
def take_the_console() -> Finding:
    """Take the messages of the console: TIOCCONS"""
    return attempts((f"{high:#x}", on_a_terminal(TIOCCONS, b"", high)) for high in HIGHS)


@probe(KIND, root=True)
def hang_up_a_terminal() -> Finding:
    """Hang up a terminal, or lock its settings (needs CAP_SYS_ADMIN)"""
    return attempts((("hang up", on_a_terminal(TIOCVHANGUP, b"")), ("lock", on_a_terminal(0x5457, b"\0" * 36))))


@probe(KIND)
def terminal_of_somebody_else() -> Finding:
    """Open another session's terminal for writing"""
    path = canary("terminal")
    status = os.stat(path)
    same = [status.st_dev, status.st_rdev] == canary("terminal_identity")
    return judge(can_open(path, os.O_WRONLY) and same, path)


@probe(KIND)
def terminal_of_the_controller() -> Finding:
    """Have the controller's own terminal as standard input, output or error, or as the controlling one"""
    for descriptor in range(3):
        if os.isatty(descriptor):
            status = os.fstat(descriptor)
            return judge([status.st_dev, status.st_rdev] in canary("host_terminals"), os.ttyname(descriptor))
    if canary("control"):
        raise Missing("the control run has no terminal either")
    with contextlib.suppress(OSError):
        return judge(can_open("/dev/tty", os.O_RDWR))
    return judge(False, "no terminal")


@probe(KIND)
def terminals_of_the_host() -> Finding:
    """See the host's terminals in /dev/pts"""
    found = {name for name in os.listdir("/dev/pts") if name.isdigit()}
    status = os.stat("/dev/pts")
    return judge([status.st_dev, status.st_ino] == canary("pts_identity"), str(sorted(found)))


@probe(KIND)
def steal_a_terminal() -> Finding:
    """Take a terminal that controls another session (TIOCSCTTY with force)"""
    path = canary("terminal")

    def attempt() -> bool:
        with contextlib.suppress(OSError):
            os.setsid()
        status = os.stat(path)
        if [status.st_dev, status.st_rdev] != canary("terminal_identity"):
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
        return len(termios.tcgetattr(descriptor)) > 0 and fcntl.ioctl(descriptor, TIOCSCTTY, 1) == 0

    return attempts([("force", in_child(attempt))])
