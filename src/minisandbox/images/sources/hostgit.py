"""Run git on the host without programs from a repository's configuration, and without prompts."""

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
"""Allowed protocols, because git runs a program for others (gitremote-helpers(7)); the host's variable overrides."""
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "protocol.ext.allow=never", "gc.auto=0")
# Git sets these variables for hooks and aliases; they would select a wrong repository (rev-parse --local-env-vars).
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
    """Run git, and kill it if this process exits; the caller checks the exit status.

    Args:
        arguments: the arguments of git.
        timeout: the timeout in seconds.
        stdin: the standard input.
        stdout: the file descriptor for the standard output; by default the output is returned.
        fetches: whether git may contact other repositories. Without it, git cannot fetch missing objects of a partial
            clone, for which the clone's own configuration could start any program.

    Raises:
        ProgramNotFound: there is no git.
        TimeoutExpired: git timed out (the exception of ``subprocess``).
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
        except BaseException:  # also on Ctrl-C, leave no git process behind
            os.killpg(git.pid, signal.SIGTERM)  # git's helpers are in its process group
            raise
    return subprocess.CompletedProcess(command, git.returncode, output, errors)


def _ends_with_us() -> list[str]:
    """Return a command prefix that kills git and its helpers when the calling thread exits."""
    setpriv = shutil.which("setpriv")  # part of util-linux, which most distributions always install
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--", "sh", "-c", _GUARD, "sh"]


def _environment(host: Mapping[str, str], *, fetches: bool) -> dict[str, str]:
    clean = {name: value for name, value in host.items() if name not in _NO_REPOSITORY}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    alone = {"GIT_NO_LAZY_FETCH": "1"} if fetches else {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    defaults = {"GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_ALLOW_PROTOCOL": _PROTOCOLS}
    if any(map(host.get, certificates.VARIABLES)):  # git does not read these variables
        defaults["GIT_SSL_CAINFO"] = str(certificates.bundle(host))
    return {**defaults, **clean, **quiet, **alone}
