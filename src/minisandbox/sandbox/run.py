"""One run of a sandbox, from the start of its pid 1 to its end. A snapshot or reset ends a run and starts the next."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from minisandbox.errors import SandboxCreationError, SandboxGone
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.plan import Plan
from minisandbox.sandbox import fd_passing
from minisandbox.sandbox.launcher import Launcher, refusal
from minisandbox.sandbox.snapshots import Tree
from minisandbox.sandbox.uppers import UpperDirectory

_READY_TIMEOUT = 60.0
_END_PATIENCE = 5.0
_STOP_TIMEOUT = 30.0


class SandboxRun:
    """The processes of one run. Creating it only sends the request; commands can run after :meth:`await_ready`.

    Args:
        launcher: launcher of the sandbox.
        plan: plan of the sandbox.
        job_listener: listening socket on which other processes submit jobs.
        trees: the sealed trees that the plan names.
        name: the sandbox's id, for messages.
        upper: directory of an upper on disk, or None for an upper in memory.

    Attributes:
        pid: host pid of the sandbox's pid 1; 0 before :meth:`await_process`.
        tree: the upper of this run.
        listener: for an allow-list, the proxy's listening socket inside the sandbox; the gateway closes it.

    Raises:
        SandboxCreationError: the launcher is gone.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: Plan,
        job_listener: socket.socket,
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
        tree_numbers = [tree.number() for tree in trees]
        self._control, sandbox_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pidfd = -1
        self.pid = 0
        self._is_awaited = True
        try:
            with sandbox_end:
                launcher.create(plan, sandbox_end, job_listener, tree_numbers)
        except BaseException:  # even on Ctrl-C
            self.end()
            raise

    @property
    def tree(self) -> Tree:
        """The upper of this run."""
        assert self._tree is not None
        return self._tree

    def await_process(self) -> None:
        """Wait until pid 1 of the sandbox is known.

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
            SandboxCreationError: the kernel refused a step, or the setup took too long.
        """
        self.await_process()
        while self._receive() != "ready":
            pass

    def _receive(self) -> str:
        """Receive the next message about the creation of the sandbox; return its event.

        Raises:
            SandboxCreationError: the sandbox could not be created.
        """
        start_time = time.monotonic()
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            data, ancillary, _, _ = self._control.recvmsg(1 << 16, socket.CMSG_SPACE(4), flags)
        except TimeoutError:
            if time.monotonic() < start_time + _READY_TIMEOUT:  # raised by a signal handler
                raise
            raise SandboxCreationError(
                f"sandbox {self._name} was not ready after {_READY_TIMEOUT:.0f} s",
                reason="the machine is overloaded, or the disk of the image store hangs",
                hint="create fewer sandboxes at once, and look at the load and at 'sudo dmesg | tail'",
            ) from None
        message = json.loads(data or b'{"event":"gone"}')
        event = message["event"]
        if event in ("forked", "tree", "listener"):
            self._keep_descriptor(event, array.array("i", ancillary[0][2][:4])[0] if ancillary else -1)
        elif event != "ready":
            self._is_awaited = False
            self._raise_failure(message)
        return str(event)

    def _keep_descriptor(self, event: str, descriptor: int) -> None:
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

    def _raise_failure(self, message: dict[str, Any]) -> NoReturn:
        if message["event"] == "gone":
            raise SandboxCreationError(
                f"sandbox {self._name} ended while it was made", reason="it was killed from outside"
            )
        if message["event"] == "refused":
            raise refusal(message["errno"], message["message"])
        raise SandboxCreationError(
            f"could not {message['operation']}: {message['message']}",
            operation=message["operation"],
            errno=message["errno"],
            hint="run 'minisandbox doctor': it tries each kernel feature and names the fix",
        )

    @property
    def pidfd(self) -> int:
        """Pidfd of the sandbox's pid 1; this object closes it."""
        return self._pidfd

    def open_job(self) -> socket.socket:
        """Open a stream socket for a new job.

        Raises:
            OSError: the peer is gone.
        """
        return new_job(self._control)

    def has_room(self) -> bool:
        """Return whether a job can be submitted without waiting; True if the peer is gone."""
        descriptor = self._control.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def has_ended(self, seconds: float) -> bool:
        """Return whether pid 1 has exited or exits within this many seconds."""
        return self._pidfd < 0 or readable(self._pidfd, seconds)

    def end(self) -> None:
        """Kill every process of the run; calling it again does nothing.

        Raises:
            SandboxGone: a process of the sandbox hangs in the kernel and did not exit.
        """
        with contextlib.suppress(SandboxCreationError, OSError):
            if self._is_awaited and self._pidfd < 0:  # interrupted before the pidfd arrived
                self._await_process(_END_PATIENCE)
        self._is_awaited = False
        self._control.close()
        if self.listener is not None:
            self.listener.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd < 0:
            return
        with sc.closing(pidfd):
            end_process(pidfd, self._name)

    def discard(self) -> None:
        """Discard the upper on disk, if any, after the run has ended."""
        if self._upper is not None:
            self._upper.discard()


def new_job(control: socket.socket) -> socket.socket:
    """Create a job's socket pair; send one end over the control socket and return the other.

    Raises:
        OSError: the peer of the control socket is gone.
    """
    job_socket, worker_end = socket.socketpair()
    try:
        with worker_end:
            fd_passing.send(control, b"job", [worker_end.fileno()])
    except BaseException:  # even on Ctrl-C, clean up
        job_socket.close()
        raise
    return job_socket


def end_process(pidfd: int, name: str) -> None:
    """Kill pid 1 of a sandbox, and wait until it and all other processes have exited.

    Raises:
        SandboxGone: a process of the sandbox hangs in the kernel and did not exit.
    """
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if not readable(pidfd, _STOP_TIMEOUT):
        reason = "a process hangs in the kernel"
        raise SandboxGone(f"sandbox {name} did not end in {_STOP_TIMEOUT:.0f} s", reason=reason)


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor becomes readable within this many seconds, as a pidfd does on process exit."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/thread-self/fdinfo/{pidfd}", "rb", buffering=0) as fdinfo:
        return int(fdinfo.read().partition(b"\nPid:")[2].split()[0])
