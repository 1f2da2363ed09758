"""System calls that nothing in a sandbox needs: whether one is refused, or gets to the kernel behind the filter.

Each is made so that it does nothing: what it asks for is there already, or cannot be.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Callable, NamedTuple

from .core import Finding, attempts, each, in_child, judge, probe, without_sandbox
from .kernel import AT_FDCWD, Argument, buffer, call, reaches

KIND = "call"
NOWHERE = b"/nonexistent/probe"


class Try(NamedTuple):
    """A call with harmless arguments."""

    name: str
    arguments: Callable[[], tuple[Argument, ...]]
    title: str
    root: bool = False  # without a sandbox, only root gets there
    maybe: bool = False  # not every kernel has it


def given(*arguments: Argument) -> Callable[[], tuple[Argument, ...]]:
    return lambda: arguments


def vectors() -> tuple[Argument, ...]:
    memory = buffer(16)
    vector = buffer(16, struct.pack("=QQ", ctypes.addressof(memory), 0))
    return (os.getpid(), vector, 1, vector, 1, 0)


def whole_machine() -> tuple[Argument, ...]:
    return (buffer(112, struct.pack("=IIQQQQQ", 1, 112, 0, 0, 0, 0, 0b1100001)), 0, -1, -1, 0)


def own_name() -> tuple[Argument, ...]:
    name = os.uname().nodename.encode()
    return (name, len(name))


def own_domain() -> tuple[Argument, ...]:
    with open("/proc/sys/kernel/domainname", "rb") as file:
        name = file.read().strip()
    return (name, len(name))


MAP = struct.pack("=5I", 2, 4, 4, 1, 0)
OLD, MACHINE, MEMORY, MOUNTS = "obsolete", "the machine is the host's", "where memory lies", "mounts"
CALLS = (
    Try("acct", given(NOWHERE), MACHINE, root=True),
    Try("add_key", given(b"user", b"probe", b"x", 1, -2), "keyrings are those of the host's sessions"),
    Try("request_key", given(b"user", b"no such probe", None, 0), "keyrings are those of the host's sessions"),
    Try("keyctl", given(0, -3, 0, 0, 0), "keyrings are those of the host's sessions"),
    Try("adjtimex", lambda: (buffer(208),), "the host's clock"),
    Try("clock_adjtime", lambda: (0, buffer(208)), "the host's clock"),
    Try("clock_settime", given(0, None), "the host's clock"),
    Try("settimeofday", given(None, None), "the host's clock", root=True),
    Try("bpf", lambda: (0, buffer(128, MAP), 72), "programs in the kernel", root=True),
    Try("chroot", given(b"/"), MOUNTS, root=True),
    Try("clone3", given(None, 0), "flags that no filter sees"),
    Try("delete_module", given(b"no_such_probe", 0o4000), MACHINE, root=True, maybe=True),
    Try("fanotify_init", given(0x200, 0), "watching whole file systems", maybe=True),
    Try("fanotify_mark", given(-1, 1, 0, AT_FDCWD, None), "watching whole file systems", maybe=True),
    Try("finit_module", given(-1, b"", 0), MACHINE, root=True, maybe=True),
    Try("fsconfig", given(-1, 0, None, None, 0), MOUNTS),
    Try("fsmount", given(-1, 0, 0), MOUNTS, root=True),
    Try("fsopen", given(b"tmpfs", 1), MOUNTS, root=True),
    Try("fspick", given(AT_FDCWD, b"/", 1), MOUNTS, root=True),
    Try("get_mempolicy", given(None, None, 0, None, 0), MEMORY, maybe=True),
    Try("init_module", given(None, 0, b""), MACHINE, root=True, maybe=True),
    Try("io_uring_enter", given(-1, 0, 0, 0, None, 0), "goes round the filter", maybe=True),
    Try("io_uring_register", given(-1, 0, None, 0), "goes round the filter", maybe=True),
    Try("io_uring_setup", lambda: (1, buffer(120)), "goes round the filter", maybe=True),
    Try("ioperm", given(0x80, 1, 1), MACHINE, root=True, maybe=True),
    Try("iopl", given(3), MACHINE, root=True, maybe=True),
    Try("kcmp", lambda: (os.getpid(), os.getpid(), 0, 0, 0), "other processes' insides", maybe=True),
    Try("kexec_file_load", given(-1, -1, 0, b"", 1 << 31), MACHINE, root=True, maybe=True),
    Try("kexec_load", given(0, 1, None, 0xFFFF), MACHINE, root=True, maybe=True),
    Try("listmount", given(None, None, 0, 0), MOUNTS, maybe=True),
    Try("statmount", given(None, None, 0, 0), MOUNTS, maybe=True),
    Try("listns", given(None, None, 0, 0), MOUNTS, maybe=True),
    Try("lookup_dcookie", given(0, None, 0), OLD, root=True, maybe=True),
    Try("lsm_list_modules", given(None, None, 0), "the host's security modules", maybe=True),
    Try("mbind", given(0, 0, 0, None, 0, 0), MEMORY, maybe=True),
    Try("memfd_secret", given(0), "memory that no accounting sees", maybe=True),
    Try("migrate_pages", given(0, 0, None, None), MEMORY, maybe=True),
    Try("modify_ldt", given(0, None, 0), "segments of old programs", maybe=True),
    Try("mount", given(None, b"/", None, 0, None), MOUNTS, root=True),
    Try("mount_setattr", lambda: (AT_FDCWD, b"/", 0, buffer(32), 32), MOUNTS, root=True),
    Try("move_mount", given(-1, b"", -1, b"", 0), MOUNTS, root=True),
    Try("move_pages", given(0, 0, None, None, None, 0), MEMORY, maybe=True),
    Try("name_to_handle_at", given(AT_FDCWD, b"/", None, None, 0), "files by number", maybe=True),
    Try("open_by_handle_at", given(AT_FDCWD, None, 0), "files by number", maybe=True),
    Try("open_tree", given(AT_FDCWD, b"/", 1), MOUNTS, root=True),
    Try("open_tree_attr", lambda: (AT_FDCWD, b"/", 1, buffer(32), 32), MOUNTS, root=True, maybe=True),
    Try("perf_event_open", whole_machine, "counters of the whole machine", maybe=True),
    Try("personality", given(0x0040000), "no address randomisation"),
    Try("pidfd_getfd", given(-1, 0, 0), "other processes' descriptors"),
    Try("pivot_root", given(NOWHERE, NOWHERE), MOUNTS, root=True),
    Try("process_madvise", given(-1, None, 0, 0, 0), "other processes' memory", maybe=True),
    Try("process_mrelease", given(-1, 0), "other processes' memory", maybe=True),
    Try("process_vm_readv", vectors, "other processes' memory"),
    Try("process_vm_writev", vectors, "other processes' memory"),
    Try("quotactl", given(0x7FFFFFFF, None, 0, None), MACHINE, maybe=True),
    Try("quotactl_fd", given(-1, 0, 0, None), MACHINE, maybe=True),
    Try("reboot", given(0, 0, 0, None), MACHINE, root=True),
    Try("set_mempolicy", given(0, None, 0), MEMORY, maybe=True),
    Try("set_mempolicy_home_node", given(0, 0, 0, 0), MEMORY, maybe=True),
    Try("setdomainname", own_domain, MACHINE, root=True),
    Try("sethostname", own_name, MACHINE, root=True),
    Try("setns", given(-1, 0), "other namespaces"),
    Try("swapoff", given(None), MACHINE, root=True, maybe=True),
    Try("swapon", given(None, 0), MACHINE, root=True, maybe=True),
    Try("sync", given(), "what the whole machine has to write"),
    Try("syncfs", given(-1), "what a file system of the host has to write"),
    Try("sysfs", given(3), OLD, maybe=True),
    Try("syslog", given(10, None, 0), "the kernel's log", maybe=True),
    Try("umount2", given(b"/usr/bin", 4), MOUNTS, root=True),
    Try("unshare", given(0), "other namespaces"),
    Try("uselib", given(None), OLD, maybe=True),
    Try("userfaultfd", given(1), "holds the kernel still in mid-copy", maybe=True),
    Try("ustat", given(0, None), OLD, maybe=True),
    Try("vhangup", given(), MACHINE, root=True),
)


def reach(entry: Try) -> Callable[[], Finding]:
    def run() -> Finding:
        return attempts([(entry.name, in_child(lambda: reaches(entry.name, *entry.arguments())))])

    return run


for entry in CALLS:
    probe(KIND, entry.name.replace("_", "-"), f"{entry.name} ({entry.title})", root=entry.root, maybe=entry.maybe)(
        reach(entry)
    )


@probe(KIND, root=True)
def set_the_clock() -> Finding:
    """Set the host's clock (to the frequency that it has)"""

    def attempt() -> bool:
        state = buffer(208)
        call("adjtimex", state)
        struct.pack_into("=I", state, 0, 2)
        call("adjtimex", state)
        return True

    return attempts([("adjtimex", in_child(attempt))])


@probe(KIND, without="no number is unknown to the kernel in the way that it is to a filter")
def calls_yet_unknown() -> Finding:
    """Reach calls that are newer than the filter"""
    return each((480, 500, 547, 600, 1000), reaches, apart=True)


# --- sockets ---------------------------------------------------------------------------------------------------------

UNIX, INET, INET6, NETLINK, PACKET = 1, 2, 10, 16, 17
TYPES = {"stream": 1, "datagram": 2, "raw": 3, "rdm": 4, "seqpacket": 5, "dccp": 6, "packet": 10}


def makes(family: int, kind: int, protocol: int = 0) -> Callable[[], bool]:
    def attempt() -> bool:
        socket.socket(family, kind, protocol).close()
        return True

    return attempt


def socket_probe(
    name: str, title: str, *sockets: tuple[int, int, int], root: bool = False, maybe: bool = False
) -> None:
    @probe(KIND, "socket-" + name, "make a socket: " + title, root=root, maybe=maybe)
    def run() -> Finding:
        return attempts(("/".join(map(str, triple)), makes(*triple)) for triple in sockets)


def each_netlink_but_routes(numbers: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((NETLINK, kind, protocol) for protocol in numbers for kind in (2, 3))


socket_probe("packet", "packets of the wire", *((PACKET, kind, protocol) for kind in (2, 3, 10) for protocol in (0, 3)),
             root=True, maybe=True)  # fmt: skip
socket_probe("raw", "raw IP", *((INET, 3, protocol) for protocol in (1, 6, 17, 255)), root=True)
socket_probe("raw6", "raw IPv6", *((INET6, 3, protocol) for protocol in (58, 6, 17, 255)), root=True, maybe=True)
socket_probe("old-packet", "packets of the wire, the old way", (INET, 10, 0x0300), (INET, 10, 3), root=True, maybe=True)
socket_probe("netlink", "netlink: sock_diag, selinux, netfilter, generic, uevent, crypto ...",
             *each_netlink_but_routes((2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16, 18, 19, 20, 21, 22)))  # fmt: skip
socket_probe("alg", "the kernel's ciphers", (38, 5, 0), maybe=True)
socket_probe("vsock", "the hypervisor", (40, 1, 0), (40, 2, 0), (40, 5, 0), maybe=True)
socket_probe("key", "the kernel's keys of IPsec", (15, 3, 2), root=True, maybe=True)
socket_probe(
    "tipc", "TIPC, RDS, XDP, QIPCRTR, SMC", (30, 4, 0), (21, 5, 0), (44, 3, 0), (42, 2, 0), (43, 1, 0), maybe=True
)
socket_probe("can", "CAN, Bluetooth, NFC, IEEE 802.15.4, phonet", (29, 3, 1), (31, 3, 1), (39, 5, 0), (36, 3, 0),
             (35, 2, 0), maybe=True)  # fmt: skip
socket_probe("protocols", "SCTP, DCCP, UDP-Lite, MPTCP, L2TP, ping", (INET, 1, 132), (INET, 5, 132), (INET, 6, 33),
             (INET, 2, 136), (INET, 1, 262), (INET, 2, 115), (INET, 2, 1), maybe=True)  # fmt: skip


@probe(KIND, without="it asks the host's kernel to load modules")
def socket_of_any_other_family() -> Finding:
    """Make a socket: every family and type but local ones, TCP and UDP, and routes"""
    allowed = {(INET, 1), (INET, 2), (INET6, 1), (INET6, 2), (NETLINK, 2), (NETLINK, 3)}
    pairs = [(family, kind) for family in range(48) for kind in TYPES.values() if family != UNIX]
    wanted = [pair for pair in [*pairs, (1 << 16, 1), (0xFF, 3)] if pair not in allowed]
    return attempts(("/".join(map(str, pair)), makes(*pair)) for pair in wanted)


@probe(KIND)
def socket_by_its_high_word() -> Finding:
    """Make a socket: garbage in the half of the arguments that the kernel does not look at"""
    high = 0x12345678 << 32
    if without_sandbox():
        return judge(reaches("socket", high | NETLINK, high | 3, high | 12))
    return attempts(
        (
            ("netlink", lambda: call("socket", high | NETLINK, high | 3, high | 12) >= 0),
            ("packet", lambda: call("socket", high | PACKET, high | 3, high) >= 0),
            ("alg", lambda: call("socket", high | 38, high | 5, high) >= 0),
            ("vsock", lambda: call("socket", high | 40, high | 1, high) >= 0),
        )
    )
