"""Run git on the host, without prompts and without programs that a repository configures; search local clones."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from minisandbox import certificates
from minisandbox.errors import ProgramNotFound, SourceError
from minisandbox.host.descriptors import hold_streams

_SEARCH_TIMEOUT = 1800.0
_GUARD = 'exec 3<&0; trap "trap - TERM; kill 0" TERM; "$@" <&3 3<&- & wait $!'
_PROTOCOLS = "file:git:http:https:ssh"
"""Allowed protocols; git runs helper programs for others (gitremote-helpers(7)). GIT_ALLOW_PROTOCOL overrides them."""
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "protocol.ext.allow=never", "gc.auto=0")
# If git started this process (a hook, an alias), these variables select git's repository (rev-parse --local-env-vars).
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
        fetches: whether git may contact other repositories. If not, git cannot fetch the missing objects of a partial
            clone, because the clone's configuration could make this fetch start any program.

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
        except BaseException:  # also on Ctrl-C, end git and its child processes, which share a process group
            os.killpg(git.pid, signal.SIGTERM)
            raise
    return subprocess.CompletedProcess(command, git.returncode, output, errors)


def _ends_with_us() -> list[str]:
    """Return a command prefix that kills git and its child processes when the calling thread exits."""
    setpriv = shutil.which("setpriv")  # part of util-linux, which most distributions always install
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--", "sh", "-c", _GUARD, "sh"]


def _environment(host: Mapping[str, str], *, fetches: bool) -> dict[str, str]:
    clean = {name: value for name, value in host.items() if name not in _NO_REPOSITORY}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    alone = {"GIT_NO_LAZY_FETCH": "1"} if fetches else {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    defaults = {"GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_ALLOW_PROTOCOL": _PROTOCOLS}
    if any(map(host.get, certificates.VARIABLES)):  # git reads only GIT_SSL_CAINFO
        defaults["GIT_SSL_CAINFO"] = str(certificates.bundle(host))
    return {**defaults, **clean, **quiet, **alone}


def find_clones(folder: Path, url: str) -> list[Path]:
    """Return the git repositories in a directory or one level below; names similar to the URL's come first."""
    repositories: list[Path] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _is_repository(entry):
            repositories.append(entry)
        elif entry.is_dir():
            repositories += filter(_is_repository, sorted(entry.iterdir()))
    return sorted(repositories, key=_likeness(url))


def _is_repository(path: Path) -> bool:
    return (path / "HEAD").is_file() or (path / ".git").exists()


def _likeness(url: str) -> Callable[[Path], int]:
    """Return a sort key for paths: 0 if a path has the OWNER and NAME of the URL, 1 for NAME alone, else 2."""
    parts = [part.lower() for part in name_parts(url)]
    pattern = re.compile(r"(?:.*[^a-z0-9])?" + r"[^a-z0-9]+".join(map(re.escape, parts)) if parts else "(?!)")
    name = parts[-1] if parts else ""

    def likeness(path: Path) -> int:
        spelled = f"{path.parent.name}/{path.name.removesuffix('.git')}".lower().removesuffix("/repo")
        return 0 if pattern.fullmatch(spelled) else 1 if name and name in spelled else 2

    return likeness


def name_parts(url: str) -> list[str]:
    """Return the last two parts of a repository's URL: OWNER and NAME."""
    return [part for part in re.split(r"[/:]", urlsplit(url).path.removesuffix(".git")) if part][-2:]


def has_commit(repository: Path, commit: str) -> bool:
    """Return whether a repository has a commit and its tree, without fetching."""
    return repository.is_dir() and _output(repository, "cat-file", "-e", f"{commit}^{{tree}}") is not None


def read_committed(folder: Path, url: str, commit: str, path: str) -> str | None:
    """Return the text of a file at a commit, from a directory of clones; None if no clone has the file.

    Args:
        folder: the directory of clones (``--repo-mirrors``).
        url: the repository's URL; clones with similar names are tried first.
        commit: the full object name of the commit.
        path: the file's path, relative to the repository's root.
    """
    repository = next((clone for clone in find_clones(folder, url) if has_commit(clone, commit)), None)
    return None if repository is None else _output(repository, "show", f"{commit}:{path}")


def find_commit(folder: Path, url: str, revision: str) -> str | None:
    """Return the full object name of a revision's commit, from a directory of clones; None if no clone has it.

    Args:
        folder: the directory of clones (``--repo-mirrors``).
        url: the repository's URL; clones with similar names are tried first.
        revision: a branch, or ``COMMIT^`` for the parent of a commit.
    """
    command = ("rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    commits = (_output(clone, *command) for clone in find_clones(folder, url))
    return next((commit.strip() for commit in commits if commit is not None), None)


def _output(repository: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a local repository, or None if the command failed."""
    try:
        done = run_git(["-C", str(repository), *arguments], timeout=_SEARCH_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise SourceError(f"git took longer than {_SEARCH_TIMEOUT:.0f} s in {repository}") from None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
