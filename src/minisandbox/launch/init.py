"""Pid 1 of a sandbox: forks workers, reaps orphans, and kills everything at the end.

When the controller's end of the control socket closes, or the zygote dies, it exits, and with it the kernel ends every
process of the sandbox and its mounts (pid_namespaces(7)). It does as little as it can, because whatever it touches is
memory of its own for as long as the sandbox lives: the plan is carried out by another process (:mod:`.setup`). In a
spare it forks its first worker before there is a plan. Both then wait for the same words, without any privilege.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from . import setup
from .jobs import worker
from .jobs.descendants import child_processes
from .kernel import cgroups, seccomp
from .kernel import syscalls as sc
from .kernel.identity import BECOME, Identity, drop_privileges, enter_new_namespace, failure
from .watchdog import DiskWatchdog, Watchdog

_CONTROL, _LIFELINE = 3, 4
HOLD = "/sys/kernel"
"""Where the zygote's mount namespace holds sealed trees: a directory that no sandbox needs anything of."""
_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWCGROUP
_MAX_FAILURES = 12
_MOST_AT_ONCE = 1000
"""Children that are collected before anything else is looked at."""
_LONGEST_WAIT = 3600.0
_PATIENCE = 60.0
"""Seconds that a worker waits for its sandbox to be asked for: it takes memory. Pid 1 can fork another."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def main(
    identity: Identity,
    birth: socket.socket,
    lifeline: int,
    network: str,
    group: cgroups.Cgroup | None,
    *,
    early: bool,
    pretend_owners: bool = False,
) -> None:
    """Become a sandbox, in a freshly forked child that is pid 1 of its process namespace. Never returns.

    Args:
        identity: who it is.
        birth: socket to the setup workers, which map the ids of this process and send the control socket at the end.
        lifeline: pipe whose other end only the zygote holds.
        network: ``off`` or ``host``.
        group: the control group that it joins, if there are any.
        early: whether to fork its first worker before it is asked for.
        pretend_owners: whether changes of owners answer success and do nothing.
    """
    sc.overwrite_arguments("minisandbox-init")
    _move_descriptors(birth, lifeline)
    partner = socket.socket(fileno=os.dup(_CONTROL))
    try:
        fds = _become(identity, partner, network, group, pretend_owners=pretend_owners)
    except OSError as error:
        partner.send(failure(error))
        partner.recv(1)  # the setup worker reads it when this sandbox is asked for
        os._exit(1)
    leader = Init(cgroups.LimitCounters(fds))
    if early:
        leader.fork_worker(partner)
    partner.send(BECOME)  # only now: pivot_root(2) moves no process that is being forked (fs/fs_struct.c)
    leader.begin(*_await_birth(partner))
    leader.serve()


def _become(
    identity: Identity,
    partner: socket.socket,
    network: str,
    group: cgroups.Cgroup | None,
    *,
    pretend_owners: bool,
) -> cgroups.CgroupFds | None:
    """Make namespaces and give up every privilege, long before there is a plan.

    Returns:
        Open files of the group, if there is one.

    Raises:
        OSError: the kernel refused.
    """
    fds = None
    if group:  # before there is a namespace of groups, which then begins at this one
        fds = group.open()
        group.join()
    sc.unshare(_NAMESPACES | (sc.CLONE_NEWNET if network == "off" else 0))
    with contextlib.suppress(OSError):  # nothing is held yet
        sc.umount(HOLD, sc.MNT_DETACH)  # copies of these mounts would keep released trees while this spare waits
    if network == "off":
        _raise_loopback()
    else:  # abstract sockets belong to the network namespace; fork no worker before this
        sc.scope_abstract_sockets()
    proc = sc.new_filesystem("proc", sc.MOUNT_ATTR_NOEXEC)
    if network == "off":
        # unanswered connections without a process end after 2 s, not after 100 (tcp(7))
        with contextlib.suppress(OSError):  # /proc/sys may be read-only in a container
            sc.write_setting("sys/net/ipv4/tcp_orphan_retries", "1", proc)
            sc.write_setting("sys/net/ipv4/ip_unprivileged_port_start", "0", proc)  # as in containers: any port
    enter_new_namespace(identity, partner, proc)
    os.close(proc)
    drop_privileges(identity)
    # set_id calls and a new user namespace clear the parent-death signal: it comes last (prctl(2))
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if pretend_owners:
        seccomp.pretend_owners()
    seccomp.install()
    seccomp.verify()
    return fds


Birth = tuple[dict[str, int], socket.SocketType, socket.SocketType, int]
"""What a sandbox begins with: the limits of its commands with its lifetime, its control socket, its door, and its upper
where that is on disk, else -1."""


def _await_birth(partner: socket.socket) -> Birth:
    """Wait until the sandbox is made.

    The control socket takes the place of the birth socket. Where making failed, or the zygote died first, there is
    nothing to be pid 1 of, or a worker.
    """
    data, ancillary, _, _ = partner.recvmsg(4096, socket.CMSG_SPACE(12), socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    control, door, *upper = array.array("i", ancillary[0][2])
    os.dup2(control, _CONTROL, inheritable=False)
    os.close(control)
    partner.close()
    numbers = dict(setup.unpack_numbers(data))
    control_socket, door_socket = socket.SocketType(fileno=_CONTROL), socket.SocketType(fileno=door)
    return numbers, control_socket, door_socket, upper[0] if upper else -1


def _move_descriptors(birth: socket.socket, lifeline: int) -> None:
    """Put what is kept at known numbers and /dev/null at the standard ones; everything else is closed."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (birth.detach(), lifeline)]
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number, descriptor in enumerate((null, null, null, *copies)):
        os.dup2(descriptor, number, inheritable=number < _CONTROL)
    sc.close_range(_LIFELINE + 1)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(handle, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


class Init:
    """The event loop of pid 1: :meth:`begin`, then :meth:`serve`.

    Args:
        counters: what counts the limits that were met.
    """

    _control: socket.SocketType
    _door: socket.SocketType
    _watchdogs: list[Watchdog | DiskWatchdog]
    _expects_commands: bool
    _ends_at: float | None
    _rlimits: tuple[tuple[str, int], ...]

    def __init__(self, counters: cgroups.LimitCounters) -> None:
        self._notes, self._notes_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._counters = counters
        self._workers: set[int] = set()
        self._waiting: set[int] = set()
        self._primary = 0
        self._failures = 0
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # SIGCHLD has the zygote's handler, which does nothing: the byte on the pipe counts
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (self._notes, self._wakeup, _LIFELINE):
            self._poll.register(descriptor, select.POLLIN)

    def begin(
        self, numbers: dict[str, int], control: socket.SocketType, door: socket.SocketType, upper: int = -1
    ) -> None:
        """Be the first process of a sandbox.

        Args:
            numbers: limits of commands, the lifetime in milliseconds, the memory and disk to watch, as :mod:`.setup`
                gives them.
            control: socket on which jobs arrive; its end is the end of the sandbox.
            door: listening socket at which others bring jobs.
            upper: descriptor of its upper if that is on disk, else -1.
        """
        self._control = control
        self._door = door
        self._control.send(b'{"event":"ready"}')
        memory = numbers.get(setup.MEMORY, 0)
        self._watchdogs = [Watchdog(memory, self._counters)] if memory else []
        if upper >= 0:
            self._watchdogs.append(DiskWatchdog(self._counters.limit_upper(upper, numbers[setup.DISK])))
        self._expects_commands = bool(numbers.get(setup.EXPECTS_COMMANDS, 0))
        lifetime = numbers[setup.LIFETIME]
        self._ends_at = time.monotonic() + lifetime / 1000 if lifetime else None
        self._rlimits = _rlimits(numbers)

    def serve(self) -> None:
        """Loop until the controller or the zygote is gone."""
        self._reap()
        if self._expects_commands and not self._workers:
            self.fork_worker()
        while True:
            # a job is only looked for while no worker waits for one; a hang-up always shows (poll(2))
            for jobs in (_CONTROL, self._door.fileno()):
                self._poll.register(jobs, 0 if self._waiting else select.POLLIN)
            events = dict(self._poll.poll(self._patience()))
            if _LIFELINE in events or events.get(_CONTROL, 0) & (select.POLLHUP | select.POLLERR):
                self._end()
            for watchdog in self._watchdogs if self._workers - self._waiting else ():
                watchdog.look(self._workers | {os.getpid()})
            if self._wakeup in events:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._notes in events:
                self._take_notes(os.read(self._notes, 4096))
            elif (events.get(_CONTROL, 0) | events.get(self._door.fileno(), 0)) & select.POLLIN:
                self.fork_worker()

    def _end(self, status: int = 0) -> NoReturn:
        """End, and with it every process here."""
        if self._counters.fds:
            self._counters.fds.lift_quota()
        os._exit(status)

    def _patience(self) -> float | None:
        """Return the milliseconds that the next wait may take; end the sandbox once its lifetime is over."""
        waits = [watchdog.wait() for watchdog in self._watchdogs] if self._workers - self._waiting else []
        if self._ends_at is not None:
            remaining = self._ends_at - time.monotonic()
            if remaining <= 0:
                self._end()
            waits.append(min(remaining, _LONGEST_WAIT))
        return min(waits) * 1000 + 1 if waits else None

    def _take_notes(self, notes: bytes) -> None:
        for note, pid in worker.read_notes(notes):
            self._failures = 0
            if pid not in self._workers:  # the last word of one that has ended
                continue
            if note == worker.IDLE:
                self._waiting.add(pid)
            else:
                self._waiting.discard(pid)
            if note == worker.RETIRED and pid == self._primary:
                self._primary = 0

    def _reap(self) -> None:
        """Reap exited children, then look for orphans once: a killed worker can leave thousands of processes."""
        orphans = False
        with contextlib.suppress(ChildProcessError):
            for _ in range(_MOST_AT_ONCE):
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    break
                if os.WIFSTOPPED(status):
                    if pid in self._workers:  # stopped from inside, it could keep no deadline
                        os.kill(pid, signal.SIGKILL)
                    continue
                orphans = orphans or status != 0 or pid not in self._workers
                self._forget(pid)
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) == worker.FAILED:
                    self._count_failure()
            else:
                with contextlib.suppress(BlockingIOError):  # a full pipe wakes pid 1 as well
                    os.write(self._wakeup_write, b"\0")  # there may be more; the loop goes round first
        if orphans:
            self._end_orphans()

    def _forget(self, pid: int) -> None:
        """Note that a child has exited: an idle worker, one that was killed from inside, or an orphan."""
        self._workers.discard(pid)
        self._waiting.discard(pid)
        if pid == self._primary:
            self._primary = 0

    def _make_room(self) -> None:
        """Kill all commands once they use up the process limit: otherwise no worker could start."""
        with contextlib.suppress(OSError):
            for name in filter(str.isdigit, os.listdir("/proc")):
                if int(name) not in self._workers | {os.getpid()}:
                    with contextlib.suppress(OSError):
                        os.kill(int(name), signal.SIGKILL)
        self._count_failure()

    def _count_failure(self) -> None:
        """Give up if no worker can be had any more: commands would wait for ever."""
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            self._end(worker.FAILED)
        time.sleep(0.02 * self._failures)  # processes or memory are used up: that may pass

    def _end_orphans(self) -> None:
        """End what fell to pid 1: a worker is the subreaper of its command, so these are a killed worker's.

        Their own children fall to pid 1 when they are reaped, and then it is the turn of those.
        """
        with contextlib.suppress(OSError):  # without descriptors /proc cannot be read
            for pid in child_processes(os.getpid()) - self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def fork_worker(self, partner: socket.socket | None = None) -> None:
        """Fork a worker.

        Args:
            partner: the birth socket, on which the worker of a sandbox that is not asked for yet waits, as pid 1 does.
        """
        primary = self._primary == 0
        try:
            pid = os.fork()
        except OSError:
            if partner is None:
                self._make_room()
            return
        if pid == 0:
            try:
                os.close(_LIFELINE)
                if self._counters.fds:
                    self._counters.fds.close_quota()
                if partner is not None:
                    self._await_begin(partner)
                notes = (self._notes_write, self._counters)
                worker.main(self._control, self._door, notes, self._rlimits, primary=primary)
            finally:
                os._exit(worker.FAILED)
        self._workers.add(pid)
        self._waiting.add(pid)
        if primary:
            self._primary = pid

    def _await_begin(self, partner: socket.socket) -> None:
        """Wait in the first worker for the same message as pid 1; each receives its own copy."""
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        worker.rehearse(self._counters)
        if not select.select([partner], [], [], _PATIENCE)[0]:
            os._exit(0)
        numbers, self._control, self._door, upper = _await_birth(partner)
        if upper >= 0:
            self._counters.limit_upper(upper, numbers[setup.DISK])
        self._rlimits = _rlimits(numbers)


def _rlimits(numbers: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Those of the numbers that are limits of commands."""
    others = (setup.MEMORY, setup.DISK, setup.EXPECTS_COMMANDS, setup.LIFETIME)
    return tuple((name, value) for name, value in numbers.items() if name not in others)
