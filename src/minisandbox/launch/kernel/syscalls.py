"""Wrap Linux system calls that Python lacks as functions that raise.

Every function raises :class:`CallError`, an ``OSError`` that also names the system call and its target.
Numbers and flags are from the kernel's uapi headers; numbers from 424 up are the same on every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_long, c_uint, c_uint32, c_uint64, c_ulong, c_void_p
from functools import cache

MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

CLONE_PARENT = 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
AT_FDCWD = -100

MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x00100000

FSOPEN_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSMOUNT_CLOEXEC = 1

RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8
RESOLVE_AS_ROOT = 0x10 | RESOLVE_NO_MAGICLINKS  # RESOLVE_IN_ROOT
RESOLVE_INSIDE = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION = 1
_SCOPE_ABSTRACT_UNIX_SOCKET = 1
SCOPED_ABI = 6
"""The first Landlock version that scopes abstract sockets, from Linux 6.12."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SYS_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_libc.mount.argtypes = (c_char_p, c_char_p, c_char_p, c_ulong, c_char_p)
_libc.umount2.argtypes = (c_char_p, c_int)
_libc.pivot_root.argtypes = (c_char_p, c_char_p)
_libc.prctl.argtypes = (c_int, c_ulong, c_ulong, c_ulong, c_ulong)
_libc.unshare.argtypes = (c_int,)
_libc.setns.argtypes = (c_int, c_int)


_UNNAMED = {524: "not supported, or no memory for the code of filters is left (net.core.bpf_jit_limit)"}
"""Messages for errors that are internal to the kernel but still reach programs: ENOTSUPP (include/linux/errno.h)."""


class CallError(OSError):
    """A system call was refused.

    Attributes:
        operation: name of the system call.
        target: its main argument as a string.
    """

    def __init__(self, number: int, operation: str, target: str) -> None:
        super().__init__(number, _UNNAMED.get(number) or os.strerror(number))
        self.operation = operation
        self.target = target

    def __str__(self) -> str:
        return f"{self.operation}({self.target}): {self.strerror}"


def _checked(result: int, operation: str, target: object) -> int:
    if result < 0:
        raise CallError(ctypes.get_errno(), operation, str(target))
    return result


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of a ``with`` block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    """Mount with mount(2), the old interface, for propagation changes and older kernels."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), None if fstype is None else fstype.encode(), flags,
        None if data is None else os.fsencode(data),
    )  # fmt: skip
    _checked(result, "mount", f"{fstype or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """Unmount a path with umount2(2)."""
    _checked(_libc.umount2(os.fsencode(target), flags), "umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Change the root mount with pivot_root(2)."""
    _checked(_libc.pivot_root(os.fsencode(new_root), os.fsencode(put_old)), "pivot_root", new_root)


def unshare(flags: int) -> None:
    """Enter new namespaces with unshare(2)."""
    _checked(_libc.unshare(flags), "unshare", hex(flags))


def clone_sibling(flags: int = 0) -> int:
    """Fork a child of this process's parent with clone(2); return its pid, or 0 in the child.

    Call it only in a process without threads, because Python and the C library do not notice this fork.
    """
    result = _syscall(c_long(_SYS_CLONE), c_ulong(flags | CLONE_PARENT | signal.SIGCHLD), None, None, None, None)
    return _checked(result, "clone", hex(flags))


def setns(descriptor: int, kind: int) -> None:
    """Enter the namespace of a descriptor with setns(2)."""
    _checked(_libc.setns(descriptor, kind), "setns", hex(kind))


def prctl(option: int, argument: int = 0, second_argument: int = 0) -> int:
    """Call prctl(2) with at most two arguments."""
    return _checked(_libc.prctl(option, argument, second_argument, 0, 0), "prctl", option)


def setdomainname(name: str) -> None:
    """Set the NIS domain name with setdomainname(2)."""
    data = os.fsencode(name)
    _checked(_libc.setdomainname(data, len(data)), "setdomainname", name)


def setfsids(uid: int, gid: int) -> None:
    """Set the file-system ids with setfsuid(2) and setfsgid(2)."""
    for call, number in ((_libc.setfsgid, gid), (_libc.setfsuid, uid)):
        call(number)
        if call(-1) != number:  # neither reports errors; an invalid id queries the current one
            raise CallError(errno.EPERM, call.__name__, str(number))


def open_tree(path: str, *, recursive: bool = False) -> int:
    """Create a detached copy of the mount at ``path`` with open_tree(2); return its descriptor."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    result = _syscall(_SYS_OPEN_TREE, c_int(AT_FDCWD), c_char_p(os.fsencode(path)), c_uint(flags))
    return _checked(result, "open_tree", path)


def move_mount(mount_fd: int, target_fd: int, label: str = "") -> None:
    """Attach a detached mount to a directory or file with move_mount(2), both given by descriptors."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    result = _syscall(_SYS_MOVE_MOUNT, c_int(mount_fd), c_char_p(b""), c_int(target_fd), c_char_p(b""), c_uint(flags))
    _checked(result, "move_mount", label or target_fd)


class _MountAttr(ctypes.Structure):
    _fields_ = (("attr_set", c_uint64), ("attr_clr", c_uint64), ("propagation", c_uint64), ("userns_fd", c_uint64))


def mount_setattr(
    mount_fd: int, set_flags: int, *, userns_fd: int = 0, recursive: bool = False, path: str = ""
) -> None:
    """Set attributes of a mount with mount_setattr(2).

    Args:
        mount_fd: descriptor of the mount's root, or of the directory that ``path`` is relative to.
        set_flags: ``MOUNT_ATTR_*`` flags to set.
        userns_fd: user namespace that provides the id map for ``MOUNT_ATTR_IDMAP``.
        recursive: whether to include the mounts below.
        path: path of the mount, or "" for the mount of the descriptor.
    """
    attr = _MountAttr(set_flags, 0, 0, userns_fd)
    flags = (0 if path else AT_EMPTY_PATH) | (AT_RECURSIVE if recursive else 0)
    result = _syscall(
        _SYS_MOUNT_SETATTR, c_int(mount_fd), c_char_p(os.fsencode(path)), c_uint(flags), ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )  # fmt: skip
    _checked(result, "mount_setattr", hex(set_flags))


def fsopen(fstype: str) -> int:
    """Begin the configuration of a new file system with fsopen(2); return its descriptor."""
    return _checked(_syscall(_SYS_FSOPEN, c_char_p(fstype.encode()), c_uint(FSOPEN_CLOEXEC)), "fsopen", fstype)


def fsconfig(fs_fd: int, key: str, value: str | None = None) -> None:
    """Set one option of a new file system with fsconfig(2): a string, or a flag if ``value`` is None."""
    command = FSCONFIG_SET_FLAG if value is None else FSCONFIG_SET_STRING
    data = None if value is None else os.fsencode(value)
    result = _syscall(_SYS_FSCONFIG, c_int(fs_fd), c_uint(command), c_char_p(key.encode()), c_char_p(data), c_int(0))
    _checked(result, "fsconfig", f"{key}={value}" if value is not None else key)


def fsmount(fs_fd: int, attributes: int = 0, label: str = "") -> int:
    """Create the configured file system and return a descriptor of its detached mount (fsconfig, fsmount(2))."""
    result = _syscall(_SYS_FSCONFIG, c_int(fs_fd), c_uint(FSCONFIG_CMD_CREATE), None, None, c_int(0))
    _checked(result, "fsconfig", label)
    result = _syscall(_SYS_FSMOUNT, c_int(fs_fd), c_uint(FSMOUNT_CLOEXEC), c_uint(attributes))
    return _checked(result, "fsmount", label)


def new_filesystem(fstype: str, attributes: int, **options: str) -> int:
    """Create a detached mount of a new file system with nosuid and, except for devpts, nodev; return its descriptor."""
    with closing(fsopen(fstype)) as fs:
        for key, value in options.items():
            fsconfig(fs, key, value)
        nodev = 0 if fstype == "devpts" else MOUNT_ATTR_NODEV
        return fsmount(fs, attributes | MOUNT_ATTR_NOSUID | nodev, fstype)


_ATTEMPTS = 1000


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", c_uint64), ("mode", c_uint64), ("resolve", c_uint64))


def openat2(directory_fd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open ``path`` below a directory under the given ``RESOLVE_*`` rules with openat2(2); return its descriptor.

    The kernel refuses ``..`` with EAGAIN if anything on the machine was renamed or mounted meanwhile, so try again.
    """
    open_how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    size = ctypes.c_size_t(ctypes.sizeof(open_how))
    name = c_char_p(os.fsencode(path))
    for _ in range(_ATTEMPTS):
        result = _syscall(_SYS_OPENAT2, c_int(directory_fd), name, ctypes.byref(open_how), size)
        if result >= 0 or ctypes.get_errno() != errno.EAGAIN:
            break
    return _checked(result, "openat2", path)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    """Close every descriptor from ``first`` to ``last`` with close_range(2)."""
    if first <= last:
        _checked(_syscall(_SYS_CLOSE_RANGE, c_uint(first), c_uint(last), c_uint(0)), "close_range", first)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", c_uint32), ("pid", c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", c_uint32), ("permitted", c_uint32), ("inheritable", c_uint32))


_CAP_VERSION_3 = 0x20080522


def capget() -> tuple[int, int, int]:
    """Return this thread's effective, permitted and inheritable capabilities as bit masks (capget(2))."""
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    _checked(_libc.capget(ctypes.byref(header), ctypes.byref(data)), "capget", "self")
    low, high = data[0], data[1]
    return (
        low.effective | high.effective << 32,
        low.permitted | high.permitted << 32,
        low.inheritable | high.inheritable << 32,
    )


def capset(mask: int) -> None:
    """Set the effective and permitted capabilities to ``mask``, and clear the inheritable set (capset(2))."""
    header = _CapHeader(_CAP_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (_CapData * 2)(_CapData(low, low, 0), _CapData(high, high, 0))
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset", hex(mask))


def default_internal_signals() -> None:
    """Reset the C library's two internal signals to their default by rt_sigaction(2), because the library refuses to.

    posix_spawn(3) leaves these signals ignored in the processes that it starts, and so in their descendants.
    """
    number = _SYS_RT_SIGACTION.get(os.uname().machine)
    if number is not None:
        for internal in (32, 33):
            default_action = ctypes.create_string_buffer(
                32
            )  # struct sigaction of the kernel: SIG_DFL, no flags, no mask
            _syscall(number, c_int(internal), default_action, None, ctypes.c_size_t(8))


def write_setting(path: str, text: str, directory_fd: int | None = None) -> None:
    """Write a setting to a file below /proc or /sys in a single write(2).

    Args:
        path: the file.
        text: the value to write.
        directory_fd: descriptor of the directory that a relative path starts from.
    """
    with closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory_fd)) as descriptor:
        os.write(descriptor, text.encode())


def trim_memory() -> None:
    """Return free memory to the kernel with malloc_trim(3); otherwise every forked child would have to map it."""
    trim = getattr(_libc, "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(c_ulong(0))


def join_new_session_keyring() -> None:
    """Replace the caller's session keyring with a new, empty one (keyctl(2))."""
    number = _SYS_KEYCTL.get(os.uname().machine)
    if number is not None:
        result = _syscall(number, c_ulong(_KEYCTL_JOIN_SESSION_KEYRING), None, 0, 0, 0)
        # ENOSYS: the kernel has no keyrings; EPERM: a container's filter refuses keyctl(2), to all descendants too
        if result < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
            _checked(-1, "keyctl", "join session keyring")


def landlock_abi() -> int:
    """Return the kernel's Landlock version, or 0 if Landlock is missing or disabled (landlock_create_ruleset(2))."""
    version: int = _syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), c_uint(_LANDLOCK_VERSION))
    return max(0, version)


def scope_abstract_sockets() -> bool:
    """Restrict this process and its descendants to abstract unix sockets that they have created (Landlock).

    Returns:
        Whether this kernel supports the restriction.
    """
    if landlock_abi() < SCOPED_ABI:
        return False
    attributes = (c_uint64 * 3)(0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET)  # struct landlock_ruleset_attr
    ruleset = _syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)), c_uint(0))
    _checked(ruleset, "landlock_create_ruleset", "abstract sockets")
    with closing(ruleset):
        _checked(_syscall(_SYS_LANDLOCK_RESTRICT_SELF, c_int(ruleset), c_uint(0)), "landlock_restrict_self", "self")
    return True


def forget_disk_priority() -> None:
    """Give this process the default disk priority (ioprio_set(2))."""
    machine = os.uname().machine
    if machine in _SYS_IOPRIO_SET:
        _checked(
            _syscall(_SYS_IOPRIO_SET[machine], c_int(_IOPRIO_WHO_PROCESS), c_int(0), c_int(0)), "ioprio_set", "self"
        )


@cache
def _argument_area() -> tuple[int, ...]:
    """Return the addresses of the arguments and the environment; they are the same in forked processes."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return tuple(int(fields[index]) for index in (45, 46, 47, 48))


def overwrite_arguments(name: str) -> None:
    """Overwrite this process's command line with ``name``, and erase its environment, as shown in /proc.

    The kernel serves ``/proc/PID/cmdline`` and ``environ`` from the process's memory (proc_pid_cmdline(5)).
    """
    start, end, env_start, env_end = _argument_area()
    text = name.encode()[: max(0, end - start - 1)]
    ctypes.memmove(c_void_p(start), text.ljust(end - start, b"\0"), end - start)
    ctypes.memset(c_void_p(env_start), 0, env_end - env_start)
    prctl(PR_SET_NAME, ctypes.cast(ctypes.create_string_buffer(text[:15]), c_void_p).value or 0)
