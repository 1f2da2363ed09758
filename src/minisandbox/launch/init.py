"""Pid 1 of a sandbox: forks workers, reaps orphans, and ends the sandbox when it exits.

Pid 1 exits when the controller closes the control socket or the zygote dies. The kernel then kills every process of the
sandbox and removes its mounts (pid_namespaces(7)). Every page that pid 1 touches is copied and stays in memory as long
as the sandbox lives, so a setup worker (:mod:`.setup`) carries out the plan. A *spare* is a sandbox that is prepared
before it is requested. Its pid 1 forks the first worker in advance. Both have dropped their privileges, and wait for
the message that starts the sandbox.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import time
from typing import NoReturn

from . import setup
from .jobs import worker
from .jobs.descendants import child_processes
from .kernel import cgroups, seccomp
from .kernel import syscalls as sc
from .kernel.identity import BECOME, Identity, drop_privileges, enter_new_namespace, failure
from .watchdog import DiskWatchdog, Watchdog, end_all

CONTROL, LIFELINE = 3, 4
HOLD = "/sys/kernel"
"""Directory in the zygote's mount namespace where sealed trees are mounted; no sandbox needs the host's files there."""
_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWCGROUP
_MAX_FAILURES = 12
_MOST_AT_ONCE = 1000
"""Children that are reaped before the loop handles other events."""
_LONGEST_WAIT = 3600.0
_MOMENT = 1
"""Milliseconds to wait for a busy worker before another one is forked, which takes more than 2 ms of CPU time."""
_PATIENCE = 60.0
"""Seconds that the first worker of a spare waits for the sandbox to be requested; then it exits to save memory."""


def main(
    identity: Identity,
    network: str,
    fds: cgroups.CgroupFds | None,
    *,
    fork_early: bool,
    pretend_owners: bool = False,
) -> None:
    """Turn a freshly forked child into pid 1 of a sandbox. Never returns.

    Besides, the process has two descriptors: ``CONTROL``, a socket to the setup workers, which map the ids and finally
    send the control socket, and ``LIFELINE``, a pipe that closes when the zygote dies.

    Args:
        identity: ids of the sandbox.
        network: ``off`` or ``host``.
        fds: open files of the control group to join, or None without one.
        fork_early: whether to fork the first worker before there is a request.
        pretend_owners: whether changes of file owners and ids do nothing but return success.
    """
    sc.overwrite_arguments("minisandbox-init")
    partner = socket.socket(fileno=os.dup(CONTROL))
    try:
        _become(identity, partner, network, fds, pretend_owners=pretend_owners)
    except OSError as error:
        partner.send(failure(error))
        partner.recv(1)  # stay until a setup worker has read the error
        os._exit(1)
    leader = Init(cgroups.LimitCounters(fds))
    if fork_early:
        leader.fork_worker(partner)
    # after the fork, because pivot_root(2) misses a process that is still being forked (fs/fs_struct.c)
    partner.send(BECOME)
    leader.begin(*_await_start(partner))
    leader.serve()


def _become(
    identity: Identity,
    partner: socket.socket,
    network: str,
    fds: cgroups.CgroupFds | None,
    *,
    pretend_owners: bool,
) -> None:
    """Create the namespaces and drop every privilege, before there is a plan.

    Raises:
        OSError: the kernel refused.
    """
    if fds:  # join first: the group becomes the root of the new cgroup namespace
        fds.join()
    sc.unshare(_NAMESPACES | (sc.CLONE_NEWNET if network == "off" else 0))
    # unmount sealed trees, if any: this namespace's copies of their mounts would keep them alive after their release
    with contextlib.suppress(OSError):
        sc.umount(HOLD, sc.MNT_DETACH)
    if network == "host":  # scope the abstract sockets of the host's namespace before a worker is forked
        sc.scope_abstract_sockets()
    proc = sc.new_filesystem("proc", sc.MOUNT_ATTR_NOEXEC)
    enter_new_namespace(identity, partner, proc)
    os.close(proc)
    drop_privileges(identity)
    # set the parent-death signal last: changes of ids and a new user namespace clear it (prctl(2))
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if pretend_owners:
        seccomp.pretend_owners()
    seccomp.install()
    seccomp.verify()


StartMessage = tuple[dict[str, int], socket.SocketType, socket.SocketType, int]
"""Message that starts pid 1 and the first worker of a spare: limits and lifetime, control socket, job listener, and the
descriptor of an upper on disk (-1 if the upper is in memory)."""


def _await_start(partner: socket.socket) -> StartMessage:
    """Wait until a setup worker has finished the sandbox; exit if it failed or the zygote died.

    The control socket gets the descriptor number of the socket to the setup workers.
    """
    data, ancillary, _, _ = partner.recvmsg(4096, socket.CMSG_SPACE(12), socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    control, job_listener, *upper = array.array("i", ancillary[0][2])
    os.dup2(control, CONTROL, inheritable=False)
    os.close(control)
    partner.close()
    settings = setup.unpack_settings(data)
    control_socket, listener_socket = socket.SocketType(fileno=CONTROL), socket.SocketType(fileno=job_listener)
    return settings, control_socket, listener_socket, upper[0] if upper else -1


class Init:
    """The event loop of pid 1: :meth:`begin`, then :meth:`serve`.

    Args:
        counters: counters of the limits that commands hit.
    """

    _control: socket.SocketType
    _job_listener: socket.SocketType
    _watchdogs: list[Watchdog | DiskWatchdog]
    _expects_commands: bool
    _deadline: float | None
    _rlimits: tuple[tuple[str, int], ...]

    def __init__(self, counters: cgroups.LimitCounters) -> None:
        self._notes, self._notes_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._counters = counters
        self._workers: set[int] = set()
        self._idle_workers: set[int] = set()
        self._primary_pid = 0
        self._failures = 0
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # the zygote's handler of SIGCHLD does nothing; the byte on the wakeup pipe wakes the loop
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (self._notes, self._wakeup, LIFELINE):
            self._poll.register(descriptor, select.POLLIN)

    def begin(
        self, settings: dict[str, int], control: socket.SocketType, job_listener: socket.SocketType, upper: int = -1
    ) -> None:
        """Take over the sandbox's sockets and limits, and report that the sandbox is ready.

        Args:
            settings: limits of commands, the lifetime in milliseconds, the memory and disk to watch, as :mod:`.setup`
                sends them.
            control: socket on which jobs arrive; the sandbox ends when it closes.
            job_listener: listening socket on which processes other than the owner submit jobs.
            upper: descriptor of an upper on disk; -1 for an upper in memory.
        """
        self._control = control
        self._job_listener = job_listener
        self._control.send(b'{"event":"ready"}')
        memory = settings.get(setup.MEMORY, 0)
        self._watchdogs = [Watchdog(memory, self._counters)] if memory else []
        if upper >= 0:
            self._watchdogs.append(DiskWatchdog(self._counters.limit_upper(upper, settings[setup.DISK])))
        self._expects_commands = bool(settings.get(setup.EXPECTS_COMMANDS, 0))
        lifetime = settings[setup.LIFETIME]
        self._deadline = time.monotonic() + lifetime / 1000 if lifetime else None
        self._rlimits = _rlimits(settings)

    def serve(self) -> None:
        """Loop until the controller or the zygote is gone."""
        self._reap()
        if self._expects_commands and not self._workers:
            self.fork_worker()
        while True:
            # wait for jobs only while no worker is idle; poll(2) reports a hang-up in any case
            for descriptor in (CONTROL, self._job_listener.fileno()):
                self._poll.register(descriptor, 0 if self._idle_workers else select.POLLIN)
            events = dict(self._poll.poll(self._poll_timeout()))
            if LIFELINE in events or events.get(CONTROL, 0) & (select.POLLHUP | select.POLLERR):
                self._end()
            for watchdog in self._watchdogs if self._workers - self._idle_workers else ():
                watchdog.check(self._workers | {os.getpid()})
            if self._wakeup in events:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._notes in events:
                self._take_notes(os.read(self._notes, 4096))
            elif self._has_jobs(events) and not self._is_idle_soon():
                self.fork_worker()

    def _has_jobs(self, events: dict[int, int]) -> bool:
        return bool((events.get(CONTROL, 0) | events.get(self._job_listener.fileno(), 0)) & select.POLLIN)

    def _is_idle_soon(self) -> bool:
        """Return whether the only worker reports within a moment that its job is done.

        On a busy machine, a caller often sends its next job before the worker that answered the last one can report.
        """
        if not self._primary_pid or self._workers != {self._primary_pid}:
            return False
        poll = select.poll()
        poll.register(self._notes, select.POLLIN)
        return bool(poll.poll(_MOMENT))

    def _end(self, status: int = 0) -> NoReturn:
        """Exit, which kills every process of the sandbox."""
        if self._counters.fds:
            self._counters.fds.lift_quota()
        os._exit(status)

    def _poll_timeout(self) -> float | None:
        """Return the timeout of the next poll in milliseconds, or None; exit once the sandbox's lifetime is over."""
        timeouts = [watchdog.wait() for watchdog in self._watchdogs] if self._workers - self._idle_workers else []
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                self._end()
            timeouts.append(min(remaining, _LONGEST_WAIT))
        return min(timeouts) * 1000 + 1 if timeouts else None

    def _take_notes(self, notes: bytes) -> None:
        for note, pid in worker.read_notes(notes):
            self._failures = 0
            if pid not in self._workers:  # a late note of a worker that was already reaped
                continue
            if note == worker.IDLE:
                self._idle_workers.add(pid)
            else:
                self._idle_workers.discard(pid)
            if note == worker.RETIRED and pid == self._primary_pid:
                self._primary_pid = 0

    def _reap(self) -> None:
        """Reap exited children, then search for orphans once, because a killed worker can leave thousands."""
        has_orphans = False
        with contextlib.suppress(ChildProcessError):
            for _ in range(_MOST_AT_ONCE):
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    break
                if os.WIFSTOPPED(status):
                    if pid in self._workers:  # a command stopped the worker, which can then enforce no timeout
                        os.kill(pid, signal.SIGKILL)
                    continue
                has_orphans = has_orphans or status != 0 or pid not in self._workers
                self._forget(pid)
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) == worker.FAILED:
                    self._count_failure()
            else:
                # more children may have exited: wake the loop again after other events; a full pipe also wakes it
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wakeup_write, b"\0")
        if has_orphans:
            self._end_orphans()

    def _forget(self, pid: int) -> None:
        """Forget a child that has exited: a worker or an orphan."""
        self._workers.discard(pid)
        self._idle_workers.discard(pid)
        if pid == self._primary_pid:
            self._primary_pid = 0

    def _make_room(self) -> None:
        """Kill all commands, because they have used up the process limit and no worker can be forked."""
        with contextlib.suppress(OSError):
            end_all(self._workers | {os.getpid()})
        self._count_failure()

    def _count_failure(self) -> None:
        """End the sandbox if workers keep failing; otherwise commands would wait forever."""
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            self._end(worker.FAILED)
        time.sleep(0.02 * self._failures)  # back off: a shortage of processes or memory may pass

    def _end_orphans(self) -> None:
        """Kill the orphans that pid 1 has inherited.

        A worker is the subreaper of its command, so only the processes of a killed worker become orphans of pid 1. Once
        they are reaped, their children become orphans of pid 1 too, and a later call kills those.
        """
        with contextlib.suppress(OSError):  # /proc cannot be read if no file descriptor is free
            for pid in child_processes(os.getpid()) - self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def fork_worker(self, partner: socket.socket | None = None) -> None:
        """Fork a worker.

        Args:
            partner: socket to the setup workers, on which the first worker of a spare waits; None in a running sandbox.
        """
        is_primary = self._primary_pid == 0
        try:
            pid = os.fork()
        except OSError:
            if partner is None:
                self._make_room()
            return
        if pid == 0:
            try:
                os.close(LIFELINE)
                if self._counters.fds:
                    self._counters.fds.close_quota()
                if partner is not None:
                    self._await_begin(partner)
                notes = (self._notes_write, self._counters)
                worker.main(self._control, self._job_listener, notes, self._rlimits, primary=is_primary)
            finally:
                os._exit(worker.FAILED)
        self._workers.add(pid)
        self._idle_workers.add(pid)
        if is_primary:
            self._primary_pid = pid

    def _await_begin(self, partner: socket.socket) -> None:
        """Wait in the first worker of a spare for the message that starts the sandbox; pid 1 receives a copy."""
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        worker.rehearse(self._counters)
        if not select.select([partner], [], [], _PATIENCE)[0]:
            os._exit(0)
        settings, self._control, self._job_listener, upper = _await_start(partner)
        if upper >= 0:
            self._counters.limit_upper(upper, settings[setup.DISK])
        self._rlimits = _rlimits(settings)


def _rlimits(settings: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return those settings that are resource limits of commands."""
    other_names = (setup.MEMORY, setup.DISK, setup.EXPECTS_COMMANDS, setup.LIFETIME)
    return tuple((name, value) for name, value in settings.items() if name not in other_names)
