"""Git on the host: nothing of its configuration may run a program or ask a question here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from minisandbox import certificates
from minisandbox.errors import ProgramNotFound
from minisandbox.host.descriptors import hold_streams

_GUARD = 'exec 3<&0; trap "trap - TERM; kill 0" TERM; "$@" <&3 3<&- & wait $!'
_PROTOCOLS = "file:git:http:https:ssh"
"""Of others git runs a program by their name (gitremote-helpers(7)); GIT_ALLOW_PROTOCOL of the host's goes first."""
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "protocol.ext.allow=never", "gc.auto=0")
# What git sets for the hooks and aliases it starts would lead ours to that repository (git rev-parse --local-env-vars).
_NO_REPOSITORY = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG_PARAMETERS",
        "GIT_DIR",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    }
)


def run_git(
    arguments: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    fetches: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run git, which dies with this process; the caller checks its exit status.

    Args:
        arguments: the arguments of git.
        timeout: seconds.
        stdin: its standard input.
        stdout: the target of its output; by default the result.
        fetches: whether it may ask another repository for objects; a partial clone's own settings would say how, by
            any program, and git would follow them for whatever object is missing.

    Raises:
        ProgramNotFound: there is no git.
        TimeoutExpired: it timed out (``subprocess``'s own).
    """
    if shutil.which("git") is None:
        raise ProgramNotFound("there is no git on PATH", hint="install git; `minisandbox doctor` prints the line")
    command = ["git", *(part for setting in _SETTINGS for part in ("-c", setting)), *arguments]
    hold_streams()
    git = subprocess.Popen(
        [*_ends_with_us(), *command], stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE,
        env=_environment(os.environ, fetches=fetches), start_new_session=True,
    )  # fmt: skip
    with git:
        try:
            output, errors = git.communicate(stdin, timeout)
        except BaseException:  # do not leave git running after any exception
            os.killpg(git.pid, signal.SIGTERM)  # its helpers are in its group
            raise
    return subprocess.CompletedProcess(command, git.returncode, output, errors)


def _ends_with_us() -> list[str]:
    """Return the start of a command line that kills git and its helpers when the calling thread ends."""
    setpriv = shutil.which("setpriv")  # util-linux; an essential package of most distributions
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--", "sh", "-c", _GUARD, "sh"]


def _environment(host: Mapping[str, str], *, fetches: bool) -> dict[str, str]:
    clean = {name: value for name, value in host.items() if name not in _NO_REPOSITORY}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    alone = {"GIT_NO_LAZY_FETCH": "1"} if fetches else {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    defaults = {"GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_ALLOW_PROTOCOL": _PROTOCOLS}
    if any(map(host.get, certificates.VARIABLES)):  # git knows the system's authorities, and not these variables
        defaults["GIT_SSL_CAINFO"] = str(certificates.bundle(host))
    return {**defaults, **clean, **quiet, **alone}
