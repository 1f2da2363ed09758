"""Create the identity of a sandbox: its user namespace, its range of host ids, its capabilities.

There are two modes, chosen by the launcher's privileges:

* *mapped*: with CAP_SYS_ADMIN and CAP_SETUID, the launcher gives each sandbox a separate range of 65,536 host ids.
  Larger ids inside are host ids that all sandboxes share.
* Otherwise the launcher first enters an outer user namespace. With newuidmap(1) and an entry in /etc/subuid, it maps
  the caller's uid and 65,535 subordinate ids, and every sandbox has all of them. Else it maps the caller's uid alone.

Host uid 0 is never mapped into a sandbox: the first mode does not map it, and in the second the caller is not root.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import pwd
import resource
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import syscalls as sc

INOTIFY = 32
"""Default limit of inotify instances per sandbox; the kernel's default is 128 per user (inotify(7))."""
PROCESSES = 1032
"""Default limit of processes per sandbox, pid 1 and workers included."""
RANGE_SIZE = 65536
BLOCK_START = 0x77390000
"""First host id of sandboxes, above the ids that systemd assigns to containers (524288 to 1879048191) and SSSD to
directory users (ldap_idmap_range_max in sssd-ldap(5): below 2000200000)."""
BLOCK_RANGES = 2200
GATEWAY_ID = BLOCK_START + BLOCK_RANGES * RANGE_SIZE
"""Host id that owns no files; the helper processes that serve root's sandboxes from outside run under it."""
LAST_ID = (1 << 31) - 1
"""The largest id that container engines accept (moby/sys/user)."""
_LARGE_IDS = 1 << 31
"""First host id for inner ids from :data:`RANGE_SIZE` on; no system assigns ids that large (systemd's UIDS-GIDS.md)."""
LOCKS = "ranges"
"""Name of the lock file; one byte of it is locked for each id range in use."""
OUTER_ID = 1
_WATCHES = 8192
"""Inotify watches per sandbox. A host user has 8,192 or more (inotify(7)), which all its sandboxes share."""

_SIGNALS = 1024
"""Pending signals per sandbox. A host user has many more, which all its sandboxes share (getrlimit(2))."""
_OWNERS = 64
"""Number of processes, of an ordinary user's limit, that remain for the user's other programs."""
_LOCKED = 1 << 16
"""Bytes of locked memory per sandbox; every user's default limit before Linux 5.16."""

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID (numbers from linux/capability.h)
CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7))
_LAST_CAPABILITY = 63
_ENTERED, _MAPPED = b"entered", b"mapped"
BECOME = b"become"
"""Message of a sandbox's pid 1 once it has its final ids and capabilities."""
_NEEDED = 1 << 21 | 1 << 7 | 1 << 6  # SYS_ADMIN, SETUID, SETGID


@dataclass(slots=True)
class Identity:
    """The identity of one sandbox: its ids, and the user namespace that maps them.

    Attributes:
        first_id: host id (as the launcher sees it) that is uid and gid 0 inside.
        id_map: content of uid_map and gid_map.
        inotify: limit of inotify instances; a host user has few, which all its sandboxes share.
        mapped: whether image files must be idmapped to appear as owned by uid 0.
        groups: whether setgroups(2) is allowed in the namespace.
        creator: host id that creates only this namespace, or 0 if the caller's own id creates it.
        processes: limit of processes for all ids together, if there is a creator; 0: no limit.
        userns_fd: descriptor of the namespace, or -1.
    """

    first_id: int
    id_map: str
    inotify: int
    mapped: bool
    groups: bool = True
    creator: int = 0
    processes: int = 0
    userns_fd: int = -1

    def fields(self) -> tuple[int, str, int, bool, bool, int, int]:
        """Return all but the namespace, to create an equal identity in another process."""
        ids = self.first_id, self.id_map, self.inotify, self.mapped
        return *ids, self.groups, self.creator, self.processes


def has_privileges() -> bool:
    """Return whether this process may map arbitrary ids and mount in its own namespaces (mode *mapped*)."""
    return sc.capget()[0] & _NEEDED == _NEEDED and _ids_are_mapped()


def _ids_are_mapped(first: int = BLOCK_START, last: int = GATEWAY_ID) -> bool:
    """Return whether this process's user namespace maps these ids; that of a nested container may not."""
    with open("/proc/self/uid_map", encoding="ascii") as table:
        rows = [tuple(map(int, line.split())) for line in table]
    return any(start <= first and start + count > last for start, _, count in rows)


def last_id() -> int:
    """Return the largest id inside a sandbox in the mode *mapped*."""
    end = _LARGE_IDS + LAST_ID - RANGE_SIZE
    is_free = all(last <= _LARGE_IDS or first > end for first, last in _foreign_ranges())
    return LAST_ID if is_free and _ids_are_mapped(_LARGE_IDS, end) else RANGE_SIZE - 1


def leave_root() -> None:
    """Switch to an id that owns no files, if permitted: even without capabilities, uid 0 could open root's files."""
    if has_privileges():
        os.setgroups([])
        os.setresgid(GATEWAY_ID, GATEWAY_ID, GATEWAY_ID)
        os.setresuid(GATEWAY_ID, GATEWAY_ID, GATEWAY_ID)


def enter_outer_namespace(mappers: Sequence[str] = ()) -> int:
    """Enter a new user namespace that maps the caller's own ids, with all capabilities in it.

    The caller's ids become :data:`OUTER_ID` there instead of 0, so that a sandbox's id map does not look like that of
    the host's root.

    Args:
        mappers: paths of newuidmap(1) and newgidmap(1), or empty strings to map a single id.

    Returns:
        The number of mapped ids: :data:`RANGE_SIZE` or 1.

    Raises:
        OSError: user namespaces are disabled.
    """
    uid, gid = os.geteuid(), os.getegid()
    commands = _map_commands(uid, gid, mappers)
    entered_read, entered_write = os.pipe()
    helper = os.fork() if commands else 0
    if commands and helper == 0:
        os.close(entered_write)
        _map_from_outside(entered_read, os.getppid(), commands)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)
    _leave_processes(_OWNERS)
    try:
        sc.unshare(sc.CLONE_NEWUSER)
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, processes)
        os.close(entered_write)
        os.close(entered_read)
    if commands and os.waitpid(helper, 0)[1] == 0:
        return RANGE_SIZE
    sc.write_setting("/proc/self/setgroups", "deny")
    for kind, number in (("uid", uid), ("gid", gid)):
        with contextlib.suppress(PermissionError):  # one of the two mappers may have succeeded
            sc.write_setting(f"/proc/self/{kind}_map", f"{OUTER_ID} {number} 1")
    with open("/proc/self/uid_map", encoding="ascii") as table:
        if not table.read() and uid == 0:  # not EPERM, which means disabled user namespaces
            raise OSError(errno.EACCES, "uid 0 cannot be mapped into a user namespace without CAP_SETFCAP")
    return 1


def _leave_processes(count: int) -> None:
    """Lower RLIMIT_NPROC, so that the next user namespace leaves ``count`` of the caller's processes to the caller."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NPROC)
    if maximum > 2 * count:
        resource.setrlimit(resource.RLIMIT_NPROC, (maximum - count, maximum))


def _map_commands(uid: int, gid: int, mappers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the mapper programs and their arguments after the pid, or [] if there is no subordinate range."""
    if not all(mappers) or len(mappers) != 2:
        return []
    commands = []
    for mapper, table, number in zip(mappers, ("/etc/subuid", "/etc/subgid"), (uid, gid), strict=True):
        start = _subordinate_range(table, uid)
        if start is None:
            return []
        own_id = [str(OUTER_ID), str(number), "1"]
        commands.append((mapper, [*own_id, str(OUTER_ID + 1), str(start), str(RANGE_SIZE - 1)]))
    return commands


def _subordinate_range(table: str, uid: int) -> int | None:
    """Return the first id of a large enough range of subordinate ids, or None if the user has none (subuid(5))."""
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


def _map_from_outside(entered_read: int, pid: int, commands: list[tuple[str, list[str]]]) -> None:
    """Run the mapper programs for a process in a new namespace, from a helper outside of it. Never returns."""
    status = 1
    try:
        os.read(entered_read, 1)  # returns once the parent has entered the namespace and closed its end
        status = 0
        for program, arguments in commands:
            status |= os.spawnve(os.P_WAIT, program, [program, str(pid), *arguments], {})  # noqa: S606 - one program, no shell
    finally:
        os._exit(1 if status else 0)


class Identities:
    """Creates identities, and holds the locks of their id ranges.

    Create it in a process whose ``/proc`` shows the host's processes, to find ranges that are still in use.

    Args:
        mapped: whether each sandbox gets a separate id range.
        count: number of ids per sandbox.
        lock_directory: directory of the lock file of ranges; only used if ``mapped``.
    """

    def __init__(self, *, mapped: bool, count: int, lock_directory: str) -> None:
        self.mapped = mapped
        self.count = count
        self._next_index = int.from_bytes(os.urandom(4)) % BLOCK_RANGES
        self._forbidden = tuple(_foreign_ranges()) if mapped else ()
        large_id_count = last_id() + 1 - RANGE_SIZE if mapped else 0
        self._large_ids_row = f"\n{RANGE_SIZE} {_LARGE_IDS} {large_id_count}" if large_id_count else ""
        self._own_ranges: set[int] = set()
        self._creators = _Creators(count)
        self._dying_ranges: frozenset[int] = frozenset()
        if mapped:
            os.makedirs(lock_directory, 0o700, exist_ok=True)
            self._locks = os.open(f"{lock_directory}/{LOCKS}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._dying_ranges = frozenset(filter(self._is_unlocked, _ranges_in_use()))

    def make(self, *, one_id: bool = False, inotify: int = INOTIFY, processes: int = PROCESSES) -> Identity:
        """Create an identity without a namespace, and in the mode *mapped* reserve an id range for it.

        Args:
            inotify: limit of inotify instances.
            one_id: map a single id unless the sandbox has a separate range. Its files on disk then belong to the
                caller, who can remove them.
            processes: limit of processes for all ids together, if there are several; 0: no limit.

        Raises:
            OSError: no id range is free.
        """
        first_id = self._take_range() if self.mapped else OUTER_ID
        creator = first_id if self.mapped else self._creators.choose(inotify)
        id_map = self._id_map(first_id, one_id=one_id)
        return Identity(first_id, id_map, inotify, self.mapped, self.count > 1, creator, processes)

    def give_back(self, identity: Identity) -> None:
        """Release the id range of a sandbox that has ended, and the id that created its namespace."""
        self._creators.in_use.discard(identity.creator)
        if self.mapped:
            index = (identity.first_id - BLOCK_START) // RANGE_SIZE
            self._lock(index, fcntl.F_UNLCK)
            self._own_ranges.discard(index)

    def _id_map(self, first_id: int, *, one_id: bool) -> str:
        """Return the content of uid_map and gid_map; no row may span two rows of the outer map (user_namespaces(7))."""
        if self.mapped:
            return f"0 {first_id} {self.count}{self._large_ids_row}"
        other_ids = "" if one_id or self.count == 1 else f"\n1 {first_id + 1} {self.count - 1}"
        return f"0 {first_id} 1{other_ids}"

    def _take_range(self) -> int:
        """Return the first id of a range that is free on this machine, and lock it."""
        for _ in range(BLOCK_RANGES):
            index, self._next_index = self._next_index, (self._next_index + 1) % BLOCK_RANGES
            first_id = BLOCK_START + index * RANGE_SIZE
            if any(first_id < end and start < first_id + RANGE_SIZE for start, end in self._forbidden):
                continue
            if index not in self._own_ranges and index not in self._dying_ranges and self._lock(index, fcntl.F_WRLCK):
                self._own_ranges.add(index)
                return first_id
        raise OSError(errno.EBUSY, "every id range is in use")

    def _is_unlocked(self, index: int) -> bool:
        """Return whether no owner holds the lock of a range; its remaining processes are then about to die."""
        return self._lock(index, fcntl.F_WRLCK) and self._lock(index, fcntl.F_UNLCK)

    def _lock(self, index: int, kind: int) -> bool:
        """Lock or unlock the byte of a range; return False if another process holds the lock.

        A single descriptor holds all locks, because every fork copies every descriptor. Open file description locks
        (fcntl(2)) end when the last process that shares the descriptor closes it.
        """
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, index, 1, 0)
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, request)
        except BlockingIOError:
            return False
        return True


def _ranges_in_use() -> set[int]:
    """Return the indices of ranges that contain the uid of a process in ``/proc``."""
    ranges = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has exited
            ranges.add((os.stat(f"/proc/{name}").st_uid - BLOCK_START) // RANGE_SIZE)
    return {index for index in ranges if 0 <= index < BLOCK_RANGES}


def _foreign_ranges() -> Iterator[tuple[int, int]]:
    """Yield the host ids that are assigned already: (first, end) of each user and each subordinate range."""
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


@dataclass(slots=True)
class _Creators:
    """Chooses a different id of the outer user namespace as the creator of each sandbox's namespace.

    The kernel counts the resources of a user namespace, whatever ids its processes have, for the id that created the
    namespace too (kernel/ucount.c). With a separate creator per namespace, that count is the sandbox's own.

    Attributes:
        count: number of ids in the outer namespace.
        in_use: creators of live sandboxes.
    """

    count: int
    in_use: set[int] = field(default_factory=set)
    _inotify: int = 0
    _last_id: int = OUTER_ID

    def choose(self, inotify: int) -> int:
        """Return a free creator for a sandbox with this many inotify instances, or 0 if there is only one id."""
        if self.count == 1:
            return 0
        if inotify > self._inotify:
            with sc.closing(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as proc:
                _limit_inotify(proc, inotify)
            self._inotify = inotify
        for _ in range(self.count):
            self._last_id = self._last_id + 1 if self._last_id < self.count else OUTER_ID + 1
            if self._last_id not in self.in_use:
                self.in_use.add(self._last_id)
                return self._last_id
        raise OSError(errno.EBUSY, "every id is in use")


def enter_new_namespace(identity: Identity, partner: socket.socket, proc: int) -> None:
    """Enter a new user namespace as its uid 0, and forbid nested user namespaces in it if possible.

    Args:
        identity: the ids to get in it.
        partner: socket to a process that stays outside and calls :func:`map_namespace`.
        proc: descriptor of a mounted proc, preferably not shared with other namespaces. In a shared proc, the kernel
            keeps one entry per namespace for each setting, and searches all of them at each open
            (fs/proc/proc_sysctl.c).

    Raises:
        OSError: the kernel refused.
    """
    _create_namespace(identity)
    with contextlib.suppress(OSError):  # /proc/sys may be read-only; the filter forbids nesting too
        forbid_nesting(proc)
    _limit_inotify(proc, identity.inotify)
    socket.send_fds(partner, [_ENTERED], [proc])
    if partner.recv(16) != _MAPPED:
        raise OSError(errno.EPERM, "the ids of a user namespace could not be mapped")


def forbid_nesting(proc: int) -> None:
    """Forbid user namespaces nested in this process's own.

    Args:
        proc: descriptor of a mounted proc.

    Raises:
        OSError: the setting cannot be written, as in containers with a read-only /proc/sys.
    """
    if _set_limit(proc, "max_user_namespaces", 0) != "0":
        raise OSError(errno.EPERM, "nested user namespaces could not be switched off")


def _create_namespace(identity: Identity) -> None:
    """Enter a new user namespace; the kernel copies this process's limits to it (kernel/user_namespace.c)."""
    _, maximum = processes = resource.getrlimit(resource.RLIMIT_NPROC)
    if identity.creator:
        _keep_counted_limits(mapped=identity.mapped)
        if identity.processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (_at_most(identity.processes, maximum), maximum))
        # leave uid 0, and restore the capabilities that this drops, because some hosts require CAP_SYS_ADMIN below
        os.setresuid(identity.creator, identity.creator, -1)
        sc.capset(sc.capget()[1])
    else:
        # reserve processes for the launcher as well as for its owner
        _leave_processes(2 * _OWNERS)
    sc.unshare(sc.CLONE_NEWUSER)
    if not identity.creator:  # all sandboxes share one count: limit only the processes, not the namespace
        _keep_counted_limits(mapped=identity.mapped)
    # Restore the limit, so that pid 1 can always fork a worker. Become dumpable, because otherwise root owns the /proc
    # files of this process, and an ordinary user cannot map its ids.
    resource.setrlimit(resource.RLIMIT_NPROC, processes)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)


def _limit_inotify(proc: int, instances: int) -> None:
    """Limit the inotify instances and watches per id in this process's user namespace."""
    with contextlib.suppress(OSError):  # a kernel without it, or a read-only /proc/sys
        _set_limit(proc, "max_inotify_instances", instances)
        _set_limit(proc, "max_inotify_watches", _WATCHES)


def _set_limit(proc: int, name: str, value: int) -> str:
    """Set a limit of this process's user namespace (namespaces(7)); return its new value."""
    with sc.closing(os.open(f"sys/user/{name}", os.O_RDWR | os.O_CLOEXEC, dir_fd=proc)) as descriptor:
        os.write(descriptor, str(value).encode())
        return os.pread(descriptor, 32, 0).decode().strip()


def map_namespace(
    identity: Identity, pid: int, partner: socket.socket, namespace_names: Sequence[str] = ()
) -> list[int]:
    """Map the ids of another process's new user namespace, and open the namespace as ``identity.userns_fd``.

    Args:
        identity: the ids to map.
        pid: the other process, as numbered in the ``/proc`` of this process.
        partner: socket to the other process, which calls :func:`enter_new_namespace` or sends :func:`failure`.
        namespace_names: names of its other namespaces to open (namespaces(7)), before it becomes non-dumpable.

    Returns:
        The descriptors of its proc and of the other namespaces.

    Raises:
        OSError: the kernel refused, in this process or in the other.
    """
    data, ancillary, _, _ = partner.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    if data != _ENTERED:
        raise read_failure(data)
    sc.write_setting(f"/proc/{pid}/uid_map", identity.id_map)
    sc.write_setting(f"/proc/{pid}/gid_map", identity.id_map)
    namespace_fds = [
        os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", *namespace_names)
    ]
    identity.userns_fd = namespace_fds[0]
    partner.send(_MAPPED)
    return [*array.array("i", ancillary[0][2]), *namespace_fds[1:]]


def failure(error: OSError) -> bytes:
    """Encode an error as a message to the caller of :func:`map_namespace`."""
    return f"{error.errno} {error}".encode()


def read_failure(message: bytes) -> OSError:
    """Decode a message of :func:`failure`; an empty message means that the process was killed."""
    number, _, text = message.decode().partition(" ")
    if not number.isdigit():
        return OSError(errno.EPERM, "a user namespace was refused, or the process that was to have it ended")
    return OSError(int(number), text)


def await_become(partner: socket.socket) -> None:
    """Wait until the process at the other end has its final ids and capabilities.

    Raises:
        OSError: the process has sent a :func:`failure`, or was killed.
    """
    if (message := partner.recv(4096)) != BECOME:
        raise read_failure(message)


def hold_namespace(identity: Identity) -> None:
    """Create the user namespace of an identity without a sandbox, to probe kernel features.

    Raises:
        OSError: the kernel refused.
    """
    own_end, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own_end, helper_end:
        helper = os.fork()
        if helper == 0:
            try:
                own_end.close()
                proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    enter_new_namespace(identity, helper_end, proc)
                    helper_end.send(BECOME)
                except OSError as error:
                    helper_end.send(failure(error))
                helper_end.recv(1)
            finally:
                os._exit(0)
        helper_end.close()
        try:
            os.close(*map_namespace(identity, helper, own_end))
            await_become(own_end)
        finally:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)


def _keep_counted_limits(*, mapped: bool) -> None:
    """Lower the limits of resources that the kernel counts per user, not per sandbox.

    The kernel counts all sandboxes of an ordinary user as that user. POSIX message queues are disabled then, because a
    user's 819,200 bytes hold only nine queues of the usual size.
    """
    limits = (resource.RLIMIT_MEMLOCK, _LOCKED), (resource.RLIMIT_SIGPENDING, _SIGNALS)
    for kind, amount in limits if mapped else (*limits, (resource.RLIMIT_MSGQUEUE, 0)):
        maximum = _at_most(amount, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (maximum, maximum))


def _at_most(amount: int, hard_limit: int) -> int:
    return amount if hard_limit == resource.RLIM_INFINITY else min(amount, hard_limit)


def act_as_owner(identity: Identity, *, undo: bool = False) -> None:
    """Switch the file-system ids to the sandbox's uid 0, with the launcher's capabilities; ``undo`` switches back.

    An overlay acts with the credentials of the process that mounted it. With an idmapped upper, that process's fsuid
    must be mapped. Otherwise overlayfs cannot create the work directory, and the mount is silently read-only
    (fs/overlayfs/super.c).
    """
    if identity.mapped:
        uid, gid = (os.geteuid(), os.getegid()) if undo else (identity.first_id, identity.first_id)
        sc.setfsids(uid, gid)
        sc.capset(sc.capget()[1])  # restore file capabilities, which leaving fsuid 0 drops


def become_inner_root(identity: Identity) -> None:
    """Enter a sandbox's user namespace as its uid 0 permanently, with the sandbox's capabilities.

    Raises:
        OSError: the kernel refused.
    """
    sc.setns(identity.userns_fd, sc.CLONE_NEWUSER)
    drop_privileges(identity)


def drop_privileges(identity: Identity) -> None:
    """Become uid 0 of a sandbox's user namespace permanently, with a fixed set of capabilities.

    Raises:
        OSError: the kernel refused.
    """
    if identity.groups:  # the kernel forbids setgroups(2) if an unprivileged process mapped the ids
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    for number in range(_LAST_CAPABILITY + 1):
        if not CAPABILITIES >> number & 1:
            try:
                sc.prctl(sc.PR_CAPBSET_DROP, number)
            except sc.CallError:  # EINVAL: this kernel has no further capabilities
                break
    sc.prctl(sc.PR_CAP_AMBIENT, sc.PR_CAP_AMBIENT_CLEAR_ALL)
    sc.capset(CAPABILITIES)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
