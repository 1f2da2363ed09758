"""A setup worker: a process next to the zygote that carries out the plans of sandboxes, one after the other.

It goes into the namespaces of a sandbox's pid 1, which waits there, without privileges, for what it is to serve; makes
what the plan says; hands over; and leaves. So pid 1 never has a privilege together with a plan, and no process needs to
be forked for a plan: what a process touches after a fork is copied page by page.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from .kernel import mounts
from .kernel import syscalls as sc
from .kernel.identity import BECOME, Identity, act_as_owner, map_namespace, read_failure
from .plan import Plan

PROXY_PORT = 3128
_BACKLOG = 256
LIFETIME, MEMORY, DISK, EXPECTS_COMMANDS = "LIFETIME", "MEMORY", "DISK", "COMMANDS"
_MOST_RIGHTS = 253
"""SCM_MAX_FD (include/net/scm.h)."""
_MAX_JOB = 1 << 18
_JOBS, _FIRST_HOME = 3, 4
_VISITED = (("mnt", sc.CLONE_NEWNS), ("uts", sc.CLONE_NEWUTS), ("net", sc.CLONE_NEWNET))


def pack_job(pid: int, identity: Identity, plan: bytes) -> bytes:
    """A job as one message: who the sandbox is, then its plan.

    Args:
        pid: its first process, as ``/proc`` calls it here.
        identity: who it is.
        plan: what it is to be (:meth:`.plan.Plan.to_json`).
    """
    who = (pid, identity.first_id, identity.id_map, identity.inotify, identity.mapped, identity.groups)
    return json.dumps(who).encode() + b"\n" + plan


def main(jobs: int) -> None:
    """Carry out jobs until the zygote ends. Never returns.

    Args:
        jobs: socket on which they arrive (:func:`pack_job`), each with descriptors: the socket to its pid 1, its end of
            the control socket, its door, and the sealed trees that its plan names.
    """
    gc.enable()
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.overwrite_arguments("minisandbox-setup")
    os.dup2(jobs, _JOBS, inheritable=False)
    refusal = _make_home()
    source = socket.socket(fileno=_JOBS)
    space, flags = socket.CMSG_SPACE(4 * _MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC
    while True:
        if refusal:
            select.select([source], [], [])
            refusal = _make_home()
        try:
            data, ancillary, _, _ = source.recvmsg(_MAX_JOB, space, flags | (socket.MSG_DONTWAIT if refusal else 0))
        except BlockingIOError:  # another setup worker took the job
            continue
        if not data:
            os._exit(0)
        who, _, plan = data.partition(b"\n")
        birth, control, door, *trees = array.array("i", ancillary[0][2])
        pid, first_id, id_map, inotify, mapped, groups = json.loads(who)
        identity = Identity(first_id, id_map, inotify, mapped, groups)
        with socket.socket(fileno=birth) as leader, socket.socket(fileno=control) as controller:
            _Making(pid, identity, plan, controller, door, tuple(trees)).carry_out(leader, refusal)
        sc.close_range(_FIRST_HOME + len(_VISITED))


def _make_home() -> OSError | None:
    """Enter namespaces to come back to after each sandbox; returns the error where the kernel refuses.

    A setup worker that ended for it would be replaced without end, and nobody would hear the reason.
    """
    sc.close_range(_FIRST_HOME)
    try:
        sc.unshare(sc.CLONE_NEWUTS | sc.CLONE_NEWNET)  # into the host's own an ordinary user could not come back
        for name, _ in _VISITED:  # they get the numbers from _FIRST_HOME on
            os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error
    return None


@dataclass(slots=True)
class _Making:
    """One sandbox, being made.

    Attributes:
        pid: its first process.
        identity: who it is.
        data: its plan.
        control: its end of the control socket.
        door: its door.
        trees: the sealed trees that its plan names.
        step: what is being done, for people.
        disk: its disk upper, once there is one.
    """

    pid: int
    identity: Identity
    data: bytes
    control: socket.socket
    door: int
    trees: tuple[int, ...]
    step: str = "make namespaces"
    disk: int = -1

    def carry_out(self, leader: socket.socket, refusal: OSError | None) -> None:
        """Make it, or tell the controller why not.

        Args:
            leader: socket to its pid 1, which ends when this is closed without a word.
            refusal: why this setup worker has no namespaces of its own, without which it can make none.
        """
        try:
            if refusal:
                raise refusal
            plan = Plan.from_json(self.data)
            visited = [pair for pair in _VISITED if pair[0] != "net" or plan.network == "allow"]
            proc, *there = map_namespace(self.identity, self.pid, leader, [name for name, _ in visited])
            with self._inside([(descriptor, kind) for descriptor, (_, kind) in zip(there, visited, strict=True)]):
                self._make(plan, proc)
            self.step = "enter its user namespace"
            if (answer := leader.recv(4096)) != BECOME:
                raise read_failure(answer)
            given = [self.control.fileno(), self.door, *([self.disk] if self.disk >= 0 else [])]
            socket.send_fds(leader, [pack_numbers(_numbers(plan))], given)
        except (OSError, ValueError) as error:
            self._report(error)

    @contextlib.contextmanager
    def _inside(self, there: list[tuple[int, int]]) -> Iterator[None]:
        """Be in namespaces of the sandbox, and who it is; come home afterwards."""
        try:
            for descriptor, kind in there:
                sc.setns(descriptor, kind)
            act_as_owner(self.identity)
            yield
        finally:
            try:
                act_as_owner(self.identity, no_more=True)
                for number, (_, kind) in enumerate(_VISITED, _FIRST_HOME):
                    sc.setns(number, kind)
            except OSError as error:  # a setup worker that is not at home must not make the next one
                self._report(error)
                os._exit(1)

    def _make(self, plan: Plan, proc: int) -> None:
        executor = mounts.Executor(self.identity.userns_fd if self.identity.mapped else None, self.trees, proc)
        for operation in plan.operations:
            self.step = operation.describe()
            executor.run(operation)
        self.step = "name it"
        _set_names(plan.hostname)
        self._hand_out("tree", executor.tree)
        self.disk = executor.disk
        if plan.network == "allow":
            self.step = "listen for the network proxy"
            self._hand_out_listener()

    def _hand_out_listener(self) -> None:
        """Give the controller a socket that listens in this network, where the way out is: nobody of ours is inside."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            listener.bind(("127.0.0.1", PROXY_PORT))
            listener.listen(_BACKLOG)
            self._hand_out("listener", listener.fileno())

    def _hand_out(self, what: str, descriptor: int) -> None:
        """Give the controller a hold on something of the sandbox: the mount that is written to, a socket."""
        socket.send_fds(self.control, [json.dumps({"event": what}).encode()], [descriptor])

    def _report(self, error: OSError | ValueError) -> None:
        """Tell the controller why there will be no sandbox."""
        number = getattr(error, "errno", None)
        message = {"event": "error", "errno": number, "message": str(error), "operation": self.step}
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())


def _set_names(hostname: str) -> None:
    """Name this sandbox; where a container engine's seccomp profile refuses that, have the old name resolve in it."""
    try:
        socket.sethostname(hostname)
        sc.setdomainname("(none)")  # the kernel's default for NIS
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        with contextlib.suppress(FileNotFoundError):  # not every plan has the file
            hosts = os.open("/run/hosts", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(hosts, f"127.0.0.1\t{os.uname().nodename}\n".encode())
            os.close(hosts)


def _numbers(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the numbers of a plan that pid 1 needs."""
    commands = (EXPECTS_COMMANDS, int(plan.expects_commands))
    watched = (MEMORY, plan.memory), (DISK, plan.disk)
    return (*plan.rlimits, (LIFETIME, plan.lifetime), *watched, commands)


def pack_numbers(numbers: tuple[tuple[str, int], ...]) -> bytes:
    """Named numbers as text, which pid 1 reads with less than a JSON parser."""
    return " ".join(f"{name}={value}" for name, value in numbers).encode()


def unpack_numbers(text: bytes) -> tuple[tuple[str, int], ...]:
    """What :func:`pack_numbers` wrote."""
    pairs = (item.partition("=") for item in text.decode().split())
    return tuple((name, int(value)) for name, _, value in pairs)
