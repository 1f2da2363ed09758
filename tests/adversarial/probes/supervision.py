"""Those who watch: pid 1 and the workers. What they are told to do must not be decided, seen or forged from inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from functools import partial
from typing import Callable

from .core import (
    HOST,
    Finding,
    Missing,
    attempts,
    can_open,
    each,
    foreign_pids,
    hosts_pid_namespace,
    in_child,
    judge,
    probe,
    read,
)
from .kernel import buffer, call

KIND = "supervision"
SEIZE = 0x4206


def watchers() -> list[int]:
    """Whoever runs this program, and pid 1 where it is not the host's."""
    found = foreign_pids()
    if not found:
        raise Missing("nobody else is to be seen")
    return found


def over_watchers(attempt_on: Callable[[int], object]) -> Finding:
    return each(watchers(), attempt_on)


@probe(KIND)
def memory() -> Finding:
    """Open the memory of pid 1 or a worker"""
    return over_watchers(lambda pid: can_open(f"/proc/{pid}/mem", os.O_RDWR))


@probe(KIND)
def copied_memory() -> Finding:
    """Copy memory from pid 1 or a worker (process_vm_readv)"""

    def attempt(pid: int) -> bool:
        vector = buffer(16)
        ctypes.memset(vector, 0, 16)
        return call("process_vm_readv", pid, vector, 1, vector, 1, 0) == 0

    return over_watchers(attempt)


@probe(KIND)
def traced() -> Finding:
    """Trace pid 1 or a worker"""
    return over_watchers(lambda pid: in_child(lambda: call("ptrace", SEIZE, pid, 0, 0) == 0)())


@probe(KIND)
def descriptors() -> Finding:
    """List the descriptors of pid 1 or a worker, where jobs come in and results go out"""
    return over_watchers(lambda pid: os.listdir(f"/proc/{pid}/fd"))


@probe(KIND)
def descriptors_opened() -> Finding:
    """Write where pid 1 or a worker writes its results: /proc/PID/fd"""

    def attempt(pid: int) -> bool:
        return any(os.path.exists(f"/proc/{pid}/fd/{number}") for number in range(32))

    return over_watchers(attempt)


@probe(KIND)
def descriptors_copied() -> Finding:
    """Take a copy of a descriptor of pid 1 or a worker (pidfd_getfd)"""
    return over_watchers(lambda pid: call("pidfd_getfd", call("pidfd_open", pid, 0), 0, 0) >= 0)


@probe(KIND)
def environment() -> Finding:
    """Read the environment, memory map or working directory of pid 1 or a worker"""

    def attempt(pid: int) -> bool:
        return bool(read(f"/proc/{pid}/maps")) and bool(os.readlink(f"/proc/{pid}/cwd"))

    return over_watchers(attempt)


@probe(KIND)
def where_they_wait() -> Finding:
    """See which system call pid 1 or a worker is in, and its stack"""

    def attempt(pid: int) -> bool:
        return bool(read(f"/proc/{pid}/syscall"))

    return over_watchers(attempt)


@probe(KIND)
def limits_of_others() -> Finding:
    """Set limits of pid 1 or a worker (to what they are)"""

    def attempt(pid: int) -> bool:
        present = buffer(16)
        call("prlimit64", pid, resource.RLIMIT_CORE, None, present)
        return call("prlimit64", pid, resource.RLIMIT_CORE, present, None) == 0

    return over_watchers(attempt)


TUNED = {"autogroup": b"0", "timerslack_ns": b"50000", "coredump_filter": b"0x33", "clear_refs": b"1", "comm": b"init",
         "timens_offsets": b"boottime 0 0", "setgroups": b"deny", "loginuid": b"0", "sched": b"0"}  # fmt: skip


def written(name: str, text: bytes) -> bool:
    descriptor = os.open("/proc/1/" + name, os.O_WRONLY)
    try:
        return os.write(descriptor, text) > 0
    finally:
        os.close(descriptor)


@probe(KIND, without="pid 1 is the host's")
def scheduling_of_pid_1() -> Finding:
    """Put pid 1 last: priority, processors, policy, input and output"""
    if hosts_pid_namespace():
        raise Missing("pid 1 is the host's")

    def policy() -> bool:
        os.sched_setscheduler(1, os.sched_getscheduler(1), os.sched_param(0))
        return True

    def adjustment() -> bool:
        with open("/proc/1/oom_score_adj", "r+b", buffering=0) as file:
            value = file.read()
            return file.write(value) > 0

    return attempts(
        (
            ("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, os.getpriority(os.PRIO_PROCESS, 1))),
            ("processors", lambda: os.sched_setaffinity(1, os.sched_getaffinity(1))),
            ("policy", policy),
            ("input and output", lambda: call("ioprio_set", 1, 1, 0) == 0),
            ("oom_score_adj", adjustment),
            *((name, partial(written, name, text)) for name, text in TUNED.items()),
        )
    )


@probe(KIND, without="pid 1 is the host's")
def killed_by_every_signal() -> Finding:
    """End, stop or confuse pid 1 by every signal there is"""
    if hosts_pid_namespace():
        raise Missing("pid 1 is the host's")
    sent = 0
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError):
            os.kill(1, number)
            sent += 1
    time.sleep(0.2)
    state = read("/proc/1/stat").rpartition(b")")[2].split()[0].decode()
    if state in "TtZX":
        return judge(True, "pid 1 is in state " + state)
    return Finding(HOST, f"{sent} signals sent")


@probe(KIND)
def dumpable() -> Finding:
    """Own the files of pid 1 or a worker in /proc, because they are dumpable"""
    nobody = 65534

    def attempt(pid: int) -> bool:
        status = os.stat(f"/proc/{pid}/mem")
        return status.st_uid == os.geteuid() and status.st_uid != nobody and os.access(f"/proc/{pid}/environ", os.R_OK)

    return over_watchers(attempt)
