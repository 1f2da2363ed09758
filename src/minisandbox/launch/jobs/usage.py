"""What a sandbox uses right now, as seen from inside."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .descendants import every_pid, has_ended, stat_fields

if TYPE_CHECKING:
    from .worker import Job

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def serve(job: Job) -> None:
    """Answer a ``usage`` request.

    Disk is counted on the sandbox's memory, which holds its upper (unless that is on disk), /run and /dev/shm.
    """
    cpu = memory = processes = 0
    for pid in every_pid():
        fields = stat_fields(pid)
        if not fields:  # gone since
            continue
        # proc_pid_stat(5), from the state on: 1 is the parent; 11 to 14 CPU ticks; 21 resident pages
        cpu += sum(int(field) for field in fields[11:15])
        memory += int(fields[21]) * _PAGE
        # children of pid 1 are our workers: every command descends from one of them
        processes += pid != 1 and fields[1] != b"1" and not has_ended(pid, fields[0])
    scratch = os.statvfs("/dev/shm")  # noqa: S108 - a mount of our own
    disk = (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize
    job.send({"event": "usage", "cpu": cpu / _TICKS, "memory": memory, "disk": disk, "processes": processes})
