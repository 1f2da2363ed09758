"""Who a sandbox is: user namespaces, ranges of host ids, capabilities.

Two ways in, chosen by trying (DESIGN 4.2). *range*: the launcher has CAP_SYS_ADMIN and CAP_SETUID where it stands, and
gives each sandbox 65,536 host ids of its own. *single*: it has not, enters an outer user namespace that maps its own
uid alone, and every sandbox maps that one id. Host uid 0 is never mapped into a sandbox by the first way; by the second
it cannot be, because the caller is not it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from . import syscalls as sc

RANGE_SIZE = 65536
BLOCK_START = 0x70000000
"""First host id given to sandboxes: above the ranges that systemd gives to containers (524288 to 1879048191)."""
BLOCK_RANGES = 4000
OUTER_ID = 1

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID (DESIGN 4.13; numbers from linux/capability.h)
CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7))
_LAST_CAPABILITY = 63
_NEEDED = 1 << 21 | 1 << 7 | 1 << 6  # SYS_ADMIN, SETUID, SETGID


@dataclass(slots=True)
class Identity:
    """A prepared user namespace for one sandbox.

    Attributes:
        userns_fd: descriptor of the namespace.
        first_id: host id (as the launcher sees it) that is uid and gid 0 inside.
        mapped: whether image files must be idmapped to appear as owned by uid 0.
        lock_fd: descriptor whose lock holds the id range, or -1.
    """

    userns_fd: int
    first_id: int
    mapped: bool
    lock_fd: int = -1

    def release_namespace(self) -> None:
        """Give up the descriptor of the namespace: whoever lives in it keeps it alive."""
        if self.userns_fd >= 0:
            os.close(self.userns_fd)
        self.userns_fd = -1

    def close(self) -> None:
        """Give up the descriptors; with the lock, the range."""
        self.release_namespace()
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
        self.lock_fd = -1


def has_privileges() -> bool:
    """Whether this process may map foreign ids and mount where it stands (the *range* way)."""
    return sc.capget()[0] & _NEEDED == _NEEDED and _ids_are_mapped()


def _ids_are_mapped() -> bool:
    """Whether the block lies in this process's own user namespace (in a nested container it may not)."""
    with open("/proc/self/uid_map", encoding="ascii") as table:
        rows = [tuple(map(int, line.split())) for line in table]
    end = BLOCK_START + BLOCK_RANGES * RANGE_SIZE
    return any(start <= BLOCK_START and end <= start + count for start, _, count in rows)


def enter_outer_namespace() -> None:
    """Enter a new user namespace that maps only the caller's own ids, with every capability in it.

    They are called :data:`OUTER_ID` there, not 0: a sandbox's own map then does not look like that of the host's root.

    Raises:
        OSError: user namespaces are switched off here.
    """
    uid, gid = os.geteuid(), os.getegid()
    sc.unshare(sc.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{OUTER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{OUTER_ID} {gid} 1")


class Identities:
    """Makes identities; holds the locks of those in use.

    Args:
        mapped: whether each sandbox gets a range of its own.
        lock_directory: where the locks of ranges lie (only used when ``mapped``).
    """

    def __init__(self, *, mapped: bool, lock_directory: str) -> None:
        self._mapped = mapped
        self._locks = lock_directory
        self._next = os.getpid() % BLOCK_RANGES
        self._forbidden = tuple(_foreign_ranges()) if mapped else ()
        if mapped:
            os.makedirs(lock_directory, 0o700, exist_ok=True)

    def make(self) -> Identity:
        """A new user namespace in which no further one can be made, and its id range.

        Raises:
            OSError: the kernel refused, or no range is free.
        """
        first, lock = self._take_range() if self._mapped else (OUTER_ID, -1)
        try:
            userns = _new_user_namespace(first, RANGE_SIZE if self._mapped else 1)
        except BaseException:  # the lock must not outlive the attempt, whatever ended it
            if lock >= 0:
                os.close(lock)
            raise
        return Identity(userns, first, self._mapped, lock)

    def _take_range(self) -> tuple[int, int]:
        for _ in range(BLOCK_RANGES):
            index, self._next = self._next, (self._next + 1) % BLOCK_RANGES
            first = BLOCK_START + index * RANGE_SIZE
            if any(first < end and start < first + RANGE_SIZE for start, end in self._forbidden):
                continue
            lock = os.open(f"{self._locks}/{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return first, lock
        raise OSError(11, "every id range is in use")


def _foreign_ranges() -> Iterator[tuple[int, int]]:
    """Host ids that belong to somebody: (first, end) of each user and each subordinate range."""
    for path, first_field, count_field in (("/etc/passwd", 2, -1), ("/etc/subuid", 1, 2), ("/etc/subgid", 1, 2)):
        try:
            with open(path, encoding="utf-8", errors="replace") as table:
                rows = [line.rstrip("\n").split(":") for line in table]
        except FileNotFoundError:
            continue
        for row in rows:
            if len(row) > 2 and row[first_field].isdigit():
                count = int(row[count_field]) if count_field > 0 and row[count_field].isdigit() else 1
                yield int(row[first_field]), int(row[first_field]) + count


def _new_user_namespace(first: int, count: int) -> int:
    """Create a user namespace through a helper process that ends at once; returns the namespace's descriptor."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        _hold_namespace(ready_write, go_read)
    try:
        os.close(ready_write)
        os.close(go_read)
        if os.read(ready_read, 1) != b"r":
            raise OSError(1, "a nested user namespace was refused")
        _write(f"/proc/{helper}/uid_map", f"0 {first} {count}")
        _write(f"/proc/{helper}/gid_map", f"0 {first} {count}")
        os.write(go_write, b"g")
        if os.read(ready_read, 1) != b"c":
            raise OSError(1, "nested user namespaces could not be switched off inside the sandbox")
        return os.open(f"/proc/{helper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(go_write)
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)


def _hold_namespace(ready: int, go: int) -> None:
    """In the helper: enter a new namespace, have it mapped, close it for further ones, wait to be ended."""
    try:
        sc.unshare(sc.CLONE_NEWUSER)
        os.write(ready, b"r")
        os.read(go, 1)
        limit = "/proc/sys/user/max_user_namespaces"
        _write(limit, "0")
        with open(limit, encoding="ascii") as check:
            os.write(ready, b"c" if check.read().strip() == "0" else b"x")
        os.read(go, 1)
    except OSError:
        os.write(ready, b"x")
    finally:
        os._exit(0)


def act_as_owner(identity: Identity) -> None:
    """Make files as the sandbox's uid 0, with the launcher's capabilities still there.

    An overlay works with the credentials of whoever mounted it; over an idmapped upper its file-system uid must be a
    mapped one, or the work directory cannot be made and the mount is silently read-only (fs/overlayfs/super.c).
    """
    if identity.mapped:
        sc.setfsids(identity.first_id)
        sc.capset(sc.capget()[1])  # leaving fsuid 0 drops the effective file capabilities (capabilities(7))


def become_inner_root(identity: Identity) -> None:
    """Enter a sandbox's user namespace as its uid 0 with the one capability set, for good.

    Raises:
        OSError: the kernel refused.
    """
    sc.setns(identity.userns_fd, sc.CLONE_NEWUSER)
    if identity.mapped:  # with one mapped id the kernel forbids setgroups(2), and there is nothing to drop by it
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    for number in range(_LAST_CAPABILITY + 1):
        if not CAPABILITIES >> number & 1:
            try:
                sc.prctl(sc.PR_CAPBSET_DROP, number)
            except sc.CallError:  # EINVAL: past the last capability this kernel knows
                break
    sc.prctl(sc.PR_CAP_AMBIENT, sc.PR_CAP_AMBIENT_CLEAR_ALL)
    sc.capset(CAPABILITIES)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
