"""The controller's side of the zygote: start it, ask it for sandboxes, end it."""

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
from minisandbox.launch.plan import Plan
from minisandbox.sandbox import fd_passing, helper_process, host_sockets
from minisandbox.sandbox.plans import real_directories, usual_preparations

_DOCTOR = "run 'minisandbox doctor': it tries each kernel feature and names the fix"
# The path of the package goes by stdin: a command line would show a host path inside every sandbox.
_BOOTSTRAP = (
    "import os, socket, sys; path, *settings = os.read(0, 65536).decode('utf-8', 'surrogateescape').split('\\0'); "
    "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
    "sys.path.append(path); from minisandbox.launch import zygote; "
    "zygote.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), settings)"
)
_NAMESPACES = "user namespaces are refused here, or used up"
_MASKED = "a container engine masks files below /proc, and the kernel then mounts no other /proc"
_REASONS = {
    errno.ENOSPC: _NAMESPACES,  # these three: unshare(2)
    errno.EUSERS: _NAMESPACES,
    errno.EPERM: _NAMESPACES,
    errno.EAGAIN: "this user has, or its control group, as many processes as it may (ulimit -u, pids.max)",
    errno.ENOMEM: "the machine, or this process's control group, has no memory left",
}
"""Likely causes for which the kernel refuses a sandbox."""
_START_TIMEOUT = 30.0
_FEWEST_FILES = 128
"""Open files that a launcher cannot do with less of: it gives what sandboxes begin with numbers from 100 on."""
_OF_THE_MESSAGE = (errno.ETOOMANYREFS, errno.EMSGSIZE)
"""What cannot be sent, or not with its descriptors while so many are under way: that is no end of the launcher."""
ONE_ID = "MINISANDBOX_ONE_ID"
"""Environment variable: 1 keeps an ordinary user's sandboxes from using subordinate ids."""
BY_RLIMIT = "rlimit"
NO_GROUPS = "MINISANDBOX_NO_CGROUPS"
"""Environment variable: 1 keeps sandboxes out of control groups."""


class Launcher:
    """One zygote and the sandboxes it forks; they end when this object is closed or this process ends.

    Args:
        runtime: private directory for locks and records.

    Raises:
        HostError: the zygote could not be started; this machine lacks a kernel feature.
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
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            groups = "" if os.environ.get(NO_GROUPS, "") not in ("", "0") else registry.owner_name()
            settings = (str(self._ranges), groups, usual_preparations().decode(), *mappers())
            self._process = helper_process.start(_BOOTSTRAP, theirs, settings)
        self._connection.settimeout(_START_TIMEOUT)
        try:
            hello = self._receive(0)
        except (OSError, HostError) as error:
            self.close()
            raise error if isinstance(error, HostError) else HostError(f"the launcher process: {error}") from error
        self.mapped = bool(hello.get("mapped"))
        self.writable_usr = bool(hello.get("usr_idmap"))
        self.layered_usr = bool(hello.get("usr_overlay"))
        self.memory_upper = bool(hello.get("memory_upper"))
        self.ids = int(str(hello.get("ids", 1)))
        self.enforcement = enforcement(hello.get("groups"))

    def create(
        self,
        plan: Plan,
        control: socket.socket,
        door: socket.socket,
        sealed: Sequence[int] = (),
    ) -> None:
        """Ask for a sandbox, without waiting for it.

        On the control socket come a pidfd of its first process (``forked``), then ``ready``; or why there will be
        none (``refused``, which is for :func:`refusal`, or ``error``).

        Args:
            plan: what to make.
            control: the sandbox's end of its control socket.
            door: listening socket at which other processes bring it jobs.
            sealed: numbers of the held trees that the plan names.

        Raises:
            SandboxCreationError: the zygote is gone.
        """
        network = "host" if plan.network == "host" else "off"  # the way out of an allow-list is no matter of the kernel
        fields = ["create", f"network={network}", f"ids={'one' if plan.one_id else 'all'}", f"inotify={plan.inotify}"]
        fields.append(f"sealed={','.join(map(str, sealed))}")
        if plan.pretend_owners:
            fields.append("owners=pretended")
        if self.enforcement["processes"] == BY_RLIMIT:
            fields.append(f"nproc={plan.processes}")
        fields += (f"{name}={amount}" for name, amount in plan.group_limits)
        self.flush()
        with self._explaining():  # messages are sent whole, by several threads too
            request = " ".join(fields).encode() + b"\n" + plan.to_json()
            fd_passing.send(self._connection, request, (control.fileno(), door.fileno()))

    def hold(self, tree: int) -> int:
        """Keep what a sandbox has written beyond its end; returns the number by which other sandboxes get it.

        Args:
            tree: descriptor of its scratch mount.

        Raises:
            SandboxCreationError: the kernel refused, or the zygote is gone.
        """
        return self._ask("hold", tree, "number")

    def measure(self, tree: int) -> int:
        """Count the bytes that a sandbox has written to its upper on disk.

        Args:
            tree: descriptor of its mount.

        Raises:
            SandboxCreationError: the kernel refused, or the zygote is gone.
        """
        return self._ask("measure", tree, "bytes")

    def forget(self, number: int) -> None:
        """Give up a held tree, at the next request or flush; safe to call from anywhere, finalisers included."""
        self._forgotten.append(number)

    def flush(self) -> None:
        """Release forgotten trees now, to free their memory; a request in progress does so when it ends.

        It never waits: a garbage collection inside a request, which holds the lock, may stop an abandoned sandbox.
        """
        while self._forgotten and self._lock.acquire(blocking=False):  # again: others may have left theirs to this one
            try:
                numbers = []
                with contextlib.suppress(IndexError):
                    while True:
                        numbers.append(str(self._forgotten.popleft()))
                with contextlib.suppress(OSError):
                    self._connection.send(" ".join(("drop", *numbers)).encode())
            finally:
                self._lock.release()

    def _ask(self, verb: str, tree: int, what: str) -> int:
        """Send one request about a tree, and return the number that answers it."""
        self.flush()
        try:
            with self._lock, self._explaining():
                number = next(self._numbers)
                fd_passing.send(self._connection, f"{verb} {number}\n".encode(), (tree,))
                return int(str(self._receive(number)[what]))
        finally:
            self.flush()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what an error of the connection means for a sandbox."""
        started = time.monotonic()
        try:
            yield
        except OSError as error:
            early = time.monotonic() < started + _START_TIMEOUT
            if isinstance(error, HostError) or (isinstance(error, TimeoutError) and early):  # of a signal's handler
                raise
            if error.errno not in _OF_THE_MESSAGE:
                self.close()
            hint = "give it fewer mounts" if error.errno == errno.EMSGSIZE else "create the sandbox again"
            raise SandboxCreationError(
                f"the launcher process does not answer: {error}", errno=error.errno, hint=hint
            ) from error

    def _receive(self, number: int) -> dict[str, object]:
        """Return the answer to a request, and drop those to earlier requests, which were interrupted."""
        while True:
            data = self._connection.recv(1 << 16)
            if not data:
                raise BrokenPipeError(errno.EPIPE, "the launcher process ended")
            answer = json.loads(data)
            if answer["to"] == number:
                return self._check(answer)
            if answer["event"] == "held":
                self.forget(answer["number"])

    def _check(self, answer: dict[str, Any]) -> dict[str, object]:
        """Return an answer, unless it is an error."""
        if answer["event"] == "error":
            if str(answer.get("path")).startswith(str(self._ranges)):
                raise registry.ranges_fault(self._ranges, OSError(answer["errno"], os.strerror(answer["errno"])))
            raise refusal(answer["errno"], answer["message"])
        return answer

    @functools.cached_property
    def host_sockets(self) -> tuple[str, ...]:
        """Return the sockets that a sandbox over the host's ``/usr`` must not reach; see :func:`.host_sockets.find`.

        Found when the first such sandbox is made: where /usr itself is bound, looking takes most of a second.
        """
        usr = () if self.layered_usr else ("/usr",)
        return host_sockets.find([*(f"/{name}" for name in real_directories()), *usr])

    @property
    def alive(self) -> bool:
        """Whether the zygote is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the zygote and every sandbox of it."""
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
        number: the kernel's error, if it was one.
        message: what the zygote says.
    """
    reason, hint = _REASONS.get(number or 0), _DOCTOR
    if number == errno.EPERM and fixes.in_container():
        is_proc = message.startswith("mount(proc")
        reason = _MASKED if is_proc else reason
        hint = f"{fixes.fix_for('private-proc' if is_proc else 'user-namespaces')}; or {_DOCTOR}"
    return SandboxCreationError(f"no sandbox could be made: {message}", errno=number, reason=reason, hint=hint)


def enforcement(groups: object) -> dict[str, str]:
    """Return what enforces each limit that depends on the machine; limits that nothing enforces are missing.

    Args:
        groups: what the zygote says about control groups, or None.
    """
    held = {"memory": "watchdog", "processes": BY_RLIMIT}
    if isinstance(groups, dict):
        by = f"cgroup v{groups['version']}"
        names = {"memory": "memory", "pids": "processes", "cpu": "cpu"}
        held |= {names[controller]: by for controller in groups["controllers"]}
    return held
