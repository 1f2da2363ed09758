"""Start the zygote, request sandboxes from it, and stop it."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minisandbox.errors import HostError, SandboxCreationError
from minisandbox.host import fixes, reaper, registry
from minisandbox.host.descriptors import hold_streams
from minisandbox.launch.plan import Plan, SpawnOptions
from minisandbox.sandbox import fd_passing, helper_process
from minisandbox.sandbox.plans import find_host_sockets, real_directories, usual_preparations

_DOCTOR = "run 'minisandbox doctor': it tries each kernel feature and names the fix"
_NAMESPACES = "user namespaces are refused here, or used up"
_MASKED = "a container engine masks files below /proc, and the kernel then mounts no other /proc"
_REASONS = {
    errno.ENOSPC: _NAMESPACES,  # the first three errors are from unshare(2)
    errno.EUSERS: _NAMESPACES,
    errno.EPERM: _NAMESPACES,
    errno.EAGAIN: "this user has, or its control group, as many processes as it may (ulimit -u, pids.max)",
    errno.ENOMEM: "the machine, or this process's control group, has no memory left",
}
"""Likely cause of each error with which the kernel refuses a sandbox."""
_START_TIMEOUT = 30.0
_FEWEST_FILES = 128
"""Minimum limit of open files: the launcher moves the descriptors of new sandboxes to numbers from 100 on."""
_OF_THE_MESSAGE = (errno.ETOOMANYREFS, errno.EMSGSIZE)
"""Errors that concern a single message (too large, too many descriptors in flight); the launcher is still alive."""
ONE_ID = "MINISANDBOX_ONE_ID"
"""Environment variable; 1 keeps an ordinary user's sandboxes from using subordinate ids."""
BY_RLIMIT = "rlimit"
NO_GROUPS = "MINISANDBOX_NO_CGROUPS"
"""Environment variable; 1 disables control groups."""


class Launcher:
    """One zygote and the sandboxes that it forks; all of them end with :meth:`close` or with this process.

    Args:
        runtime: private directory for locks and records.

    Raises:
        HostError: the zygote could not be started, for example because the kernel lacks a feature.
    """

    def __init__(self, runtime: Path) -> None:
        if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < _FEWEST_FILES:
            raise HostError(
                f"sandboxes need {_FEWEST_FILES} open files at least, and this process may have {files} (ulimit -Hn)",
                hint="start it with a higher limit: LimitNOFILE= of a service, --ulimit nofile of a container",
            )
        hold_streams()
        self.runtime = runtime
        self._ranges = registry.ranges_directory(runtime)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._forgotten: deque[int] = deque()
        self._connection, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with zygote_end:
            groups = "" if os.environ.get(NO_GROUPS, "") not in ("", "0") else registry.owner_name()
            settings = (str(self._ranges), groups, usual_preparations().decode(), *mappers())
            self._process = helper_process.start(helper_process.bootstrap("launch.zygote"), zygote_end, settings)
        self._connection.settimeout(_START_TIMEOUT)
        try:
            handshake = self._receive(0)
        except (OSError, HostError) as error:
            self.close()
            raise error if isinstance(error, HostError) else HostError(f"the launcher process: {error}") from error
        self.mapped = bool(handshake.get("mapped"))
        self.writable_usr = bool(handshake.get("usr_idmap"))
        self.layered_usr = bool(handshake.get("usr_overlay"))
        self.memory_upper = bool(handshake.get("memory_upper"))
        self.ids = int(str(handshake.get("ids", 1)))
        self.enforcement = enforcement(handshake.get("groups"))

    def create(
        self,
        plan: Plan,
        control: socket.socket,
        job_listener: socket.socket,
        sealed: Sequence[int] = (),
    ) -> None:
        """Request a sandbox, without waiting for it.

        The control socket then receives a pidfd of pid 1 (``forked``) and later ``ready``. If the sandbox cannot be
        created, it receives ``refused`` (see :func:`refusal`) or ``error`` instead.

        Args:
            plan: plan of the sandbox.
            control: the sandbox's end of its control socket.
            job_listener: listening socket on which other processes submit jobs.
            sealed: numbers of the sealed trees that the plan names.

        Raises:
            SandboxCreationError: the zygote is gone.
        """
        # an allow-list needs no network either, because the gateway provides the only access
        network = "host" if plan.network == "host" else "off"
        nproc = plan.processes if self.enforcement["processes"] == BY_RLIMIT else 0
        options = SpawnOptions(
            network, plan.one_id, plan.inotify, nproc, sealed, plan.group_limits, plan.pretend_owners
        )
        self.flush()
        with self._explaining():  # no lock needed: the socket sends messages atomically
            request = b"create " + options.to_json() + b"\n" + plan.to_json()
            fd_passing.send(self._connection, request, (control.fileno(), job_listener.fileno()))

    def hold(self, tree: int) -> int:
        """Keep a sandbox's upper after the sandbox has ended; return the number by which plans refer to it.

        Args:
            tree: descriptor of the sandbox's writable mount.

        Raises:
            SandboxCreationError: the kernel refused, or the zygote is gone.
        """
        return self._ask("hold", tree, "number")

    def measure(self, tree: int) -> int:
        """Count the bytes that a sandbox has written to its upper on disk.

        Args:
            tree: descriptor of the sandbox's writable mount.

        Raises:
            SandboxCreationError: the kernel refused, or the zygote is gone.
        """
        return self._ask("measure", tree, "bytes")

    def forget(self, number: int) -> None:
        """Mark a tree for release at the next request or flush; safe to call from anywhere, even from finalisers."""
        self._forgotten.append(number)

    def flush(self) -> None:
        """Release forgotten trees now, to free their memory. If a request is in progress, that request releases them.

        It never waits for the lock, because a garbage collection may call it in a thread that holds the lock.
        """
        while self._forgotten and self._lock.acquire(blocking=False):  # loop: other threads may add trees
            try:
                numbers = []
                with contextlib.suppress(IndexError):
                    while True:
                        numbers.append(str(self._forgotten.popleft()))
                with contextlib.suppress(OSError):
                    self._connection.send(" ".join(("drop", *numbers)).encode())
            finally:
                self._lock.release()

    def _ask(self, verb: str, tree: int, field: str) -> int:
        """Send a request about a tree; return the number in the answer."""
        self.flush()
        try:
            with self._lock, self._explaining():
                request_number = next(self._numbers)
                fd_passing.send(self._connection, f"{verb} {request_number}\n".encode(), (tree,))
                return int(str(self._receive(request_number)[field]))
        finally:
            self.flush()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert an OSError of the connection to a SandboxCreationError."""
        start_time = time.monotonic()
        try:
            yield
        except OSError as error:
            is_early = time.monotonic() < start_time + _START_TIMEOUT
            if isinstance(error, HostError) or (isinstance(error, TimeoutError) and is_early):  # by a signal handler
                raise
            if error.errno not in _OF_THE_MESSAGE:
                self.close()
            hint = "give it fewer mounts" if error.errno == errno.EMSGSIZE else "create the sandbox again"
            raise SandboxCreationError(
                f"the launcher process does not answer: {error}", errno=error.errno, hint=hint
            ) from error

    def _receive(self, request_number: int) -> dict[str, object]:
        """Return the answer to a request; drop answers to earlier requests that were interrupted."""
        while True:
            data = self._connection.recv(1 << 16)
            if not data:
                raise BrokenPipeError(errno.EPIPE, "the launcher process ended")
            answer = json.loads(data)
            if answer["to"] == request_number:
                return self._check(answer)
            if answer["event"] == "held":
                self.forget(answer["number"])

    def _check(self, answer: dict[str, Any]) -> dict[str, object]:
        """Return an answer, or raise the error that it reports."""
        if answer["event"] == "error":
            if str(answer.get("path")).startswith(str(self._ranges)):
                raise registry.ranges_fault(self._ranges, OSError(answer["errno"], os.strerror(answer["errno"])))
            raise refusal(answer["errno"], answer["message"])
        return answer

    @functools.cached_property
    def host_sockets(self) -> tuple[str, ...]:
        """The host's sockets that a sandbox with the host's ``/usr`` must not reach.

        They are searched for only when needed: if /usr itself is bind-mounted, the search takes almost a second.
        """
        usr_paths = () if self.layered_usr else ("/usr",)
        return find_host_sockets([*(f"/{name}" for name in real_directories()), *usr_paths])

    @property
    def alive(self) -> bool:
        """Whether the zygote is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the zygote and all its sandboxes."""
        with contextlib.suppress(OSError):
            self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper_process.end(self._process)
            reaper.reap_groups(registry.owner_name())


def mappers() -> tuple[str, str]:
    """Return the programs that map an ordinary user's subordinate ids, or empty strings."""
    if os.environ.get(ONE_ID, "") not in ("", "0"):
        return "", ""
    return shutil.which("newuidmap") or "", shutil.which("newgidmap") or ""


def refusal(number: int | None, message: str) -> SandboxCreationError:
    """Return the error for a sandbox that the zygote refused.

    Args:
        number: errno of the failed system call, or None.
        message: message of the zygote.
    """
    reason, hint = _REASONS.get(number or 0), _DOCTOR
    if number == errno.EPERM and fixes.in_container():
        is_proc = message.startswith("mount(proc")
        reason = _MASKED if is_proc else reason
        hint = f"{fixes.fix_for('private-proc' if is_proc else 'user-namespaces')}; or {_DOCTOR}"
    return SandboxCreationError(f"no sandbox could be made: {message}", errno=number, reason=reason, hint=hint)


def enforcement(groups: object) -> dict[str, str]:
    """Return the mechanism that enforces each machine-dependent limit; leave out limits that cannot be enforced.

    Args:
        groups: control groups as reported by the zygote, or None.
    """
    mechanisms = {"memory": "watchdog", "processes": BY_RLIMIT}
    if isinstance(groups, dict):
        cgroup = f"cgroup v{groups['version']}"
        names = {"memory": "memory", "pids": "processes", "cpu": "cpu"}
        mechanisms |= {names[controller]: cgroup for controller in groups["controllers"]}
    return mechanisms
