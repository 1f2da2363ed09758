"""Starting a process of ours beside the controller: the launcher, the network's gateway."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import minisandbox
from minisandbox.errors import HostError
from minisandbox.sandbox import interpreter

_PATIENCE = 5.0


def start(bootstrap: str, theirs: socket.socket, settings: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start an isolated interpreter with nothing of ours but a socket and a pidfd of this process.

    Args:
        bootstrap: the program; its arguments are the numbers of the two descriptors. Its stdin holds the path of this
            package and the settings, with NUL characters between: a command line would show a host path in sandboxes.
        theirs: its end of the connection.
        settings: texts that it is given.

    Raises:
        HostError: it cannot be started.
    """
    how = interpreter.find(sys.executable)
    package = Path(minisandbox.__file__).parent.parent
    controller = -1
    try:
        controller = os.pidfd_open(os.getpid())
        process = subprocess.Popen(
            [*how.words, "-I", "-S", "-B", "-c", bootstrap, str(theirs.fileno()), str(controller)],
            executable=how.program,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), controller, how.descriptor),
            cwd="/",
            env={},
            start_new_session=True,  # Ctrl-C is for the controller to handle
        )
        os.fchmod(how.descriptor, 0)  # it is executed: nobody is to open it or execute it again, from inside least
        assert process.stdin is not None
        process.stdin.write("\0".join((str(package), *settings)).encode("utf-8", "surrogateescape"))
        process.stdin.close()
    except OSError as error:
        raise HostError(f"cannot start {sys.executable}: {error.strerror}") from error
    finally:
        if controller >= 0:
            os.close(controller)
        os.close(how.descriptor)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of one whose connection was closed; one that sees nothing, since it was stopped, is killed.

    Raises:
        TimeoutExpired: it hangs in the kernel (``subprocess``'s own).
    """
    try:
        process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_PATIENCE)
