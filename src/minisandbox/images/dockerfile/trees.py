"""Read the build context, and match sources with wildcards in the context or in an image."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from minisandbox.errors import DockerfileError
from minisandbox.images.tree import FileTree, LinkError, Parts, resolve
from minisandbox.launch.kernel import syscalls
from minisandbox.store.blobs.lower_layers import attributes_of

_MOST_IGNORE = 1 << 20


@dataclass(frozen=True, slots=True)
class ContextTree:
    """The files of a build context.

    Attributes:
        root: the directory.
        ignored: the patterns of ``.dockerignore``; None if there is no such file.
    """

    root: Path
    ignored: PatternMatcher | None = None
    closed: bool = True

    def status(self, path: Parts) -> os.stat_result | None:
        """Return the status of a path; None if the path is missing or excluded by ``.dockerignore``."""
        try:
            status = os.lstat(self._host_path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status if not path or self._shows(path, status) else None

    def names(self, path: Parts) -> list[str]:
        """Return the names in a directory, sorted, without those that ``.dockerignore`` excludes."""
        names = sorted(os.listdir(self._host_path(path)))
        if self.ignored is None:
            return names
        return [name for name in names if self._shows((*path, name), os.lstat(self._host_path((*path, name))))]

    def link(self, path: Parts) -> str:
        """Return the target of a link."""
        return os.readlink(self._host_path(path))

    def open(self, path: Parts) -> io.BufferedReader:
        """Open a file; fail if a parent directory has become a link."""
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.fdopen(syscalls.openat2(root, "/".join(path), os.O_RDONLY, syscalls.RESOLVE_INSIDE), "rb")
        finally:
            os.close(root)

    def attributes(self, path: Parts) -> dict[str, bytes]:
        """Return the extended attributes of a path."""
        return attributes_of(self._host_path(path))

    def _host_path(self, path: Parts) -> str:
        return "/".join((os.fspath(self.root), *path))

    def _shows(self, path: Parts, status: os.stat_result) -> bool:
        if self.ignored is None or not self.ignored.matches(name := "/".join(path)):
            return True
        return stat.S_ISDIR(status.st_mode) and self.ignored.may_match_under(name) and bool(self.names(path))


def open_context(root: Path, dockerfile: Path) -> ContextTree:
    """Return the files of a build context.

    Args:
        root: the directory.
        dockerfile: the Dockerfile; ``NAME.dockerignore`` next to it takes precedence over ``.dockerignore``.

    Raises:
        DockerfileError: there is no such directory, or the ``.dockerignore`` is malformed.
    """
    if not root.is_dir():
        raise DockerfileError(f"{root} is not a directory", hint="give the directory that holds the files for COPY")
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), root / ".dockerignore"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with path.open("rb") as file:
                patterns = file.read(_MOST_IGNORE + 1).decode("utf-8-sig", "surrogateescape")
            if len(patterns) > _MOST_IGNORE:
                raise DockerfileError(f"{path} has more than {_MOST_IGNORE} bytes")
            try:
                return ContextTree(root, PatternMatcher(patterns.splitlines()))
            except ValueError as error:
                raise DockerfileError(f"{path} cannot be used", reason=str(error)) from None
    return ContextTree(root)


def split(path: str) -> Parts:
    """Split a path into parts, and resolve ``..``.

    Raises:
        LinkError: a ``..`` leads out of the root.
    """
    names: list[str] = []
    for name in path.split("/"):
        if name == ".." and not names:
            raise LinkError("it lies outside of the context")
        if name == "..":
            names.pop()
        elif name not in ("", "."):
            names.append(name)
    return tuple(names)


def find_matches(tree: FileTree, pattern: str) -> list[tuple[Parts, Parts]]:
    """Return (path, path with links resolved) for each path that matches a COPY source with wildcards.

    Args:
        tree: the tree.
        pattern: the source; each part of the path may have wildcards, as in ``.dockerignore``.

    Raises:
        LinkError: a link leads out of a build context, or is part of a cycle.
        ValueError: a wildcard is malformed.
    """
    matches: list[tuple[Parts, Parts]] = [((), ())]
    for part in split(pattern):
        if not is_pattern(part):
            name = part
            matches = [
                ((*spelled_path, name), resolve(tree, (*real_path, name))) for spelled_path, real_path in matches
            ]
            continue
        # Python's re warns about "[" in a character class. In a COPY source, a leading "!" is literal.
        with warnings.catch_warnings(action="ignore"):
            matcher = PatternMatcher([f"\\{part}" if part[0] in "! " else part])
        matches = [
            ((*spelled_path, name), resolve(tree, (*real_path, name)))
            for spelled_path, real_path in matches
            if (status := tree.status(real_path)) is not None and stat.S_ISDIR(status.st_mode)
            for name in tree.names(real_path)
            if matcher.matches(name)
        ]
    return [(spelled_path, real_path) for spelled_path, real_path in matches if tree.status(real_path) is not None]


def find_link(tree: FileTree, path: str) -> tuple[str, str] | None:
    """Return the first dangling symlink in a path, with its target; None if the path has no such link."""
    real_path: Parts = ()
    parts = split(path)
    for depth, part in enumerate(parts, 1):
        status = tree.status((*real_path, part))
        if status is not None and stat.S_ISLNK(status.st_mode):
            target = resolve(tree, (*real_path, part))
            if tree.status(target) is None:
                return "/".join(parts[:depth]), tree.link((*real_path, part))
            real_path = target
        else:
            real_path = (*real_path, part)
    return None


def is_pattern(text: str) -> bool:
    """Return whether a string has wildcards."""
    return any(sign in text for sign in "*?[\\")
