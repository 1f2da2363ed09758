"""Who may trace a process so that it stops at its end (PTRACE_O_TRACEEXIT): pid 1 is asked by the system-call filter.

A process that is traced so is held in its last step until its tracer lets it go on or ends. Two that trace each other
so, or more in a ring, never end, not even by the SIGKILL of the host (Linux 6.18): their sandbox, its namespaces and
control groups stay until the machine restarts. strace asks for that option whenever it starts a program, so that it
cannot be refused to all. It is refused to whom somebody traces, or was allowed to trace so before: in a ring, whoever
was the last to be allowed would have been.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, thread, flags; number, architecture, ip, args
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, val, error, flags
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_MOST = 10_000
"""Tracers with what each was allowed to trace: more are not kept in mind, and so not allowed."""
_UNKNOWN = (OSError, LookupError, ValueError)
"""What looking at a thread raises that has ended, or cannot be read."""


class Tracing:
    """What the filter of a sandbox asks.

    What was allowed is kept in mind for as long as the tracer lives: nothing tells whether its call is over, and a
    process that is only about to be traced shows no tracer.

    Args:
        listener: what the filter was installed with (:func:`.seccomp.install`); -1: nothing is ever asked.
    """

    def __init__(self, listener: int) -> None:
        self.listener = listener
        self._tracers: dict[int, set[int]] = {}  # by the thread that each was allowed to trace
        self._kept = 0

    def close(self) -> None:
        """Leave the answers to another process that has the listener."""
        if self.listener != -1:
            os.close(self.listener)

    def answer(self) -> None:
        """Answer one question; whoever asked may have ended meanwhile."""
        with contextlib.suppress(OSError):
            question = bytearray(_NOTIFICATION.size)
            fcntl.ioctl(self.listener, _RECEIVE, question)
            number, tracer, _, _, _, _, _, traced, *_ = _NOTIFICATION.unpack(question)
            error, flags = (0, _CONTINUE) if self._allow(tracer, traced & 0xFFFFFFFF) else (-errno.EPERM, 0)
            self._send(_ANSWER.pack(number, 0, error, flags))

    def _send(self, answer: bytes) -> None:
        """Give an answer. Where others ask at that moment it waits, and a child that ends then interrupts it."""
        while True:
            with contextlib.suppress(InterruptedError):
                fcntl.ioctl(self.listener, _SEND, bytearray(answer))
                return

    def _allow(self, tracer: int, traced: int) -> bool:
        """Whether a thread may trace another so; what is allowed is kept in mind before it is said.

        By execve(2) any thread of a process takes the number of its first one. Whoever is about to trace that one
        traces it then; so does who was about to trace it by its own number. So both are kept in mind.
        """
        try:
            process, its_tracer = _process_and_tracer(tracer)
        except _UNKNOWN:  # then nobody knows
            return False
        if its_tracer or self._may_be_traced(tracer) or self._may_be_traced(process):
            return False
        return all(self._keep(tracer, number) for number in {traced, _process_of(traced)})

    def _keep(self, tracer: int, traced: int) -> bool:
        """Keep in mind who may trace whom; returns whether there is room."""
        if tracer in self._tracers.get(traced, ()):
            return True
        if self._kept >= _MOST:
            self._forget_ended()
        if self._kept >= _MOST:
            return False
        self._tracers.setdefault(traced, set()).add(tracer)
        self._kept += 1
        return True

    def _may_be_traced(self, thread: int) -> bool:
        """Whether any thread that lives was allowed to trace this one."""
        return any(map(_lives, self._tracers.get(thread, ())))

    def _forget_ended(self) -> None:
        left = {traced: set(filter(_lives, tracers)) for traced, tracers in self._tracers.items()}
        self._tracers = {traced: tracers for traced, tracers in left.items() if tracers}
        self._kept = sum(map(len, self._tracers.values()))


def _process_of(thread: int) -> int:
    """The process of a thread; the thread's own number where there is none."""
    try:
        return _process_and_tracer(thread)[0]
    except _UNKNOWN:
        return thread


def _process_and_tracer(thread: int) -> tuple[int, int]:
    with open(f"/proc/{thread}/status", "rb") as source:
        rows = dict(line.split(b":", 1) for line in source)
    return int(rows[b"Tgid"]), int(rows[b"TracerPid"])


def _lives(thread: int) -> bool:
    """Whether there is a thread of this number; in doubt there is."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(thread, 0)
        except ProcessLookupError:
            return False
    return True
