"""The process that makes a sandbox from its plan, and then is its first worker.

It shares the namespaces of pid 1, whose root directory moves with pivot_root(2) as its own does. When it has been idle
for a while it ends, and the memory that making took ends with it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket

from . import mounts, seccomp, worker
from . import syscalls as sc
from .identity import Identity, act_as_owner, become_inner_root
from .ledger import Ledger
from .plan import Plan

MADE = b"made"
PROXY_PORT = 3128
_BACKLOG = 256
LIFETIME, MEMORY = "LIFETIME", "MEMORY"
_MOST_RIGHTS = 253
"""SCM_MAX_FD (include/net/scm.h)."""
_MAX_PLAN = 1 << 18


def main(
    identity: Identity, birth: int, init: socket.socket, notes: tuple[int, Ledger], failure: OSError | None
) -> None:
    """Wait for the plan, carry it out, become a worker. Never returns.

    Args:
        identity: who the sandbox is.
        birth: socket on which the plan arrives, with the control socket, the door and the sealed trees it names.
        init: socket to pid 1, which is told the limits and given control socket and door, and then that all is made.
        notes: pipe on which pid 1 is told what this worker does, and the ledger of what was refused.
        failure: why the namespaces could not be made, if so.
    """
    plan, (control, door, *given) = _await_plan(birth)
    init.sendmsg(
        [pack_numbers((*plan.rlimits, (LIFETIME, plan.lifetime), (MEMORY, plan.memory)))], [_rights(control, door)]
    )
    step = "make namespaces"
    try:
        if failure:
            raise failure
        act_as_owner(identity)
        executor = mounts.Executor(identity.userns_fd if identity.mapped else None, tuple(given))
        for operation in plan.operations:
            step = operation.describe()
            executor.run(operation)
        step = "enter its user namespace"
        socket.sethostname(plan.hostname)
        become_inner_root(identity)
        sc.prctl(sc.PR_SET_DUMPABLE, 0)
        _hand_out(control, "tree", executor.tree)
        if plan.network == "allow":
            step = "listen for the network proxy"
            _hand_out_listener(control)
        _keep_only(control, door, notes[0], init.fileno(), *notes[1].descriptors)
        step = "install the system-call filter"
        seccomp.install()
        seccomp.verify()
    except (OSError, ValueError) as error:
        report(control, error, step)
        os._exit(1)
    init.send(MADE)
    init.close()
    with socket.socket(fileno=control) as jobs, socket.socket(fileno=door) as listener:
        worker.main(jobs, listener, notes, plan.rlimits, primary=True)


def _await_plan(birth: int) -> tuple[Plan, list[int]]:
    with socket.socket(fileno=birth) as source:
        data, ancillary, _, _ = source.recvmsg(_MAX_PLAN, socket.CMSG_SPACE(4 * _MOST_RIGHTS), socket.MSG_CMSG_CLOEXEC)
    if not data:  # the zygote is gone
        os._exit(0)
    return Plan.from_json(data), list(array.array("i", ancillary[0][2]))


def _hand_out(control: int, what: str, descriptor: int) -> None:
    """Give the controller a hold on something of here: the mount that is written to (of no use as a path), a socket."""
    with socket.socket(fileno=os.dup(control)) as out:
        out.sendmsg([json.dumps({"event": what}).encode()], [_rights(descriptor)])


def _hand_out_listener(control: int) -> None:
    """Give the controller a socket that listens in this network, where the way out is: nobody of ours is inside."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(("127.0.0.1", PROXY_PORT))
        listener.listen(_BACKLOG)
        _hand_out(control, "listener", listener.fileno())


def _rights(*descriptors: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()


def _keep_only(*kept: int) -> None:
    """Close every descriptor but the standard ones and these."""
    first = 3
    for descriptor in sorted(kept):
        sc.close_range(first, descriptor - 1)
        first = descriptor + 1
    sc.close_range(first)


def report(control: int, error: OSError | ValueError, step: str) -> None:
    """Tell the controller why there will be no sandbox."""
    message = {"event": "error", "errno": getattr(error, "errno", None), "message": str(error), "operation": step}
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(control)) as out:
        out.send(json.dumps(message).encode())


def pack_numbers(numbers: tuple[tuple[str, int], ...]) -> bytes:
    """Named numbers as text, which pid 1 reads with less than a JSON parser."""
    return " ".join(f"{name}={value}" for name, value in numbers).encode()


def unpack_numbers(text: bytes) -> tuple[tuple[str, int], ...]:
    """What :func:`pack_numbers` wrote."""
    pairs = (item.partition("=") for item in text.decode().split())
    return tuple((name, int(value)) for name, _, value in pairs)
