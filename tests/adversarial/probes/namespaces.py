"""Namespaces and mounts: make new ones, enter the host's, change what is mounted."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import tempfile
from functools import partial

from .core import (
    REFUSALS,
    Attempt,
    Finding,
    Missing,
    all_pids,
    attempts,
    canary,
    each,
    in_child,
    judge,
    namespace,
    probe,
    read,
    status_field,
    without_sandbox,
)
from .kernel import AT_FDCWD, NAMESPACE_FLAGS, buffer, call, number_of, reaches

KIND = "namespace"
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 32, 4096, 16384, 1 << 18, 1 << 20
MNT_DETACH, MNT_EXPIRE = 2, 4
FILE_SYSTEMS = ("tmpfs", "ramfs", "proc", "sysfs", "overlay", "devpts", "mqueue", "cgroup2", "debugfs", "tracefs",
                "bpf", "binfmt_misc", "securityfs", "ext4", "squashfs", "fuse", "nfs", "9p", "devtmpfs")  # fmt: skip
USER = NAMESPACE_FLAGS["user"]
KINDS = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")


# --- new ones --------------------------------------------------------------------------------------------------------


@probe(KIND, root=True)
def unshare_each() -> Finding:
    """Make a new namespace of each kind: unshare"""
    return each(NAMESPACE_FLAGS, lambda name: call("unshare", NAMESPACE_FLAGS[name]) == 0, apart=True)


@probe(KIND)
def unshare_with_a_user_namespace() -> Finding:
    """Make a new user namespace, and each other kind in it: unshare"""
    return each(NAMESPACE_FLAGS, lambda name: call("unshare", NAMESPACE_FLAGS[name] | USER) == 0, apart=True)


def clone(flags: int) -> bool:
    """fork() with flags; the child ends at once."""
    pid = call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def clone3(flags: int) -> bool:
    arguments = buffer(88, struct.pack("=5Q", flags, 0, 0, 0, signal.SIGCHLD))
    pid = call("clone3", arguments, 88)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


CLONED = {name: flag for name, flag in NAMESPACE_FLAGS.items() if name != "time"}


@probe(KIND, root=True)
def clone_each() -> Finding:
    """Start a process in a new namespace of each kind: clone"""
    return each(CLONED, lambda name: clone(CLONED[name]))


@probe(KIND)
def clone_with_a_user_namespace() -> Finding:
    """Start a process in a new user namespace, and each other kind in it: clone, with garbage in the high word"""
    return each(CLONED, lambda name: clone(CLONED[name] | USER | 0xABCD << 32))


@probe(KIND, root=True)
def clone3_each() -> Finding:
    """Start a process in a new namespace of each kind: clone3, whose flags no filter can see"""
    return each(NAMESPACE_FLAGS, lambda name: clone3(NAMESPACE_FLAGS[name]))


@probe(KIND)
def clone3_with_a_user_namespace() -> Finding:
    """Start a process in a new user namespace, and each other kind in it: clone3"""
    return each(NAMESPACE_FLAGS, lambda name: clone3(NAMESPACE_FLAGS[name] | USER))


@probe(KIND)
def capabilities_of_a_nested_one() -> Finding:
    """Get every capability back in a nested user namespace"""

    def attempt() -> bool:
        before = int(status_field("CapEff"), 16)
        call("unshare", USER)
        return int(status_field("CapEff"), 16) & ~before != 0 or os.geteuid() != 0 or before != 0

    return attempts([("unshare", in_child(attempt))])


@probe(KIND)
def overlay_in_a_nested_one() -> Finding:
    """Mount an overlay in a nested user namespace (CVE-2021-3493, CVE-2023-0386)"""
    top = tempfile.mkdtemp()

    def attempt() -> bool:
        call("unshare", USER | NAMESPACE_FLAGS["mnt"])
        options = f"lowerdir={top}:/usr"
        return call("mount", b"overlay", top.encode(), b"overlay", 0, options.encode()) == 0

    try:
        return attempts([("overlay", in_child(attempt))])
    finally:
        os.rmdir(top)


@probe(KIND)
def firewall_in_a_nested_one() -> Finding:
    """Talk to the packet filter with the capabilities of a nested namespace (CVE-2023-32233)"""

    def attempt() -> bool:
        call("unshare", USER | NAMESPACE_FLAGS["net"])
        socket.socket(16, socket.SOCK_RAW, 0).close()
        return True

    return attempts([("netlink", in_child(attempt))])


@probe(KIND)
def room_for_user_namespaces() -> Finding:
    """Have the kernel allow user namespaces, or raise the number that it allows"""
    path = "/proc/sys/user/max_user_namespaces"

    def raised() -> bool:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            return not without_sandbox() and os.write(descriptor, b"100") > 0
        finally:
            os.close(descriptor)

    return attempts((("allowed", lambda: int(read(path)) > 0), ("raised", raised)))


# --- the host's ------------------------------------------------------------------------------------------------------


def same_as_the_hosts(kind: str) -> Finding:
    return judge(namespace(kind) == canary("namespaces")[kind], namespace(kind))


for one in KINDS:
    if one != "pid":  # processes.py
        probe(KIND, "of-the-host-" + one, "be in the host's namespace: " + one)(partial(same_as_the_hosts, one))


@probe(KIND, root=True)
def enter_the_hosts() -> Finding:
    """Enter a namespace of the host through /proc/PID/ns"""

    def enter(pid: int, kind: str) -> bool:
        if namespace(kind, str(pid)) != canary("namespaces").get(kind):
            return False
        return call("setns", os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0) == 0

    pids = sorted({1, os.getppid(), canary("host_pid"), *all_pids()[:20]})
    kinds = ("mnt", "net", "ipc", "uts", "cgroup", "pid")
    return attempts((f"{pid}/{kind}", in_child(partial(enter, pid, kind))) for pid in pids for kind in kinds)


@probe(KIND)
def reach_setns() -> Finding:
    """Reach setns at all: with no descriptor, by any flag"""
    flags = {**NAMESPACE_FLAGS, "any": 0}
    return each(flags, lambda name: reaches("setns", -1, flags[name]))


@probe(KIND, root=True)
def enter_its_own_again() -> Finding:
    """Enter the namespaces that it is in, by name and by a process (needs CAP_SYS_ADMIN over them)"""

    def by_name(kind: str) -> bool:
        return call("setns", os.open("/proc/self/ns/" + kind, os.O_RDONLY), 0) == 0

    def by_process(flag: int) -> bool:
        return call("setns", call("pidfd_open", os.getpid(), 0), flag) == 0

    kinds = [kind for kind in KINDS if kind != "user"]  # one's own user namespace: EINVAL
    named = [(kind, in_child(partial(by_name, kind))) for kind in kinds]
    held = [(kind + " by process", in_child(partial(by_process, NAMESPACE_FLAGS[kind]))) for kind in kinds]
    return attempts([*named, *held])


# --- mounts ----------------------------------------------------------------------------------------------------------


def safely() -> None:
    """A mount namespace of its own where that can be had; without a sandbox, nothing is tried in the host's."""
    try:
        call("unshare", NAMESPACE_FLAGS["mnt"])
        call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    except OSError as error:
        if error.errno in REFUSALS and namespace("mnt") == canary("namespaces")["mnt"] and os.geteuid() == 0:
            raise Missing("this is the host's mount namespace") from error


def mounted(source: bytes, kind: bytes, flags: int, options: bytes) -> Attempt:
    def attempt() -> bool:
        safely()
        point = tempfile.mkdtemp()
        try:
            call("mount", source, point.encode(), kind, flags, options)
            call("umount2", point.encode(), MNT_DETACH)
            return True
        finally:
            os.rmdir(point)

    return in_child(attempt)


def points() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return sorted({line.split()[4].encode().decode("unicode_escape") for line in table})[:60]


@probe(KIND, root=True)
def mount_each() -> Finding:
    """Mount a new file system of each kind"""
    return attempts(
        (name, mounted(b"none", name.encode(), 0, b"lowerdir=/usr:/etc" if name == "overlay" else b""))
        for name in FILE_SYSTEMS
    )


@probe(KIND, root=True)
def mount_again() -> Finding:
    """Show something a second time, move it, or change how changes to it spread"""
    return attempts(
        (
            ("root", mounted(b"/", b"", MS_BIND | MS_REC, b"")),
            ("usr", mounted(b"/usr", b"", MS_BIND, b"")),
            ("proc", mounted(b"/proc", b"", MS_BIND | MS_REC, b"")),
            ("the first process's root", mounted(b"/proc/1/root", b"", MS_BIND, b"")),
        )
    )


@probe(KIND, root=True)
def mount_anew() -> Finding:
    """Make each mount writable, executable, with devices and setuid programs"""

    def attempt(point: str) -> bool:
        safely()
        return call("mount", None, os.fsencode(point), None, MS_REMOUNT | MS_BIND, None) == 0

    return each(points(), attempt, apart=True)


@probe(KIND, root=True)
def unmount_each() -> Finding:
    """Unmount each mount, to see what is beneath"""

    def attempt(point: str) -> bool:
        safely()
        return reaches("umount2", os.fsencode(point), MNT_EXPIRE)  # the first time, it only marks

    return each([point for point in points() if point != "/"], attempt, apart=True)


@probe(KIND, root=True)
def change_how_mounts_spread() -> Finding:
    """Make the mounts shared with others"""

    def attempt(flags: int) -> bool:
        safely()
        return call("mount", b"none", b"/", None, flags, None) == 0

    return attempts(
        (("shared", in_child(lambda: attempt(MS_SHARED))), ("private", in_child(lambda: attempt(MS_PRIVATE))))
    )


@probe(KIND, root=True)
def mount_by_descriptors() -> Finding:
    """Make a file system with the new calls, from beginning to end: fsopen, fsconfig, fsmount, move_mount"""

    def attempt() -> bool:
        safely()
        context = call("fsopen", b"tmpfs", 0)
        call("fsconfig", context, 6, None, None, 0)
        tree = call("fsmount", context, 0, 0)
        point = tempfile.mkdtemp()
        try:
            call("move_mount", tree, b"", AT_FDCWD, point.encode(), 4)
            return call("umount2", point.encode(), MNT_DETACH) == 0
        finally:
            os.rmdir(point)

    return attempts([("tmpfs", in_child(attempt))])


@probe(KIND, root=True)
def copy_a_mount() -> Finding:
    """Copy a tree of mounts and change it: open_tree, mount_setattr"""

    def attempt(path: str) -> bool:
        safely()
        tree = call("open_tree", AT_FDCWD, path.encode(), 1)
        return call("mount_setattr", tree, b"", 0x1000, buffer(32, struct.pack("=4Q", 2, 1, 0, 0)), 32) == 0

    return each(("/", "/usr", "/proc"), attempt, apart=True)


@probe(KIND, root=True)
def another_root() -> Finding:
    """Change the root directory: pivot_root, chroot"""

    def chroot(path: str) -> bool:
        os.chroot(path)
        return True

    def pivot() -> bool:
        safely()
        return reaches("pivot_root", b"/usr/none", b"/usr/none")

    return attempts(
        (
            ("chroot", in_child(lambda: chroot("/usr"))),
            ("same root", in_child(lambda: chroot("/"))),
            ("pivot", in_child(pivot)),
        )
    )


# --- i386 ------------------------------------------------------------------------------------------------------------

I386 = {"getpid": 20, "unshare": 310, "clone": 120, "mount": 21, "keyctl": 288, "setns": 346}


def by_interrupt(number: int, first: int = 0) -> int:
    """Make a system call as 32-bit programs do; the numbers are theirs."""
    import mmap  # noqa: PLC0415 - only here, and only where there is such an interrupt

    if os.uname().machine != "x86_64":
        raise Missing("int 0x80 is x86's")
    # push rbx; mov ebx, edi; mov eax, number; int 0x80; pop rbx; ret
    code = b"\x53\x89\xfb\xb8" + struct.pack("=i", number) + b"\xcd\x80\x5b\xc3"
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)(first))


@probe(KIND, maybe=True, may_die=True)
def by_the_interrupt_of_i386() -> Finding:
    """Make a new user namespace with a 32-bit call, which native filters overlook (int 0x80)"""

    def pid() -> bool:
        return by_interrupt(I386["getpid"]) == os.getpid()

    def user() -> bool:
        return by_interrupt(I386["unshare"], USER) == 0

    return attempts((("getpid", in_child(pid)), ("unshare", in_child(user))))


@probe(KIND, maybe=True, may_die=True)
def by_the_numbers_of_x32() -> Finding:
    """Make a new user namespace with an x32 call, which native filters overlook"""
    if os.uname().machine != "x86_64":
        raise Missing("x32 is x86's")
    bit = 0x40000000
    return attempts(
        (
            ("getpid", in_child(lambda: call(bit | number_of("getpid")) == os.getpid())),
            ("unshare", in_child(lambda: call(bit | number_of("unshare"), USER) == 0)),
        )
    )
