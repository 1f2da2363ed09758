"""Write the layers of COPY, ADD and WORKDIR.

Links in a destination path are resolved within the image's layers. The kernel never follows a link of an image.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from minisandbox.errors import ImageRefused
from minisandbox.images.dockerfile.parsing import refuse
from minisandbox.images.dockerfile.sources import WHITEOUT, CopySource, Item
from minisandbox.images.dockerfile.trees import split
from minisandbox.images.tree import FileTree, LinkError, Parts, resolve
from minisandbox.launch.kernel.identity import LAST_ID, last_id
from minisandbox.spec import CopyFiles
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.store.blobs.streams import Blob, LayerStream
from minisandbox.store.blobs.tarstream import DIRECTORY, FILE, HARD_LINK, LINK, Member, TarReader
from minisandbox.store.blobs.unpack import Unpacked, unpack_members

MADE = 1_577_836_800 * 10**9
"""The mtime of files without a source: the start of 2020, because zip(1) and wheels reject times before 1980."""
_CHUNK = 1 << 20
_MOST_TAR = 64 << 30
_MOST_FILE = 16 << 20
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=][rwxXst]*)+)")
_WHO = {"u": (stat.S_IRWXU, 6), "g": (stat.S_IRWXG, 3), "o": (stat.S_IRWXO, 0)}


def copy_layer(
    copy: CopyFiles,
    sources: tuple[CopySource, ...],
    tree: FileTree,
    directory: Path,
    below: LowerLayers,
    *,
    keep_owners: bool,
) -> Unpacked:
    """Write the layer of a COPY.

    Args:
        copy: the instruction.
        sources: the files to copy.
        tree: the tree of the sources.
        directory: a new directory for the layer.
        below: the layers below.
        keep_owners: whether files may get owners other than the user of this process.

    Raises:
        DockerfileError: the destination or the owner does not exist or is invalid, or a file changed during the copy.
        ImageRefused: an added archive is malformed or hostile.
        OSError: a file cannot be written; ENOSPC if the disk is full.
    """
    owner = None
    try:
        owner = find_owner(copy.owner, below) if copy.owner else None
    except ValueError as error:
        if copy.sources or copy.documents:  # if the user of a WORKDIR is unknown, engines use root
            refuse(copy, str(error), "make the user in a RUN before, or give numbers")
    if keep_owners and max(owner or (0,)) > (largest_id := last_id()):
        refuse(copy, f"this process's sandboxes have no ids above {largest_id}", f"give an id up to {largest_id}")
    members = _Members(copy, sources, tree, below, owner)
    return unpack_members(members, directory, lambda: below, keep_owners=keep_owners)


class _CopiedTree:
    """The image's file tree, in which files that are already extracted hide the image's files and links."""

    def __init__(self, image: FileTree) -> None:
        self.closed = False
        self.paths: set[Parts] = set()
        self._image = image
        self.names, self.link, self.open, self.attributes = image.names, image.link, image.open, image.attributes

    def status(self, path: Parts) -> os.stat_result | None:
        return None if path in self.paths else self._image.status(path)


class _Members:
    """Iterator over the files of a COPY as tar members, with the interface of :class:`.TarReader`."""

    def __init__(
        self,
        copy: CopyFiles,
        sources: tuple[CopySource, ...],
        tree: FileTree,
        image: FileTree,
        owner: tuple[int, int] | None,
    ) -> None:
        self._copy, self._sources, self._tree, self._image, self._owner = copy, sources, tree, image, owner
        self._content: Iterator[bytes] = iter(())
        self._written: set[Parts] = set()

    def refuse(self, reason: str, name: bytes | None = None) -> NoReturn:
        """Raise the error for a member that cannot be copied."""
        prefix = f"{name.decode('utf-8', 'backslashreplace')!r}: " if name else ""
        refuse(self._copy, f"{prefix}{reason}")

    def content(self) -> Iterator[bytes]:
        """Yield the content of the member that was yielded last."""
        return self._content

    def __iter__(self) -> Iterator[Member]:
        try:
            root = resolve(self._image, split(self._copy.destination))
        except LinkError as error:
            refuse(self._copy, f"the destination: {error}")
        is_single = not self._is_folder(root)
        yield from self._folders(root[:-1] if is_single else root)
        for document in self._copy.documents:
            if "/" in document.name or document.name in (".", ".."):
                refuse(self._copy, f"{document.name!r} cannot name a file")
            self._content = iter((document.content,))
            yield self._with_destination(
                Member(b"", FILE, 0o644, 0, 0, MADE, len(document.content)), root, document.name, is_single
            )
        for source in self._sources:
            yield from self._members(source, root, is_single=is_single)

    def _is_folder(self, root: Parts) -> bool:
        """Return whether the destination is an existing directory, or must be created as a directory."""
        copy = self._copy
        status = self._image.status(root)
        exists = status is not None and stat.S_ISDIR(status.st_mode)
        if copy.destination.endswith("/") or exists or copy.keep_parents:
            return True
        if len(copy.sources) + len(copy.documents) > 1 or len(self._sources) > 1:
            refuse(copy, "several sources need a directory", "end the destination with a slash")
        return any(
            source.is_folder or (copy.extract and self._is_archive(item))
            for source in self._sources
            for item in source.items
        )

    def _folders(self, path: Parts) -> Iterator[Member]:
        """Yield a path's missing directories, outermost first."""
        for depth in range(1, len(path) + 1):
            folder = path[:depth]
            if folder in self._written:
                continue
            status = self._image.status(folder)
            self._written.add(folder)
            if status is None:
                yield self._owned(Member(_name(folder), DIRECTORY, 0o755, 0, 0, MADE, 0))
            elif not stat.S_ISDIR(status.st_mode):
                refuse(self._copy, f"the destination: /{'/'.join(folder)} is not a directory")

    def _members(self, source: CopySource, root: Parts, *, is_single: bool) -> Iterator[Member]:
        for item in source.items:
            if self._copy.extract and not source.is_folder and item.member.kind == FILE and self._is_archive(item):
                yield from self._archive_members(item, root)
                continue
            member = item.member
            if item.same_as is not None:
                member = replace(member, kind=HARD_LINK, target=_name((*root, *item.same_as)), size=0)
            self._content = self._read(item)
            if not is_single:
                yield from self._folders((*root, *item.target[:-1]))
            yield self._with_destination(member, root, "/".join(item.target), is_single)

    def _with_destination(self, member: Member, root: Parts, target: str, is_single: bool) -> Member:
        """Return a member at its destination, with the owner and mode of the instruction."""
        path = root if is_single else (*root, *target.split("/"))
        status = self._image.status(path) if path not in self._written else None
        if status is not None and stat.S_ISDIR(status.st_mode) != (member.kind == DIRECTORY):
            kinds = ("a file", "a directory") if member.kind != DIRECTORY else ("a directory", "something else")
            refuse(self._copy, f"{kinds[0]} cannot replace {kinds[1]}: /{'/'.join(path)}")
        if member.kind == DIRECTORY:
            self._written.add(path)
        if self._copy.mode and member.kind not in (LINK, HARD_LINK):
            try:
                mode = changed_mode(self._copy.mode, member.mode, is_folder=member.kind == DIRECTORY)
            except ValueError as error:
                refuse(self._copy, f"--chmod: {error}")
            member = replace(member, mode=mode)
        return self._owned(replace(member, name=_name(path)))

    def _owned(self, member: Member) -> Member:
        return member if self._owner is None else replace(member, uid=self._owner[0], gid=self._owner[1])

    def _read(self, item: Item) -> Iterator[bytes]:
        """Yield a file's content; reject a file whose size changed since it was listed."""
        remaining = item.member.size
        with self._tree.open(item.source) as file:
            while remaining and (chunk := file.read(min(remaining, _CHUNK))):
                remaining -= len(chunk)
                yield chunk
            if remaining or file.read(1):
                refuse(self._copy, f"{'/'.join(item.source)!r} changed meanwhile", "build again")

    # --- archives ---

    def _is_archive(self, item: Item) -> bool:
        """Return whether a file begins with a tar header, after decompression if it is compressed."""
        try:
            with self._open_archive(item) as stream:
                tarfile.TarInfo.frombuf(stream.exactly(512), "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ImageRefused):
            return False
        return True

    @contextmanager
    def _open_archive(self, item: Item) -> Iterator[LayerStream]:
        name = f"line {self._copy.line}: {'/'.join(item.source)}"
        with self._tree.open(item.source) as file, LayerStream(Blob(file, "", name), _MOST_TAR) as stream:
            yield stream

    def _archive_members(self, item: Item, root: Parts) -> Iterator[Member]:
        tree = _CopiedTree(self._image)
        with self._open_archive(item) as stream:
            reader = TarReader(stream)
            for member in reader:
                path = self._destination_in(tree, reader, member, root)
                if member.kind == HARD_LINK:
                    target = _parts(reader, member, member.target)
                    member.target = _name((*root, *target))
                if path == root and member.kind == DIRECTORY:  # keep the metadata of the destination
                    continue
                yield from self._folders(path[:-1])
                tree.paths.add(path)
                self._written.add(path)
                self._content = reader.content()
                yield self._owned(replace(member, name=_name(path)))
            # Like engines, ignore data after the end of the archive.

    def _destination_in(self, tree: _CopiedTree, reader: TarReader, member: Member, root: Parts) -> Parts:
        """Return the destination of an archive's member; its parent directories may be links in the image."""
        names = _parts(reader, member, member.name)
        if not names:
            return root
        if any(name.startswith(WHITEOUT) for name in names):
            reader.refuse(f"no layer can have names that begin with {WHITEOUT}", member.name)
        try:
            return (*resolve(tree, (*root, *names[:-1])), names[-1])
        except LinkError as error:
            reader.refuse(str(error), member.name)


def _parts(reader: TarReader, member: Member, path: bytes) -> Parts:
    try:
        return split(path.decode("utf-8", "surrogateescape"))
    except LinkError:
        reader.refuse("its path leads out of the destination", member.name)


def _name(path: Parts) -> bytes:
    return "/".join(path).encode("utf-8", "surrogateescape")


def find_owner(owner: str, image: FileTree) -> tuple[int, int]:
    """Return the user and group ids of ``[USER][:[GROUP]]`` in an image, as BuildKit does.

    The default group is the user's group in ``/etc/passwd``; for a numeric user, it is the group with the same number.
    The default user is root.

    Raises:
        ValueError: the image has no user or group of that name, or the number is too large.
    """
    user, _, group = owner.partition(":")
    uid, gid = _find(image, "passwd", user or "0", (2, 3))
    if group:
        (gid,) = _find(image, "group", group, (2,))
    return uid, gid


def find_home(user: str, image: FileTree) -> str:
    """Return the home directory of a user in an image; the user is a name or an id, or "" for root."""
    user = user or "0"
    for row in _rows(image, "passwd"):
        if len(row) > 5 and user in (row[0], row[2]) and row[5]:
            return row[5]
    return "/root" if user in ("0", "root") else "/"


def _find(image: FileTree, file: str, name: str, columns: tuple[int, ...]) -> tuple[int, ...]:
    if name == "root":
        return (0,) * len(columns)
    if name.isascii() and name.isdecimal():
        if int(name) > LAST_ID:
            raise ValueError(f"{name} is no user or group: the largest number is {LAST_ID}")
        return (int(name),) * len(columns)
    for row in _rows(image, file):
        if row[0] == name and len(row) > max(columns) and all(row[column].isdigit() for column in columns):
            return tuple(int(row[column]) for column in columns)
    raise ValueError(f"the image's /etc/{file} has no {name!r}")


def _rows(image: FileTree, file: str) -> Iterator[list[str]]:
    try:
        path = resolve(image, ("etc", file))
    except LinkError:
        return
    status = image.status(path)
    if status is not None and stat.S_ISREG(status.st_mode):
        with image.open(path) as text_file:
            for line in text_file.read(_MOST_FILE).decode("utf-8", "surrogateescape").splitlines():
                yield line.split(":")


def changed_mode(chmod: str, mode: int, *, is_folder: bool) -> int:
    """Return a file's permission bits after ``--chmod``: octal, or symbolic as in chmod(1) (``u=rwX,go=rX``).

    Raises:
        ValueError: the mode is neither octal nor symbolic.
    """
    if re.fullmatch(r"[0-7]{1,5}", chmod) and int(chmod, 8) <= 0o7777:
        return int(chmod, 8)
    for clause in chmod.split(","):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            raise ValueError(f"{chmod!r} is not a mode: write it like 755 or u=rwX,go=rX")
        classes = "ugo" if "a" in match[1] or not match[1] else match[1]
        for sign, letters in re.findall(r"([-+=])([rwxXst]*)", match[2]):
            mode = _apply_clause(mode, classes, sign, letters, is_folder=is_folder)
    return mode


def _apply_clause(mode: int, classes: str, sign: str, letters: str, *, is_folder: bool) -> int:
    is_executable = "x" in letters or ("X" in letters and (is_folder or mode & 0o111))
    bits = 4 * ("r" in letters) + 2 * ("w" in letters) + bool(is_executable)
    permissions = mask = 0
    for class_letter in classes:
        class_mask, shift = _WHO[class_letter]
        mask |= class_mask
        permissions |= bits << shift
        if "s" in letters and class_letter in "ug":
            permissions |= stat.S_ISUID if class_letter == "u" else stat.S_ISGID
    if "t" in letters:
        permissions |= stat.S_ISVTX
    if sign == "=":
        return mode & ~mask | permissions
    return mode | permissions if sign == "+" else mode & ~permissions
