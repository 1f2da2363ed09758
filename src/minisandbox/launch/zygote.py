"""The zygote: a small single-threaded process from which every sandbox of one controller is forked.

Namespace work needs a process without threads (unshare(2)); the controller has threads, so it is done here. The zygote
is pid 1 of a process namespace that holds every sandbox: it ends when its controller does, and the kernel ends them all
with it (pid_namespaces(7)).
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
from dataclasses import dataclass

from . import init
from . import syscalls as sc
from .identity import Identities, Identity, enter_outer_namespace, has_privileges

_MAX_MESSAGE = 1 << 18


def main(connection: socket.socket, controller: int, lock_directory: str) -> None:
    """Serve one controller until it ends. Never returns.

    Args:
        connection: datagram socket to the controller.
        controller: pidfd of the controller.
        lock_directory: where locks of id ranges lie.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor per live sandbox
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own handler would let a sandbox interrupt its pid 1
    gc.disable()  # nothing here makes cycles, and a collection would copy every page it touches in each child
    sc.overwrite_arguments("minisandbox-launcher")  # reads /proc, which the first process loses below
    try:
        mapped = _enter_namespaces(connection)
        zygote = _Zygote(connection, controller, lock_directory, mapped=mapped)
    except OSError as error:
        connection.send(json.dumps({"event": "error", "errno": error.errno, "message": str(error)}).encode())
        os._exit(1)
    zygote.serve()


def _enter_namespaces(connection: socket.socket) -> bool:
    """Go on as pid 1 of a process namespace, with a private mount namespace; the first process only waits.

    Returns:
        Whether each sandbox can have a range of host ids of its own.
    """
    mapped = has_privileges()
    if not mapped:
        enter_outer_namespace()
    sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWPID)
    child = os.fork()
    if child:
        connection.close()
        os.waitpid(child, 0)
        os._exit(0)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    # helpers are named by their pids in the new namespace; the first process, which shares the mounts, is not in it
    sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV)
    sc.overwrite_arguments("minisandbox-zygote")
    return mapped


class _Zygote:
    def __init__(self, connection: socket.socket, controller: int, lock_directory: str, *, mapped: bool) -> None:
        self._connection = connection
        self._controller = controller
        self._identities = Identities(mapped=mapped, lock_directory=lock_directory)
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._lifeline, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._live: dict[int, Identity] = {}
        usr = mapped and _can_idmap("/usr", self._identities.make())
        self._spare: _Embryo | None = self._fork("off")
        self._wants_spare = False
        connection.send(json.dumps({"event": "hello", "mapped": mapped, "usr_idmap": usr}).encode())

    def serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._connection.fileno(), self._controller, self._wakeup):
            poll.register(descriptor, select.POLLIN)
        gc.freeze()
        while True:
            events = dict(poll.poll(0 if self._wants_spare else None))
            if not events:
                self._make_spare()
            if self._controller in events:
                os._exit(0)
            if self._wakeup in events:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._connection.fileno() in events:
                self._handle_request()

    def _make_spare(self) -> None:
        """Make the next embryo while nobody waits for it; where that fails, whoever needs it is told why."""
        self._wants_spare = False
        with contextlib.suppress(OSError):
            self._spare = self._fork("off")

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if identity := self._live.pop(pid, None):
                    identity.close()

    def _handle_request(self) -> None:
        data, ancillary, _, _ = self._connection.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if not ancillary:  # the controller ran out of descriptors, or the message was cut
            self._connection.send(b'{"event":"error","errno":null,"message":"a request without a control socket"}')
            return
        control = array.array("i", ancillary[0][2][:4])[0]
        try:
            pidfd = self._create(data, control)
        except OSError as error:
            self._connection.send(json.dumps({"event": "error", "errno": error.errno, "message": str(error)}).encode())
            return
        finally:
            os.close(control)
        self._connection.sendmsg([b'{"event":"forked"}'], [_rights(pidfd)])
        os.close(pidfd)

    def _create(self, request: bytes, control: int) -> int:
        """Give an embryo its plan; returns a pidfd of it.

        Args:
            request: the network mode, a line feed, the plan.
            control: the sandbox's end of its control socket.
        """
        network, _, plan = request.partition(b"\n")
        if network == b"off" and self._spare:
            embryo, self._spare, self._wants_spare = self._spare, None, True
        else:
            embryo = self._fork(network.decode())
        with embryo.birth:
            embryo.birth.sendmsg([plan], [_rights(control)])
            return os.pidfd_open(embryo.pid)

    def _fork(self, network: str) -> _Embryo:
        """Fork a process that has namespaces of its own and waits for its plan."""
        identity = self._identities.make()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                pid = self._fork_init(identity, theirs, network)
        except OSError:
            ours.close()
            identity.close()
            raise
        identity.release_namespace()
        self._live[pid] = identity
        return _Embryo(pid, ours)

    def _fork_init(self, identity: Identity, birth: socket.socket, network: str) -> int:
        sc.unshare(sc.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    init.main(identity, birth, self._lifeline, network)
                finally:
                    os._exit(70)
            return pid
        finally:
            # back to our own, or the next unshare(CLONE_NEWPID) is EINVAL (kernel/pid_namespace.c, copy_pid_ns)
            sc.setns(self._own_pid_namespace, sc.CLONE_NEWPID)


@dataclass(frozen=True, slots=True)
class _Embryo:
    """A sandbox before it has its plan.

    Attributes:
        pid: its first process.
        birth: socket on which the plan and the control socket are sent.
    """

    pid: int
    birth: socket.socket


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def _can_idmap(path: str, identity: Identity) -> bool:
    """Whether the file system of ``path`` can be idmapped (an overlay of a container engine cannot)."""
    tree = -1
    try:
        tree = sc.open_tree(path)
        sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, userns_fd=identity.userns_fd)
    except sc.CallError:
        return False
    finally:
        identity.close()
        if tree >= 0:
            os.close(tree)
    return True
