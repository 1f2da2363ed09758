"""The host's processes: see them, signal them, trace them, read them, outlive the sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from functools import partial

from .core import (
    ABSENT,
    HOST,
    Finding,
    all_pids,
    attempts,
    blocked,
    canary,
    each,
    in_child,
    is_secret,
    judge,
    namespace,
    probe,
    read,
)
from .kernel import buffer, call

KIND = "process"
SEIZE = 0x4206
PRIO_PROCESS, PRIO_PGRP = 0, 1
MANY = 4000
"""More processes than a sandbox of these tests has had."""


def with_token() -> list[int]:
    """Host processes, by the token in their arguments."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            if canary("token").encode() in read(f"/proc/{pid}/cmdline"):
                found.append(pid)
    return found


def the_hosts() -> list[int]:
    """Pids that are, or would be, the host's."""
    return sorted({*with_token(), canary("host_pid")})


@probe(KIND)
def see_one() -> Finding:
    """See a process of the host in /proc"""
    found = with_token()
    return judge(found, f"{found} of {len(all_pids())}")


@probe(KIND)
def signal_one() -> Finding:
    """Signal a process of the host (signal 0)"""
    found = with_token()  # its number alone may be that of a process of one's own
    return each(found, lambda pid: os.kill(pid, 0)) if found else blocked("none is to be seen")


@probe(KIND)
def signal_its_group() -> Finding:
    """Signal a process group of the host (signal 0)"""
    return attempts([("group", lambda: os.killpg(canary("host_group"), 0))])


@probe(KIND)
def hold_one() -> Finding:
    """Take hold of a process of the host (pidfd_open) and signal it"""

    def attempt(pid: int) -> bool:
        held = call("pidfd_open", pid, 0)
        return pid in with_token() and call("pidfd_send_signal", held, 0, None, 0) == 0

    return each(the_hosts(), attempt)


@probe(KIND)
def trace_one() -> Finding:
    """Trace a process of the host (PTRACE_SEIZE)"""
    return each(the_hosts(), lambda pid: pid in with_token() and call("ptrace", SEIZE, pid, 0, 0) == 0, apart=True)


@probe(KIND)
def read_its_environment() -> Finding:
    """Read the environment of a process of the host"""
    return each(all_pids(), lambda pid: is_secret(read(f"/proc/{pid}/environ")))


@probe(KIND)
def read_its_memory() -> Finding:
    """Read and write the memory of a process of the host"""

    def attempt(pid: int) -> bool:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        return True

    return each(with_token() or [canary("host_pid")], attempt)


@probe(KIND)
def read_its_descriptors() -> Finding:
    """List and open the descriptors of a process of the host"""
    return each(with_token() or [canary("host_pid")], lambda pid: os.readlink(f"/proc/{pid}/fd/0"))


@probe(KIND)
def copy_from_it() -> Finding:
    """Copy memory of a process of the host (process_vm_readv)"""

    def attempt(pid: int) -> bool:
        if pid not in with_token():
            return False
        memory = buffer(16)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 0)
        address = ctypes.cast(vector, ctypes.POINTER(ctypes.c_char * 16)).contents
        return call("process_vm_readv", pid, address, 1, address, 1, 0) == 0  # nothing is copied: a length of 0

    return each(the_hosts(), attempt)


@probe(KIND)
def its_limits_and_scheduling() -> Finding:
    """Change limits, processors or priority of a process of the host to what they are"""
    found = with_token()
    pid = found[0] if found else canary("host_pid")

    def limits() -> bool:
        return bool(found) and resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, 4)) is not None

    def processors() -> bool:
        os.sched_setaffinity(pid, os.sched_getaffinity(pid))
        return bool(found)

    def priority() -> bool:
        os.setpriority(PRIO_PROCESS, pid, os.getpriority(PRIO_PROCESS, pid))
        return bool(found)

    return attempts((("limits", limits), ("processors", processors), ("priority", priority)))


@probe(KIND)
def namespace_of_processes() -> Finding:
    """Be in the host's process namespace"""
    return judge(namespace("pid") == canary("namespaces")["pid"], namespace("pid"))


@probe(KIND, maybe=True)
def count_them() -> Finding:
    """Learn how many processes the host has run from /proc/sys/kernel/ns_last_pid"""
    last, hosts = int(read("/proc/sys/kernel/ns_last_pid")), int(canary("host_pid"))
    if hosts < MANY:  # they begin anew at kernel.pid_max
        return Finding(ABSENT, f"the host's own numbers are as low as a sandbox's: {hosts}")
    return judge(last >= hosts, str(last))


@probe(KIND, root=True)
def raise_its_priority() -> Finding:
    """Take more of the processors than others: negative nice value, real-time scheduling, idle-proof I/O"""

    def real_time(policy: int) -> bool:
        os.sched_setscheduler(0, policy, os.sched_param(1))
        return True

    return attempts(
        (
            ("nice", in_child(lambda: os.setpriority(PRIO_PROCESS, 0, -20))),
            ("nice of the group", in_child(lambda: os.setpriority(PRIO_PGRP, 0, -1))),
            ("fifo", in_child(lambda: real_time(os.SCHED_FIFO))),
            ("round robin", in_child(lambda: real_time(os.SCHED_RR))),
            ("input and output", in_child(lambda: call("ioprio_set", 1, 0, 1 << 13) == 0)),
        )
    )


@probe(KIND, maybe=True)
def raise_its_limits() -> Finding:
    """Raise a hard limit (needs CAP_SYS_RESOURCE)"""
    names = ("NOFILE", "NPROC", "MEMLOCK", "CORE", "FSIZE", "NICE", "RTPRIO", "MSGQUEUE", "SIGPENDING", "STACK", "AS")

    def raised(name: str) -> bool:
        number = getattr(resource, "RLIMIT_" + name)
        soft, hard = resource.getrlimit(number)
        if hard == resource.RLIM_INFINITY or (name == "NOFILE" and hard >= 1 << 20):
            return False
        try:
            resource.setrlimit(number, (soft, hard + 1))
        except ValueError as error:
            raise OSError(1, str(error)) from error
        return True

    named = [(name, in_child(partial(raised, name))) for name in names if hasattr(resource, "RLIMIT_" + name)]
    return attempts(named)


@probe(KIND, without="the control run is as the host")
def be_spared_when_memory_runs_out() -> Finding:
    """Have the kernel rather kill a process of the host when memory runs out (oom_score_adj)"""

    def attempt() -> bool:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(int(canary("oom_score_adj")) - 1))
        return True

    return attempts([("oom_score_adj", in_child(attempt))])


@probe(KIND)
def live_on() -> Finding:
    """Leave a daemon that ignores every signal and outlives the sandbox"""
    words = ["trap '' HUP INT TERM; i=0; while [ $i -lt 300 ]; do sleep 1; i=$((i+1)); done #", canary("daemon")]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.closerange(3, 256)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.setpgid(0, 0)
            os.execv("/bin/sh", ["/bin/sh", "-c", " ".join(words)])
        os._exit(0)
    os.wait()
    return Finding(HOST, "started")
