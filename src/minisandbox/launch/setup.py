"""A setup worker: a process next to the zygote that sets up sandboxes in two steps, each a job.

To *prepare* one, before there is a request, it maps the ids of a new pid 1, goes into its namespaces, and makes there
what does not depend on the image. To *finish* one it goes there again, adds what the plan says, and tells pid 1 to
begin. Between the two, what the second step needs lies in a socket, the *handover*, so that any setup worker
can take it: descriptors of the namespaces, of scratch, and of the socket to pid 1. So pid 1 never has a privilege
together with a plan, and no process needs to be forked for a plan: what a process touches after a fork is copied page
by page.

Jobs wait in one queue, and a sandbox is prepared before it is finished. A setup worker that waits for a handover
therefore waits for another one that has begun, never for a job that is behind its own.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .kernel import cgroups, mounts
from .kernel import syscalls as sc
from .kernel.identity import BECOME, Identity, act_as_owner, map_namespace, read_failure
from .plan import Operation, Plan, unpack_operations

PROXY_PORT = 3128
_BACKLOG = 256
LIFETIME, MEMORY, DISK, EXPECTS_COMMANDS = "LIFETIME", "MEMORY", "DISK", "COMMANDS"
_MOST_RIGHTS = 253
"""SCM_MAX_FD (include/net/scm.h)."""
_MAX_JOB = 1 << 18
_JOBS, _FIRST_HOME = 3, 4
_HOME = {sc.CLONE_NEWNS: _FIRST_HOME, sc.CLONE_NEWUTS: _FIRST_HOME + 1, sc.CLONE_NEWNET: _FIRST_HOME + 2}
"""Descriptors of the namespaces to come back to, by their kinds."""


PREPARE, FINISH, BOTH = "prepare", "finish", "both"
"""Jobs. With each come descriptors: the socket to pid 1 and our end of the handover; or its other end, or the socket to
pid 1, and then the sandbox's end of its control socket, its door, and the sealed trees that its plan names."""


PREPARED = b"prepared"
"""What is in a handover besides descriptors, unless it is an error."""
Amounts = tuple[tuple[str, int], ...]
"""Limits of a control group: (name, amount)."""


def pack_job(
    job: str, pid: int, identity: Identity, plan: bytes, group: cgroups.Cgroup | None, amounts: Amounts = ()
) -> bytes:
    """Encode a job as one message: the action, the sandbox that it is for, then the plan.

    Args:
        job: ``PREPARE``, ``FINISH`` or ``BOTH``.
        pid: the sandbox's first process, as ``/proc`` calls it here.
        identity: who it is.
        plan: what it is to be (:meth:`.plan.Plan.to_json`); to prepare one, its first line.
        group: its control group, if there are any.
        amounts: the limits of its group.
    """
    who = (pid, identity.first_id, identity.id_map, identity.inotify, identity.mapped, identity.groups)
    where = (group.version, group.directories) if group else (0, {})
    return json.dumps((job, who, where, amounts)).encode() + b"\n" + plan


def main(jobs: int) -> None:
    """Carry out jobs until the zygote ends. Never returns.

    Args:
        jobs: socket on which they arrive (:func:`pack_job`).
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
        who, _, plan = data.partition(b"\n")
        job, (pid, first_id, id_map, inotify, mapped, groups), where, amounts = json.loads(who)
        making = _Making(pid, Identity(first_id, id_map, inotify, mapped, groups), plan, refusal)
        if job == PREPARE:
            making.prepare_for_another(*descriptors)
        else:
            making.limits = cgroups.Cgroup(*where), amounts
            making.finish(descriptors[0], descriptors[1], descriptors[2], descriptors[3:], prepared=job == FINISH)
        sc.close_range(_FIRST_HOME + len(_HOME))


def _receive(source: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive a message with its descriptors."""
    space, flags = socket.CMSG_SPACE(4 * _MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC | flags
    data, ancillary, _, _ = source.recvmsg(_MAX_JOB, space, flags)
    return data, list(array.array("i", ancillary[0][2])) if ancillary else []


def _make_home() -> OSError | None:
    """Enter namespaces to come back to after each sandbox; returns the error if the kernel refuses.

    A setup worker that exited instead would be replaced forever, and the reason would be lost.
    """
    sc.close_range(_FIRST_HOME)
    try:
        sc.unshare(sc.CLONE_NEWUTS | sc.CLONE_NEWNET)  # into the host's own an ordinary user could not come back
        for name in ("mnt", "uts", "net"):  # the new descriptors get the numbers of _HOME
            os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class _Held:
    """A sandbox whose ids are mapped: descriptors of it.

    Attributes:
        leader: socket to its pid 1, which ends when this is closed without a word.
        user: its user namespace.
        mount: its mount namespace.
        names: its UTS namespace.
        network: its network namespace.
        tree: once it is prepared, a copy of its scratch mount (:attr:`.mounts.Executor.tree`).
    """

    leader: int
    user: int
    mount: int
    names: int
    network: int
    tree: int = -1

    def descriptors(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (self.leader, self.user, self.mount, self.names, self.network, self.tree)


class _Refused(Exception):
    """The message of a setup worker that could not prepare a sandbox."""


@dataclass(slots=True)
class _Making:
    """One sandbox, being made.

    Attributes:
        pid: its first process.
        identity: who it is.
        plan: its plan, or the first line of one.
        refusal: why this setup worker has no namespaces of its own, without which it can make none.
        step: what is being done, for people.
        limits: its control group, with the limits that the group gets.
    """

    pid: int
    identity: Identity
    plan: bytes
    refusal: OSError | None
    limits: tuple[cgroups.Cgroup, Amounts] = (cgroups.Cgroup(0, {}), ())
    step: str = "make namespaces"

    def prepare_for_another(self, leader: int, handover: int) -> None:
        """Prepare it, and leave it to the setup worker that finishes it.

        A failure waits there too, with the socket, so that the process stays until it is requested.
        """
        with socket.socket(fileno=handover) as other:
            try:
                held, proc = self._map(leader)
                executor = mounts.Executor(self._idmap(held), proc=proc)
                with self._inside(held):
                    self._run(executor, unpack_operations(self.plan))
                socket.send_fds(other, [PREPARED], replace(held, tree=executor.tree).descriptors())
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    socket.send_fds(other, [self._failure(error)], [leader])

    def finish(self, source: int, control: int, door: int, trees: Sequence[int], *, prepared: bool) -> None:
        """Make what its plan says and tell its pid 1 to begin; or tell the controller why there will be no sandbox.

        Args:
            source: its end of the handover, or the socket to its pid 1.
            control: its end of the control socket.
            door: its door.
            trees: the sealed trees that its plan names.
            prepared: whether it is prepared already.
        """
        with socket.socket(fileno=control) as controller:
            try:
                plan = Plan.from_json(self.plan)
                held, proc = self._take_over(source) if prepared else self._map(source)
                if held is None or not self._limit(*self.limits):
                    return
                with socket.socket(fileno=os.dup(held.leader)) as leader:
                    if prepared:  # a spare may fork before it says so, and pivot_root(2) must find all its processes
                        self._await_become(leader)
                    executor = mounts.Executor(self._idmap(held), tuple(trees), proc, held.tree)
                    self._carry_out(plan, held, executor, controller)
                    if not prepared:
                        self._await_become(leader)
                    _hand_out(controller, "tree", executor.tree)
                    numbers = pack_numbers(_numbers(plan))
                    descriptors = [control, door, *([executor.disk] if executor.disk >= 0 else [])]
                    socket.send_fds(leader, [numbers], descriptors)
                    if prepared:
                        with contextlib.suppress(BrokenPipeError):  # there is no early worker, or it has exited
                            socket.send_fds(leader, [numbers], descriptors)
            except _Refused as error:
                controller.send(error.args[0])
            except (OSError, ValueError) as error:
                with contextlib.suppress(OSError):
                    controller.send(self._failure(error))

    def _await_become(self, leader: socket.socket) -> None:
        self.step = "enter its user namespace"
        if (answer := leader.recv(4096)) != BECOME:
            raise read_failure(answer)

    def _map(self, leader: int) -> tuple[_Held, int]:
        """Map the sandbox's ids; return its descriptors and its proc file system."""
        if self.refusal:
            raise self.refusal
        with socket.socket(fileno=os.dup(leader)) as partner:
            proc, *others = map_namespace(self.identity, self.pid, partner, ("mnt", "uts", "net"))
        return _Held(leader, self.identity.userns_fd, *others), proc

    def _take_over(self, handover: int) -> tuple[_Held | None, int]:
        """Receive what another setup worker prepared; None if it, or the sandbox's first process, was killed."""
        if self.refusal:
            raise self.refusal
        with socket.socket(fileno=handover) as other:
            data, descriptors = _receive(other)
        if len(descriptors) == 1:
            raise _Refused(data)
        return _Held(*descriptors) if descriptors else None, -1

    def _idmap(self, held: _Held) -> int | None:
        return held.user if self.identity.mapped else None

    def _carry_out(self, plan: Plan, held: _Held, executor: mounts.Executor, controller: socket.socket) -> None:
        """Do what the plan says, its preparations included if it is not prepared."""
        self._run(executor, plan.takes)
        network = plan.network == "allow"
        with self._inside(held, network=network):
            if held.tree >= 0:
                executor.enter_scratch()
            else:
                self._run(executor, plan.preparations)
            self._run(executor, plan.operations)
            if network:
                self.step = "listen for the network proxy"
                _hand_out_listener(controller)

    def _limit(self, group: cgroups.Cgroup, amounts: Amounts) -> bool:
        """Set the limits of its control group; returns whether the group is there, which goes with the sandbox."""
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
    def _inside(self, held: _Held, *, network: bool = False) -> Iterator[None]:
        """Enter namespaces of the sandbox with its identity, and return afterwards."""
        visited = ((held.mount, sc.CLONE_NEWNS), (held.names, sc.CLONE_NEWUTS), (held.network, sc.CLONE_NEWNET))
        there = visited if network else visited[:2]
        try:
            for descriptor, kind in there:
                sc.setns(descriptor, kind)
            act_as_owner(self.identity)
            yield
        finally:
            try:
                act_as_owner(self.identity, no_more=True)
                for _, kind in there:
                    sc.setns(_HOME[kind], kind)
            except OSError:  # a setup worker that is not at home must not make the next one
                os._exit(1)

    def _failure(self, error: OSError | ValueError) -> bytes:
        """Return the message that tells the controller why there will be no sandbox."""
        number = getattr(error, "errno", None)
        message = {"event": "error", "errno": number, "message": str(error), "operation": self.step}
        return json.dumps(message).encode()


def _hand_out(controller: socket.socket, what: str, descriptor: int) -> None:
    """Give the controller a hold on something of the sandbox: the mount that is written to, a socket."""
    socket.send_fds(controller, [json.dumps({"event": what}).encode()], [descriptor])


def _hand_out_listener(controller: socket.socket) -> None:
    """Give the controller a listening socket in this network, for the proxy: none of our processes is inside."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(("127.0.0.1", PROXY_PORT))
        listener.listen(_BACKLOG)
        _hand_out(controller, "listener", listener.fileno())


def _numbers(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the numbers of a plan that pid 1 needs."""
    commands = (EXPECTS_COMMANDS, int(plan.expects_commands))
    watched = (MEMORY, plan.memory), (DISK, plan.disk)
    return (*plan.rlimits, (LIFETIME, plan.lifetime), *watched, commands)


def pack_numbers(numbers: tuple[tuple[str, int], ...]) -> bytes:
    """Named numbers as text, which pid 1 reads with less than a JSON parser."""
    return " ".join(f"{name}={value}" for name, value in numbers).encode()


def unpack_numbers(text: bytes) -> tuple[tuple[str, int], ...]:
    """Decode what :func:`pack_numbers` wrote."""
    pairs = (item.partition("=") for item in text.decode().split())
    return tuple((name, int(value)) for name, _, value in pairs)
