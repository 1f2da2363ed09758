"""Programs of the host that end with us: what waits for a server, or for a file, would go on when we were killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# It is the first of a session, with the program and what that starts in it, and ends them when the owner has ended.
_GUARD = """
import os, select, signal, sys
owner, command = int(sys.argv[1]), sys.argv[2:]
os.set_inheritable(owner, False)
ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by this interpreter, not by whoever asked
program = os.posix_spawnp(command[0], command, os.environ, setsigdef=ignored)
poll = select.poll()
for descriptor in (owner, os.pidfd_open(program)):
    poll.register(descriptor, select.POLLIN)
if owner in dict(poll.poll()):
    os.killpg(0, signal.SIGKILL)
status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
os._exit(status if status >= 0 else 128 - status)
"""


def run_bound(
    command: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    env: Mapping[str, str],
) -> subprocess.CompletedProcess[bytes]:
    """Run a program that ends with this process, however that ends, with what it has started in its session.

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
    owner = os.pidfd_open(os.getpid())
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(owner), *command],
            stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, env=env, pass_fds=(owner,),
            start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(owner)
    with guard:
        try:
            output, errors = guard.communicate(stdin, timeout)
        except BaseException:  # whatever it is, what was started does not outlive it
            if guard.returncode is None:  # not yet waited for: the number is still its own
                os.killpg(guard.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, guard.returncode, output, errors)
