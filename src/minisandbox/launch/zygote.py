"""The zygote: a small single-threaded process that forks every sandbox of one controller.

New user namespaces need a process without threads (unshare(2)), and the controller has threads. The zygote is pid 1 of
a process namespace that contains every sandbox. It exits when its controller does, and the kernel then kills all
sandboxes (pid_namespaces(7)).

A sandbox starts in five steps:

1. The template (:mod:`.template`) forks a spare (:mod:`.init`). The spare is a child of the zygote. It joins a control
   group, creates namespaces, and requests its ids.
2. A setup worker (:mod:`.setup`) maps the ids, and mounts in the spare everything that does not depend on the image.
3. Meanwhile the spare drops its privileges, installs the system-call filter, forks its first worker, and waits.
4. On a request, the zygote sends the spare and the plan to a setup worker. The setup worker limits the control group,
   mounts the layers in the spare, and pivots to the new root.
5. Only then do pid 1 and its worker receive the sandbox's sockets and the limits of commands, and start to serve.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from . import disk, init, setup, template
from .kernel import cgroups, mounts, seccomp
from .kernel import syscalls as sc
from .kernel.identity import (
    PROCESSES,
    RANGE_SIZE,
    Identities,
    Identity,
    enter_outer_namespace,
    has_privileges,
    hold_namespace,
)
from .plan import SpawnOptions

_MAX_MESSAGE = 1 << 18
_SETUP_WORKERS = max(2, min(8, len(os.sched_getaffinity(0))))
_PAUSE = 0.03
"""Seconds from a request until its spare is replaced, because the requested sandbox needs the CPU first."""
_MOST_SPARES = max(2, min(8, 2 * len(os.sched_getaffinity(0))))
_GAP = 0.01
"""Seconds without a request before a spare is created, because a burst of requests needs all of the CPU."""
_CALM = 10.0
"""Seconds without a request after which all spares but one are dropped to save memory."""
_RETRY = 1.0
"""Seconds until the next attempt to fork setup workers that the kernel refused."""


def main(connection: socket.socket, controller: int, *settings: str) -> None:
    """Serve one controller until it ends. Never returns.

    Args:
        connection: datagram socket to the controller.
        controller: pidfd of the controller.
        settings: directory of the locks of id ranges; the owner's name for control groups, or "" for none; the usual
            preparations (:func:`.plan.pack_operations`); the programs that map an ordinary user's subordinate ids
            (newuidmap(1), newgidmap(1)), or empty strings to map a single id.
    """
    lock_directory, owner, preparations, *mappers = settings
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Raise the limit, because each live sandbox takes a descriptor. Ignore SIGINT, because otherwise a command could
    # interrupt its pid 1.
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _reset_process_state()
    forbid_imports()
    # Disable the garbage collector: there are no cycles, and a collection would copy every page that it touches in each
    # child. Overwrite the arguments here, because that reads /proc/self, which _enter_namespaces replaces.
    gc.disable()
    sc.overwrite_arguments("minisandbox-launcher")
    try:
        seccomp.assemble()
        sc.join_new_session_keyring()
        cgroup_roots = _find_roots() if owner else cgroups.CgroupRoots(0)
        identities = _enter_namespaces(connection, lock_directory, mappers)
        zygote = _Zygote(connection, controller, identities, _make_groups(cgroup_roots, owner), preparations.encode())
    except (OSError, ValueError) as error:
        connection.send(setup.error_message(error, to=0, path=str(getattr(error, "filename", None))))
        os._exit(1)
    zygote.serve()


def _find_roots() -> cgroups.CgroupRoots:
    """Find where control groups can be created. Call it before entering a pid namespace, which hides others."""
    try:
        return cgroups.enable_controllers(cgroups.find_roots())
    except OSError:
        return cgroups.CgroupRoots(0)


def _make_groups(cgroup_roots: cgroups.CgroupRoots, owner: str) -> cgroups.OwnerCgroups | None:
    """Create the owner's control groups; return None if the machine has none or the kernel refuses."""
    if not cgroup_roots.version:
        return None
    try:
        return cgroups.OwnerCgroups(cgroup_roots, owner)
    except OSError:  # the kernel may refuse despite the permissions, in a container for instance
        return None


def _reset_process_state() -> None:
    """Reset the state that commands would inherit from the controller: umask, signals, priorities.

    With a realtime priority, a command could keep all other processes from the CPUs. With an OOM score adjustment below
    0 (proc(5)), the kernel would kill other processes first when memory runs out.
    """
    os.umask(0o022)
    for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
        resource.setrlimit(kind, (0, 0))
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError):  # a container may refuse it
        sc.forget_disk_priority()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", buffering=0) as score:
        if int(score.read()) < 0:
            score.write(b"0")  # with CAP_SYS_RESOURCE, this becomes the minimum for all descendants
    ignored_signals = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}
    for number in signal.valid_signals() - ignored_signals:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that forked this process may block signals
    sc.default_internal_signals()


def forbid_imports() -> None:
    """Make every later import fail, because inside a sandbox it could run a file that an agent has written."""
    for name in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(name)  # import the codecs, which Python otherwise does at first use
    for finders in (sys.meta_path, sys.path_hooks, sys.path):
        finders.clear()


def _enter_namespaces(connection: socket.socket, lock_directory: str, mappers: list[str]) -> Identities:
    """Continue in a child that is pid 1 of a new process namespace; this process only waits for the child.

    Returns:
        The identities that sandboxes can get.
    """
    mapped = has_privileges()
    count = RANGE_SIZE if mapped else enter_outer_namespace(mappers)
    sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWPID)
    child = os.fork()
    if child:
        connection.close()
        os.waitpid(child, 0)
        os._exit(0)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    identities = Identities(mapped=mapped, count=count, lock_directory=lock_directory)
    # mount /proc of the new namespace, because processes are looked up by their pids in it
    sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV)
    sc.overwrite_arguments("minisandbox-zygote")
    return identities


class _Zygote:
    def __init__(
        self,
        connection: socket.socket,
        controller: int,
        identities: Identities,
        groups: cgroups.OwnerCgroups | None,
        preparations: bytes,
    ) -> None:
        self._connection = connection
        self._controller = controller
        self._identities = identities
        self._groups = groups
        self._lifeline, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._live: dict[int, tuple[Identity, cgroups.Cgroup | None]] = {}
        mapped = identities.mapped
        with self._trial_identity() as trial:
            usr_idmap = _can_idmap(trial, "/usr")
            memory_upper = _can_write_to_memory(trial)
        usr_overlay = usr_idmap or _can_layer("/usr")
        self._jobs, self._workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._workers: set[int] = set()
        self._template: socket.socket | None = None
        self._template_pid = 0
        # before the forks, so that forked processes share as many pages as possible
        gc.collect()
        gc.freeze()
        sc.trim_memory()
        self._fork_template()
        self._fork_workers()
        self._sealed_count = 0
        self._spare_options = SpawnOptions(nproc=0 if groups else PROCESSES)
        self._preparations = preparations
        self._spares: deque[_Spare] = deque()
        # monotonic time of the last request, and target number of spares, which grows in a burst of requests
        self._requested_at = 0.0
        self._spare_target = 1
        self._make_spare()
        self._fork_at: float | None = None  # monotonic time at which missing processes are forked
        hello: dict[str, object] = {"event": "hello", "to": 0, "mapped": mapped, "ids": identities.count}
        hello |= {"usr_idmap": usr_idmap, "usr_overlay": usr_overlay, "memory_upper": memory_upper}
        if groups:
            hello["groups"] = {"version": groups.roots.version, "controllers": sorted(groups.roots.controllers)}
        connection.send(json.dumps(hello).encode())

    @contextlib.contextmanager
    def _trial_identity(self) -> Iterator[Identity]:
        """Create a user namespace like that of a sandbox, to probe kernel features in.

        Raises:
            OSError: the kernel refused the namespace.
        """
        identity = self._identities.make()
        hold_namespace(identity)
        try:
            yield identity
        finally:
            os.close(identity.userns_fd)
            self._identities.give_back(identity)

    def serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._connection.fileno(), self._controller, self._wakeup):
            poll.register(descriptor, select.POLLIN)
        while True:
            events = dict(poll.poll(self._poll_timeout()))
            if self._controller in events:
                self._end()
            if self._wakeup in events:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._connection.fileno() in events:
                self._handle_request()
            now = time.monotonic()
            if self._fork_at is not None and now >= self._fork_at:
                self._make_missing()
            elif not events and now >= self._requested_at + _CALM:
                self._drop_spares()

    def _end(self) -> NoReturn:
        """Exit, which kills every sandbox."""
        for _, group in self._live.values():
            if group:
                group.lift_quota()
        os._exit(0)

    def _poll_timeout(self) -> float | None:
        """Return the milliseconds until the next action that needs no request."""
        due = self._fork_at
        if due is None and len(self._spares) > 1:
            due = self._requested_at + _CALM
        return None if due is None else max(0.0, due - time.monotonic()) * 1000

    def _make_soon(self) -> None:
        """Schedule the fork of missing processes, unless it is scheduled already."""
        if self._fork_at is None:
            self._fork_at = time.monotonic() + _PAUSE

    def _make_missing(self) -> None:
        """Create one spare and replace lost setup workers; if that fails, the next request reports the reason."""
        self._fork_at = None
        if time.monotonic() < self._requested_at + _GAP:
            self._fork_at = self._requested_at + _GAP
        elif len(self._spares) < self._spare_target:
            with contextlib.suppress(OSError):
                self._make_spare()
                if len(self._spares) < self._spare_target:  # create one per iteration, so that requests come first
                    self._fork_at = 0.0
        try:
            self._fork_workers()
        except OSError:
            self._fork_at = time.monotonic() + _RETRY

    def _drop_spares(self) -> None:
        """Drop all spares but one."""
        self._spare_target = 1
        while len(self._spares) > self._spare_target:
            self._spares.pop().source.close()  # the spare exits, and is reaped

    def _reap(self) -> None:
        """Reap exited processes; schedule the replacement of spares and setup workers."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                for spare in [spare for spare in self._spares if spare.pid == pid]:
                    spare.source.close()
                    self._spares.remove(spare)
                    self._make_soon()
                if pid in self._workers:
                    self._workers.remove(pid)
                    self._make_soon()
                if pid == self._template_pid:
                    self._template_pid = 0
                    self._drop_template()
                identity, group = self._live.pop(pid, (None, None))
                if identity:
                    self._identities.give_back(identity)
                if group:
                    group.remove()

    def _handle_request(self) -> None:
        """Handle one request: a line of words, then for ``create`` the plan of a sandbox.

        The first word is the verb. The second word of ``hold`` and ``measure`` is a request number, which the response
        repeats. The response to ``create`` goes to the sandbox's own control socket.
        """
        flags = socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self._connection.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(8), flags)
        if not data:
            self._end()
        descriptors = list(array.array("i", ancillary[0][2])) if ancillary else []
        line, _, plan = data.partition(b"\n")
        verb, *arguments = line.decode().split()
        try:
            if verb == "create":
                self._create(arguments, plan, descriptors)
            elif verb == "hold":
                response = {"event": "held", "to": int(arguments[0]), "number": self._hold(descriptors)}
                self._connection.send(json.dumps(response).encode())
            elif verb == "measure":
                response = {"event": "measured", "to": int(arguments[0]), "bytes": _measure(descriptors)}
                self._connection.send(json.dumps(response).encode())
            else:
                _drop(arguments)
        except (OSError, ValueError) as error:
            self._connection.send(setup.error_message(error, to=int(arguments[0])))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _hold(self, descriptors: list[int]) -> int:
        """Mount a sandbox's tree in the zygote's mount namespace, where it can be copied; return its number.

        A detached mount that a process holds by a descriptor alone cannot be copied before Linux 6.15
        (fs/namespace.c, __do_loopback).
        """
        (tree,) = descriptors
        if not self._sealed_count:
            _mount_tmpfs(init.HOLD)
        self._sealed_count += 1
        os.mkdir(f"{init.HOLD}/{self._sealed_count}")
        mounts.attach(tree, f"{init.HOLD}/{self._sealed_count}")
        return self._sealed_count

    def _create(self, arguments: list[str], plan: bytes, descriptors: list[int]) -> None:
        """Create a sandbox, and send the controller its pidfd or the error.

        Args:
            arguments: the options (:meth:`.plan.SpawnOptions.to_json`).
            plan: the plan of the sandbox.
            descriptors: the sandbox's end of its control socket, and the socket on which other processes submit jobs.
        """
        if len(descriptors) != 2:  # the controller sees the control socket close
            return
        control = socket.socket(fileno=descriptors[0])
        try:
            self._begin(SpawnOptions.from_json(arguments[0]), plan, control, descriptors[1])
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                control.send(setup.error_message(error, event="refused"))
        finally:
            control.detach()

    def _begin(self, options: SpawnOptions, plan: bytes, control: socket.socket, job_listener: int) -> None:
        if not self._workers:
            self._fork_workers()
        is_usual = options.fits(self._spare_options, many_ids=self._identities.count > 1)
        is_usual = is_usual and plan.partition(b"\n")[0] == self._preparations
        if is_usual:
            self._make_soon()
            self._requested_at = time.monotonic()
        prepared_spare = self._take_spare() if is_usual else None
        if is_usual and prepared_spare is None:  # a burst of requests has used up the spares: keep more
            self._spare_target = min(2 * self._spare_target, _MOST_SPARES)
        spare, job = (prepared_spare, setup.FINISH) if prepared_spare else (self._fork(options), setup.BOTH)
        with spare.source, contextlib.ExitStack() as stack:
            _hand_out(control, os.pidfd_open(spare.pid))
            paths = [f"{init.HOLD}/{number}" for number in options.sealed]
            trees = [stack.enter_context(sc.closing(sc.open_tree(path))) for path in paths]
            descriptors = (spare.source.fileno(), control.fileno(), job_listener, *trees)
            self._give_job(job, spare, plan, descriptors, options.amounts)

    def _take_spare(self) -> _Spare | None:
        """Return a usable spare or None; drop spares whose preparation failed, because a new attempt may succeed."""
        while self._spares:
            spare = self._spares.popleft()
            if spare.is_usable():
                return spare
            spare.source.close()
        return None

    def _give_job(
        self, job: str, spare: _Spare, plan: bytes, descriptors: Sequence[int], amounts: setup.Amounts = ()
    ) -> None:
        data = setup.pack_job(job, spare.pid, spare.identity, plan, spare.group, amounts)
        socket.send_fds(self._jobs, [data], descriptors)

    def _make_spare(self) -> None:
        """Fork a spare and queue its preparation. In a burst of requests the spare forks no early worker."""
        spare = self._fork(self._spare_options, fork_early=time.monotonic() >= self._requested_at + _PAUSE)
        handover, sending_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with spare.source, sending_end:
            self._give_job(setup.PREPARE, spare, self._preparations, (spare.source.fileno(), sending_end.fileno()))
        self._spares.append(replace(spare, source=handover))

    def _fork(self, options: SpawnOptions, *, fork_early: bool = False) -> _Spare:
        """Fork a process that creates its namespaces and waits to become pid 1 of a sandbox."""
        identity = self._identities.make(one_id=options.one_id, inotify=options.inotify, processes=options.nproc)
        setup_end, init_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group: cgroups.Cgroup | None = None
        try:
            group = self._groups.make(cpu=options.limits_cpu) if self._groups else None
            with init_end:
                pid = template.fork(
                    self._template or self._fork_template(), init_end, identity, options.network, group,
                    fork_early=fork_early, pretend_owners=options.pretend_owners,
                )  # fmt: skip
        except OSError as error:
            setup_end.close()
            if isinstance(error, TimeoutError | BrokenPipeError | ConnectionResetError):
                self._drop_template()
            self._identities.give_back(identity)
            if group:
                group.remove()
            raise
        self._live[pid] = (identity, group)
        return _Spare(pid, identity, setup_end, group)

    def _fork_workers(self) -> None:
        while len(self._workers) < _SETUP_WORKERS:
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    setup.main(self._workers_end.fileno())
                finally:
                    os._exit(1)
            self._workers.add(pid)

    def _fork_template(self) -> socket.socket:
        self._template, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with template_end:
            self._template_pid = os.fork()
            if self._template_pid == 0:
                try:
                    template.main(template_end.fileno(), self._lifeline)
                finally:
                    os._exit(1)
        return self._template

    def _drop_template(self) -> None:
        """Kill a template that does not answer; the next sandbox's fork starts another."""
        if self._template:
            self._template.close()
        if self._template_pid:
            os.kill(self._template_pid, signal.SIGKILL)
        self._template, self._template_pid = None, 0


def _hand_out(control: socket.socket, pidfd: int) -> None:
    """Send the controller a pidfd of its sandbox's pid 1."""
    with sc.closing(pidfd):
        socket.send_fds(control, [b'{"event":"forked"}'], [pidfd])


def _mount_tmpfs(path: str) -> None:
    with sc.closing(sc.new_filesystem("tmpfs", 0, mode="0700")) as tree:
        mounts.attach(tree, path)


def _drop(numbers: list[str]) -> None:
    """Unmount sealed trees that the controller no longer needs. The request has no response."""
    for number in numbers:
        with contextlib.suppress(OSError):
            sc.umount(f"{init.HOLD}/{int(number)}", sc.MNT_DETACH)
            os.rmdir(f"{init.HOLD}/{int(number)}")


def _can_layer(path: str) -> bool:
    """Return whether a directory can be an overlay layer; it cannot if mounts of other owners lie below it."""
    _mount_tmpfs(init.HOLD)  # an overlay without an upper needs two lowers
    try:
        with sc.closing(sc.fsopen("overlay")) as fs:
            sc.fsconfig(fs, "lowerdir", f"{path}:{init.HOLD}")
            sc.fsconfig(fs, "userxattr")
            os.close(sc.fsmount(fs, 0, "overlay"))
    except sc.CallError:
        return False
    finally:
        sc.umount(init.HOLD, sc.MNT_DETACH)
    return True


def _can_idmap(identity: Identity, path: str) -> bool:
    """Return whether the file system of ``path`` can be idmapped; a container engine's overlay cannot."""
    if not identity.mapped:
        return False
    try:
        with sc.closing(sc.open_tree(path)) as tree:
            sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, userns_fd=identity.userns_fd)
    except sc.CallError:
        return False
    return True


def _can_write_to_memory(identity: Identity) -> bool:
    """Return whether a sandbox's overlay can have its upper on a tmpfs."""
    idmapped = not identity.mapped or mounts.tmpfs_can_be_idmapped(identity.userns_fd)
    return idmapped and mounts.tmpfs_keeps_attributes()


def _measure(descriptors: list[int]) -> int:
    """Return the bytes in an upper on disk. For an ordinary user, only the zygote can read all of its files."""
    (tree,) = descriptors
    with sc.closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree)) as upper:
        return disk.measure(upper)


@dataclass(frozen=True, slots=True)
class _Spare:
    """A sandbox that waits for its plan.

    Attributes:
        pid: its first process.
        identity: its ids.
        source: the handover if a setup worker prepares the spare, else the socket to its pid 1.
        group: its control group, or None without control groups.
    """

    pid: int
    identity: Identity
    source: socket.socket
    group: cgroups.Cgroup | None

    def is_usable(self) -> bool:
        """Return whether a setup worker has prepared the spare or is about to; False if the preparation failed."""
        try:
            return self.source.recv(len(setup.PREPARED), socket.MSG_PEEK | socket.MSG_DONTWAIT) == setup.PREPARED
        except BlockingIOError:
            return True
