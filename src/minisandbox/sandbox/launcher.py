"""The controller's side of the zygote: start it, ask it for sandboxes, end it."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import minisandbox
from minisandbox.errors import HostError, SandboxCreationError
from minisandbox.launch.plan import Plan

_DOCTOR = "run 'minisandbox doctor': it tries each kernel feature and names the fix"
# The path of the package goes by stdin: a command line would show a host path inside every sandbox.
_BOOTSTRAP = (
    "import os, socket, sys; path, locks = os.read(0, 65536).decode('utf-8', 'surrogateescape').split('\\0'); "
    "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
    "sys.path.append(path); from minisandbox.launch import zygote; "
    "zygote.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), locks)"
)
_START_TIMEOUT = 30.0


class Launcher:
    """One zygote and the sandboxes it forks; they end when this object is closed or this process ends.

    Args:
        runtime: private directory for locks and records.

    Raises:
        HostError: the zygote could not be started; this machine lacks a kernel feature.
    """

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start_zygote(theirs, runtime)
        self._connection.settimeout(_START_TIMEOUT)
        try:
            hello, _ = self._receive()
        except OSError as error:
            self.close()
            raise error if isinstance(error, HostError) else HostError(f"the launcher process: {error}") from error
        self.mapped = bool(hello.get("mapped"))
        self.writable_usr = bool(hello.get("usr_idmap"))

    def create(self, plan: Plan, control: socket.socket) -> int:
        """Fork a sandbox.

        Args:
            plan: what to make.
            control: the sandbox's end of its control socket.

        Returns:
            A pidfd of its first process, which answers ``ready`` or ``error`` on the control socket.

        Raises:
            SandboxCreationError: it could not even be forked, or the zygote is gone.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [control.fileno()]).tobytes())
        with self._lock:
            try:
                self._connection.sendmsg([plan.network.encode() + b"\n" + plan.to_json()], [rights])
                _, pidfd = self._receive()
            except OSError as error:
                if isinstance(error, HostError):
                    raise
                self.close()  # an answer that comes late must not be taken for that to another request
                raise SandboxCreationError(
                    f"the launcher process does not answer: {error}", errno=error.errno, hint="create the sandbox again"
                ) from error
        return pidfd

    def _receive(self) -> tuple[dict[str, object], int]:
        data, ancillary, _, _ = self._connection.recvmsg(1 << 16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise BrokenPipeError(errno.EPIPE, "the launcher process ended")
        answer = json.loads(data)
        if answer["event"] == "error":
            refused = answer["errno"] in (errno.ENOSPC, errno.EUSERS, errno.EPERM)  # unshare(2)
            raise SandboxCreationError(
                f"no sandbox could be made: {answer['message']}",
                errno=answer["errno"],
                reason="user namespaces are refused here, or used up" if refused else None,
                hint=_DOCTOR,
            )
        return answer, array.array("i", ancillary[0][2][:4])[0] if ancillary else -1

    @property
    def alive(self) -> bool:
        """Whether the zygote is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the zygote and every sandbox of it."""
        with contextlib.suppress(OSError):
            self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)


def _start_zygote(theirs: socket.socket, runtime: Path) -> subprocess.Popen[bytes]:
    controller = os.pidfd_open(os.getpid())
    package = Path(minisandbox.__file__).parent.parent
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, str(theirs.fileno()), str(controller)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), controller),
            cwd="/",
            env={},
            start_new_session=True,  # Ctrl-C is for the controller to handle
        )
        assert process.stdin is not None
        process.stdin.write(f"{package}\0{runtime / 'ids'}".encode("utf-8", "surrogateescape"))
        process.stdin.close()
    except OSError as error:
        raise HostError(f"cannot start {sys.executable}: {error.strerror}") from error
    finally:
        os.close(controller)
    return process
