"""Find damaged layers and move them to quarantine; the next build of their images builds them again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from minisandbox.errors import ImageRefused, NotFound, StoreError
from minisandbox.store import entries as listing
from minisandbox.store.blobs.layer_blobs import COLD, is_there, known_blob
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.scanning import describe, hash_file, kind_of, walk
from minisandbox.store.entries import FILE, Entry
from minisandbox.store.keys import is_key
from minisandbox.store.sizes import stack_of
from minisandbox.store.store import Store

_MOST_TOLD = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of one layer.

    Attributes:
        key: key of the layer.
        kind: kind of the build step that created the layer.
        problems: one line for each of the first 20 problems.
        count: number of all problems.
        quarantined: the layer's path in quarantine, relative to the store; "" if the layer was not moved.
    """

    key: str
    kind: str
    problems: tuple[str, ...]
    count: int
    quarantined: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        checked: number of checked layers.
        files: number of checked files.
        bytes: number of bytes of content that were read.
        damaged: the damaged layers.
        unreadable: number of files and directories that were not checked, because this user may not read them.
        images: names of images with a missing or damaged layer or a damaged record.
    """

    checked: int
    files: int
    bytes: int
    damaged: tuple[Damage, ...]
    unreadable: int
    images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyEvent:
    """Progress of a verification: one more layer has been checked.

    Attributes:
        done: number of checked layers.
        total: number of layers to check.
        key: key of this layer.
        problems: number of problems in this layer.
    """

    done: int
    total: int
    key: str
    problems: int


def verify(
    store: Store,
    *,
    full: bool = False,
    keys: Iterable[str] | None = None,
    progress: Callable[[VerifyEvent], None] | None = None,
) -> VerifyReport:
    """Compare layers with their file lists, and move damaged layers to quarantine.

    The verification can be interrupted: each damaged layer is moved as soon as it has been checked. Sandboxes that are
    running on a damaged layer continue, but new sandboxes cannot use it. In a read-only store, damage is only reported.

    Args:
        store: the store.
        full: also read the content of each file, not only names, types, sizes, modes, owners, mtimes, links and
            extended attributes.
        keys: keys of the layers to check; all layers by default.
        progress: called after each layer.

    Returns:
        The damaged layers and images, and the number of layers, files and bytes checked.

    Raises:
        NotFound: a layer of ``keys`` is missing.
        StoreError: a system call failed.
    """
    layer_keys = _all_keys(store) if keys is None else list(dict.fromkeys(keys))
    check, damaged = _Check(store, full), list[Damage]()
    for index, key in enumerate(layer_keys, 1):
        try:
            with store.hold(key, frozen=True):
                fault = check.layer(key)
                damaged += [_quarantined(store, fault)] if fault is not None else []
        except NotFound:
            if keys is not None:
                raise
            continue  # another process has removed the layer
        if progress is not None:
            progress(VerifyEvent(index, len(layer_keys), key, 0 if fault is None else fault.count))
    if full and keys is None:
        check.orphans()
    broken_images = tuple(_broken(store, {damage.key for damage in damaged}))
    return VerifyReport(len(layer_keys), check.files, check.bytes, tuple(damaged), check.unreadable, broken_images)


def _all_keys(store: Store) -> list[str]:
    """Return the keys of all layers, including layers without a record."""
    with store_faults("list layers"):
        return sorted(name for name in os.listdir(store.root / "layers") if is_key(name))


def _broken(store: Store, damaged_keys: set[str]) -> Iterator[str]:
    for name in store.image_names():
        try:
            image = store.image(name)
        except NotFound:
            continue
        except StoreError:
            yield name
            if store.writable:
                store.quarantine_image(name)
            continue
        stack = {*stack_of(image)}
        if stack & damaged_keys or any(not store.has_layer(key) for key in stack):
            yield name


def _quarantined(store: Store, damage: Damage) -> Damage:
    if not store.writable:
        return damage
    return replace(damage, quarantined=str(store.quarantine(damage.key).relative_to(store.root)))


@dataclass(slots=True)
class _Check:
    """State of one verification: counters, and the digests of shared inodes, so that each is hashed only once."""

    store: Store
    full: bool
    files: int = 0
    bytes: int = 0
    unreadable: int = 0
    _digests: dict[int, str] = field(default_factory=dict)

    def layer(self, key: str) -> Damage | None:
        """Compare a layer with its file list; return its damage, or None if it is intact."""
        kind = "?"
        with store_faults(f"verify layer {key}"):
            try:
                kind = str(self.store.layer(key).step.get("kind", "?"))
                directory = self.store.layer_directory(key)
                expected = {entry.path: entry for entry in listing.read_entries(directory)}
            except FileNotFoundError:
                return Damage(key, kind, ("the list of its files is missing",), 1)
            except StoreError as error:
                return Damage(key, kind, (str(error.what),), 1)
            except NotFound:
                return Damage(key, kind, ("its record is missing",), 1)
            compare = self._compare_frozen if self.store.is_frozen(key) else self._compare
            problems = list(compare(key, expected))
        if not problems:
            return None
        return Damage(key, kind, tuple(problems[:_MOST_TOLD]), len(problems))

    def orphans(self) -> None:
        """Remove damaged orphans from the pool, so that no new layer links to them."""
        for path, status in self.store.pool.orphans() if self.store.writable else ():
            if self._is_damaged(path, status):
                os.unlink(path)

    def _is_damaged(self, path: str, status: os.stat_result) -> bool:
        try:
            return describe("", path, status).object != os.path.basename(path).partition(".")[0]
        except PermissionError:  # the build step removed the owner's read permission
            self.unreadable += 1
            return False

    def _compare_frozen(self, key: str, expected: dict[str, Entry]) -> Iterator[str]:
        """Check the size of a frozen layer's blob and, in a full verification, its digest."""
        self.files += sum(entry.kind == FILE for entry in expected.values())
        try:
            blob = known_blob(self.store.root, key, COLD)
        except (StoreError, ImageRefused):
            blob = None
        if blob is None or not is_there(blob):
            yield "its blob is missing, or has another size"
        elif self.full:
            self.bytes += blob.size
            if f"sha256:{hash_file(str(blob.path), blob.size)}" != blob.digest:
                yield "its blob has other content"

    def _compare(self, key: str, expected: dict[str, Entry]) -> Iterator[str]:
        tree = self.store.layer_directory(key) / "tree"
        checked_paths: set[str] = set()
        try:
            for path, status in walk(tree):
                checked_paths.add(path)
                entry = expected.get(path)
                if entry is None:
                    yield f"{path}: is not in the list"
                else:
                    yield from self._entry(entry, f"{tree}/{path}" if path else str(tree), status)
        except PermissionError as error:  # the build step removed the owner's permission to read a directory
            self.unreadable += 1
            unreadable_path = os.path.relpath(os.fsdecode(error.filename), tree)
            checked_paths |= {
                path for path in expected if path == unreadable_path or path.startswith(f"{unreadable_path}/")
            }
        except FileNotFoundError as error:
            yield f"{error.filename}: has gone"
        yield from (f"{path}: is missing" for path in expected.keys() - checked_paths)

    def _entry(self, entry: Entry, file_path: str, status: os.stat_result) -> Iterator[str]:
        path = entry.path or "."
        if kind_of(status) != entry.kind:
            yield f"{path}: is of another type"
            return
        current = describe(entry.path, file_path, status, digest="")
        for name in ("mode", "uid", "gid", "size", "mtime", "target", "attributes"):
            expected, actual = getattr(entry, name), getattr(current, name)
            if expected != actual:
                texts = (f"{value:o}" if name == "mode" else str(value)[:80] for value in (actual, expected))
                yield f"{path}: {name} is {', was '.join(texts)}"
        if entry.kind == FILE:
            yield from self._file(entry, file_path, status)

    def _file(self, entry: Entry, file_path: str, status: os.stat_result) -> Iterator[str]:
        self.files += 1
        if not self.full or status.st_size != entry.size:
            return
        digest = self._digests.get(status.st_ino)
        if digest is None:
            try:
                digest = hash_file(file_path, status.st_size)
            except PermissionError:
                self.unreadable += 1
                return
            self.bytes += status.st_size
            if status.st_nlink > 1:
                self._digests[status.st_ino] = digest
        if digest != entry.digest:
            yield f"{entry.path}: has other content"
            self._forget(entry, status)
        elif entry.object_name and self.store.writable:
            self._put_back(entry, file_path)

    def _put_back(self, entry: Entry, file_path: str) -> None:
        """Add an intact file to the pool if its object is missing there, so that later layers can share the file."""
        path = self.store.pool.path(entry.object_name)
        if not os.path.lexists(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError):
                os.link(file_path, path, follow_symlinks=False)

    def _forget(self, entry: Entry, status: os.stat_result) -> None:
        """Remove a damaged inode from the pool, so that no new layer links to it."""
        if not self.store.writable or not entry.object_name:
            return
        path = self.store.pool.path(entry.object_name)
        with self.store.pool.using(exclusive=True), suppress(FileNotFoundError):
            if path.lstat().st_ino == status.st_ino:
                path.unlink()
