"""Git repositories: one local mirror of each, which a commit is fetched into once; a commit's tree is taken from it.

A mirror holds the commits that were asked for, and what they share once: fetching the next commit of a repository
brings only what is new. None of its history gets into an image: the tree alone is handed on, as a pack. The files of
submodules take the place of their gitlinks in that tree.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from minisandbox.errors import DiskFull, InvalidValue, SourceError
from minisandbox.images.python.index import without_credentials
from minisandbox.images.sources.hostgit import run_git
from minisandbox.images.sources.submodules import Module, read_modules, resolve_url
from minisandbox.spec import GitSource, shown
from minisandbox.store import Store
from minisandbox.store.disk.faults import disk_full

FETCH_TIMEOUT = 1800.0
_REFUSED = re.compile(
    r"unadvertised object|not our ref|want [0-9a-f]+ not valid|no such remote ref|couldn't find remote ref"
    r"|not support shallow"
)
"""What git prints where a server gives out only what a branch or tag names, or cannot leave history out (dumb HTTP)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A commit's pack from a mirror.

    Attributes:
        pack: the file with the commit's tree.
        tree: the tree's object name.
        submodules: the paths of the submodules whose files are in the tree.
        described: git's description of the commit by its last tag; "" without one.
    """

    pack: Path
    tree: str
    submodules: tuple[str, ...]
    described: str


@dataclass(slots=True)
class _Merged:
    """A commit's files together with those of its submodules.

    Attributes:
        entries: the lines of ``git ls-tree -r -z``, the submodules' in place of their gitlinks.
        stores: the object directories that have them.
        submodules: the paths of the submodules.
    """

    entries: list[bytes]
    stores: list[Path]
    submodules: list[str]


@dataclass(frozen=True, slots=True)
class Mirrors:
    """The mirrors of a store, and directories of clones that are tried before the network.

    Attributes:
        store: the store whose directory ``repositories`` holds the mirrors.
        clones: a directory with repositories made elsewhere, bare or not, at most two directories down; None for none.
            Those called ``OWNER/NAME``, ``OWNER__NAME`` or ``NAME`` are looked in first, then all others: the commit
            alone decides the content. They are only read.
    """

    store: Store
    clones: Path | None = None

    def take(self, source: GitSource, work: Path, *, timeout: float = FETCH_TIMEOUT) -> Taken:
        """Write the pack of a commit's tree, fetching the commit first if no mirror has it.

        Args:
            source: the repository and the commit.
            work: an existing directory for the pack; it is the caller's to remove.
            timeout: seconds for each attempt to fetch.

        Returns:
            The pack's file, and what is known of the commit.

        Raises:
            SourceError: the repository cannot be reached or has no such commit.
            ProgramNotFound: there is no git.
            DiskFull: the disk is full.
        """
        repository = self._repository(source, timeout)
        # a shallow commit has no parents here, but its tree is complete
        tree = _git(["-C", str(repository), "rev-parse", "--verify", f"{source.commit}^{{tree}}"], source).strip()
        objects, merged = repository, _Merged([], [], [])
        self._merge(merged, source, repository, b"", timeout)
        if merged.submodules:
            objects = work / "merged.git"
            tree = _write_tree(merged, objects, repository, source)
        pack = work / "tree.pack"
        with pack.open("xb") as target:
            command = ["-C", str(objects), "pack-objects", "--quiet", "--revs", "--stdout", "--threads=1"]
            _run(command, source, stdin=tree.encode(), stdout=target.fileno(), timeout=timeout)
        return Taken(pack, tree, tuple(merged.submodules), _described(repository, source))

    def _merge(self, merged: _Merged, source: GitSource, repository: Path, prefix: bytes, timeout: float) -> None:
        """Add a commit's files and, in place of each gitlink, those of its submodule; other gitlinks stay.

        Args:
            merged: the collection to extend.
            source: the commit.
            repository: a repository with the commit.
            prefix: the path of its files, with a slash at its end; empty for the superproject.
            timeout: seconds for each attempt to fetch.
        """
        listing = _run(["-C", str(repository), "ls-tree", "-r", "-z", source.commit], source, timeout=FETCH_TIMEOUT)
        entries = listing.stdout.split(b"\0")[:-1]
        has_links = any(entry.startswith(b"160000 ") for entry in entries)
        modules = _modules(repository, source) if has_links else {}
        merged.stores.append(_objects(repository, source))
        for entry in entries:
            kind, _, path = entry.partition(b"\t")
            module = modules.get(path) if kind.startswith(b"160000 ") else None
            if module is None or not module.is_checked_out:
                merged.entries.append(kind + b"\t" + prefix + path)
                continue
            shown_path = os.fsdecode(prefix + path)
            submodule = _submodule(source, module, kind.split()[-1].decode(), shown_path)
            submodule_repository = self._of_submodule(submodule, source, shown_path, timeout)
            merged.submodules.append(shown_path)
            self._merge(merged, submodule, submodule_repository, prefix + path + b"/", timeout)

    def _of_submodule(self, submodule: GitSource, source: GitSource, path: str, timeout: float) -> Path:
        """Return a repository with a submodule's commit."""
        try:
            # a server's .gitmodules could name any repository of this machine
            return self._repository(submodule, timeout, local=_is_local(source.url))
        except SourceError as error:
            name = "/".join(_words(submodule)) or "OWNER/NAME"
            raise SourceError(
                f"cannot fetch submodule {path!r} of {_shown(source)}: "
                f"commit {submodule.commit} of {_shown(submodule)}",
                reason=": ".join(filter(None, (error.what, error.reason))),
                hint=f"give --repo-mirrors DIR with a clone at DIR/{name} that has the commit",
            ) from error

    def describe(self, source: GitSource) -> str:
        """Return git's description of a commit by its last tag; "" if no local repository has both."""
        places = (*self._local_clones(source), self._mirror(source))
        repository = next((path for path in places if _has(path, source)), None)
        return "" if repository is None else _described(repository, source)

    def _local_clones(self, source: GitSource) -> list[Path]:
        return [] if self.clones is None else _repositories(self.clones, source)

    def _mirror(self, source: GitSource) -> Path:
        return self.store.root / "repositories" / mirror_name(_place(source))

    def _repository(self, source: GitSource, timeout: float, *, local: bool = True) -> Path:
        """Return a repository with a commit; fetch it if necessary. ``local`` allows paths of this machine."""
        local_clones, mirror = self._local_clones(source), self._mirror(source)
        is_refused = _is_local(source.url) and not local
        for path in local_clones if is_refused else (*local_clones, mirror):
            if _has(path, source):
                return path
        if is_refused:
            raise SourceError("a repository of a server may not name a path of this machine")
        with self.store.lock(f"repository-{mirror.name}"):
            if not _has(mirror, source):
                _fetch(source, mirror, timeout, local_clones)
        return mirror


def _repositories(folder: Path, source: GitSource) -> list[Path]:
    """Return the git repositories in a directory or one level below; those named like the source come first."""
    repositories: list[Path] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _is_repository(entry):
            repositories.append(entry)
        elif entry.is_dir():
            repositories += filter(_is_repository, sorted(entry.iterdir()))
    return sorted(repositories, key=_likeness(source))


def _is_repository(path: Path) -> bool:
    return (path / "HEAD").is_file() or (path / ".git").exists()


def _likeness(source: GitSource) -> Callable[[Path], int]:
    """Return a sort key of paths: 0 if a path has the source's OWNER and NAME, 1 for NAME alone, else 2."""
    name_parts = _words(source)
    name = re.compile(
        r"(?:.*[^a-z0-9])?" + r"[^a-z0-9]+".join(map(re.escape, name_parts)).lower() if name_parts else "(?!)"
    )
    last = name_parts[-1].lower() if name_parts else ""

    def likeness(path: Path) -> int:
        spelled = f"{path.parent.name}/{path.name.removesuffix('.git')}".lower().removesuffix("/repo")
        return 0 if name.fullmatch(spelled) else 1 if last and last in spelled else 2

    return likeness


def _words(source: GitSource) -> list[str]:
    """Return the last two parts of a repository's URL: OWNER and NAME."""
    return [word for word in re.split(r"[/:]", urlsplit(source.url).path.removesuffix(".git")) if word][-2:]


def _described(repository: Path, source: GitSource) -> str:
    """Return git's description of a commit by its last tag with a number (``5.4.1-159-g5e7f1ab``), or ""."""
    command = ["-C", str(repository), "describe", "--tags", "--long", "--match", "*[0-9]*", source.commit]
    done = _run(command, source, timeout=FETCH_TIMEOUT, check=False)
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def read_committed(folder: Path, url: str, commit: str, path: str) -> str | None:
    """Return the text of a file at a commit, from a directory of clones; None if none has it.

    Args:
        folder: the directory with the repositories, as ``--repo-mirrors`` names it.
        url: the repository's URL; clones of similar names are tried first.
        commit: the full commit.
        path: the file, from the repository's root.
    """
    source = GitSource(url, commit)
    for repository in _repositories(folder, source):
        if _has(repository, source):
            done = _run(["-C", str(repository), "show", f"{commit}:{path}"], source, timeout=FETCH_TIMEOUT, check=False)
            return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
    return None


def find_commit(folder: Path, url: str, revision: str) -> str | None:
    """Return the full commit id of a revision, from a directory of clones; None if none has it.

    Args:
        folder: the directory with the repositories, as ``--repo-mirrors`` names it.
        url: the repository's URL; clones of similar names are tried first.
        revision: a branch, or ``COMMIT^`` for the commit before one.
    """
    source = GitSource(url, "0" * 40)
    for repository in _repositories(folder, source):
        command = ["rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}"]
        done = _run(["-C", str(repository), *command], source, timeout=FETCH_TIMEOUT, check=False)
        if done.returncode == 0:
            return done.stdout.decode().strip()
    return None


def mirror_name(url: str) -> str:
    """Return the directory name of a repository's mirror: readable, and unique for every URL."""
    plain = _plain(url)
    label = re.sub(r"[^A-Za-z0-9.-]+", "_", plain.rpartition("://")[2]).strip("._-")[-60:]
    return f"{label or 'repository'}-{_digest(plain)}.git"


def _plain(url: str) -> str:
    return without_credentials(url).removesuffix("/").removesuffix(".git")


def origin(source: GitSource) -> str:
    """Return the identity of a commit's origin: knowing a commit id grants no access to others' fetches."""
    return _digest(_plain(_place(source)))


def _digest(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()[:32]


def _has(repository: Path, source: GitSource) -> bool:
    """Return whether a repository has a commit with all its objects, without fetching any."""
    if not repository.is_dir():
        return False
    probe = ["-C", str(repository), "cat-file", "-e", f"{source.commit}^{{tree}}"]
    return _run(probe, source, timeout=FETCH_TIMEOUT, check=False).returncode == 0


def _fetch(source: GitSource, mirror: Path, timeout: float, local_clones: list[Path]) -> None:
    try:
        if not (mirror / "HEAD").is_file():
            mirror.parent.mkdir(mode=0o700, exist_ok=True)
            _git(["init", "--quiet", "--bare", "--template=", str(mirror)], source)
        if not _fetch_one(source, mirror, timeout):
            _fetch_branches(source, mirror, timeout)
    except SourceError as error:
        if local_clones:
            looked = ", ".join(map(str, local_clones))
            error.reason = "\n".join(filter(None, (f"{looked} has no commit {source.commit}", error.reason)))
        raise


def _fetch_one(source: GitSource, mirror: Path, timeout: float) -> bool:
    """Fetch only the commit; return False if the server refuses to send a commit by its id.

    Raises:
        SourceError: another failure; fetching more of the repository would fail as well, or take hours.
    """
    refspec = f"{source.commit}:refs/kept/{source.commit}"  # git may remove unreferenced objects
    command = ["-C", str(mirror), "fetch", "--quiet", "--no-tags", "--depth=1", "--", _place(source), refspec]
    done = _run(command, source, timeout=timeout, check=False, fetches=True)
    if done.returncode == 0:
        return True
    message = done.stderr.decode("utf-8", "replace")
    if _REFUSED.search(message) is None:
        raise _failure(source, message)
    return False


def _fetch_branches(source: GitSource, mirror: Path, timeout: float) -> None:
    """Fetch all branches and tags, without pull requests, which may be tens of thousands."""
    refspecs = [f"+refs/{kind}/*:refs/fetched/{kind}/*" for kind in ("heads", "tags")]
    _run(
        ["-C", str(mirror), "fetch", "--quiet", "--no-tags", "--", _place(source), *refspecs],
        source,
        timeout=timeout,
        fetches=True,
    )
    if not _has(mirror, source):
        raise SourceError(
            f"{_shown(source)} has no commit {source.commit}",
            reason="its server does not give out that commit by its name, and no branch or tag leads to it",
            hint="check the commit, or give --repo-mirrors DIR with a repository that has it",
        )


def _modules(repository: Path, source: GitSource) -> dict[bytes, Module]:
    """Return the entries of a commit's ``.gitmodules`` by path; empty if it is missing or malformed."""
    command = ["-C", str(repository), "config", "--null", f"--blob={source.commit}:.gitmodules", "--list"]
    done = _run(command, source, timeout=FETCH_TIMEOUT, check=False)
    return read_modules(done.stdout) if done.returncode == 0 else {}


def _submodule(source: GitSource, module: Module, commit: str, path: str) -> GitSource:
    url = resolve_url(_place(source), module.url)
    try:
        return GitSource(url, commit)
    except InvalidValue as error:
        raise SourceError(f"cannot fetch submodule {path!r} of {_shown(source)}", reason=error.what) from error


def _objects(repository: Path, source: GitSource) -> Path:
    command = ["-C", str(repository), "rev-parse", "--git-path", "objects"]
    return (repository / _git(command, source).removesuffix("\n")).absolute()


def _write_tree(merged: _Merged, target: Path, repository: Path, source: GitSource) -> str:
    """Create a repository that borrows the objects of a merged commit; return the id of its tree."""
    style = _git(["-C", str(repository), "rev-parse", "--show-object-format"], source).strip()
    _git(["init", "--quiet", "--bare", "--template=", f"--object-format={style}", str(target)], source)
    (target / "objects/info").mkdir(exist_ok=True)
    (target / "objects/info/alternates").write_bytes(b"".join(os.fsencode(path) + b"\n" for path in merged.stores))
    command = ["-C", str(target), "update-index", "-z", "--index-info"]
    _run(command, source, timeout=FETCH_TIMEOUT, stdin=b"".join(entry + b"\0" for entry in merged.entries))
    return _git(["-C", str(target), "write-tree"], source).strip()


def _git(arguments: list[str], source: GitSource) -> str:
    return _run(arguments, source, timeout=FETCH_TIMEOUT).stdout.decode("utf-8", "surrogateescape")


def _run(
    arguments: list[str],
    source: GitSource,
    *,
    timeout: float,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    check: bool = True,
    fetches: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    try:
        done = run_git(arguments, timeout=timeout, stdin=stdin, stdout=stdout, fetches=fetches)
    except subprocess.TimeoutExpired:
        raise SourceError(
            f"fetching {_shown(source)} took longer than {timeout:.0f} s",
            reason="the server or the network is slow, or hangs",
            hint="try again; a local clone needs no network (git: url: /path, or --repo-mirrors DIR)",
        ) from None
    if check and done.returncode != 0:
        raise _failure(source, done.stderr.decode("utf-8", "replace"))
    return done


def _failure(source: GitSource, message: str) -> SourceError | DiskFull:
    what = f"fetch {source.commit[:12]} from {_shown(source)}"
    if "No space left on device" in message or "Disk quota exceeded" in message:
        return disk_full(what)
    lines = _git_messages(source, message)
    hint = "check the address and your access to it; on a machine without network give --repo-mirrors DIR"
    if "dubious ownership" in message:
        hint = "the repository belongs to another user: `git config --global --add safe.directory PATH` trusts it"
    if re.search(r"unable to read [0-9a-f]{40}|missing (?:blob|tree) object", message):
        hint = "the repository is not whole, as after a partial clone: `git fetch --refetch` in it, or a new clone"
    return SourceError(f"cannot {what}", reason=" / ".join(lines[-4:]), hint=hint)


def _git_messages(source: GitSource, message: str) -> list[str]:
    """Return git's messages line by line, with secrets removed from the URL: git keeps the query."""
    for form in (source.url, without_credentials(source.url)):
        message = message.replace(form, _shown(source))
    return [line for line in message.splitlines() if line.strip()]


def _place(source: GitSource) -> str:
    """Return the URL for git; a local path becomes absolute, because git runs in another directory.

    A directory that is called like an address is not a mirror: rows were read so too, and each address has one mirror.
    """
    return str(Path(source.url).expanduser().absolute()) if _is_path(source.url) else source.url


def _is_path(url: str) -> bool:
    return ":" not in url.partition("/")[0]


def _is_local(url: str) -> bool:
    """Return whether git reads an address from this machine."""
    return _is_path(url) or url.startswith("file://")


def _shown(source: GitSource) -> str:
    return shown(source.url)
