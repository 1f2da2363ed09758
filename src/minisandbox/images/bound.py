"""Programs of the host that end with us: what waits for a server, or for a file, would go on when we were killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisandbox.host.descriptors import hold_streams

_GUARD = str(Path(__file__).with_name("guard.py"))


def run_bound(
    command: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    env: Mapping[str, str],
) -> subprocess.CompletedProcess[bytes]:
    """Run a program that ends with the calling thread, however that ends.

    Everything below it ends with it too, daemons in sessions of their own included.

    Args:
        command: the program and its arguments.
        timeout: seconds.
        stdin: what it reads.
        stdout: where its output goes; into the result by default.
        env: its environment.

    Returns:
        Its output and its exit status, which is 128 and the number where a signal ended it.

    Raises:
        FileNotFoundError: there is no such program on the environment's PATH.
        TimeoutExpired: it took longer (``subprocess``'s own).
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise FileNotFoundError(f"no {command[0]} that can be executed is on PATH")
    hold_streams()
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), *command],
        stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, env=env, start_new_session=True,
    )  # fmt: skip
    with guard:
        try:
            output, errors = guard.communicate(stdin, timeout)
        except BaseException:  # whatever it is, what was started does not outlive it
            guard.terminate()
            raise
    return subprocess.CompletedProcess(command, guard.returncode, output, errors)
