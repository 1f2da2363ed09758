"""List the files that a COPY copies, and hash them for the layer's key."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import NoReturn

from e2b_dockerfile_utils import PatternMatcher

from minisandbox.images.dockerfile.parsing import refuse
from minisandbox.images.dockerfile.trees import find_link, find_matches, is_pattern, split
from minisandbox.images.tree import FileTree, LinkError, Parts
from minisandbox.spec import Context, CopyFiles
from minisandbox.store.blobs.tarstream import DIRECTORY, FIFO, FILE, LINK, Member
from minisandbox.values import JSONValue

WHITEOUT = ".wh."
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: LINK, stat.S_IFIFO: FIFO}


@dataclass(frozen=True, slots=True)
class Item:
    """A file, directory or link to copy.

    Attributes:
        source: the path in the source tree.
        target: the path below the destination.
        member: the tar member of the layer, without a name.
        same_as: for a hard link, the target of the first item with the same inode; otherwise None.
    """

    source: Parts
    target: Parts
    member: Member
    same_as: Parts | None = None


@dataclass(frozen=True, slots=True)
class CopySource:
    """The files that one source argument of a COPY matches.

    Attributes:
        items: the files.
        is_folder: whether the source is a directory; a COPY copies its contents, not the directory itself.
    """

    items: tuple[Item, ...]
    is_folder: bool


def list_sources(copy: CopyFiles, tree: FileTree) -> tuple[CopySource, ...]:
    """List the files to copy.

    Args:
        copy: the instruction.
        tree: the tree of the sources.

    Raises:
        DockerfileError: a source does not exist, lies outside the context, or cannot be read.
    """
    try:
        exclusions = PatternMatcher(list(copy.excludes)) if copy.excludes else None
    except ValueError as error:
        refuse(copy, f"--exclude: {error}")
    sources: list[CopySource] = []
    for pattern in copy.sources:
        try:
            matches = find_matches(tree, pattern)
        except (LinkError, ValueError) as error:
            refuse(copy, f"{pattern!r}: {error}", "put what is copied into the context")
        except OSError as error:
            refuse(copy, f"{pattern!r} cannot be read: {error}")
        if not matches and not is_pattern(pattern):
            _refuse_missing(copy, tree, pattern)
        sources += [_copy_source(copy, tree, pattern, path, real_path, exclusions) for path, real_path in matches]
    return tuple(sources)


def _refuse_missing(copy: CopyFiles, tree: FileTree, pattern: str) -> NoReturn:
    location, hint = "that image", None
    if isinstance(copy.origin, Context):
        location, hint = "the context", "is it left out by .dockerignore?"
    if (link := find_link(tree, pattern)) is not None:
        refuse(
            copy, f"{link[0]!r} is a link to {link[1]!r}, which is not in {location}", hint and f"copy it there; {hint}"
        )
    refuse(copy, f"there is no {pattern!r} in {location}", hint)


def _copy_source(
    copy: CopyFiles, tree: FileTree, pattern: str, path: Parts, real_path: Parts, exclusions: PatternMatcher | None
) -> CopySource:
    status = tree.status(real_path)
    assert status is not None
    is_folder = stat.S_ISDIR(status.st_mode)
    lister = _Lister(copy, tree, exclusions)
    if copy.keep_parents:
        prefix = path[len(split(pattern.partition("/./")[0])) if "/./" in pattern.lstrip("./") else 0 :]
        for depth in range(1, len(prefix) + (1 if is_folder else 0)):
            lister.add(real_path[: len(real_path) - len(prefix) + depth], prefix[:depth])
        prefix = prefix if is_folder else prefix[:-1]
    else:
        prefix = ()
    if is_folder:
        lister.add_content(real_path, prefix, ())
    elif exclusions is None or not exclusions.matches(path[-1]):
        lister.add(real_path, (*prefix, path[-1]))
    return CopySource(tuple(lister.items), is_folder)


class _Lister:
    def __init__(self, copy: CopyFiles, tree: FileTree, exclusions: PatternMatcher | None) -> None:
        self.items: list[Item] = []
        self._copy, self._tree, self._exclusions = copy, tree, exclusions
        self._inodes: dict[tuple[int, int], Parts] = {}

    def add_content(self, source: Parts, target: Parts, relative_path: Parts) -> None:
        for name in self._tree.names(source):
            self._add_entry((*source, name), (*target, name), (*relative_path, name))

    def _add_entry(self, source: Parts, target: Parts, relative_path: Parts) -> None:
        status = self._tree.status(source)
        if status is None:
            return
        is_folder = stat.S_ISDIR(status.st_mode)
        if self._exclusions is not None and self._exclusions.matches(name := "/".join(relative_path)):
            has_included = is_folder and self._exclusions.may_match_under(name)
            if not has_included:
                return
        self.add(source, target)
        if is_folder:
            self.add_content(source, target, relative_path)

    def add(self, source: Parts, target: Parts) -> None:
        """Add a file, directory or link to the list; skip devices and sockets, which an image may contain."""
        status = self._tree.status(source)
        if status is None:
            refuse(self._copy, f"{'/'.join(source)!r} is gone", "the context must not change meanwhile")
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            if isinstance(self._copy.origin, Context):
                refuse(self._copy, f"{'/'.join(source)!r} is a device or a socket", "leave it out with .dockerignore")
            return
        if any(part.startswith(WHITEOUT) for part in target):
            refuse(self._copy, f"{'/'.join(source)!r}: no layer can have names that begin with {WHITEOUT}")
        member = Member(
            b"", kind, stat.S_IMODE(status.st_mode), *self._owner(status), status.st_mtime_ns,
            status.st_size if kind == FILE else 0, os.fsencode(self._tree.link(source)) if kind == LINK else b"",
            self._tree.attributes(source) if kind in (FILE, DIRECTORY) else {},
        )  # fmt: skip
        same_as = self._hard_link_target(target, status) if kind == FILE else None
        self.items.append(Item(source, target, member, same_as))

    def _owner(self, status: os.stat_result) -> tuple[int, int]:
        """Return an item's owner: root for files of a build context, the original owner for files of an image."""
        if isinstance(self._copy.origin, Context):
            return 0, 0
        return status.st_uid, status.st_gid

    def _hard_link_target(self, target: Parts, status: os.stat_result) -> Parts | None:
        """Return the target of the first item with the same inode, for a hard link to it, or None."""
        if status.st_nlink == 1:
            return None
        inode = status.st_dev, status.st_ino
        earlier_target = self._inodes.setdefault(inode, target)
        return None if earlier_target == target else earlier_target


def content_digest(sources: tuple[CopySource, ...], tree: FileTree) -> str:
    """Return a hash of the names, modes, links, attributes and contents of files, without times and owners."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(b"D" if source.is_folder else b"F")
        for item in source.items:
            member, content = item.member, ""
            if member.kind == FILE and item.same_as is None:
                with tree.open(item.source) as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            attributes = tuple(sorted(member.attributes.items()))
            target, link = "/".join(item.target), os.fsdecode(member.target)
            row = (target, member.kind, member.mode, content, link, attributes, item.same_as)
            digest.update(repr(row).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def definition(copy: CopyFiles, origin: str) -> dict[str, JSONValue]:
    """Return all inputs of a COPY's layer, which its key is derived from.

    Args:
        copy: the instruction.
        origin: the hash of the copied files of a build context, or the key of the image or stage copied from.
    """
    fields: dict[str, JSONValue] = {
        "kind": "copy",
        "origin": origin,
        "destination": copy.destination,
        "documents": [[document.name, hashlib.sha256(document.content).hexdigest()] for document in copy.documents],
        "several": len(copy.sources),
        "owner": copy.owner,
        "mode": copy.mode,
        "extract": copy.extract,
    }
    if not isinstance(copy.origin, Context):
        fields |= {"sources": list(copy.sources), "excludes": list(copy.excludes), "parents": copy.keep_parents}
    return fields
