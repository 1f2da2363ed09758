"""Git on the host: nothing of its configuration may run a program or ask a question here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisandbox.errors import ProgramNotFound
from minisandbox.host.descriptors import hold_streams

_GUARD = str(Path(__file__).with_name("guard.py"))
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
    """Run git, which ends with this process; its exit status is the caller's to look at.

    Args:
        arguments: what follows ``git``.
        timeout: seconds.
        stdin: what it reads.
        stdout: where its output goes; into the result by default.
        fetches: whether it may ask another repository for objects; a partial clone's own settings would say how, by
            any program, and git would follow them for whatever object is missing.

    Raises:
        ProgramNotFound: there is no git.
        TimeoutExpired: it took longer (``subprocess``'s own).
    """
    if shutil.which("git") is None:
        raise ProgramNotFound("there is no git on PATH", hint="install git; `minisandbox doctor` prints the line")
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    env = _environment(os.environ, fetches=fetches)
    return run_bound(["git", *settings, *arguments], timeout=timeout, stdin=stdin, stdout=stdout, env=env)


def run_bound(
    command: Sequence[str], *, timeout: float, stdin: bytes = b"", stdout: int = subprocess.PIPE, env: Mapping[str, str]
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
        TimeoutExpired: it took longer (``subprocess``'s own).
    """
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


def _environment(host: Mapping[str, str], *, fetches: bool) -> dict[str, str]:
    clean = {name: value for name, value in host.items() if name not in _NO_REPOSITORY}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    alone = {"GIT_NO_LAZY_FETCH": "1"} if fetches else {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    return {"GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_ALLOW_PROTOCOL": _PROTOCOLS, **clean, **quiet, **alone}
