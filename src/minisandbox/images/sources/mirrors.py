"""Local mirrors of git repositories: fetch each requested commit once, and export its tree without history.

A mirror keeps all commits that were requested. Commits share objects, so another commit of the same repository needs
only a small download. An image receives a pack of the commit's tree, without history, in which the files of submodules
replace their gitlinks.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import DiskFull, InvalidValue, SourceError
from minisandbox.git import find_clones, has_commit, name_parts, run_git
from minisandbox.images.python.index import without_credentials
from minisandbox.spec import GitSource, shown
from minisandbox.store import Store
from minisandbox.store.disk.faults import disk_full

FETCH_TIMEOUT = 1800.0
_REFUSED = re.compile(
    r"unadvertised object|not our ref|want [0-9a-f]+ not valid|no such remote ref|couldn't find remote ref"
    r"|not support shallow"
)
"""Git's messages if a server does not send commits by id, or no shallow commits (dumb HTTP)."""


@dataclass(frozen=True, slots=True)
class CommitPack:
    """The pack of a commit's tree, written from a mirror.

    Attributes:
        pack: the pack file.
        tree: the object name of the tree.
        submodules: the paths of the submodules whose files are in the tree.
        described: the ``git describe`` output for the commit; "" without a tag.
    """

    pack: Path
    tree: str
    submodules: tuple[str, ...]
    described: str


@dataclass(slots=True)
class _Merged:
    """The files of a commit, in which the files of submodules replace their gitlinks.

    Attributes:
        entries: the lines of ``git ls-tree -r -z`` for all files.
        stores: the git object directories of the superproject and the submodules.
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
        clones: a directory with existing clones, bare or not, at most two levels deep; None for no clones. Clones named
            ``OWNER/NAME``, ``OWNER__NAME`` or ``NAME`` are tried first, then all others, because the commit id alone
            determines the content. Clones are never changed.
    """

    store: Store
    clones: Path | None = None

    def take(self, source: GitSource, staging: Path, *, timeout: float = FETCH_TIMEOUT) -> CommitPack:
        """Write the pack of a commit's tree; fetch the commit first if no clone and no mirror has it.

        Args:
            source: the repository and the commit.
            staging: an existing directory for the pack, which the caller removes.
            timeout: the timeout of each fetch in seconds.

        Returns:
            The pack, and facts about the commit.

        Raises:
            SourceError: the repository cannot be reached or has no such commit.
            ProgramNotFound: there is no git.
            DiskFull: the disk is full.
        """
        repository = self._repository(source, timeout)
        # Read the tree, which is complete even if a shallow fetch lacks the commit's parents.
        tree = _git(source, repository, "rev-parse", "--verify", f"{source.commit}^{{tree}}").strip()
        objects, merged = repository, _Merged([], [], [])
        self._merge(merged, source, repository, b"", timeout)
        if merged.submodules:
            objects = staging / "merged.git"
            tree = _write_tree(merged, objects, repository, source)
        pack = staging / "tree.pack"
        with pack.open("xb") as target:
            command = ("pack-objects", "--quiet", "--revs", "--stdout", "--threads=1")
            _run(source, objects, *command, stdin=tree.encode(), stdout=target.fileno(), timeout=timeout)
        return CommitPack(pack, tree, tuple(merged.submodules), _described(repository, source))

    def _merge(self, merged: _Merged, source: GitSource, repository: Path, prefix: bytes, timeout: float) -> None:
        """Add the files of a commit and, recursively, of its submodules; keep gitlinks that git would not check out.

        Args:
            merged: the collection to extend.
            source: the commit.
            repository: a repository with the commit.
            prefix: the path of the commit's files with a trailing slash; empty for the superproject.
            timeout: the timeout of each fetch in seconds.
        """
        listing = _run(source, repository, "ls-tree", "-r", "-z", source.commit)
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
        """Return a repository that contains a submodule's commit; fetch the commit if it is missing."""
        try:
            # The .gitmodules of a remote repository must not give access to repositories of this machine.
            return self._repository(submodule, timeout, local=_is_local(source.url))
        except SourceError as error:
            name = "/".join(name_parts(submodule.url)) or "OWNER/NAME"
            raise SourceError(
                f"cannot fetch submodule {path!r} of {shown(source.url)}: "
                f"commit {submodule.commit} of {shown(submodule.url)}",
                reason=": ".join(filter(None, (error.what, error.reason))),
                hint=f"give --repo-mirrors DIR with a clone at DIR/{name} that has the commit",
            ) from error

    def describe(self, source: GitSource) -> str:
        """Return the ``git describe`` output for a commit; "" if no local repository has the commit and a tag."""
        repositories = (*self._local_clones(source), self._mirror(source))
        repository = next((path for path in repositories if has_commit(path, source.commit)), None)
        return "" if repository is None else _described(repository, source)

    def _local_clones(self, source: GitSource) -> list[Path]:
        return [] if self.clones is None else find_clones(self.clones, source.url)

    def _mirror(self, source: GitSource) -> Path:
        return self.store.root / "repositories" / mirror_name(_location(source))

    def _repository(self, source: GitSource, timeout: float, *, local: bool = True) -> Path:
        """Return a repository that contains a commit; fetch it if missing. ``local`` allows paths of this machine."""
        local_clones, mirror = self._local_clones(source), self._mirror(source)
        is_refused = _is_local(source.url) and not local
        for path in local_clones if is_refused else (*local_clones, mirror):
            if has_commit(path, source.commit):
                return path
        if is_refused:
            raise SourceError("a repository of a server may not name a path of this machine")
        with self.store.lock(f"repository-{mirror.name}"):
            if not has_commit(mirror, source.commit):
                _fetch(source, mirror, timeout, local_clones)
        return mirror


def _described(repository: Path, source: GitSource) -> str:
    """Return the ``git describe`` output from the last tag with a digit (``5.4.1-159-g5e7f1ab``), or ""."""
    command = ("describe", "--tags", "--long", "--match", "*[0-9]*", source.commit)
    process = _run(source, repository, *command, check=False)
    return process.stdout.decode("utf-8", "replace").strip() if process.returncode == 0 else ""


def mirror_name(url: str) -> str:
    """Return the directory name of a repository's mirror, which is readable and unique for each URL."""
    address = _canonical(url).rpartition("://")[2]
    label = re.sub(r"[^A-Za-z0-9.-]+", "_", address).strip("._-")[-60:]
    return f"{label or 'repository'}-{_url_digest(url)}.git"


def _canonical(url: str) -> str:
    return without_credentials(url).removesuffix("/").removesuffix(".git")


def origin(source: GitSource) -> str:
    """Return a hash of the URL for layer keys, so that knowing a commit id does not suffice to use a layer."""
    return _url_digest(_location(source))


def _url_digest(url: str) -> str:
    return hashlib.sha256(_canonical(url).encode()).hexdigest()[:32]


def _fetch(source: GitSource, mirror: Path, timeout: float, local_clones: list[Path]) -> None:
    try:
        if not (mirror / "HEAD").is_file():
            mirror.parent.mkdir(mode=0o700, exist_ok=True)
            _git(source, mirror.parent, "init", "--quiet", "--bare", "--template=", str(mirror))
        if not _fetch_one(source, mirror, timeout):
            _fetch_branches(source, mirror, timeout)
    except SourceError as error:
        if local_clones:
            folders = ", ".join(map(str, local_clones))
            error.reason = "\n".join(filter(None, (f"{folders} has no commit {source.commit}", error.reason)))
        raise


def _fetch_one(source: GitSource, mirror: Path, timeout: float) -> bool:
    """Fetch only the commit; return False if the server refuses to send a commit by its id.

    Raises:
        SourceError: the fetch failed for another reason, so that fetching all branches would fail too, or take hours.
    """
    refspec = f"{source.commit}:refs/kept/{source.commit}"  # the ref protects the commit from git gc
    command = ("fetch", "--quiet", "--no-tags", "--depth=1", "--", _location(source), refspec)
    process = _run(source, mirror, *command, timeout=timeout, check=False, fetches=True)
    if process.returncode == 0:
        return True
    message = process.stderr.decode("utf-8", "replace")
    if _REFUSED.search(message) is None:
        raise _failure(source, message)
    return False


def _fetch_branches(source: GitSource, mirror: Path, timeout: float) -> None:
    """Fetch all branches and tags; skip refs of pull requests, of which there may be tens of thousands.

    Raises:
        SourceError: the fetch failed, or no branch or tag contains the commit.
    """
    refspecs = [f"+refs/{kind}/*:refs/fetched/{kind}/*" for kind in ("heads", "tags")]
    command = ("fetch", "--quiet", "--no-tags", "--", _location(source), *refspecs)
    _run(source, mirror, *command, timeout=timeout, fetches=True)
    if not has_commit(mirror, source.commit):
        raise SourceError(
            f"{shown(source.url)} has no commit {source.commit}",
            reason="its server does not give out that commit by its name, and no branch or tag leads to it",
            hint="check the commit, or give --repo-mirrors DIR with a repository that has it",
        )


def _modules(repository: Path, source: GitSource) -> dict[bytes, _Module]:
    """Return the entries of a commit's ``.gitmodules`` by path; empty if it is missing or malformed."""
    command = ("config", "--null", f"--blob={source.commit}:.gitmodules", "--list")
    process = _run(source, repository, *command, check=False)
    return _read_modules(process.stdout) if process.returncode == 0 else {}


def _submodule(source: GitSource, module: _Module, commit: str, path: str) -> GitSource:
    url = _resolve_url(_location(source), module.url)
    try:
        return GitSource(url, commit)
    except InvalidValue as error:
        raise SourceError(f"cannot fetch submodule {path!r} of {shown(source.url)}", reason=error.what) from error


def _objects(repository: Path, source: GitSource) -> Path:
    return (repository / _git(source, repository, "rev-parse", "--git-path", "objects").removesuffix("\n")).absolute()


def _write_tree(merged: _Merged, target: Path, repository: Path, source: GitSource) -> str:
    """Write the tree of merged files into a new repository that borrows their objects; return the tree's id."""
    object_format = _git(source, repository, "rev-parse", "--show-object-format").strip()
    init = ("init", "--quiet", "--bare", "--template=", f"--object-format={object_format}")
    _git(source, target.parent, *init, str(target))
    (target / "objects/info").mkdir(exist_ok=True)
    (target / "objects/info/alternates").write_bytes(b"".join(os.fsencode(path) + b"\n" for path in merged.stores))
    index = b"".join(entry + b"\0" for entry in merged.entries)
    _run(source, target, "update-index", "-z", "--index-info", stdin=index)
    return _git(source, target, "write-tree").strip()


def _git(source: GitSource, folder: Path, *arguments: str) -> str:
    return _run(source, folder, *arguments).stdout.decode("utf-8", "surrogateescape")


def _run(
    source: GitSource,
    folder: Path,
    *arguments: str,
    timeout: float = FETCH_TIMEOUT,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    check: bool = True,
    fetches: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    try:
        process = run_git(["-C", str(folder), *arguments], timeout=timeout, stdin=stdin, stdout=stdout, fetches=fetches)
    except subprocess.TimeoutExpired:
        raise SourceError(
            f"fetching {shown(source.url)} took longer than {timeout:.0f} s",
            reason="the server or the network is slow, or hangs",
            hint="try again; a local clone needs no network (git: url: /path, or --repo-mirrors DIR)",
        ) from None
    if check and process.returncode != 0:
        raise _failure(source, process.stderr.decode("utf-8", "replace"))
    return process


def _failure(source: GitSource, message: str) -> SourceError | DiskFull:
    action = f"fetch {source.commit[:12]} from {shown(source.url)}"
    if "No space left on device" in message or "Disk quota exceeded" in message:
        return disk_full(action)
    lines = _git_messages(source, message)
    hint = "check the address and your access to it; on a machine without network give --repo-mirrors DIR"
    if "dubious ownership" in message:
        hint = "the repository belongs to another user: `git config --global --add safe.directory PATH` trusts it"
    if re.search(r"unable to read [0-9a-f]{40}|missing (?:blob|tree) object", message):
        hint = "the repository is not whole, as after a partial clone: `git fetch --refetch` in it, or a new clone"
    return SourceError(f"cannot {action}", reason=" / ".join(lines[-4:]), hint=hint)


def _git_messages(source: GitSource, message: str) -> list[str]:
    """Return the lines of git's messages; redact the URL, because git prints URLs with secrets in the query."""
    for url in (source.url, without_credentials(source.url)):
        message = message.replace(url, shown(source.url))
    return [line for line in message.splitlines() if line.strip()]


def _location(source: GitSource) -> str:
    """Return the URL for git; make a local path absolute, because git runs in another directory.

    A string that looks like a URL is never read as a local path, even if such a directory exists.
    """
    return str(Path(source.url).expanduser().absolute()) if _is_path(source.url) else source.url


def _is_path(url: str) -> bool:
    return ":" not in url.partition("/")[0]


def _is_local(url: str) -> bool:
    """Return whether a URL names a repository of this machine."""
    return _is_path(url) or url.startswith("file://")


# --- submodules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Module:
    """An entry of ``.gitmodules``.

    Attributes:
        url: the URL of the submodule's repository; ``./`` and ``../`` are relative to the superproject's URL.
        is_checked_out: whether ``git submodule update`` checks the submodule out (``update`` is not ``none``).
    """

    url: str
    is_checked_out: bool


def _read_modules(listing: bytes) -> dict[bytes, _Module]:
    """Return the entries of ``.gitmodules`` that have a path and a URL, by path.

    Args:
        listing: the output of ``git config --null --list`` for ``.gitmodules``.
    """
    sections: dict[bytes, dict[bytes, bytes]] = {}
    for line in listing.split(b"\0"):
        key, _, value = line.partition(b"\n")
        section, _, entry = key.partition(b".")
        name, _, variable = entry.rpartition(b".")
        if section == b"submodule" and name:
            sections.setdefault(name, {})[variable] = value
    return {
        fields[b"path"].rstrip(b"/"): _Module(os.fsdecode(fields[b"url"]), fields.get(b"update") != b"none")
        for fields in sections.values()
        if fields.get(b"path") and fields.get(b"url")
    }


def _resolve_url(base: str, url: str) -> str:
    """Return the absolute URL of a submodule, as ``git submodule init`` resolves it.

    Args:
        base: the superproject's URL.
        url: the submodule's URL in ``.gitmodules``.
    """
    if not url.startswith(("./", "../")):
        return url
    base, separator = base.rstrip("/"), "/"
    while url.startswith(("./", "../")):
        step, _, url = url.partition("/")
        if step == "..":
            base, separator, _ = base.rpartition("/" if "/" in base else ":")
    return f"{base}{separator}{url}".rstrip("/")
