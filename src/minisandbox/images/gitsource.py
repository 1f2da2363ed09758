"""Git sources: one commit, fetched into a bare repository of our own, handed on as a pack without any history."""

from __future__ import annotations

import subprocess
from pathlib import Path

from minisandbox.errors import DiskFull, SourceError
from minisandbox.images.hostgit import run_git
from minisandbox.images.index import without_credentials
from minisandbox.images.recipe import GitSource
from minisandbox.store.faults import disk_full

FETCH_TIMEOUT = 1800.0


def fetch_commit(source: GitSource, work: Path, *, timeout: float = FETCH_TIMEOUT) -> tuple[Path, str]:
    """Fetch a commit and write the pack of its tree.

    Args:
        source: the repository and the commit.
        work: an existing directory for the repository and the pack; it is the caller's to remove.
        timeout: seconds for each attempt to fetch.

    Returns:
        The pack's file and the object name of the commit's tree.

    Raises:
        SourceError: the repository cannot be reached or has no such commit.
        ProgramNotFound: there is no git.
        DiskFull: there is no space.
    """
    repository = work / "fetched.git"
    _git(["init", "--quiet", "--bare", "--template=", str(repository)], source)
    if not _fetch_one(source, repository, timeout):
        _fetch_all(source, repository, timeout)
    tree = _git(["-C", str(repository), "rev-parse", "--verify", f"{source.commit}^{{tree}}"], source)
    pack = work / "tree.pack"
    with pack.open("xb") as target:
        command = ["-C", str(repository), "pack-objects", "--quiet", "--revs", "--stdout", "--threads=1"]
        _run(command, source, stdin=tree, stdout=target.fileno(), timeout=timeout)
    return pack, tree.strip()


def _fetch_one(source: GitSource, repository: Path, timeout: float) -> bool:
    """Fetch the commit and nothing else; False where the server gives out only what a branch or tag names."""
    command = ["-C", str(repository), "fetch", "--quiet", "--no-tags", "--depth=1", "--", _place(source), source.commit]
    done = _run(command, source, timeout=timeout, check=False)
    return done.returncode == 0


def _fetch_all(source: GitSource, repository: Path, timeout: float) -> None:
    command = ["-C", str(repository), "fetch", "--quiet", "--no-tags", "--", _place(source), "+refs/*:refs/fetched/*"]
    _run(command, source, timeout=timeout)
    probe = ["-C", str(repository), "cat-file", "-e", f"{source.commit}^{{commit}}"]
    if _run(probe, source, timeout=timeout, check=False).returncode != 0:
        raise SourceError(
            f"{_shown(source)} has no commit {source.commit}", hint="check the commit, or name a repository that has it"
        )


def _git(arguments: list[str], source: GitSource) -> str:
    return _run(arguments, source, timeout=FETCH_TIMEOUT).stdout.decode()


def _run(
    arguments: list[str],
    source: GitSource,
    *,
    timeout: float,
    stdin: str = "",
    stdout: int = subprocess.PIPE,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    try:
        done = run_git(arguments, timeout=timeout, stdin=stdin.encode(), stdout=stdout)
    except subprocess.TimeoutExpired:
        raise SourceError(
            f"fetching {_shown(source)} took longer than {timeout:.0f} s",
            reason="the server or the network is slow, or hangs",
            hint="try again; a local clone (git: url: /path) needs no network",
        ) from None
    if check and done.returncode != 0:
        raise _failure(source, done.stderr.decode("utf-8", "replace"))
    return done


def _failure(source: GitSource, said: str) -> SourceError | DiskFull:
    what = f"fetch {source.commit[:12]} from {_shown(source)}"
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return disk_full(what)
    lines = [line for line in said.replace(source.url, _shown(source)).splitlines() if line.strip()]
    hint = "check the address and your access to it"
    if "dubious ownership" in said:
        hint = "the repository belongs to another user: `git config --global --add safe.directory PATH` trusts it"
    return SourceError(f"cannot {what}", reason=" / ".join(lines[-4:]), hint=hint)


def _place(source: GitSource) -> str:
    """What git is given: a local path is made absolute, since git runs elsewhere."""
    path = Path(source.url).expanduser()
    return str(path.absolute()) if path.exists() else source.url


def _shown(source: GitSource) -> str:
    return without_credentials(source.url)
