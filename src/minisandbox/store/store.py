"""The store: layers, image records, logs and downloads, each published atomically."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import NotFound, StoreError
from minisandbox.store.catalogue import Catalogue, check_name
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
from minisandbox.types import JSONValue

__all__ = ["Made", "Store", "check_name"]

VERSION = 2
LOCK_TIMEOUT = 6 * 3600.0
_MOST_VERSION = 1 << 10

_PARTS = (
    "layers", "objects", "blobs", "images", "failed", "pins", "quarantine", "staging", "locks", "logs", "downloads",
)  # fmt: skip
_TORN = re.compile(r"\..+\.[0-9a-f]{12}")
_TORN_AGE = 3600.0


@dataclass(frozen=True, slots=True)
class Store(Catalogue):
    """A store on disk. Make one with :meth:`open`."""

    @classmethod
    def open(cls, root: Path | str | None = None, *, read_only: bool = False) -> Store:
        """Open a store, and create it if missing; remove the leftovers of dead processes.

        A store on a read-only file system, or one that belongs to another user, is opened for reading.

        Args:
            root: its directory; see :func:`default_root`.
            read_only: open it for reading whatever this process may do.

        Raises:
            StoreError: the directory cannot be used, others may write to it, it is no store, is of a later version, or
                lies on overlayfs or a network file system.
            DiskFull: there is no space to make it.
            NotFound: the store is missing, and is opened for reading.
        """
        path = default_root() if root is None else Path(root).expanduser().absolute()
        if read_only or is_read_only(path):
            return cls._open_read_only(path)
        with store_faults(f"open the store {path}"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path)
            check_file_system(path)
            _check_version(path)
            for part in _PARTS:
                (path / part).mkdir(mode=0o700, exist_ok=True)
            reclaim(path)
            _remove_torn(path)
        return cls(path)

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
        """Return the directory tree of a published layer; of one that is frozen, where holding it makes the tree.

        Raises:
            NotFound: there is no such layer.
        """
        if not self.has_layer(key):
            raise NotFound(f"layer {key} is not in the store {self.root}", hint="build the image again")
        return self.layer_directory(key) / "tree"

    def layer_directory(self, key: str) -> Path:
        """Return where a layer lies, or would: its tree, its record, the list of its files.

        Raises:
            InvalidValue: the key is malformed.
        """
        return self.root / "layers" / check_key(key)

    def is_frozen(self, key: str) -> bool:
        """Return whether a layer is compressed; its next use unpacks it."""
        return is_frozen(self.layer_directory(key))

    @property
    def pool(self) -> Pool:
        """The inodes that layers share."""
        return Pool(self.root / "objects")

    def layer(self, key: str) -> LayerRecord:
        """Return the record of a published layer.

        Raises:
            NotFound: there is no such layer.
            StoreError: its record is damaged.
        """
        self.layer_tree(key)  # is it there?
        with store_faults(f"read layer {key}"):
            return LayerRecord.read(self.root, f"layers/{key}/layer.json")

    def layers(self) -> Iterator[LayerRecord]:
        """Yield every published layer, in the order of their keys.

        Raises:
            StoreError: a record is damaged.
        """
        for key in self.layer_keys():
            with suppress(NotFound):  # removed since
                yield self.layer(key)

    def layer_keys(self) -> list[str]:
        """Return the keys of all published layers, in order."""
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
        """Return a layer, making it first if it is missing, or if it is damaged; several processes make it once.

        Args:
            key: its address.
            parent: the key of the layer below, or None.
            step: what makes it, for its record.
            make: is given an empty directory on the store's file system, and returns what it made there.
            on_wait: called again and again while another process is making it.
            stacked_with: keys of layers that images stack with this one, besides its parent and those below that.
            hold: holds the layer from now on.

        Returns:
            Its record, and whether this call made it.

        Raises:
            DiskFull: the disk is full; nothing was published.
            StoreError: the store refused, or another maker took longer than six hours.
            BaseException: what ``make`` raised, an ``OSError`` as StoreError; nothing was published.
        """
        if (record := self._sound(key, hold)) is not None:
            stamp(self.layer_directory(key), count=False)  # the collector leaves it to us for a while
            return record, False
        self.require_writable(f"make layer {key}")
        with self.lock(key, on_wait=on_wait):
            if (record := self._sound(key, hold)) is not None:
                return record, False
            if self.layer_directory(key).exists():
                self.quarantine(key)
            with self.staging(f"layer-{key[:12]}") as work:
                started = time.monotonic()
                result = make(work)
                took = round(time.monotonic() - started, 3)
                return self._publish(work, result, _unsized(key, parent, step, result, took), stacked_with, hold), True

    def _sound(self, key: str, hold: Lease | None) -> LayerRecord | None:
        """Return a layer's record and hold the layer; None if it is missing or damaged."""
        if not self.has_layer(key):
            return None
        try:
            if hold is not None:
                hold.add([self.layer_directory(key)])
            record = self.layer(key)
        except NotFound:  # removed this moment
            return None
        except StoreError:
            if not self.writable:
                raise
            return None
        return record if self.is_frozen(key) or (self.layer_directory(key) / "tree").is_dir() else None

    def remove_unused_layer(self, key: str) -> bool:
        """Remove a layer that no process holds. It goes by one rename, so it is never half there.

        Returns:
            Whether it was removed; False if it is in use, or not there.

        Raises:
            StoreError: the kernel refused.
        """
        self.require_writable(f"remove layer {key}")
        layer = self.layer_directory(key)
        with store_faults(f"remove layer {key}"):
            fd = open_exclusive(layer)
            if fd is None:
                return False
            try:
                # Its own lock protects the renamed directory; no directory is created, because the disk may be full.
                trash = self.root / "staging" / f"removed.{secrets.token_hex(6)}"
                layer.rename(trash)
                remove_tree(trash)
            finally:
                os.close(fd)
        return True

    def quarantine(self, key: str) -> Path:
        """Move a damaged layer to quarantine; sandboxes over it run on.

        Returns:
            Where it lies now, until :func:`.collect.collect` removes it.

        Raises:
            StoreError: the kernel refused.
        """
        self.require_writable(f"put layer {key} into quarantine")
        with store_faults(f"put layer {key} into quarantine"):
            return set_aside(self.root, self.layer_directory(key))

    @contextmanager
    def hold(self, *keys: str, frozen: bool = False) -> Iterator[Lease]:
        """Keep layers from being removed or frozen while the body runs, or this process lives.

        Args:
            keys: the layers; more can be added. Those that are frozen get their trees back first.
            frozen: leave those frozen that are.

        Raises:
            NotFound: a layer is missing.
            StoreError: the kernel refused, or one is frozen, and damaged or read-only.
            DiskFull: a layer is frozen, and there is no space for its tree.
        """
        with Lease(Holder(), frozen=frozen) as lease:
            lease.add(map(self.layer_directory, keys))
            yield lease

    # --- the rest ---

    def lock(self, name: str, *, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Hold the store's lock of that name while the body runs."""
        self.require_writable(f"lock {name}")
        return hold_lock(self.root / "locks" / f"{check_name(name)}.lock", timeout=LOCK_TIMEOUT, on_wait=on_wait)

    def alone(self) -> AbstractContextManager[None]:
        """Let no other process collect or freeze while the body runs.

        It needs no lock file, which could not be made on a full disk.

        Raises:
            OSError: the lock cannot be opened.
        """
        return hold_flock(self.root / "layers", DIRECTORY)

    @contextmanager
    def staging(self, label: str) -> Iterator[Path]:
        """Make a private directory for half-made things, removed when the body ends or its process dies.

        Args:
            label: what it is for: part of its name, and what errors call it.

        Raises:
            DiskFull: the disk is full, or the body found it so.
            StoreError: any other refusal of the system, in the body too.
        """
        self.require_writable(f"make {label}")
        with store_faults(f"make {label}"), staging_directory(self.root, label) as path:
            yield path

    def log_path(self, key: str) -> Path:
        """Return the file for the output of the step that makes a layer."""
        return self.root / "logs" / f"{check_key(key)}.log"

    def download_path(self, sha256: str) -> Path:
        """Return the file for a download with that hash."""
        return self.root / "downloads" / check_key(sha256)

    def _record(self, key: str) -> Path:
        return self.layer_directory(key) / "layer.json"

    def _publish(
        self, work: Path, result: Made, unsized: LayerRecord, stacked_with: Sequence[str], hold: Lease | None
    ) -> LayerRecord:
        with store_faults(f"publish layer {unsized.key}"):
            below = self._objects_below(unsized.parent, stacked_with)
            layer, record = Publication(self.pool, work, result, below).prepare(unsized)
            if hold is not None:  # before anybody can see it, and so remove it
                hold.add([self.layer_directory(record.key)], layer)
            make_visible(layer, self.layer_directory(record.key))
        return record

    def _objects_below(self, parent: str | None, stacked_with: Sequence[str]) -> Iterator[str]:
        """Yield the objects of the layers that one is stacked with; they are read on demand."""
        stack: dict[str, None] = {}
        waiting = [key for key in (parent, *stacked_with) if key is not None]
        while waiting:
            key = waiting.pop()
            if key not in stack and self.has_layer(key):
                stack[key] = None
                below = self.layer(key).parent
                waiting += [below] if below is not None else []
        yield from objects_of(self.layer_directory(key) for key in stack)


def _unsized(key: str, parent: str | None, step: Mapping[str, JSONValue], result: Made, took: float) -> LayerRecord:
    """Return a layer's record before its files are counted."""
    imported = result.seconds is not None
    seconds = took if result.seconds is None else result.seconds
    return LayerRecord(key, parent, dict(step), seconds, 0, 0, time.time(), dict(result.facts), imported)


def _remove_torn(root: Path) -> None:
    """Remove the half-written files of killed processes (:func:`.write_atomic`)."""
    for directory in (root, root / "images", root / "failed", root / "logs", root / "blobs"):
        for path in directory.glob(".*"):
            with suppress(OSError):  # its writer was quicker
                if _TORN.fullmatch(path.name) and time.time() - path.stat().st_mtime > _TORN_AGE:
                    path.unlink()


def _check_version(root: Path) -> None:
    """Refuse a directory that is no store, or one of another version; mark an empty one as ours."""
    file = root / "version"
    try:
        text = read_below(root, file.name, _MOST_VERSION).decode("ascii", "replace").strip()
    except FileNotFoundError:
        if any(not entry.name.startswith((".version.", "lost+found")) for entry in root.iterdir()):
            _check_unmarked(file)
            return
        write_atomic(file, f"{VERSION}\n".encode())
        return
    if text == str(VERSION):
        return
    if text.isdigit() and int(text) < VERSION:
        raise StoreError(
            f"the store {root} was made by an earlier MiniSandbox, and cannot be read",
            reason=f"it has version {text}, this MiniSandbox has {VERSION}",
            hint=f"its images are made again: remove it (chmod -R u+rwX {shlex.quote(str(root))}; rm -r "
            f"{shlex.quote(str(root))}), or set MINISANDBOX_STORE to a new directory; then build or pull",
        )
    raise StoreError(
        f"the store {root} has version {text[:20]!r}; this MiniSandbox reads {VERSION}",
        hint="use a later MiniSandbox, or set MINISANDBOX_STORE to another directory",
    )


def _check_unmarked(file: Path) -> None:
    """Accept a directory whose first opener marked it between our two looks; refuse anything else."""
    if file.exists():
        _check_version(file.parent)
        return
    raise StoreError(
        f"{file.parent} is not a store, and not empty",
        reason="it has no file `version`",
        hint="set MINISANDBOX_STORE to an empty or new directory",
    )
