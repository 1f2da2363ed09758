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

from . import mounts, worker
from . import syscalls as sc
from .identity import Identity, act_as_owner, become_inner_root
from .plan import Plan

MADE = b"made"
_MAX_PLAN = 1 << 18


def main(identity: Identity, birth: int, init: socket.socket, notes: int, failure: OSError | None) -> None:
    """Wait for the plan, carry it out, become a worker. Never returns.

    Args:
        identity: who the sandbox is.
        birth: socket on which the plan and the control socket arrive.
        init: socket to pid 1, which is told the limits and given the control socket, and then that all is made.
        notes: pipe on which pid 1 is told what this worker does.
        failure: why the namespaces could not be made, if so.
    """
    plan, control = _await_plan(birth)
    init.sendmsg([pack_limits(plan.rlimits)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [control]))])
    step = "make namespaces"
    try:
        if failure:
            raise failure
        act_as_owner(identity)
        executor = mounts.Executor(identity.userns_fd if identity.mapped else None)
        for operation in plan.operations:
            step = operation.describe()
            executor.run(operation)
        step = "enter its user namespace"
        socket.sethostname(plan.hostname)
        become_inner_root(identity)
        sc.prctl(sc.PR_SET_DUMPABLE, 0)
        _keep_only(control, notes, init.fileno())
    except (OSError, ValueError) as error:
        report(control, error, step)
        os._exit(1)
    init.send(MADE)
    init.close()
    with socket.socket(fileno=control) as jobs:
        worker.main(jobs, notes, plan.rlimits, primary=True)


def _await_plan(birth: int) -> tuple[Plan, int]:
    with socket.socket(fileno=birth) as source:
        data, ancillary, _, _ = source.recvmsg(_MAX_PLAN, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    if not data:  # the zygote is gone
        os._exit(0)
    return Plan.from_json(data), array.array("i", ancillary[0][2][:4])[0]


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


def pack_limits(limits: tuple[tuple[str, int], ...]) -> bytes:
    """Limits as text, which pid 1 reads with less than a JSON parser."""
    return " ".join(f"{name}={value}" for name, value in limits).encode() or b" "


def unpack_limits(text: bytes) -> tuple[tuple[str, int], ...]:
    """What :func:`pack_limits` wrote."""
    pairs = (item.partition("=") for item in text.decode().split())
    return tuple((name, int(value)) for name, _, value in pairs)
