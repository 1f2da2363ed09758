"""Who a sandbox is: user namespaces, ranges of host ids, capabilities.

Two ways in, chosen by trying (DESIGN 4.2). *mapped*: the launcher has CAP_SYS_ADMIN and CAP_SETUID where it stands, and
gives each sandbox 65,536 host ids of its own. Otherwise it enters an outer user namespace first: with newuidmap(1) and
an entry in /etc/subuid one that holds the caller's own uid and 65,535 subordinate ones, and every sandbox has all of
them; else one that holds the caller's alone. Host uid 0 is never mapped into a sandbox by the first way; by the others
it cannot be, because the caller is not it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import syscalls as sc
from .plan import INOTIFY

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
        groups: whether setgroups(2) is allowed in it.
        lock_fd: descriptor whose lock holds the id range, or -1.
    """

    userns_fd: int
    first_id: int
    mapped: bool
    groups: bool = True
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


def enter_outer_namespace(mappers: Sequence[str] = ()) -> int:
    """Enter a new user namespace that maps the caller's own ids, with every capability in it.

    They are called :data:`OUTER_ID` there, not 0: a sandbox's own map then does not look like that of the host's root.

    Args:
        mappers: paths of newuidmap(1) and newgidmap(1), or empty texts where they are not to be used.

    Returns:
        How many ids are mapped: all of a range, or one.

    Raises:
        OSError: user namespaces are switched off here.
    """
    uid, gid = os.geteuid(), os.getegid()
    commands = _map_commands(uid, gid, mappers)
    entered, gate = os.pipe()
    helper = os.fork() if commands else 0
    if commands and helper == 0:
        os.close(gate)
        _map_from_outside(entered, os.getppid(), commands)
    try:
        sc.unshare(sc.CLONE_NEWUSER)
    finally:
        os.close(gate)
        os.close(entered)
    if commands and os.waitpid(helper, 0)[1] == 0:
        return RANGE_SIZE
    _write("/proc/self/setgroups", "deny")
    for kind, number in (("uid", uid), ("gid", gid)):
        with contextlib.suppress(PermissionError):  # one of the two programs may have done its part
            _write(f"/proc/self/{kind}_map", f"{OUTER_ID} {number} 1")
    return 1


def _map_commands(uid: int, gid: int, mappers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The programs to run, with what follows the pid: the caller's own id, then a range; none without a range."""
    if not all(mappers) or len(mappers) != 2:
        return []
    commands = []
    for mapper, table, number in zip(mappers, ("/etc/subuid", "/etc/subgid"), (uid, gid), strict=True):
        start = _subordinate_range(table, uid)
        if start is None:
            return []
        own = [str(OUTER_ID), str(number), "1"]
        commands.append((mapper, [*own, str(OUTER_ID + 1), str(start), str(RANGE_SIZE - 1)]))
    return commands


def _subordinate_range(table: str, uid: int) -> int | None:
    """First of a user's subordinate ids, if there are enough of them in a row (subuid(5))."""
    names = {str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    with contextlib.suppress(OSError), open(table, encoding="utf-8", errors="replace") as rows:
        for row in rows:
            name, _, numbers = row.strip().partition(":")
            start, _, count = numbers.partition(":")
            if name in names and start.isdigit() and count.isdigit() and int(count) >= RANGE_SIZE - 1:
                return int(start)
    return None


def _map_from_outside(entered: int, pid: int, commands: list[tuple[str, list[str]]]) -> None:
    """In a helper that stays outside: map the ids of a process that has entered a new namespace. Never returns."""
    status = 1
    try:
        os.read(entered, 1)  # ends when the other closes its end: it is in
        status = 0
        for program, arguments in commands:
            status |= os.spawnve(os.P_WAIT, program, [program, str(pid), *arguments], {})  # noqa: S606 - one program, no shell
    finally:
        os._exit(1 if status else 0)


class Identities:
    """Makes identities; holds the locks of those in use.

    Args:
        mapped: whether each sandbox gets a range of its own.
        count: how many ids a sandbox has.
        lock_directory: where the locks of ranges lie (only used when ``mapped``).
    """

    def __init__(self, *, mapped: bool, count: int, lock_directory: str) -> None:
        self.mapped = mapped
        self.count = count
        self._locks = lock_directory
        self._next = os.getpid() % BLOCK_RANGES
        self._forbidden = tuple(_foreign_ranges()) if mapped else ()
        if mapped:
            os.makedirs(lock_directory, 0o700, exist_ok=True)

    def make(self, *, one_id: bool = False, inotify: int = INOTIFY) -> Identity:
        """A new user namespace in which no further one can be made, and its id range.

        Args:
            inotify: how many inotify instances there can be in it; a host user's are few, and all sandboxes share them.
            one_id: have but one id where the range is not the sandbox's own: what it leaves on a disk then belongs to
                the caller, who can remove it.

        Raises:
            OSError: the kernel refused, or no range is free.
        """
        first, lock = self._take_range() if self.mapped else (OUTER_ID, -1)
        try:
            userns = _new_user_namespace(self._id_map(first, one_id=one_id), inotify)
        except BaseException:  # the lock must not outlive the attempt, whatever ended it
            if lock >= 0:
                os.close(lock)
            raise
        return Identity(userns, first, self.mapped, self.count > 1, lock)

    def _id_map(self, first: int, *, one_id: bool) -> str:
        """What is written to uid_map and gid_map; no row may span two rows of the outer map (user_namespaces(7))."""
        if self.mapped:
            return f"0 {first} {self.count}"
        rest = "" if one_id or self.count == 1 else f"\n1 {first + 1} {self.count - 1}"
        return f"0 {first} 1{rest}"

    def _take_range(self) -> tuple[int, int]:
        for _ in range(BLOCK_RANGES):
            index, self._next = self._next, (self._next + 1) % BLOCK_RANGES
            first = BLOCK_START + index * RANGE_SIZE
            if any(first < end and start < first + RANGE_SIZE for start, end in self._forbidden):
                continue
            lock = _lock(f"{self._locks}/{index}")
            if lock is not None:
                return first, lock
        raise OSError(11, "every id range is in use")


def _lock(path: str) -> int | None:
    """The lock of a range as a descriptor that holds it, or None where another has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):  # not removed since it was opened ('sandbox prune')
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


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


def _new_user_namespace(id_map: str, inotify: int) -> int:
    """Create a user namespace through a helper process that ends at once; returns the namespace's descriptor."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        _hold_namespace(ready_write, go_read, inotify)
    try:
        os.close(ready_write)
        os.close(go_read)
        if os.read(ready_read, 1) != b"r":
            raise OSError(1, "a nested user namespace was refused")
        _write(f"/proc/{helper}/uid_map", id_map)
        _write(f"/proc/{helper}/gid_map", id_map)
        os.write(go_write, b"g")
        if os.read(ready_read, 1) != b"c":
            raise OSError(1, "nested user namespaces could not be switched off inside the sandbox")
        return os.open(f"/proc/{helper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(go_write)
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)


def _hold_namespace(ready: int, go: int, inotify: int) -> None:
    """In the helper: enter a new namespace, have it mapped, close it for further ones, wait to be ended."""
    try:
        sc.unshare(sc.CLONE_NEWUSER)
        os.write(ready, b"r")
        os.read(go, 1)
        limit = "/proc/sys/user/max_user_namespaces"
        _write(limit, "0")
        with contextlib.suppress(FileNotFoundError):  # a kernel without inotify
            _write("/proc/sys/user/max_inotify_instances", str(inotify))
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
    if identity.groups:  # with one id that nobody privileged has mapped, the kernel forbids setgroups(2)
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
