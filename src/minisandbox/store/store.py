"""Open a store, and publish, hold and remove its layers."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minisandbox.errors import NotFound, StoreError
from minisandbox.store.catalogue import NAMES, Catalogue, check_name
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import DIRECTORY, hold_flock, hold_lock
from minisandbox.store.disk.paths import check_file_system, check_private, default_root, is_read_only, set_aside
from minisandbox.store.disk.reading import read_below
from minisandbox.store.disk.staging import reclaim, staging_directory
from minisandbox.store.disk.trees import remove_tree
from minisandbox.store.keys import check_key
from minisandbox.store.leases import Holder, Lease, open_exclusive, stamp
from minisandbox.store.objects import Pool
from minisandbox.store.publishing import Made, Publication, make_visible, objects_of
from minisandbox.store.records import LayerRecord, is_frozen
from minisandbox.values import JSONValue

__all__ = ["Made", "Store", "check_name"]

VERSION = 2
LOCK_TIMEOUT = 6 * 3600.0
_MOST_VERSION = 1 << 10

_PARTS = (
    "layers", "objects", "blobs", "images", "failed", "pins", "quarantine", "staging", "locks", "logs", "downloads",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store(Catalogue):
    """A store on disk. Create it with :meth:`open`."""

    @classmethod
    def open(cls, root: Path | str | None = None, *, read_only: bool = False) -> Store:
        """Open a store, or create it if it is missing, and remove the leftovers of dead processes.

        A store on a read-only file system, or one that belongs to another user, is opened read-only.

        Args:
            root: directory of the store; see :func:`default_root`.
            read_only: open the store read-only even if this process may write to it.

        Raises:
            StoreError: the directory is inaccessible, writable by other users or not a store, the store has another
                version, or the directory is on overlayfs or a network file system.
            DiskFull: there is no space to create the store.
            NotFound: the store is missing, and ``read_only`` is set.
        """
        path = default_root() if root is None else Path(root).expanduser().absolute()
        if read_only or is_read_only(path):
            return cls._open_read_only(path)
        with store_faults(f"open the store {path}"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path)
            check_file_system(path)
            _check_version(path)
            for folder in _PARTS:
                (path / folder).mkdir(mode=0o700, exist_ok=True)
            reclaim(path)
            store = cls(path)
            if not (path / "archived").exists():
                store._mark_archived()
        return store

    @classmethod
    def _open_read_only(cls, path: Path) -> Store:
        if not (path / "version").is_file():
            raise NotFound(
                f"there is no store at {path}",
                reason="it is not there, or this user may not read it",
                hint="give the directory that holds the file `version`",
            )
        with store_faults(f"open the store {path}"):
            _check_version(path)
        return cls(path, writable=False)

    # --- layers ---

    def has_layer(self, key: str) -> bool:
        """Return whether the layer is published."""
        return self._record(key).is_file()

    def layer_tree(self, key: str) -> Path:
        """Return the path of a published layer's tree. A frozen layer has no tree until :meth:`hold` unpacks it.

        Raises:
            NotFound: there is no such layer.
        """
        if not self.has_layer(key):
            raise NotFound(f"layer {key} is not in the store {self.root}", hint="build the image again")
        return self.layer_directory(key) / "tree"

    def layer_directory(self, key: str) -> Path:
        """Return the path of a layer's directory, which contains its tree, record and file list; it may be missing.

        Raises:
            InvalidValue: the key is malformed.
        """
        return self.root / "layers" / check_key(key)

    def is_frozen(self, key: str) -> bool:
        """Return whether a layer is compressed until its next use."""
        return is_frozen(self.layer_directory(key))

    @property
    def pool(self) -> Pool:
        """Pool of the files that layers share by hard links."""
        return Pool(self.root / "objects")

    def layer(self, key: str) -> LayerRecord:
        """Return the record of a published layer.

        Raises:
            NotFound: there is no such layer.
            StoreError: the record is damaged.
        """
        self.layer_tree(key)  # raises NotFound
        with store_faults(f"read layer {key}"):
            return LayerRecord.read(self.root, f"layers/{key}/layer.json")

    def layers(self) -> Iterator[LayerRecord]:
        """Yield the record of every published layer, sorted by key.

        Raises:
            StoreError: a record is damaged.
        """
        for key in self.layer_keys():
            with suppress(NotFound):  # the layer was removed meanwhile
                yield self.layer(key)

    def layer_keys(self) -> list[str]:
        """Return the keys of all published layers, sorted."""
        with store_faults("list layers"):
            return sorted(path.name for path in (self.root / "layers").iterdir() if (path / "layer.json").is_file())

    def ensure_layer(
        self,
        key: str,
        *,
        parent: str | None,
        step: Mapping[str, JSONValue],
        make: Callable[[Path], Made],
        on_wait: Callable[[], None] | None = None,
        stacked_with: Sequence[str] = (),
        hold: Lease | None = None,
    ) -> tuple[LayerRecord, bool]:
        """Return a layer; build it if it is missing or damaged. Of several concurrent processes, only one builds it.

        Args:
            key: key of the layer.
            parent: key of the layer below, or None.
            step: the build step, for the layer's record.
            make: builds the tree in an empty directory on the store's file system, and returns the result.
            on_wait: called repeatedly while another process builds the layer.
            stacked_with: keys of further layers that images combine with this layer, besides the layers below.
            hold: lease to add the layer to.

        Returns:
            The layer's record, and whether this call built the layer.

        Raises:
            DiskFull: the disk is full; nothing was published.
            StoreError: the store cannot be written, or another process took longer than six hours to build the layer.
            BaseException: ``make`` failed; an ``OSError`` becomes a StoreError. Nothing was published.
        """
        if (record := self._sound(key, hold)) is not None:
            stamp(self.layer_directory(key), count=False)  # protects the layer from collect() for a grace time
            return record, False
        self.require_writable(f"make layer {key}")
        with self.lock(key, on_wait=on_wait):
            if (record := self._sound(key, hold)) is not None:
                return record, False
            if self.layer_directory(key).exists():
                self.quarantine(key)
            with self.staging(f"layer-{key[:12]}") as staging:
                started = time.monotonic()
                made = make(staging)
                seconds = round(time.monotonic() - started, 3) if made.seconds is None else made.seconds
                unsized = LayerRecord(
                    key, parent, dict(step), seconds, 0, 0, time.time(), dict(made.facts), made.seconds is not None
                )
                return self._publish(staging, made, unsized, stacked_with, hold), True

    def _sound(self, key: str, hold: Lease | None) -> LayerRecord | None:
        """Add a layer to a lease and return its record, or None if the layer is missing or damaged."""
        if not self.has_layer(key):
            return None
        try:
            if hold is not None:
                hold.add([self.layer_directory(key)])
            record = self.layer(key)
        except NotFound:  # the layer was removed meanwhile
            return None
        except StoreError:
            if not self.writable:
                raise
            return None
        return record if self.is_frozen(key) or (self.layer_directory(key) / "tree").is_dir() else None

    def remove_unused_layer(self, key: str) -> bool:
        """Remove a layer that is not in use, by a single rename, so that no process sees an incomplete layer.

        Returns:
            Whether the layer was removed; False if it is in use or missing.

        Raises:
            StoreError: a system call failed.
        """
        layer = self.layer_directory(key)
        with self._changing(f"remove layer {key}"):
            fd = open_exclusive(layer)
            if fd is None:
                return False
            try:
                # The layer's own lock protects the renamed directory, so the removal needs no new files on a full disk.
                trash = self.root / "staging" / f"removed.{secrets.token_hex(6)}"
                layer.rename(trash)
                remove_tree(trash)
            finally:
                os.close(fd)
        return True

    def quarantine(self, key: str) -> Path:
        """Move a damaged layer to quarantine; running sandboxes that use the layer continue.

        Returns:
            The layer's path in quarantine, where it stays until :func:`.collect.collect` removes it.

        Raises:
            StoreError: a system call failed.
        """
        with self._changing(f"put layer {key} into quarantine"):
            return set_aside(self.root, self.layer_directory(key))

    @contextmanager
    def hold(self, *keys: str, frozen: bool = False) -> Iterator[Lease]:
        """Hold layers while the body runs, so that no process removes or freezes them.

        Args:
            keys: keys of the layers; the body can add more layers to the lease. Frozen layers are unpacked first.
            frozen: leave frozen layers frozen.

        Raises:
            NotFound: a layer is missing.
            StoreError: a system call failed, or a frozen layer is damaged or in a read-only store.
            DiskFull: there is no space to unpack a frozen layer.
        """
        with Lease(Holder(), frozen=frozen) as lease:
            lease.add(map(self.layer_directory, keys))
            yield lease

    # --- locks and paths ---

    def lock(self, name: str, *, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Hold the store's lock with this name while the body runs."""
        self.require_writable(f"lock {name}")
        return hold_lock(self.root / "locks" / f"{check_name(name)}.lock", timeout=LOCK_TIMEOUT, on_wait=on_wait)

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from collecting garbage or freezing layers while the body runs.

        The directory itself is locked, because a lock file could not be created on a full disk.

        Raises:
            OSError: the lock cannot be opened.
        """
        return hold_flock(self.root / "layers", DIRECTORY)

    @contextmanager
    def staging(self, label: str) -> Iterator[Path]:
        """Create a private directory for unfinished files; remove it when the body ends or the process dies.

        Args:
            label: purpose of the directory, for its name and for error messages.

        Raises:
            DiskFull: the disk is full; also if the body fails with this OSError.
            StoreError: a system call failed with another OSError; also if it failed in the body.
        """
        with self._changing(f"make {label}"), staging_directory(self.root, label) as path:
            yield path

    def log_path(self, key: str) -> Path:
        """Return the path of the log of the step that builds a layer."""
        return self.root / "logs" / f"{check_key(key)}.log"

    def download_path(self, sha256: str) -> Path:
        """Return the path of the downloaded file with this SHA-256."""
        return self.root / "downloads" / check_key(sha256)

    def _mark_archived(self) -> None:
        """Mark the images of a store that an earlier version created (:meth:`archived_images`)."""
        with self.staging("archived") as folder, suppress(FileExistsError):
            for record in self.images(on_damaged=lambda *_: None):
                if NAMES in record.notes:
                    (folder / record.name).touch(mode=0o600)
            folder.rename(self.root / "archived")

    def _record(self, key: str) -> Path:
        return self.layer_directory(key) / "layer.json"

    def _publish(
        self, staging: Path, made: Made, unsized: LayerRecord, stacked_with: Sequence[str], hold: Lease | None
    ) -> LayerRecord:
        with store_faults(f"publish layer {unsized.key}"):
            below = partial(self._objects_below, unsized.parent, stacked_with)
            layer, record = Publication(self.pool, staging, made, below).prepare(unsized)
            if hold is not None:  # before the publication, so that no process can remove the layer
                hold.add([self.layer_directory(record.key)], layer)
            make_visible(layer, self.layer_directory(record.key))
        return record

    def _objects_below(
        self, parent: str | None, stacked_with: Sequence[str], digests: frozenset[bytes]
    ) -> Iterator[str]:
        """Yield the names of pool objects with these contents in the layers below and in ``stacked_with``."""
        stack: dict[str, None] = {}
        pending = [key for key in (parent, *stacked_with) if key is not None]
        while pending:
            key = pending.pop()
            if key not in stack and self.has_layer(key):
                stack[key] = None
                parent_key = self.layer(key).parent
                pending += [parent_key] if parent_key is not None else []
        yield from objects_of((self.layer_directory(key) for key in stack), digests)


def _check_version(root: Path) -> None:
    """Reject a directory that is not a store or has another version; write the version into an empty directory."""
    version_file = root / "version"
    try:
        version = read_below(root, version_file.name, _MOST_VERSION).decode("ascii", "replace").strip()
    except FileNotFoundError:
        if any(not entry.name.startswith((".version.", "lost+found")) for entry in root.iterdir()):
            _check_unmarked(version_file)
        else:
            write_atomic(version_file, f"{VERSION}\n".encode())
        return
    if version == str(VERSION):
        return
    if version.isdigit() and int(version) < VERSION:
        raise StoreError(
            f"the store {root} was made by an earlier MiniSandbox, and cannot be read",
            reason=f"it has version {version}, this MiniSandbox has {VERSION}",
            hint=f"its images are made again: remove it (chmod -R u+rwX {shlex.quote(str(root))}; rm -r "
            f"{shlex.quote(str(root))}), or set MINISANDBOX_STORE to a new directory; then build or pull",
        )
    raise StoreError(
        f"the store {root} has version {version[:20]!r}; this MiniSandbox reads {VERSION}",
        hint="use a later MiniSandbox, or set MINISANDBOX_STORE to another directory",
    )


def _check_unmarked(version_file: Path) -> None:
    """Reject a directory without a version file, unless another process has just created the store."""
    if version_file.exists():
        _check_version(version_file.parent)
        return
    raise StoreError(
        f"{version_file.parent} is not a store, and not empty",
        reason="it has no file `version`",
        hint="set MINISANDBOX_STORE to an empty or new directory",
    )
