"""The synchronous sandbox."""

from __future__ import annotations

import array
import contextlib
import io
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from minisandbox.errors import SandboxCreationError, SandboxGone
from minisandbox.host import reaper
from minisandbox.sandbox import uppers
from minisandbox.sandbox.controller import Controller, current_controller
from minisandbox.sandbox.environment import command_environment
from minisandbox.sandbox.patching import PATCH_SCRIPT, checked_patch
from minisandbox.sandbox.plans import Request, check_mounts, make_plan
from minisandbox.sandbox.wire import Call, ExecCall, ReadCall, WriteCall
from minisandbox.types import ExecResult, GiB, ImageSpec, Limits, MiB, Mount, Network

_READY_TIMEOUT = 60.0
_DEADLINE_GRACE = 60.0
"""Seconds after a command's deadline within which its end must have been reported, however busy the machine is."""
_STOP_TIMEOUT = 30.0
_FILE_TIMEOUT = 300.0
_PATCH_TIMEOUT = 300.0


class Sandbox:
    """One isolated, writable, throw-away workspace over an image. Make one with :meth:`create`.

    It is a context manager, safe to use from several threads, and ends with the process that made it.

    Attributes:
        id: its name, unique on this machine.
        image: what is inside.
        created_in: seconds that creation took.
    """

    def __init__(
        self, controller: Controller, image: ImageSpec, identifier: str, environment: Mapping[str, str]
    ) -> None:
        self.id = identifier
        self.image = image
        self.created_in = 0.0
        self._controller = controller
        self._environment = command_environment(image, environment)
        self._limits = Limits()
        self._upper: Path | None = None
        self._control: socket.socket | None = None
        self._pidfd = -1
        self._stopped = False
        self._stopping = threading.Lock()

    @classmethod
    def create(
        cls,
        image: ImageSpec,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
    ) -> Sandbox:
        """Make a sandbox and wait until it is ready for commands.

        Args:
            image: what is inside.
            limits: what it may use; the defaults of :class:`Limits` if None.
            network: what it can reach; nothing but its own loopback if None.
            mounts: host directories and files to show inside, read-only.
            environment: variables that every command gets, over the image's.
            upper: an existing, empty host directory that takes the writes instead of memory. After :meth:`stop` its
                ``tree`` is a complete layer.

        Returns:
            The sandbox, ready.

        Raises:
            InvalidValue: an argument cannot be used.
            HostError: this machine lacks a kernel feature.
            SandboxCreationError: the kernel refused a step; the error names it.
        """
        started = time.monotonic()
        controller = current_controller()
        box = cls(controller, image, f"box-{secrets.token_hex(6)}", environment or {})
        box._limits = limits or Limits()
        box._upper = upper
        request = Request(
            image, box._limits, network or Network.off(), check_mounts(mounts), "sandbox", upper,
            controller.launcher.writable_usr,
        )  # fmt: skip
        if upper is not None:
            uppers.prepare(upper)
        box._start(request)
        box.created_in = time.monotonic() - started
        return box

    def _start(self, request: Request) -> None:
        plan = make_plan(request)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._pidfd = self._controller.launcher.create(plan, theirs)
            self._await_ready(self._control)
            self._controller.add(self, request.network.mode, self._pidfd)
        except BaseException:  # whatever went wrong, a Ctrl-C included: nothing half-made stays
            self.stop()
            raise

    def _await_ready(self, control: socket.socket) -> None:
        control.settimeout(_READY_TIMEOUT)
        try:
            answer = json.loads(control.recv(1 << 16) or b'{"event":"gone"}')
        except TimeoutError:
            raise SandboxCreationError(f"sandbox {self.id} was not ready after {_READY_TIMEOUT:.0f} s") from None
        if answer["event"] == "ready":
            return
        if answer["event"] == "gone":
            raise SandboxCreationError(
                f"sandbox {self.id} ended while it was made", reason="it was killed from outside"
            )
        raise SandboxCreationError(
            f"could not {answer['operation']}: {answer['message']}",
            operation=answer["operation"],
            errno=answer["errno"],
            hint="run 'minisandbox doctor': it tries each kernel feature and names the fix",
        )

    def __enter__(self) -> Self:
        """Use the sandbox in a ``with`` block; it is stopped at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Stop the sandbox."""
        self.stop()

    def __del__(self) -> None:
        """Stop a sandbox that nobody can reach any more."""
        if not self._stopped and self._pidfd >= 0 and self._controller.pid == os.getpid():
            warnings.warn(
                f"sandbox {self.id} was never stopped; use a with block", ResourceWarning, stacklevel=2, source=self
            )
            self.stop()

    @property
    def files(self) -> Files:
        """The file verbs."""
        return Files(self)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end.

        Returns when the command's own process has ended; background processes it leaves go on until the sandbox stops.
        A non-zero exit, a signal and a timeout are values, not exceptions.

        Args:
            command: text for ``bash -c`` (no login shell), or an argument list.
            timeout: wall seconds after which the command's whole tree (and nothing else) is killed; None: no limit.
            cwd: directory to start in; relative ones are below the image's workdir, which is also the default.
            env: variables for this command, over those of the sandbox.
            stdin: its standard input; empty if None.

        Returns:
            How it ended and what it printed.

        Raises:
            InvalidValue: an argument cannot be used.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        call = ExecCall(
            command,
            env={**self._environment, **(env or {})},
            cwd=self._directory(cwd),
            timeout=timeout,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            output=self._limits.output,
        )
        if not self._drive(call, None if timeout is None else timeout + _DEADLINE_GRACE):
            call.hung_up()
        return call.result()

    def patch(
        self, path: str | PurePosixPath | None = None, *, base: str | None = None, limit: int | None = None
    ) -> bytes:
        """A git patch of everything in a repository that differs from a commit: new, deleted and binary files included.

        The index and the work tree stay as they are. Files that git ignores are left out.

        Args:
            path: the repository; the image's workdir if None.
            base: the commit to compare with; the one the image was made of if None.
            limit: most bytes; a larger patch is an error. None: no limit.

        Returns:
            The patch; empty if nothing differs.

        Raises:
            FileAccessError: the patch is larger than the limit.
            CommandFailed: git could not compute it, for example because the repository was destroyed.
            SandboxGone: the sandbox has ended.
        """
        command = ["bash", "-c", PATCH_SCRIPT, "patch", base or self.image.base_commit]
        result = self.exec(command, cwd=path, timeout=_PATCH_TIMEOUT)
        output = io.BytesIO()
        if result.ok:
            self._read(result.stdout.strip(), output, limit)
        return checked_patch(result, output.getvalue())

    def stop(self) -> None:
        """End every process of the sandbox and its mounts; calling it again does nothing.

        In a process forked from the one that made the sandbox it only forgets it: the sandbox is its maker's.

        Raises:
            SandboxGone: a process of it hangs in the kernel and did not end.
        """
        with self._stopping:
            if self._stopped or self._controller.pid != os.getpid():
                self._stopped = True
                return
            self._stopped = True
            if self._control is not None:
                self._control.close()
            try:
                self._end_processes()
            finally:
                self._controller.remove(self)
        if self._upper is not None:
            uppers.finish(self._upper)

    def _end_processes(self) -> None:
        if self._pidfd < 0:
            return
        pidfd, self._pidfd = self._pidfd, -1
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not _ready(pidfd, _STOP_TIMEOUT):
                reason = "a process hangs in the kernel"
                raise SandboxGone(f"sandbox {self.id} did not end in {_STOP_TIMEOUT:.0f} s", reason=reason)
        finally:
            os.close(pidfd)

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""
        return not self._stopped and not _ready(self._pidfd, 0.0)

    def _directory(self, path: str | PurePosixPath | None) -> str:
        return str(self.image.workdir / path) if path is not None else str(self.image.workdir)

    def _read(self, path: str | PurePosixPath, sink: BinaryIO, limit: int | None) -> None:
        call = ReadCall(str(path), cwd=str(self.image.workdir), limit=limit, sink=sink)
        self._transfer(call)
        call.result()

    def _write(self, path: str | PurePosixPath, source: Iterator[bytes], mode: int | None) -> None:
        call = WriteCall(str(path), cwd=str(self.image.workdir), mode=mode, source=source)
        self._transfer(call)
        call.result()

    def _transfer(self, call: Call) -> None:
        if not self._drive(call, _FILE_TIMEOUT):
            raise SandboxGone(
                f"sandbox {self.id}: a file transfer was cut off", reason="its worker was killed from inside"
            )

    def _drive(self, call: Call, timeout: float | None) -> bool:
        """Carry a call through on a socket of its own; returns False if the peer hung up before it answered.

        Leaving early (an exception, a Ctrl-C) closes the socket, which ends the command's tree.
        """
        if self._stopped or self._control is None:
            raise SandboxGone(f"sandbox {self.id} is stopped")
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(self._control, theirs)
            ours.settimeout(timeout)
            try:
                _converse(call, ours)
            except TimeoutError:
                self.stop()
                raise SandboxGone(f"sandbox {self.id} did not answer and was stopped", reason="it hangs") from None
        if not call.done:
            self._check_alive()
        return call.done

    def _hand_over(self, control: socket.socket, theirs: socket.socket) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]).tobytes())
        try:
            control.sendmsg([b"job"], [rights])
        except OSError as error:
            raise SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped or killed from outside") from error

    def _check_alive(self) -> None:
        # the kernel closes the workers' sockets a moment before pid 1 counts as ended
        pidfd = self._pidfd
        if self._stopped or _ready(pidfd, 0.2):
            raise SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped or killed from outside")


class Files:
    """Reading and writing files of a sandbox; every verb is carried out inside it.

    Paths are absolute, or relative to the image's workdir.
    """

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def read_bytes(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> bytes:
        """The content of a regular file.

        Args:
            path: the file.
            limit: most bytes to read; a larger file is an error. None: no limit.

        Raises:
            FileAccessError: there is no such file, it is not a regular one, or it is too large.
            SandboxGone: the sandbox has ended.
        """
        sink = io.BytesIO()
        self._box._read(path, sink, limit)
        return sink.getvalue()

    def read_text(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> str:
        """The content of a regular file as UTF-8; other bytes become U+FFFD. Raises as :meth:`read_bytes`."""
        return self.read_bytes(path, limit=limit).decode("utf-8", "replace")

    def write_bytes(self, path: str | PurePosixPath, data: bytes, *, mode: int | None = None) -> None:
        """Replace the content of a file; it and missing parent directories are made.

        Args:
            path: the file.
            data: its new content.
            mode: permission bits; None leaves them (0644 for a new file).

        Raises:
            FileAccessError: it cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
        """
        self._box._write(path, iter((data,)), mode)

    def write_text(self, path: str | PurePosixPath, text: str, *, mode: int | None = None) -> None:
        """Replace the content of a file by text as UTF-8. Raises as :meth:`write_bytes`."""
        self.write_bytes(path, text.encode("utf-8", "surrogateescape"), mode=mode)

    def upload(self, local: Path, path: str | PurePosixPath, *, mode: int | None = None) -> None:
        """Copy a host file into the sandbox, in pieces.

        Raises:
            FileAccessError: it cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
            OSError: the host file cannot be read.
        """
        with local.open("rb") as source:
            self._box._write(path, iter(lambda: source.read(1 << 20), b""), mode)

    def download(self, path: str | PurePosixPath, local: Path, *, limit: int | None = 2 * GiB) -> None:
        """Copy a file of the sandbox to the host, in pieces; the host file appears when it is complete.

        Args:
            path: the file inside.
            local: the host file.
            limit: most bytes to copy (a sparse file can be larger than any disk); a larger file is an error.

        Raises:
            FileAccessError: there is no such file, it is not a regular one, or it is too large.
            SandboxGone: the sandbox has ended.
            OSError: the host file cannot be written.
        """
        partial = local.with_name(f".{local.name}.{secrets.token_hex(4)}")
        try:
            with partial.open("wb") as sink:
                self._box._read(path, sink, limit)
            partial.replace(local)
        finally:
            partial.unlink(missing_ok=True)


def live_sandboxes() -> tuple[reaper.Record, ...]:
    """Every live sandbox of this user, whoever owns it."""
    return tuple(reaper.live_records(reaper.runtime_directory()))


def _converse(call: Call, connection: socket.socket) -> None:
    """Send what a call has to say and feed it the answer, until it is done or the peer has hung up."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its answer says why
        for piece in call.outgoing():
            connection.sendall(piece)
    while not call.done and (data := _receive(connection)):
        call.feed(data)


def _receive(connection: socket.socket) -> bytes:
    for _ in range(2):  # reported once where the peer closed with our bytes unread; its answer still waits
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(1 << 18)
    return b""


def _ready(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
