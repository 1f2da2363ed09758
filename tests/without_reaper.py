"""Run a command where nobody reaps orphans: ``tests/without_reaper.py python -m pytest tests/kernel``.

The first process of many containers is a program that never waits for children it did not start. A process whose parent
ended first stays a zombie there, and its /proc/PID, for ever.

The command runs in a process namespace of its own, as whoever calls; its first process is this script and waits for the
command alone. Whatever the command leaves ends with the namespace. Nothing else may make sandboxes meanwhile: their
control groups are known by pids, and a pid means something else there.

Exit status: that of the command, or 128 and the number of the signal that ended it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

INSIDE = "--inside"
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def wait_for_one(command: list[str]) -> int:
    """Be the first process of the namespace: start a command, wait for it and for nothing else."""
    child = os.fork()
    if child == 0:
        os.execvp(command[0], command)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments:
        raise SystemExit(__doc__)
    if arguments[0] == INSIDE and os.getpid() == 1:
        status = wait_for_one(arguments[1:])
        return status if status >= 0 else 128 - status
    # An ordinary user gets the namespace by way of a user namespace, and stays who it is.
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    command = [UNSHARE[0], *user, *UNSHARE[1:], sys.executable, __file__, INSIDE, *arguments]
    # Fake sandboxes are known by their owners' pids too, and lie in the directory for temporary files.
    with tempfile.TemporaryDirectory(prefix="minisandbox-no-reaper-", ignore_cleanup_errors=True) as private:
        os.chmod(private, 0o755)
        return subprocess.run(command, env={**os.environ, "TMPDIR": private}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
