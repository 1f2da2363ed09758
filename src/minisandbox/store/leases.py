"""Leases: locks on layers in use, which must not be removed.

A lease is a shared flock(2) on the layer's directory. It needs no file of its own, works on a store that is mounted
read-only, and ends with its process, however that ends. Who wants to remove a layer takes the lock exclusively, without
waiting. A process holds one descriptor for each layer in use, however many sandboxes use it.
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
    """A descriptor of a layer's directory with its lock; closed when the last lease is released."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Holder:
    """The layers that one process holds: one descriptor for each, however many leases have it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[Path, _Held] = weakref.WeakValueDictionary()

    def take(self, layer: Path, lies: Path | None = None, *, frozen: bool = False) -> _Held:
        """Return an object that holds a layer as long as it is referenced; see :meth:`Lease.add`."""
        with self._lock:
            held = self._held.get(layer)
            if held is None:
                with store_faults(f"hold layer {layer.name}"):
                    held = self._held[layer] = _Held(_open_shared(lies or layer))
        if frozen or not is_frozen(layer):
            return held
        from minisandbox.store.blobs.thawing import thaw  # noqa: PLC0415 - few layers are frozen

        try:
            thaw(layer)  # held, so that it cannot be removed or frozen; other layers can be taken meanwhile
        except BaseException:  # Ctrl-C above all: it is not held then, however long the traceback lives
            del held
            raise
        return held


class Lease:
    """Layers that stay in the store while it lasts: until its ``with`` block ends, it is released, or the process ends.

    Args:
        holder: who keeps the descriptors.
        frozen: leave those frozen that are; otherwise they get their trees back first.
    """

    def __init__(self, holder: Holder, *, frozen: bool = False) -> None:
        self._holder = holder
        self._frozen = frozen
        self._held: list[_Held] = []

    def add(self, layers: Iterable[Path], lies: Path | None = None) -> None:
        """Hold further layers.

        Args:
            layers: their directories.
            lies: where the one layer still lies, if it is about to be published.

        Raises:
            NotFound: a layer is missing or being removed; those before it are held.
            StoreError: the kernel refused, or one is frozen, and damaged or read-only.
            DiskFull: a layer is frozen, and there is no space for its tree.
        """
        for layer in layers:
            self._held.append(self._holder.take(layer, lies, frozen=self._frozen))

    def release(self) -> None:
        """Let go; calling it again does nothing."""
        self._held.clear()

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self.release()


def layer_of(path: Path) -> Path | None:
    """Return the directory of the layer whose tree holds a path; None if it is in no layer."""
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
    """Take the shared lock of a layer; return whether it could: a layer that is being removed has none.

    It is held exclusively for a moment, or while the layer is removed or frozen; another user may hold it forever.
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
    """Lock a layer exclusively and return a descriptor that the caller closes; None if it is in use or gone.

    Raises:
        OSError: the kernel refused.
    """
    with suppress(FileNotFoundError):
        return open_locked(layer, DIRECTORY)
    return None


def in_use(layer: Path) -> bool:
    """Return whether any process holds a layer right now."""
    fd = open_exclusive(layer)
    if fd is None:
        return layer.exists()
    os.close(fd)
    return False


# --- uses ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a layer.

    Attributes:
        count: how many sandboxes were made over it.
        last: seconds since the epoch when it was last used, or made.
    """

    count: int
    last: float


def stamp(layer: Path, *, count: bool) -> None:
    """Note that a layer is used; on a store that cannot be written nothing happens.

    Args:
        layer: its directory.
        count: whether a sandbox is made over it: one byte more in the file ``used``, whose mtime is the moment.
    """
    try:
        fd = os.open(layer / USED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # read-only, another user's, full: it can be used all the same
        return
    try:
        if count:
            os.write(fd, b".")
        else:
            os.utime(fd)
    except OSError:  # the same
        pass
    finally:
        os.close(fd)


def use_of(layer: Path, published: float) -> Use:
    """Return the use of a layer.

    Args:
        layer: its directory.
        published: when it was published, seconds since the epoch.
    """
    try:
        info = os.stat(layer / USED, follow_symlinks=False)
    except OSError:  # never used
        return Use(0, published)
    return Use(info.st_size, max(published, info.st_mtime))
