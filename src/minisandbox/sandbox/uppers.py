"""Manage uppers on disk: for builds, whose upper becomes a layer, and for kernels that refuse a tmpfs as upper."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from minisandbox.errors import HostError, InvalidValue
from minisandbox.host.os_errors import runtime_os_errors
from minisandbox.launch.disk import FLOOR
from minisandbox.sandbox import scratch
from minisandbox.store.disk.paths import is_read_only
from minisandbox.store.disk.trees import remove_tree
from minisandbox.store.leases import layer_of
from minisandbox.store.store import Store
from minisandbox.types import ImageSpec, Limits, Mount

WATCHED = "watchdog"
"""Name in ``info().enforced`` of the mechanism that enforces ``Limits.disk`` of an upper on disk."""
_live: set[Path] = set()
_unused: deque[Path] = deque()


class UpperDirectory:
    """A directory on the store's disk for the upper of one run of a sandbox.

    The first :func:`sweep` after the last reference to this object is gone removes it. If its owner is killed, the next
    owner removes it (:mod:`.scratch`).

    Args:
        image: image of the sandbox; the directory is created in the image's store, or in this user's own.

    Attributes:
        path: the directory.

    Raises:
        HostError: the directory cannot be created, or the disk is full.
    """

    def __init__(self, image: ImageSpec) -> None:
        parent = _store(image) / "uppers"
        with runtime_os_errors("make a directory for uppers", parent.parent, ""):
            parent.mkdir(mode=0o700, exist_ok=True)
            info = os.statvfs(parent)
        if (free_size := info.f_bavail * info.f_frsize) < FLOOR:
            raise HostError(
                f"the store's disk has {free_size >> 20} MiB free, and sandboxes need {FLOOR >> 20}",
                reason="on this kernel sandboxes write to that disk, not to memory",
                hint=f"free some space at {parent}; 'minisandbox image ls --sizes' shows what the store takes",
            )
        self.path = scratch.new_scratch(parent)
        _live.add(self.path)

    def discard(self) -> None:
        """Mark the directory for removal, even if other objects still use it; calling it again does nothing."""
        if self.path in _live:
            _live.discard(self.path)
            _unused.append(self.path)

    def __del__(self) -> None:
        """Mark the directory for removal."""
        if hasattr(self, "path"):
            self.discard()


def _forget_all() -> None:
    """Forget the directories in a forked child, because they belong to its parent."""
    _live.clear()
    _unused.clear()


os.register_at_fork(after_in_child=_forget_all)


def _store(image: ImageSpec) -> Path:
    """Return the image's store if this process may write to it, otherwise this user's own store."""
    for layer in filter(None, map(layer_of, reversed(image.layers))):
        if not is_read_only(store := layer.parents[1]):
            return store
    return Store.open().root


def sweep(*, include_live: bool = False) -> None:
    """Remove the directories marked for removal; safe to call from several threads.

    Args:
        include_live: whether to remove all other directories too, once every sandbox of this process has ended.
    """
    for path in list(_live) if include_live else ():
        _live.discard(path)
        _unused.append(path)
    while _unused:
        try:
            path = _unused.popleft()
        except IndexError:
            return
        scratch.remove(path)


def prepare(upper: Path) -> None:
    """Create the directories for overlay uppers in a host directory.

    Args:
        upper: the host directory, empty or with a ``tree`` of earlier writes.

    Raises:
        InvalidValue: the path is not a directory of this user, or contains anything but ``tree``.
    """
    if not upper.is_absolute() or upper.is_symlink() or not upper.is_dir() or set(os.listdir(upper)) - {"tree"}:
        raise InvalidValue(f"upper {upper} is not an absolute path of an empty directory")
    if (owner := upper.stat().st_uid) != os.geteuid():
        raise InvalidValue(
            f"upper {upper} belongs to the user {owner}",
            reason="what is setuid inside is so on disk, and that user could run it",
            hint="give a directory of your own: mktemp -d",
        )
    upper.chmod(0o700)  # other users must not reach setuid programs in it
    for name in {"tree", "work", "usr", "usr-work"} - set(os.listdir(upper)):
        (upper / name).mkdir()
        (upper / name).chmod(0o755)


def check_limits(limits: Limits | None) -> None:
    """Reject a disk limit for an upper given by the caller, because the kernel has no quota for one directory.

    Raises:
        InvalidValue: the disk limit is not the default.
    """
    if isinstance(limits, Limits) and limits.disk != Limits().disk:  # Core.create rejects other types
        raise InvalidValue(
            f"Limits.disk={limits.disk} and upper= cannot be combined",
            reason="what is written to an upper on disk is limited by that disk alone",
            hint="leave out Limits.disk, and give a directory on a file system of that size; or leave out upper=",
        )


def check_mounts(mounts: Sequence[Mount]) -> None:
    """Reject writable mounts, which only builds may use.

    Raises:
        InvalidValue: a mount is writable.
    """
    for mount in mounts if isinstance(mounts, (list, tuple)) else ():
        if isinstance(mount, Mount) and mount.upper is not None:  # Core.create rejects other types
            raise InvalidValue(f"mount {mount.target}: writable mounts are not supported", hint="use files.upload")


def finish(upper: Path) -> None:
    """Turn the upper of a finished build into a layer: a single directory ``tree``."""
    for name in ("work", "usr-work"):
        if (upper / name).is_dir():
            remove_tree(upper / name)  # its inner directories have mode 000 (fs/overlayfs/super.c)
    usr = upper / "usr"
    if not usr.is_dir():
        return
    if any(usr.iterdir()):
        usr.rename(upper / "tree" / "usr")
    else:
        usr.rmdir()
