"""Lock layers in use, so that no process removes or freezes them.

A lease is a shared flock(2) on the layer's directory. It needs no lock file, works on a read-only mount, and the kernel
releases it when the process exits or is killed. To remove a layer, a process needs an exclusive lock, and does not wait
for it. A process keeps one descriptor for each layer in use, even if many sandboxes use the layer.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from minisandbox.errors import NotFound, StoreError
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import DIRECTORY, open_locked, still_named
from minisandbox.store.keys import is_key
from minisandbox.store.records import is_frozen

USED = "used"
_TIMEOUT = 300.0
_POLL = 0.01


class _Held:
    """Locked descriptor of a layer's directory, closed when this process releases its last lease on the layer."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Holder:
    """Table of the layers that this process holds; all leases on a layer share one descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[Path, _Held] = weakref.WeakValueDictionary()

    def take(self, layer: Path, lies: Path | None = None, *, frozen: bool = False) -> _Held:
        """Lock a layer; the lock is released when the returned object is garbage-collected. See :meth:`Lease.add`."""
        with self._lock:
            lock = self._held.get(layer)
            if lock is None:
                with store_faults(f"hold layer {layer.name}"):
                    lock = self._held[layer] = _Held(_open_shared(lies or layer))
        if frozen or not is_frozen(layer):
            return lock
        from minisandbox.store.blobs.thawing import thaw  # noqa: PLC0415 - few layers are frozen

        try:
            # `lock` prevents removal and freezing of the layer. Unpack without self._lock, which other threads need.
            thaw(layer)
        except BaseException:  # also on Ctrl-C, release now, because the traceback would keep `lock` alive
            del lock
            raise
        return lock


class Lease:
    """Lease on layers: they stay in the store until the ``with`` block ends, release() is called, or the process exits.

    Args:
        holder: the process's table of held layers.
        frozen: leave frozen layers frozen; otherwise frozen layers are unpacked first.
    """

    def __init__(self, holder: Holder, *, frozen: bool = False) -> None:
        self._holder = holder
        self._frozen = frozen
        self._held: list[_Held] = []

    def add(self, layers: Iterable[Path], lies: Path | None = None) -> None:
        """Add layers to the lease.

        Args:
            layers: directories of the layers.
            lies: current path of the layer's directory, if a single layer is added that is not published yet.

        Raises:
            NotFound: a layer is missing or being removed; the lease keeps the layers before it.
            StoreError: a system call failed, or a frozen layer is damaged or in a read-only store.
            DiskFull: there is no space to unpack a frozen layer.
        """
        for layer in layers:
            self._held.append(self._holder.take(layer, lies, frozen=self._frozen))

    def release(self) -> None:
        """Release all layers; releasing them again does nothing."""
        self._held.clear()

    def __enter__(self) -> Self:
        """Use the lease in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release all layers."""
        self.release()


def layer_of(path: Path) -> Path | None:
    """Return the directory of the layer whose tree contains a path, or None if no layer contains the path."""
    for tree in (path, *path.parents):
        layer = tree.parent
        if tree.name == "tree" and layer.parent.name == "layers" and is_key(layer.name):
            return layer
    return None


def _open_shared(layer: Path) -> int:
    fd = None
    with suppress(FileNotFoundError):
        fd = open_locked(layer, DIRECTORY, lambda fd: _share(fd, layer))
    if fd is None:
        raise NotFound(f"layer {layer.name} is not in the store {layer.parent.parent}", hint="build the image again")
    return fd


def _share(fd: int, layer: Path) -> bool:
    """Take the shared lock of a layer; return False if the layer is being removed.

    Wait while another process removes or freezes the layer. The wait has a timeout, because another user of the machine
    could hold the lock forever.
    """
    deadline = time.monotonic() + _TIMEOUT
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        if not still_named(fd, layer):
            return False
        if time.monotonic() >= deadline:
            raise StoreError(
                f"layer {layer.name} is still locked after {_TIMEOUT:.0f} s",
                reason="another process freezes it, or the store's owner keeps its lock",
                hint=f"see who has it open: fuser -v {layer}",
            )
        time.sleep(_POLL)


def open_exclusive(layer: Path) -> int | None:
    """Lock a layer exclusively; return a descriptor that the caller closes, or None if the layer is in use or missing.

    Raises:
        OSError: a system call failed.
    """
    with suppress(FileNotFoundError):
        return open_locked(layer, DIRECTORY)
    return None


def in_use(layer: Path) -> bool:
    """Return whether a process holds the layer."""
    fd = open_exclusive(layer)
    if fd is None:
        return layer.exists()
    os.close(fd)
    return False


# --- uses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """Usage record of a layer.

    Attributes:
        count: number of sandboxes that were created on the layer.
        last: time when the layer was last used or created, in seconds since the epoch.
    """

    count: int
    last: float


def stamp(layer: Path, *, count: bool) -> None:
    """Record that a layer is used now, by the mtime of its file ``used``; do nothing if the store is not writable.

    Args:
        layer: directory of the layer.
        count: whether to count a new sandbox, by appending a byte to ``used``.
    """
    try:
        fd = os.open(layer / USED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # the store is read-only or full; the layer is usable without a usage record
        return
    try:
        if count:
            os.write(fd, b".")
        else:
            os.utime(fd)
    except OSError:  # best effort, as above
        pass
    finally:
        os.close(fd)


def use_of(layer: Path, created: float) -> Use:
    """Return the usage record of a layer.

    Args:
        layer: directory of the layer.
        created: seconds since the epoch when the layer was published.
    """
    try:
        status = os.lstat(f"{layer}/{USED}")
    except OSError:  # no usage record: the layer was never used
        return Use(0, created)
    return Use(status.st_size, max(created, status.st_mtime))
