"""One run of a sandbox, from its first process to its last. A snapshot or reset ends a run and starts the next."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from minisandbox.errors import SandboxCreationError, SandboxGone
from minisandbox.launch.plan import Plan
from minisandbox.sandbox import fd_passing
from minisandbox.sandbox.launcher import Launcher, refusal
from minisandbox.sandbox.snapshots import Tree
from minisandbox.sandbox.uppers import UpperDirectory

_READY_TIMEOUT = 60.0
_END_PATIENCE = 5.0
_STOP_TIMEOUT = 30.0


class SandboxRun:
    """The processes of a sandbox, asked for and not awaited; ready for commands after :meth:`await_ready`.

    Args:
        launcher: who makes it.
        plan: what it is.
        door: listening socket at which other processes bring it jobs.
        trees: the sealed trees that the plan names.
        name: the sandbox's id, for messages.
        upper: the directory on disk that its writes go to, if not to memory.

    Attributes:
        pid: host pid of its first process; 0 before :meth:`await_process`.
        tree: what it writes.
        listener: if it was asked for, the socket that listens inside for its way out; the gateway closes it.

    Raises:
        SandboxCreationError: the launcher is gone.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: Plan,
        door: socket.socket,
        trees: Sequence[Tree],
        name: str,
        *,
        upper: UpperDirectory | None = None,
    ) -> None:
        self._name = name
        self._upper = upper
        self._tree: Tree | None = None
        self.listener: socket.socket | None = None
        self._launcher = launcher
        numbers = [tree.number() for tree in trees]
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pidfd = -1
        self.pid = 0
        self._awaited = True
        try:
            with theirs:
                launcher.create(plan, theirs, door, numbers)
        except BaseException:  # a Ctrl-C included
            self.end()
            raise

    @property
    def tree(self) -> Tree:
        """What it writes."""
        assert self._tree is not None
        return self._tree

    def await_process(self) -> None:
        """Wait until its first process is known.

        Raises:
            SandboxCreationError: the process could not be forked.
        """
        self._await_process(_READY_TIMEOUT)

    def _await_process(self, seconds: float) -> None:
        self._control.settimeout(seconds)
        while not self.pid:
            self._receive()

    def await_ready(self) -> None:
        """Wait until commands can be run.

        Raises:
            SandboxCreationError: the kernel refused a step, or it took too long.
        """
        self.await_process()
        while self._receive() != "ready":
            pass

    def _receive(self) -> str:
        """Receive the next message about the creation of the sandbox; return its event.

        Raises:
            SandboxCreationError: the sandbox will not be.
        """
        started = time.monotonic()
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            data, ancillary, _, _ = self._control.recvmsg(1 << 16, socket.CMSG_SPACE(4), flags)
        except TimeoutError:
            if time.monotonic() < started + _READY_TIMEOUT:  # of a signal's handler
                raise
            raise SandboxCreationError(
                f"sandbox {self._name} was not ready after {_READY_TIMEOUT:.0f} s",
                reason="the machine is overloaded, or the disk of the image store hangs",
                hint="create fewer sandboxes at once, and look at the load and at 'sudo dmesg | tail'",
            ) from None
        answer = json.loads(data or b'{"event":"gone"}')
        event = answer["event"]
        if event in ("forked", "tree", "listener"):
            self._keep(event, array.array("i", ancillary[0][2][:4])[0] if ancillary else -1)
        elif event != "ready":
            self._awaited = False
            self._fail(answer)
        return str(event)

    def _keep(self, event: str, descriptor: int) -> None:
        if descriptor < 0:
            hint = "close sandboxes that are not needed, or raise the limit on open files (ulimit -n)"
            raise SandboxCreationError("no file descriptor is left for the sandbox", errno=errno.EMFILE, hint=hint)
        if event == "forked":
            self._pidfd = descriptor
            self.pid = _pid_of(descriptor)
        elif event == "listener":
            self.listener = socket.socket(fileno=descriptor)
        else:
            self._tree = Tree(self._launcher, descriptor, self._upper)

    def _fail(self, answer: dict[str, Any]) -> NoReturn:
        if answer["event"] == "gone":
            raise SandboxCreationError(
                f"sandbox {self._name} ended while it was made", reason="it was killed from outside"
            )
        if answer["event"] == "refused":
            raise refusal(answer["errno"], answer["message"])
        raise SandboxCreationError(
            f"could not {answer['operation']}: {answer['message']}",
            operation=answer["operation"],
            errno=answer["errno"],
            hint="run 'minisandbox doctor': it tries each kernel feature and names the fix",
        )

    @property
    def pidfd(self) -> int:
        """Descriptor of its first process; this object closes it."""
        return self._pidfd

    def open_job(self) -> socket.socket:
        """Open a stream socket for a new job.

        Raises:
            OSError: its end is gone.
        """
        return new_job(self._control)

    def has_room(self) -> bool:
        """Return whether a job can be handed over without waiting; True if the peer is gone."""
        descriptor = self._control.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def over(self, seconds: float) -> bool:
        """Return whether its first process exits within so many seconds."""
        return self._pidfd < 0 or readable(self._pidfd, seconds)

    def end(self) -> None:
        """End every process of it; calling it again does nothing.

        Raises:
            SandboxGone: a process of it hangs in the kernel and did not end.
        """
        with contextlib.suppress(SandboxCreationError, OSError):
            if self._awaited and self._pidfd < 0:  # given up before its first process was known
                self._await_process(_END_PATIENCE)
        self._awaited = False
        self._control.close()
        if self.listener is not None:
            self.listener.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd < 0:
            return
        try:
            end_process(pidfd, self._name)
        finally:
            os.close(pidfd)

    def discard(self) -> None:
        """Remove its upper on disk once it has ended."""
        if self._upper is not None:
            self._upper.discard()


def new_job(control: socket.socket) -> socket.socket:
    """Return one end of a new job's stream socket; the other end goes over a control socket.

    Raises:
        OSError: the end of the control socket is gone.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            fd_passing.send(control, b"job", [theirs.fileno()])
    except BaseException:  # a Ctrl-C too: nothing half-made stays
        ours.close()
        raise
    return ours


def end_process(pidfd: int, name: str) -> None:
    """Kill the first process of a sandbox, and wait until it and with it all others have ended.

    Raises:
        SandboxGone: a process of it hangs in the kernel and did not end.
    """
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if not readable(pidfd, _STOP_TIMEOUT):
        reason = "a process hangs in the kernel"
        raise SandboxGone(f"sandbox {name} did not end in {_STOP_TIMEOUT:.0f} s", reason=reason)


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor becomes readable within so many seconds; a pidfd does when its process exits."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _pid_of(pidfd: int) -> int:
    descriptor = os.open(f"/proc/thread-self/fdinfo/{pidfd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 4096).partition(b"\nPid:")[2].split()[0])
    finally:
        os.close(descriptor)
