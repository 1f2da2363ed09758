"""Provide a fake sandbox for unit tests, which runs on any machine but ISOLATES NOTHING.

Commands of a fake are ordinary processes of this user on this machine, and can read and destroy all files that the
user can. Never give a fake to an agent that runs a model's commands. Handles, commands, processes, shells, files and
patches behave as in a real sandbox, and pass the same conformance suite (``tests/conformance``). The differences:

* The workdir is an empty temporary directory, whose path is in ``image.workdir``: use relative paths. All other files
  are the host's; layers of an image are ignored. ``changes()`` lists the contents of the workdir.
* Only the limits of single processes (open files, file size, output) and the lifetime are enforced.
* There are no snapshots, forks, resets, attached handles, mounts, networks and labels, and no processes with
  ``lifetime="sandbox"``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NoReturn, Self

from minisandbox.errors import HostError, NotFound, SandboxGone, Unsupported
from minisandbox.launch.setup import LIFETIME
from minisandbox.sandbox import scratch
from minisandbox.sandbox._async.sandbox import AsyncSandbox
from minisandbox.sandbox._sync.sandbox import Sandbox
from minisandbox.sandbox.io_async import call_or_undo
from minisandbox.sandbox.protocol.environment import command_environment
from minisandbox.sandbox.protocol.file_calls import FILE_TYPES
from minisandbox.sandbox.run import new_job, readable
from minisandbox.sandbox.validation import check_creation, check_timeout
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import Change, ChangeKind, ImageSpec, Limits, Refusals, SandboxInfo

_SUPERVISOR = (
    "import json, os, sys; sys.path.append(sys.argv[1]); from minisandbox.launch import unisolated; "
    "unisolated.main(int(sys.argv[2]), json.loads(sys.argv[3]))"
)
_TIMEOUT = 60.0
NOTHING = ImageSpec("fake", ())
"""Image for a fake that needs no environment variables."""


class _FakeCore:
    """The fake's implementation of :class:`minisandbox.sandbox.backend.SandboxCore`."""

    owned = True

    def __init__(self, image: ImageSpec, limits: Limits | None, environment: Mapping[str, str] | None) -> None:
        check_creation(image, limits, None, (), environment, None, None)
        started, self._created, self._owner = time.monotonic(), time.time(), os.getpid()
        self.id, self.limits = f"fake-{secrets.token_hex(6)}", limits or Limits()
        scratch.reap()
        directory = scratch.new_scratch()
        for name in ("home", "tmp", "work"):
            (directory / name).mkdir()
        self.image = replace(image, layers=(), workdir=PurePosixPath(directory / "work"))
        directories = {"HOME": str(directory / "home"), "TMPDIR": str(directory / "tmp")}
        self.environment = command_environment(image, directories, dict(image.environment), dict(environment or {}))
        self._control, supervisor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with supervisor_end:
            self._process = _start(supervisor_end.fileno(), self.limits)
        self.stop = weakref.finalize(self, _stop, self._owner, self._control, self._process, directory)
        self._control.settimeout(_TIMEOUT)
        if not self._control.recv(64):
            self.stop()
            raise HostError("the fake's supervisor exited at its start")
        self.created_in = time.monotonic() - started

    @property
    def alive(self) -> bool:
        """Whether the supervisor is running."""
        return self._control.fileno() >= 0 and not readable(self._control.fileno(), 0.0)

    @property
    def abandoned(self) -> bool:
        """Whether this process owns the fake and has not stopped it yet."""
        return self.stop.alive and self._owner == os.getpid()

    def open_job(self, *, wait: bool = True) -> socket.socket:  # noqa: ARG002 - jobs of a fake never wait
        """Return a stream socket to the supervisor for one job."""
        try:
            return new_job(self._control)
        except OSError as error:
            raise self._gone() from error

    def check_alive(self) -> None:
        """Raise SandboxGone if the supervisor has exited or exits within 0.2 s."""
        if self._control.fileno() < 0 or readable(self._control.fileno(), 0.2):
            raise self._gone()

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped or killed from outside")

    def info(self) -> SandboxInfo:
        """Describe the fake."""
        self.check_alive()
        expires = None if self.limits.lifetime is None else self._created + self.limits.lifetime
        return SandboxInfo(
            self.id, self.image.name, self._owner, self._process.pid, self._created, "off", expires=expires
        )

    def refusals(self) -> Refusals:
        """Return no refusals."""
        self.check_alive()
        return Refusals()

    def changes(self, below: PurePosixPath, timeout: float | None, max_characters: int = 0) -> tuple[Change, ...]:  # noqa: ARG002 - a fake has few changes
        """Return the files in the workdir at or below a path, all as additions."""
        check_timeout(timeout)
        self.check_alive()
        paths = sorted(path for path in Path(self.image.workdir).rglob("*") if path.is_relative_to(below))
        types = (FILE_TYPES[stat.S_IFMT(path.lstat().st_mode)] for path in paths)
        return tuple(
            Change(PurePosixPath(path), ChangeKind.ADDED, kind) for path, kind in zip(paths, types, strict=True)
        )

    def processes(self) -> tuple[str, ...]:
        """Return no processes, because a fake's processes do not outlive their handles."""
        self.check_alive()
        return ()

    def connect_process(self, process_id: str) -> socket.socket:
        """Raise NotFound, because a fake's processes do not outlive their handles."""
        self.check_alive()
        raise NotFound(f"a fake sandbox has no process {process_id!r}")

    def _unsupported(self, *_: object) -> NoReturn:
        self.check_alive()
        raise Unsupported("a fake sandbox cannot do this", hint="use a real one in this test: minisandbox.Sandbox")

    snapshot = fork = reset = process_listener = _unsupported

    def leave(self) -> None:
        """Stop at the end of a ``with`` block."""
        self.stop()


def _start(control: int, limits: Limits) -> subprocess.Popen[bytes]:
    rlimits = {"CORE": 0, "NOFILE": limits.open_files, LIFETIME: int((limits.lifetime or 0) * 1000)}
    if limits.file_size is not None:
        rlimits["FSIZE"] = limits.file_size
    package, null = Path(__file__).parent.parent, subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _SUPERVISOR, package, str(control), json.dumps(rlimits)],
        stdin=null, stdout=null, stderr=null, pass_fds=(control,), cwd="/", env={},
        start_new_session=True,  # only the owner handles Ctrl-C
    )  # fmt: skip


def _stop(owner: int, control: socket.socket, process: subprocess.Popen[bytes], directory: Path) -> None:
    """Close the control socket, wait until the supervisor has killed all processes, and remove the directory."""
    control.close()
    if os.getpid() == owner:  # a forked child only closes its socket
        process.wait(_TIMEOUT)
        remove_tree(directory)


class FakeSandbox(Sandbox):
    """A sandbox for tests that isolates NOTHING: commands are ordinary processes of this user on this machine.

    All methods except :meth:`create` are those of :class:`minisandbox.Sandbox`.
    """

    @classmethod
    def create(  # type: ignore[override] # a fake supports fewer arguments
        cls,
        image: ImageSpec = NOTHING,
        *,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Create a fake; the arguments are those of :meth:`minisandbox.Sandbox.create`.

        Raises:
            InvalidValue: an argument has a wrong type.
            HostError: the supervisor could not be started.
        """
        return cls(_FakeCore(image, limits, environment))


class AsyncFakeSandbox(AsyncSandbox):
    """Async version of :class:`FakeSandbox`, which isolates NOTHING either."""

    @classmethod
    async def create(  # type: ignore[override] # a fake supports fewer arguments
        cls,
        image: ImageSpec = NOTHING,
        *,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Create a fake, as :meth:`FakeSandbox.create` does."""
        return cls(await call_or_undo(lambda core: core.stop(), _FakeCore, image, limits, environment))
