"""Fork the first processes of sandboxes, in a process that does nothing else.

After a fork, each page that either process writes is copied. For each sandbox, the zygote writes several hundred pages,
and the old copies would stay with the sandbox. The template writes about eighty.
"""

from __future__ import annotations

import array
import errno
import fcntl
import marshal
import os
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

from . import init
from .kernel import syscalls as sc
from .kernel.cgroups import Cgroup, CgroupFds
from .kernel.identity import Identity

_REQUESTS = 3
_MAX_REQUEST = 4096
_MOST_DESCRIPTORS = 16
_PATIENCE = 10.0


def main(requests: int, lifeline: int) -> NoReturn:
    """Fork a process for each request of :func:`fork`, until the zygote ends.

    Args:
        requests: socket on which the requests arrive.
        lifeline: pipe that pid 1 of every sandbox inherits.
    """
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.overwrite_arguments("minisandbox-template")
    signal.set_wakeup_fd(-1)
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100) for descriptor in (requests, lifeline)]
    for descriptor, number in zip(copies, (_REQUESTS, init.LIFELINE), strict=True):
        os.dup2(descriptor, number, inheritable=False)
    sc.close_range(init.LIFELINE + 1)
    source = socket.socket(fileno=_REQUESTS)
    space = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
    while True:
        data, ancillary, _, _ = source.recvmsg(_MAX_REQUEST, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        try:
            pid = sc.clone_sibling(sc.CLONE_NEWPID)
        except sc.CallError as error:
            pid = -(error.errno or errno.EIO)
        if pid == 0:
            try:
                _begin(data, array.array("i", ancillary[0][2]))
            finally:
                os._exit(70)
        sc.close_range(init.LIFELINE + 1)
        source.send(b"%d" % pid)


def _begin(data: bytes, descriptors: Sequence[int]) -> None:
    fields, network, no_quota, fork_early, pretend_owners = marshal.loads(data)  # noqa: S302 - from the zygote
    init_end, *group = descriptors
    os.dup2(init_end, init.CONTROL, inheritable=False)
    os.close(init_end)
    fds = CgroupFds.unpack(group, no_quota) if group else None
    init.main(Identity(*fields), network, fds, fork_early=fork_early, pretend_owners=pretend_owners)


def fork(
    template: socket.socket,
    init_end: socket.socket,
    identity: Identity,
    network: str,
    group: Cgroup | None,
    *,
    fork_early: bool,
    pretend_owners: bool,
) -> int:
    """Request a process that calls :func:`.init.main`; return its pid. It is the caller's child.

    Args:
        template: socket to the template.
        init_end: socket by which setup workers reach the process.
        identity: ids of the sandbox.
        network: ``off`` or ``host``.
        group: control group to join, or None without control groups.
        fork_early: whether to fork the first worker before there is a request.
        pretend_owners: whether changes of file owners and ids do nothing but return success.

    Raises:
        OSError: the kernel refused, or the template has ended or does not answer.
    """
    fds = group.open() if group else None  # here, because each page that the new process writes is copied
    descriptors, no_quota = (fds.pack(), fds.no_quota) if fds else ([], "")
    try:
        data = marshal.dumps((identity.fields(), network, no_quota, fork_early, pretend_owners))
        template.settimeout(_PATIENCE)
        socket.send_fds(template, [data], [init_end.fileno(), *descriptors])
        pid = int(template.recv(32) or -errno.EPIPE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if pid < 0:
        raise OSError(-pid, f"clone: {os.strerror(-pid)}")
    return pid
