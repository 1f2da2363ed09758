"""Set up sandboxes in setup workers, processes next to the zygote. A sandbox takes two steps, and each is a job.

To *prepare* a sandbox, before there is a request, the setup worker maps the ids of a new pid 1, enters its namespaces,
and mounts everything that does not depend on the image. To *finish* it, a setup worker enters the namespaces again,
executes the rest of the plan, and sends pid 1 the message to begin. In between, a socket, the *handover*, holds the
descriptors that the second step needs: the namespaces, scratch, and the socket to pid 1. Any setup worker can receive
them. So pid 1 never has privileges and a plan at the same time. Besides, no process is forked for a plan, because a
fork would copy every page that the new process touches.

Jobs wait in one queue, and a sandbox is prepared before it is finished. A setup worker that waits for a handover
therefore waits for a job that another setup worker has begun, never for a job behind its own.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .kernel import cgroups, mounts
from .kernel import syscalls as sc
from .kernel.identity import Identity, act_as_owner, await_become, map_namespace
from .plan import Operation, Plan, unpack_operations

PROXY_PORT = 3128
_BACKLOG = 256
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
LIFETIME, MEMORY, DISK, EXPECTS_COMMANDS = "LIFETIME", "MEMORY", "DISK", "COMMANDS"
_MOST_RIGHTS = 253
"""SCM_MAX_FD (include/net/scm.h)."""
_MAX_JOB = 1 << 18
_JOBS, _FIRST_HOME = 3, 4
_HOME = {sc.CLONE_NEWNS: _FIRST_HOME, sc.CLONE_NEWUTS: _FIRST_HOME + 1, sc.CLONE_NEWNET: _FIRST_HOME + 2}
"""Descriptors of the setup worker's own namespaces, by kind, to return to after each sandbox."""


PREPARE, FINISH, BOTH = "prepare", "finish", "both"
"""Jobs. Each message carries descriptors. ``PREPARE``: the socket to pid 1 and the sending end of the handover.
``FINISH``: the receiving end of the handover; ``BOTH``: the socket to pid 1. The last two also carry the sandbox's end
of its control socket, the socket on which processes other than the owner submit jobs, and the sealed trees that the
plan names."""


PREPARED = b"prepared"
"""Message of a handover that carries the descriptors of a prepared sandbox; any other message is an error."""
Amounts = Sequence[tuple[str, int]]
"""Limits of a control group: (name, amount)."""


def pack_job(
    job: str, pid: int, identity: Identity, plan: bytes, group: cgroups.Cgroup | None, amounts: Amounts = ()
) -> bytes:
    """Encode a job as one message: the action, the sandbox that it is for, then the plan.

    Args:
        job: ``PREPARE``, ``FINISH`` or ``BOTH``.
        pid: the sandbox's first process, as numbered in the ``/proc`` of this process.
        identity: ids of the sandbox.
        plan: the plan (:meth:`.plan.Plan.to_json`); for ``PREPARE`` its first line.
        group: control group of the sandbox, or None without control groups.
        amounts: limits of the control group.
    """
    sandbox_fields = (pid, identity.first_id, identity.id_map, identity.inotify, identity.mapped, identity.groups)
    group_fields = (group.version, group.directories) if group else (0, {})
    return json.dumps((job, sandbox_fields, group_fields, amounts)).encode() + b"\n" + plan


def main(jobs: int) -> None:
    """Carry out jobs until the zygote ends. Never returns.

    Args:
        jobs: socket on which the jobs arrive (:func:`pack_job`).
    """
    gc.enable()
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.overwrite_arguments("minisandbox-setup")
    os.dup2(jobs, _JOBS, inheritable=False)
    refusal = _make_home()
    source = socket.socket(fileno=_JOBS)
    while True:
        if refusal:
            select.select([source], [], [])
            refusal = _make_home()
        try:
            data, descriptors = _receive(source, socket.MSG_DONTWAIT if refusal else 0)
        except BlockingIOError:  # another setup worker took the job
            continue
        if not data:
            os._exit(0)
        sandbox_fields, _, plan = data.partition(b"\n")
        job, (pid, first_id, id_map, inotify, mapped, groups), group_fields, amounts = json.loads(sandbox_fields)
        setup = _Setup(pid, Identity(first_id, id_map, inotify, mapped, groups), plan, refusal)
        if job == PREPARE:
            setup.prepare_for_another(*descriptors)
        else:
            setup.limits = cgroups.Cgroup(*group_fields), amounts
            setup.finish(descriptors[0], descriptors[1], descriptors[2], descriptors[3:], prepared=job == FINISH)
        sc.close_range(_FIRST_HOME + len(_HOME))


def _receive(source: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive a message with its descriptors."""
    space, flags = socket.CMSG_SPACE(4 * _MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC | flags
    data, ancillary, _, _ = source.recvmsg(_MAX_JOB, space, flags)
    return data, list(array.array("i", ancillary[0][2])) if ancillary else []


def _make_home() -> OSError | None:
    """Enter new namespaces to return to after each sandbox; return the error if the kernel refuses.

    Exiting on an error would lose the reason, and the zygote would replace the setup worker again and again.
    """
    sc.close_range(_FIRST_HOME)
    try:
        # Unshare, because an ordinary user could not return to the host's namespaces. The opened descriptors get the
        # numbers in _HOME.
        sc.unshare(sc.CLONE_NEWUTS | sc.CLONE_NEWNET)
        for name in ("mnt", "uts", "net"):
            os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    return None


class _SandboxFds(NamedTuple):
    """Descriptors of a sandbox whose ids are mapped.

    Attributes:
        init_socket: socket to pid 1, which exits if the socket closes without a message.
        user: user namespace.
        mount: mount namespace.
        uts: UTS namespace.
        network: network namespace.
        tree: copy of the scratch mount (:attr:`.mounts.Executor.tree`) once the sandbox is prepared, else -1.
    """

    init_socket: int
    user: int
    mount: int
    uts: int
    network: int
    tree: int = -1


class _Refused(Exception):
    """A sandbox could not be prepared. The argument is the error message of the setup worker that tried."""


@dataclass(slots=True)
class _Setup:
    """One sandbox while it is being set up.

    Attributes:
        pid: the sandbox's first process.
        identity: ids of the sandbox.
        plan: the plan, or the first line of one.
        refusal: why this setup worker could not create its own namespaces, which every job needs; None if it could.
        step: the current step, for error messages.
        limits: control group of the sandbox and the limits to set on it.
    """

    pid: int
    identity: Identity
    plan: bytes
    refusal: OSError | None
    limits: tuple[cgroups.Cgroup, Amounts] = (cgroups.Cgroup(0, {}), ())
    step: str = "make namespaces"

    def prepare_for_another(self, init_socket: int, handover: int) -> None:
        """Prepare the sandbox, and send its descriptors to the handover for the setup worker that finishes it.

        On failure, send the error with the socket to pid 1 instead. The open socket keeps pid 1 alive until a request
        receives the error.
        """
        with socket.socket(fileno=handover) as peer:
            try:
                fds, proc = self._map(init_socket)
                executor = mounts.Executor(self._idmap_fd(fds), proc=proc)
                with self._inside(fds, network=True):
                    self._begin_network(proc)
                    self._run(executor, unpack_operations(self.plan))
                socket.send_fds(peer, [PREPARED], fds._replace(tree=executor.tree))
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    socket.send_fds(peer, [error_message(error, operation=self.step)], [init_socket])

    def finish(self, source: int, control: int, job_listener: int, trees: Sequence[int], *, prepared: bool) -> None:
        """Execute the plan and start pid 1, or report to the controller why there is no sandbox.

        Args:
            source: receiving end of the handover, or the socket to pid 1.
            control: the sandbox's end of the control socket.
            job_listener: listening socket on which processes other than the owner submit jobs.
            trees: the sealed trees that the plan names.
            prepared: whether the sandbox is prepared already.
        """
        with socket.socket(fileno=control) as controller:
            try:
                plan = Plan.from_json(self.plan)
                fds, proc = self._take_over(source) if prepared else self._map(source)
                if fds is None or not self._limit(*self.limits):
                    return
                with socket.socket(fileno=os.dup(fds.init_socket)) as init_socket:
                    if prepared:  # pivot_root(2) must find all processes: wait until the spare has forked its worker
                        self._await_become(init_socket)
                    executor = mounts.Executor(self._idmap_fd(fds), tuple(trees), proc, fds.tree)
                    self._carry_out(plan, fds, executor, controller)
                    if not prepared:
                        self._await_become(init_socket)
                    _hand_out(controller, "tree", executor.tree)
                    settings = pack_settings(_settings(plan))
                    descriptors = [control, job_listener, *([executor.disk] if executor.disk >= 0 else [])]
                    socket.send_fds(init_socket, [settings], descriptors)
                    if prepared:
                        with contextlib.suppress(BrokenPipeError):  # there is no early worker, or it has exited
                            socket.send_fds(init_socket, [settings], descriptors)
            except _Refused as error:
                controller.send(error.args[0])
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    controller.send(error_message(error, operation=self.step))

    def _await_become(self, init_socket: socket.socket) -> None:
        self.step = "enter its user namespace"
        await_become(init_socket)

    def _map(self, init_socket: int) -> tuple[_SandboxFds, int]:
        """Map the ids of the sandbox; return its descriptors and the descriptor of its proc file system."""
        if self.refusal:
            raise self.refusal
        with socket.socket(fileno=os.dup(init_socket)) as partner:
            proc, *others = map_namespace(self.identity, self.pid, partner, ("mnt", "uts", "net"))
        return _SandboxFds(init_socket, self.identity.userns_fd, *others), proc

    def _take_over(self, handover: int) -> tuple[_SandboxFds | None, int]:
        """Receive a prepared sandbox; return None if its setup worker or its first process was killed."""
        if self.refusal:
            raise self.refusal
        with socket.socket(fileno=handover) as peer:
            data, descriptors = _receive(peer)
        if len(descriptors) == 1:
            raise _Refused(data)
        return _SandboxFds(*descriptors) if descriptors else None, -1

    def _idmap_fd(self, fds: _SandboxFds) -> int | None:
        return fds.user if self.identity.mapped else None

    def _carry_out(self, plan: Plan, fds: _SandboxFds, executor: mounts.Executor, controller: socket.socket) -> None:
        """Execute the plan, including its preparations unless the sandbox is prepared already."""
        self._run(executor, plan.takes)
        with self._inside(fds, network=plan.network != "host"):
            if fds.tree >= 0:
                executor.enter_scratch()
            else:
                if plan.network != "host":
                    self._begin_network(executor.proc)
                self._run(executor, plan.preparations)
            self._run(executor, plan.operations)
            if plan.network == "allow":
                self.step = "listen for the network proxy"
                _hand_out_listener(controller)

    def _begin_network(self, proc: int) -> None:
        """Set up the network namespace that this process has entered; ``proc`` is the sandbox's proc file system."""
        self.step = "raise the loopback interface"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as udp_socket:
            request = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack_from("H", fcntl.ioctl(udp_socket, _SIOCGIFFLAGS, request), 16)
            fcntl.ioctl(udp_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
        # Drop unanswered orphaned connections after 2 s instead of 100 s (tcp(7)), and open all ports to every user,
        # as container engines do. Both fail if /proc/sys is read-only, as in some containers.
        with contextlib.suppress(OSError):
            sc.write_setting("sys/net/ipv4/tcp_orphan_retries", "1", proc)
            sc.write_setting("sys/net/ipv4/ip_unprivileged_port_start", "0", proc)

    def _limit(self, group: cgroups.Cgroup, amounts: Amounts) -> bool:
        """Set the limits of the control group; return False if the group was removed with its sandbox."""
        for name, amount in amounts:
            self.step = f"limit {name}"
            if not group.can_limit(name):
                raise ValueError(f"there is no control group to limit {name} with")
            try:
                group.limit(name, amount)
            except FileNotFoundError:
                return False
        return True

    def _run(self, executor: mounts.Executor, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.step = operation.describe()
            executor.run(operation)

    @contextlib.contextmanager
    def _inside(self, fds: _SandboxFds, *, network: bool = False) -> Iterator[None]:
        """Enter the sandbox's namespaces and act with its ids; return to the own namespaces afterwards."""
        namespaces = ((fds.mount, sc.CLONE_NEWNS), (fds.uts, sc.CLONE_NEWUTS), (fds.network, sc.CLONE_NEWNET))
        entered = namespaces if network else namespaces[:2]
        try:
            for descriptor, kind in entered:
                sc.setns(descriptor, kind)
            act_as_owner(self.identity)
            yield
        finally:
            try:
                act_as_owner(self.identity, undo=True)
                for _, kind in entered:
                    sc.setns(_HOME[kind], kind)
            except OSError:  # stuck in this sandbox's namespaces, so this process must not set up another
                os._exit(1)


def error_message(error: OSError | ValueError, event: str = "error", **fields: object) -> bytes:
    """Return the message that reports an error to the controller."""
    number = getattr(error, "errno", None)
    return json.dumps({"event": event, "errno": number, "message": str(error), **fields}).encode()


def _hand_out(controller: socket.socket, event: str, descriptor: int) -> None:
    """Send the controller a descriptor of the sandbox: its writable mount, or a listening socket."""
    socket.send_fds(controller, [json.dumps({"event": event}).encode()], [descriptor])


def _hand_out_listener(controller: socket.socket) -> None:
    """Create a listening socket in the sandbox's network and send it to the controller, whose proxy runs outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(("127.0.0.1", PROXY_PORT))
        listener.listen(_BACKLOG)
        _hand_out(controller, "listener", listener.fileno())


def _settings(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the settings that pid 1 needs from a plan, as named numbers."""
    commands = (EXPECTS_COMMANDS, int(plan.expects_commands))
    watched = (MEMORY, plan.memory), (DISK, plan.disk)
    return (*plan.rlimits, (LIFETIME, plan.lifetime), *watched, commands)


def pack_settings(settings: tuple[tuple[str, int], ...]) -> bytes:
    """Encode named numbers as plain text, so that pid 1 needs no JSON parser, which would take memory."""
    return " ".join(f"{name}={value}" for name, value in settings).encode()


def unpack_settings(text: bytes) -> dict[str, int]:
    """Decode what :func:`pack_settings` wrote."""
    items = (item.partition("=") for item in text.decode().split())
    return {name: int(value) for name, _, value in items}
