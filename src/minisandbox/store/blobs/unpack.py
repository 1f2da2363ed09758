"""Unpack a layer's tar safely into a directory that becomes a layer of the store.

Links are resolved in an in-memory model of the layer's files and never by the kernel, so no link can lead out of the
layer. Directories are opened with ``RESOLVE_BENEATH`` and ``RESOLVE_NO_SYMLINKS`` (openat2(2)), and files are
created with ``O_EXCL`` and ``O_NOFOLLOW``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from minisandbox.errors import ImageRefused
from minisandbox.launch.jobs.tree_writer import NEW_FILE_FLAGS
from minisandbox.launch.kernel import syscalls
from minisandbox.launch.kernel.identity import last_id
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.store.blobs.streams import SPARE, LayerStream, require_room
from minisandbox.store.blobs.tarstream import DIRECTORY, FIFO, FILE, HARD_LINK, LINK, Member, MemberReader, TarReader

OPAQUE = "user.overlay.opaque"
"""Extended attribute of opaque directories for mounts with ``userxattr``, which we always use (overlayfs.rst)."""
NOBODY = 65534
WHITEOUT, OPAQUE_MARK = ".wh.", ".wh..wh..opq"  # image-spec, layer.md
_AUFS = ".wh..wh."
"""Prefix of the internal files of aufs, which docker used before 2015."""
_AUFS_LINKS = ".wh..wh.plnk"
"""Directory with one name of each hard-linked file of aufs; the file's other names are hard links to it."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_LONGEST_NAME, LONGEST_PATH = 255, 3500  # limits.h: NAME_MAX; PATH_MAX without the store's own directories
DEEPEST = 256
_MOST_LINKS = 40  # path_resolution(7)
_CHECK_EVERY = 256 << 20
"""Bytes between two checks of the disk's free space."""
_NAMESPACES = ("security", "system", "trusted", "user")  # xattr(7)
LATEST = (1 << 33) * 10**9


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one layer.

    Attributes:
        content: maximum bytes of all files.
        entries: maximum number of names.
        text: maximum bytes of all paths, links and extended attributes, which are kept in memory.
        spare: bytes to leave free on the disk.
    """

    content: int = 64 << 30
    entries: int = 2_000_000
    text: int = 512 << 20
    spare: int = SPARE


@dataclass(slots=True)
class Unpacked:
    """The result of unpacking a layer.

    Attributes:
        digests: SHA-256 of each file's content, by inode.
        plain: inodes of the files that have no extended attributes.
        hides_all: whether the layer hides all files of the layers below.
        notes: descriptions of file properties that could not be kept, with the number of occurrences.
    """

    digests: dict[int, str] = field(default_factory=dict)
    plain: set[int] = field(default_factory=set)
    hides_all: bool = False
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Node:
    """A file or directory in the model of the layer.

    Attributes:
        kind: type of the file, one of the constants of :mod:`.tarstream`, or "whiteout".
        children: the contents of a directory, by name.
        member: the attributes of a directory; None if the archive has no entry for it.
        target: target of a symbolic link.
        opaque: whether a directory hides the directory of the same path in the layers below.
        whiteouts: names in a directory of the layers below that this layer hides.
    """

    kind: str
    children: dict[str, _Node] = field(default_factory=dict)
    member: Member | None = None
    target: str = ""
    opaque: bool = False
    whiteouts: set[str] | None = None


Below = Callable[[], LowerLayers]
"""Returns the layers below the unpacked one; called when all its files are written."""


def unpack(
    stream: LayerStream, tree: Path, below: Below | None, *, keep_owners: bool, bounds: Bounds | None = None
) -> Unpacked:
    """Unpack a layer.

    Args:
        stream: the layer's tar.
        tree: the directory to create. Its parent directory must be private, because the directory ``TREE.removed``
            is created there too, for directories that later entries replace.
        below: the layers below, used to drop whiteouts of files that they do not have; None keeps all whiteouts.
        keep_owners: whether to set the owners that the tar names; otherwise the user of this process owns all files.
        bounds: limits of the layer.

    Raises:
        ImageRefused: the archive is malformed, hostile or too large.
        OSError: a system call failed, for example with ENOSPC because the disk is full.
    """
    try:
        unpacked = unpack_members(TarReader(stream), tree, below, keep_owners=keep_owners, bounds=bounds)
    except OSError as error:
        if not _is_refusal(error):
            raise
        raise ImageRefused(
            f"{stream.name} has a path that this file system cannot hold",
            reason=str(error)[:400],
            hint="nothing of this layer was published",
        ) from error
    stream.finish()
    return unpacked


def unpack_members(
    reader: MemberReader, tree: Path, below: Below | None, *, keep_owners: bool, bounds: Bounds | None = None
) -> Unpacked:
    """Unpack the members of a layer from any reader; see :func:`unpack`."""
    tree.mkdir(mode=0o700)
    root_fd = os.open(tree, _OPEN_DIRECTORY | os.O_CLOEXEC)
    unpacker = _Unpacker(reader, root_fd, tree.with_suffix(".removed"), below, keep_owners, bounds or Bounds())
    try:
        unpacker.run()
    finally:
        unpacker.close()
    return unpacker.result


class _Unpacker:
    def __init__(
        self,
        reader: MemberReader,
        root_fd: int,
        trash: Path,
        below: Below | None,
        keep_owners: bool,
        bounds: Bounds,
    ) -> None:
        self.result = Unpacked()
        self._reader = reader
        self._root = root_fd
        self._trash = trash
        self._find_below = below
        self._below: LowerLayers | None = None
        self._keep_owners = keep_owners
        self._last_id = last_id() if keep_owners else 0
        self._bounds = bounds
        self._top = _Node(DIRECTORY)
        self._open: tuple[tuple[str, ...], int] = ((), -1)
        self._inherits = bool(os.listxattr(root_fd))  # new files may get a default ACL
        self._folder_name = ""
        self._folder: tuple[_Node, tuple[str, ...]] = self._top, ()  # the directory that the name leads to
        self._removed = self._names = self._text = self._content = 0
        self._unchecked = _CHECK_EVERY  # makes the first write check the free space
        self._member = Member(b"", FILE, 0, 0, 0, 0, 0)

    def run(self) -> None:
        for member in self._reader:
            self._member = member
            self._count(1)
            self._take(member)
        self._remove_links()
        if self._find_below is not None:
            self._below = self._find_below()
        self._hide((), self._top, is_hidden=False)
        self._forget()
        self.result.hides_all = self._top.opaque
        self._top.opaque = False  # overlayfs ignores the attribute on a layer's root
        self._settle((), self._top)

    def close(self) -> None:
        self._forget()
        os.close(self._root)

    def _remove_links(self) -> None:
        """Remove the link directory of aufs; the files in it keep their other hard links."""
        folder = self._top.children.get(_AUFS_LINKS, _Node(DIRECTORY))
        for name in [*folder.children]:
            self._remove(folder, (_AUFS_LINKS,), name)
        self._remove(self._top, (), _AUFS_LINKS)

    def _refuse(self, reason: str) -> NoReturn:
        self._reader.refuse(reason, self._member.name)

    def _count(self, names: int) -> None:
        self._names += names
        if self._names > self._bounds.entries:
            self._refuse(f"the layer has more than {self._bounds.entries} entries")

    # --- one member ---

    def _take(self, member: Member) -> None:
        self._text += len(member.name) + len(member.target)
        if member.attributes:
            self._text += sum(len(name) + len(value) for name, value in member.attributes.items())
        if self._text > self._bounds.text:
            self._refuse(f"the layer's paths, links and extended attributes have more than {self._bounds.text} bytes")
        path = os.fsdecode(member.name).removeprefix("./")
        folder_name, _, name = path.rpartition("/")
        if folder_name != self._folder_name or name in ("", ".", "..") or _AUFS in path:
            parts = self._parts(path)
            if not parts:
                if member.kind != DIRECTORY:
                    self._refuse("the root of an image is a directory")
                self._top.member = member
                return
            is_aufs_file = any(part.startswith(_AUFS) and part != OPAQUE_MARK for part in parts)
            if is_aufs_file and (member.kind != FILE or parts[:-1] != [_AUFS_LINKS]):
                return
            name = parts.pop()
            self._folder_name = "/".join(parts)
            self._folder = self._directory(parts)
        else:
            self._check_lengths(path, (name,))
        folder, folder_path = self._folder
        if name.startswith(WHITEOUT):
            self._note_whiteout(folder, name)
            return
        if member.kind == HARD_LINK:
            self._link(folder, folder_path, name)
            return
        replaced = folder.children.get(name)
        if replaced is not None and replaced.kind == DIRECTORY == member.kind:
            replaced.member = member
            return
        self._remove(folder, folder_path, name)
        self._make(folder, folder_path, name)

    def _parts(self, path: str) -> list[str]:
        """Split a path into names; reject "..", and ignore leading slashes as tar(1) does."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            self._refuse("its path has '..'")
        self._check_lengths(path, parts)
        return parts

    def _check_lengths(self, path: str, parts: Sequence[str]) -> None:
        if len(path) > LONGEST_PATH:
            self._refuse(f"its path has more than {LONGEST_PATH} characters")
        if len(path) * 4 > _LONGEST_NAME and any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
            self._refuse(f"a name in its path has more than {_LONGEST_NAME} bytes")

    def _directory(self, parts: list[str]) -> tuple[_Node, tuple[str, ...]]:
        """Find or create a directory, resolving this layer's links in the model; return its node and its path."""
        path: list[str] = []
        node, nodes = self._top, [self._top]
        pending, link_count = list(reversed(parts)), 0
        while pending:
            part = pending.pop()
            if part == "..":  # from the target of a link
                if not path:
                    self._refuse("it lies behind a link that leads out of the image")
                path.pop()
                nodes.pop()
            else:
                child = node.children.get(part) or self._imply(node, path, part)
                if child.kind == LINK:
                    link_count += 1
                    if link_count > _MOST_LINKS:
                        self._refuse(f"it lies behind more than {_MOST_LINKS} links")
                    if child.target.startswith("/"):
                        path, nodes = [], [self._top]
                    pending += [name for name in reversed(child.target.split("/")) if name not in ("", ".")]
                elif child.kind != DIRECTORY:
                    self._refuse(f"it lies in {'/'.join((*path, part))!r}, which is a {child.kind}")
                elif len(path) == DEEPEST:
                    self._refuse(f"it lies in more than {DEEPEST} directories")
                else:
                    path.append(part)
                    nodes.append(child)
            node = nodes[-1]
        if len("/".join(path)) > LONGEST_PATH:
            self._refuse(f"its path has more than {LONGEST_PATH} characters")
        return node, tuple(path)

    def _imply(self, node: _Node, path: list[str], name: str) -> _Node:
        """Create a parent directory that has no entry in the archive so far."""
        if name.startswith(WHITEOUT) and (path or name != _AUFS_LINKS):
            self._refuse(f"it lies in {name!r}, which is a whiteout")
        self._count(1)
        parent_fd = self._at(tuple(path))
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        fd = syscalls.openat2(parent_fd, name, _OPEN_DIRECTORY, syscalls.RESOLVE_INSIDE)
        self._forget()
        self._open = ((*path, name), fd)
        child = node.children[name] = _Node(DIRECTORY)
        return child

    def _note_whiteout(self, folder: _Node, name: str) -> None:
        hidden = name.removeprefix(WHITEOUT)
        if name == OPAQUE_MARK:
            folder.opaque = True
        elif hidden in ("", ".", ".."):
            self._refuse("it is a whiteout of no file")
        else:
            folder.whiteouts = folder.whiteouts or set()
            folder.whiteouts.add(hidden)

    def _link(self, folder: _Node, folder_path: tuple[str, ...], name: str) -> None:
        target = self._parts(os.fsdecode(self._member.target))
        if not target:
            self._refuse("it is a hard link to a directory")
        target_folder, target_folder_path = self._directory(target[:-1])
        target_node = target_folder.children.get(target[-1])
        if target_node is None or target_node.kind == DIRECTORY:
            kind = "a directory" if target_node else "nothing of this layer"
            self._refuse(f"it is a hard link to {os.fsdecode(self._member.target)!r}, which is {kind}")
        if folder.children.get(name) is target_node:
            return
        if target_folder_path[: len(folder_path) + 1] == (*folder_path, name):
            self._refuse("it is a hard link to a file in the directory that it replaces")
        self._remove(folder, folder_path, name)
        target_fd = self._duplicate(target_folder_path)
        try:
            os.link(target[-1], name, src_dir_fd=target_fd, dst_dir_fd=self._at(folder_path), follow_symlinks=False)
        finally:
            os.close(target_fd)
        folder.children[name] = target_node

    def _make(self, folder: _Node, folder_path: tuple[str, ...], name: str) -> None:
        member, parent_fd = self._member, self._at(folder_path)
        node = _Node(member.kind)
        if member.kind == FILE:
            self._write(member, name, parent_fd)
        elif member.kind == DIRECTORY:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
            node.member = member
        elif member.kind == LINK:
            node.target = self._symlink(member, name, parent_fd)
        elif member.kind == FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent_fd)
            self._own(member, name, parent_fd)
            os.chmod(name, member.mode, dir_fd=parent_fd)
            self._date(member, name, parent_fd)
        else:  # skip devices: a sandbox has its own /dev, and device files elsewhere do not work
            self.result.notes["device files are left out"] += folder_path[:1] != ("dev",)
            self._note_whiteout(folder, f"{WHITEOUT}{name}")  # a device hides this name in the layers below
            return
        folder.children[name] = node

    def _symlink(self, member: Member, name: str, parent_fd: int) -> str:
        target = os.fsdecode(member.target)
        if not target or len(member.target) > 4095:  # symlink(2): PATH_MAX
            self._refuse("it is a link to a path that is empty or too long")
        os.symlink(target, name, dir_fd=parent_fd)
        self._own(member, name, parent_fd)
        self._date(member, name, parent_fd)
        if member.attributes:
            self.result.notes["extended attributes of links are left out"] += 1
        return target

    def _write(self, member: Member, name: str, parent_fd: int) -> None:
        self._content += member.size
        if self._content > self._bounds.content:
            self._refuse(f"the layer's files have more than {self._bounds.content} bytes")
        fd = os.open(name, NEW_FILE_FLAGS, member.mode & 0o777, dir_fd=parent_fd)
        try:
            hasher = hashlib.sha256()
            for chunk in self._reader.content():
                hasher.update(chunk)
                self._require_room(fd, len(chunk))
                while chunk := chunk[os.write(fd, chunk) :]:
                    pass
            status = os.fstat(fd)
            self._finish(fd, member, self._owner(member), status)
            self.result.digests[status.st_ino] = hasher.hexdigest()
            if not member.attributes and not self._inherits:
                self.result.plain.add(status.st_ino)
        finally:
            os.close(fd)

    def _require_room(self, fd: int, size: int) -> None:
        self._unchecked += size
        if self._unchecked > _CHECK_EVERY:
            self._unchecked = 0
            require_room(fd, size, "unpack the layer", self._bounds.spare)

    # --- attributes ---

    def _finish(self, fd: int, member: Member, owner: tuple[int, int], status: os.stat_result) -> None:
        """Set the metadata, owner first: a change of owner clears setuid bits and capabilities (chown(2))."""
        if owner not in ((-1, -1), (status.st_uid, status.st_gid)):
            os.fchown(fd, *owner)
        if member.attributes:
            self._set_attributes(fd, member)
        if member.attributes or stat.S_IMODE(status.st_mode) != member.mode:  # an ACL may have changed the mode
            os.fchmod(fd, member.mode)
        mtime = _moment(member)
        os.utime(fd, ns=(mtime, mtime))

    def _owner(self, member: Member) -> tuple[int, int]:
        if not self._keep_owners:
            if member.uid or member.gid:
                self.result.notes["files of other owners belong to root"] += 1
            return -1, -1
        uid, gid = member.uid, member.gid
        if uid > self._last_id or gid > self._last_id:
            self.result.notes[f"files of ids above {self._last_id} belong to nobody"] += 1
            return (uid if uid <= self._last_id else NOBODY), (gid if gid <= self._last_id else NOBODY)
        return uid, gid

    def _own(self, member: Member, name: str, parent_fd: int) -> None:
        uid, gid = self._owner(member)
        if self._keep_owners:
            os.chown(name, uid, gid, dir_fd=parent_fd, follow_symlinks=False)

    def _date(self, member: Member, name: str, parent_fd: int) -> None:
        mtime = _moment(member)
        os.utime(name, ns=(mtime, mtime), dir_fd=parent_fd, follow_symlinks=False)

    def _set_attributes(self, fd: int, member: Member) -> None:
        for name, value in member.attributes.items():
            is_overlay = name.startswith("user.overlay.")
            if not is_overlay and name.startswith(("user.", "security.capability", "system.posix_acl_")):
                with contextlib.suppress(OSError):  # no permission, or the file system does not support it
                    os.setxattr(fd, name, value)
                    continue
            namespace = name.partition(".")[0]
            label = f"extended attributes {namespace}.*" if namespace in _NAMESPACES else "other extended attributes"
            self.result.notes[f"{label} are left out"] += 1

    # --- whiteouts and directories, once all files exist ---

    def _hide(self, path: tuple[str, ...], node: _Node, *, is_hidden: bool) -> None:
        """Create whiteouts, except for names that exist in this layer (image-spec, layer.md, "Whiteouts")."""
        is_hidden = is_hidden or node.opaque
        for name in sorted(node.whiteouts or ()):
            own_child = node.children.get(name)
            if own_child is not None:
                own_child.opaque = own_child.kind == DIRECTORY
            elif self._below is None or (not is_hidden and self._below.shows((*path, name))):
                # An unprivileged user may create a whiteout since Linux 5.8 (mknod(2) with WHITEOUT_DEV).
                parent_fd = self._at(path)
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent_fd)
                os.utime(name, ns=(0, 0), dir_fd=parent_fd, follow_symlinks=False)
                node.children[name] = _Node("whiteout")
        for name, child in node.children.items():
            if child.kind == DIRECTORY:
                self._hide((*path, name), child, is_hidden=is_hidden)

    def _settle(self, path: tuple[str, ...], node: _Node) -> None:
        """Set the metadata of directories, innermost first, after creating all files, which changes mtimes."""
        for name, child in node.children.items():
            if child.kind == DIRECTORY:
                self._settle((*path, name), child)
        member = node.member or (self._below or LowerLayers()).directory(path)
        fd = self._duplicate(path)
        try:
            if node.opaque:
                os.setxattr(fd, OPAQUE, b"y")
            owner = (-1, -1) if node.member is None and not self._keep_owners else self._owner(member)
            self._finish(fd, member, owner, os.fstat(fd))
        finally:
            os.close(fd)

    # --- the tree ---

    def _remove(self, folder: _Node, folder_path: tuple[str, ...], name: str) -> None:
        """Remove the file or directory that an earlier entry created under this name."""
        removed = folder.children.pop(name, None)
        if removed is None:
            return
        self._folder_name, self._folder = "", (self._top, ())  # its path may have led through the removed file
        if removed.kind != DIRECTORY:
            os.unlink(name, dir_fd=self._at(folder_path))
            return
        if not self._removed:
            self._trash.mkdir(mode=0o700)
        self._removed += 1
        os.rename(name, self._trash / str(self._removed), src_dir_fd=self._at(folder_path))
        self._forget()

    def _at(self, path: tuple[str, ...]) -> int:
        """Return the file descriptor of a directory; cache the descriptor of the last directory."""
        if not path:
            return self._root
        if self._open[0] != path:
            fd = self._duplicate(path)
            self._forget()
            self._open = (path, fd)
        return self._open[1]

    def _duplicate(self, path: tuple[str, ...]) -> int:
        return syscalls.openat2(self._root, "/".join(path) or ".", _OPEN_DIRECTORY, syscalls.RESOLVE_INSIDE)

    def _forget(self) -> None:
        if self._open[1] >= 0:
            os.close(self._open[1])
        self._open = ((), -1)


def _moment(member: Member) -> int:
    return max(-LATEST, min(member.mtime, LATEST))


def _is_refusal(error: OSError) -> bool:
    """Return whether an OSError means that the file system rejects a path of the archive."""
    return error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EMLINK, errno.EILSEQ, errno.EINVAL)
