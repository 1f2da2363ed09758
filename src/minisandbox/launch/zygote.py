"""The zygote: a small single-threaded process that forks every sandbox of one controller.

New user namespaces need a process without threads (unshare(2)), and the controller has threads. The zygote is pid 1 of
a process namespace that contains every sandbox. It exits when its controller does, and the kernel then kills all
sandboxes (pid_namespaces(7)).

A sandbox starts in five steps:

1. The zygote forks a spare (:mod:`.init`), which joins a control group, creates namespaces, and requests its ids.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from . import disk, init, setup
from .kernel import cgroups, mounts, seccomp
from .kernel import syscalls as sc
from .kernel.identity import RANGE_SIZE, Identities, Identity, enter_outer_namespace, has_privileges, hold_namespace
from .plan import INOTIFY, PROCESSES

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


def main(connection: socket.socket, controller: int, settings: list[str]) -> None:
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))  # one descriptor per live sandbox
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # with Python's handler, a command could interrupt its pid 1
    _reset_process_state()
    forbid_imports()
    gc.disable()  # there are no cycles, and a collection would copy every page it touches in each child
    sc.overwrite_arguments("minisandbox-launcher")  # before _enter_namespaces: it reads the /proc of this process
    try:
        seccomp.assemble()
        sc.join_new_session_keyring()
        roots = _find_roots() if owner else cgroups.CgroupRoots(0)
        identities = _enter_namespaces(connection, lock_directory, mappers)
        zygote = _Zygote(connection, controller, identities, _make_groups(roots, owner), preparations.encode())
    except (OSError, ValueError) as error:
        number, path = getattr(error, "errno", None), getattr(error, "filename", None)
        answer = {"event": "error", "to": 0, "errno": number, "message": str(error), "path": str(path)}
        connection.send(json.dumps(answer).encode())
        os._exit(1)
    zygote.serve()


def _find_roots() -> cgroups.CgroupRoots:
    """Find where control groups can be created. Call it before entering a pid namespace, which hides others."""
    try:
        return cgroups.enable_controllers(cgroups.find_roots())
    except OSError:
        return cgroups.CgroupRoots(0)


def _make_groups(roots: cgroups.CgroupRoots, owner: str) -> cgroups.OwnerCgroups | None:
    """Create the owner's control groups; return None if the machine has none or the kernel refuses."""
    if not roots.version:
        return None
    try:
        return cgroups.OwnerCgroups(roots, owner)
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
            score.write(b"0")  # set with CAP_SYS_RESOURCE: a minimum for all descendants
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}:  # these stay ignored
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
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._lifeline, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._live: dict[int, tuple[Identity, cgroups.Cgroup | None]] = {}
        mapped = identities.mapped
        with self._trial_identity() as trial:
            usr = _can_idmap(trial, "/usr")
            memory_upper = _can_write_to_memory(trial)
        layered = usr or self._can_layer("/usr")
        self._jobs, self._workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._workers: set[int] = set()
        self._fork_workers()
        self._sealed = 0
        self._usual = SpawnOptions(nproc=0 if groups else PROCESSES)
        self._preparations = preparations
        self._spares: deque[_Spare] = deque()
        self._asked = 0.0  # monotonic time of the last request
        self._wanted = 1  # target number of spares; grows in a burst of requests
        self._make_spare()
        self._due: float | None = None  # monotonic time at which missing processes are forked
        hello: dict[str, object] = {"event": "hello", "to": 0, "mapped": mapped, "ids": identities.count}
        hello |= {"usr_idmap": usr, "usr_overlay": layered, "memory_upper": memory_upper}
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
        gc.collect()
        gc.freeze()
        sc.trim_memory()
        while True:
            events = dict(poll.poll(self._patience()))
            if self._controller in events:
                self._end()
            if self._wakeup in events:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._connection.fileno() in events:
                self._handle_request()
            now = time.monotonic()
            if self._due is not None and now >= self._due:
                self._make_missing()
            elif not events and now >= self._asked + _CALM:
                self._drop_spares()

    def _end(self) -> NoReturn:
        """Exit, which kills every sandbox."""
        for _, group in self._live.values():
            if group:
                group.lift_quota()
        os._exit(0)

    def _patience(self) -> float | None:
        """Return the milliseconds until the next action that needs no request."""
        due = self._due if self._due is not None else self._asked + _CALM if len(self._spares) > 1 else None
        return None if due is None else max(0.0, due - time.monotonic()) * 1000

    def _make_soon(self) -> None:
        """Schedule the fork of missing processes, unless it is scheduled already."""
        if self._due is None:
            self._due = time.monotonic() + _PAUSE

    def _make_missing(self) -> None:
        """Create one spare and replace lost setup workers; if that fails, the next request reports the reason."""
        self._due = None
        if time.monotonic() < self._asked + _GAP:
            self._due = self._asked + _GAP
        elif len(self._spares) < self._wanted:
            with contextlib.suppress(OSError):
                self._make_spare()
                if len(self._spares) < self._wanted:  # create one per iteration, so that requests come first
                    self._due = 0.0
        try:
            self._fork_workers()
        except OSError:
            self._due = time.monotonic() + _RETRY

    def _drop_spares(self) -> None:
        """Drop all spares but one."""
        self._wanted = 1
        while len(self._spares) > self._wanted:
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
                identity, group = self._live.pop(pid, (None, None))
                if identity:
                    self._identities.give_back(identity)
                if group:
                    group.remove()

    def _handle_request(self) -> None:
        """Handle one request: a line of words, then for ``create`` the plan of a sandbox.

        The first word is the verb. The second word of ``hold`` and ``measure`` is a number, which the answer repeats.
        ``create`` is answered on the sandbox's own control socket.
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
                held = {"event": "held", "to": int(arguments[0]), "number": self._hold(descriptors)}
                self._connection.send(json.dumps(held).encode())
            elif verb == "measure":
                measured = {"event": "measured", "to": int(arguments[0]), "bytes": _measure(descriptors)}
                self._connection.send(json.dumps(measured).encode())
            else:
                self._drop(arguments)
        except (OSError, ValueError) as error:
            answer = {"event": "error", "to": int(arguments[0]), "errno": getattr(error, "errno", None)}
            answer["message"] = str(error)
            self._connection.send(json.dumps(answer).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _hold(self, descriptors: list[int]) -> int:
        """Mount a sandbox's tree in the zygote's mount namespace, where it can be copied; return its number.

        A detached mount that a process holds by a descriptor alone cannot be copied before Linux 6.15
        (fs/namespace.c, __do_loopback).
        """
        (tree,) = descriptors
        if not self._sealed:
            self._mount_at(sc.new_filesystem("tmpfs", 0, mode="0700"), init.HOLD)
        self._sealed += 1
        os.mkdir(f"{init.HOLD}/{self._sealed}")
        self._mount_at(os.dup(tree), f"{init.HOLD}/{self._sealed}")
        return self._sealed

    def _can_layer(self, path: str) -> bool:
        """Return whether a directory can be an overlay layer, which mounts of other owners below it prevent."""
        self._mount_at(sc.new_filesystem("tmpfs", 0), init.HOLD)  # an overlay without an upper needs two lowers
        fs = sc.fsopen("overlay")
        try:
            sc.fsconfig(fs, "lowerdir", f"{path}:{init.HOLD}")
            sc.fsconfig(fs, "userxattr")
            os.close(sc.fsmount(fs, 0, "overlay"))
        except sc.CallError:
            return False
        finally:
            os.close(fs)
            sc.umount(init.HOLD, sc.MNT_DETACH)
        return True

    @staticmethod
    def _mount_at(tree: int, path: str) -> None:
        point = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sc.move_mount(tree, point, path)
        finally:
            os.close(point)
            os.close(tree)

    def _drop(self, numbers: list[str]) -> None:
        """Unmount trees that the controller no longer needs, without an answer."""
        for number in numbers:
            with contextlib.suppress(OSError):
                sc.umount(f"{init.HOLD}/{int(number)}", sc.MNT_DETACH)
                os.rmdir(f"{init.HOLD}/{int(number)}")

    def _create(self, arguments: list[str], plan: bytes, descriptors: list[int]) -> None:
        """Create a sandbox, and send the controller its pidfd or the error.

        Args:
            arguments: options that are fixed when a spare is forked, and the limits of its control group.
            plan: the plan of the sandbox.
            descriptors: the sandbox's end of its control socket, and its door.
        """
        if len(descriptors) != 2:  # the controller sees the control socket close
            return
        control = socket.socket(fileno=descriptors[0])
        try:
            self._begin(SpawnOptions.read(arguments), plan, control, descriptors[1])
        except (OSError, ValueError) as error:
            refusal = {"event": "refused", "errno": getattr(error, "errno", None), "message": str(error)}
            with contextlib.suppress(OSError):
                control.send(json.dumps(refusal).encode())
        finally:
            control.detach()

    def _begin(self, options: SpawnOptions, plan: bytes, control: socket.socket, door: int) -> None:
        if not self._workers:
            self._fork_workers()
        usual = options.fits(self._usual, many_ids=self._identities.count > 1)
        usual = usual and plan.partition(b"\n")[0] == self._preparations
        if usual:
            self._make_soon()
            self._asked = time.monotonic()
        ready = self._take_spare() if usual else None
        if usual and ready is None:  # a burst of requests has used up the spares: keep more
            self._wanted = min(2 * self._wanted, _MOST_SPARES)
        spare, job = (ready, setup.FINISH) if ready else (self._fork(options), setup.BOTH)
        trees: list[int] = []
        with spare.source:
            try:
                _hand_out(control, os.pidfd_open(spare.pid))
                trees.extend(sc.open_tree(f"{init.HOLD}/{number}") for number in options.sealed)
                descriptors = (spare.source.fileno(), control.fileno(), door, *trees)
                self._give_job(job, spare, plan, descriptors, options.amounts)
            finally:
                for tree in trees:
                    os.close(tree)

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
        spare = self._fork(self._usual, early=time.monotonic() >= self._asked + _PAUSE)
        handover, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with spare.source, theirs:
            self._give_job(setup.PREPARE, spare, self._preparations, (spare.source.fileno(), theirs.fileno()))
        self._spares.append(replace(spare, source=handover))

    def _fork(self, options: SpawnOptions, *, early: bool = False) -> _Spare:
        """Fork a process that creates its namespaces and waits to become pid 1 of a sandbox."""
        identity = self._identities.make(one_id=options.one_id, inotify=options.inotify, processes=options.nproc)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group: cgroups.Cgroup | None = None
        try:
            group = self._groups.make(cpu=options.limits_cpu) if self._groups else None
            with theirs:
                pretend = options.pretend_owners
                pid = self._fork_init(
                    lambda: init.main(
                        identity, theirs, self._lifeline, options.network, group, early=early, pretend_owners=pretend
                    )
                )
        except OSError:
            ours.close()
            self._identities.give_back(identity)
            if group:
                group.remove()
            raise
        self._live[pid] = (identity, group)
        return _Spare(pid, identity, ours, group)

    def _fork_workers(self) -> None:
        while len(self._workers) < _SETUP_WORKERS:
            self._workers.add(self._fork_worker())

    def _fork_worker(self) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                setup.main(self._workers_end.fileno())
            finally:
                os._exit(1)
        return pid

    def _fork_init(self, main: Callable[[], None]) -> int:
        sc.unshare(sc.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    main()
                finally:
                    os._exit(70)
            return pid
        finally:
            # return, or the next unshare(CLONE_NEWPID) fails with EINVAL (kernel/pid_namespace.c, copy_pid_ns)
            sc.setns(self._own_pid_namespace, sc.CLONE_NEWPID)


def _hand_out(control: socket.socket, pidfd: int) -> None:
    """Send the controller a pidfd of its sandbox's pid 1."""
    try:
        socket.send_fds(control, [b'{"event":"forked"}'], [pidfd])
    finally:
        os.close(pidfd)


def _can_idmap(identity: Identity, path: str) -> bool:
    """Return whether the file system of ``path`` can be idmapped; a container engine's overlay cannot."""
    tree = -1
    try:
        if identity.mapped:
            tree = sc.open_tree(path)
            sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, userns_fd=identity.userns_fd)
    except sc.CallError:
        return False
    finally:
        if tree >= 0:
            os.close(tree)
    return identity.mapped


def _can_write_to_memory(identity: Identity) -> bool:
    """Return whether a sandbox's overlay can have its upper on a tmpfs."""
    idmapped = not identity.mapped or mounts.tmpfs_can_be_idmapped(identity.userns_fd)
    return idmapped and mounts.tmpfs_keeps_attributes()


def _measure(descriptors: list[int]) -> int:
    """Count the bytes in an upper on disk. For an ordinary user, only the zygote can read all files of an upper."""
    (tree,) = descriptors
    upper = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree)
    try:
        return disk.measure(upper)
    finally:
        os.close(upper)


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


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """Options of a ``create`` request that the zygote itself needs; the plan contains all others.

    Attributes:
        network: ``off`` or ``host``.
        one_id: whether the sandbox has a single uid, for builds by an ordinary user, who then owns all their files.
        inotify: limit of inotify instances.
        nproc: limit of processes for all ids of the sandbox together; 0: no limit.
        sealed: numbers of the sealed trees that are lower layers of the sandbox.
        amounts: (name, amount) of the limits of its control group.
        pretend_owners: whether changes of file owners and ids do nothing but return success.
    """

    network: str = "off"
    one_id: bool = False
    inotify: int = INOTIFY
    nproc: int = 0
    sealed: tuple[int, ...] = ()
    amounts: tuple[tuple[str, int], ...] = ()
    pretend_owners: bool = False

    @classmethod
    def read(cls, arguments: list[str]) -> SpawnOptions:
        """Read ``name=value`` words.

        Raises:
            ValueError: a value is not a number.
        """
        values = dict(word.split("=", 1) for word in arguments)
        sealed = tuple(int(number) for number in values.pop("sealed", "").split(",") if number)
        network, one_id = values.pop("network", "off"), values.pop("ids", "all") == "one"
        inotify, nproc = int(values.pop("inotify", INOTIFY)), int(values.pop("nproc", 0))
        pretend = values.pop("owners", "real") == "pretended"
        amounts = tuple((name, int(amount)) for name, amount in values.items())
        return cls(network, one_id, inotify, nproc, sealed, amounts, pretend)

    def fits(self, spare: SpawnOptions, *, many_ids: bool) -> bool:
        """Return whether a spare that was forked with the options ``spare`` suits this request."""
        ids = (self.one_id, self.nproc) == (spare.one_id, spare.nproc) or not many_ids
        same = (self.network, self.inotify, self.limits_cpu) == (spare.network, spare.inotify, spare.limits_cpu)
        return same and ids and self.pretend_owners == spare.pretend_owners

    @property
    def limits_cpu(self) -> bool:
        """Whether the control group limits the CPU."""
        return any(name == "cpu" for name, _ in self.amounts)
