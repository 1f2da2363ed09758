"""The path of the store, and whether it is writable and private."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.host.environment import file_system, is_network
from minisandbox.store.disk.durable import sync_directory


def default_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the store's directory.

    Args:
        environment: where to look; the process's own environment by default.

    Returns:
        ``$MINISANDBOX_STORE``, else ``$XDG_CACHE_HOME/minisandbox``, else ``~/.cache/minisandbox``; always absolute.

    Raises:
        StoreError: no setting names the directory, and there is no home directory.
    """
    env = os.environ if environment is None else environment
    if chosen := env.get("MINISANDBOX_STORE"):
        return Path(chosen).expanduser().absolute()
    cache = env.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative values are invalid and are ignored.
    if cache.startswith("/"):
        return Path(cache) / "minisandbox"
    home = home_directory(env)
    if home is None:
        raise StoreError(
            "there is no place for the store",
            reason="HOME is not set, and this user is not in the password file",
            hint="set MINISANDBOX_STORE to a directory of your own",
        )
    return home / ".cache/minisandbox"


def home_directory(environment: Mapping[str, str]) -> Path | None:
    """Return the user's home: ``$HOME``, otherwise the password file's; None if neither is set."""
    if home := environment.get("HOME"):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError:
        return None


def is_read_only(path: Path) -> bool:
    """Return whether this process may not change a store: it is on a read-only mount or belongs to another user."""
    try:
        owner = (path / "version").lstat().st_uid
    except OSError:
        return False
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    # One that this process could write to is no exception: layers of several owners cannot all be copied up inside.
    return owner != os.geteuid() or not os.access(path, os.W_OK | os.X_OK)


def check_private(path: Path) -> None:
    """Refuse a directory in which another user could replace a store's parts by links.

    Raises:
        StoreError: the directory belongs to another user, or others may write to it.
        OSError: the directory cannot be examined.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"the store {path} cannot be made",
            reason=f"the directory belongs to another user (uid {status.st_uid}), who could change what is kept in it",
            hint="set MINISANDBOX_STORE to a directory of your own, or to one that is not there yet",
        )
    if status.st_mode & 0o022:
        raise StoreError(
            f"the store {path} cannot be used",
            reason="others may write to the directory, and could change what is kept in it",
            hint=f"chmod go-w {shlex.quote(str(path))}",
        )


def check_file_system(path: Path) -> None:
    """Refuse a file system on which no layer can be made, or on which locks do not hold.

    Raises:
        StoreError: the file system is overlayfs or a network file system.
        OSError: the directory cannot be looked at.
    """
    kind = file_system(path)
    if is_network(kind):
        raise StoreError(
            f"the store {path} lies on {kind}, a network file system",
            reason="a node does not see the locks that another holds there: it would remove what the other is building "
            "or using; nor can layers be made there",
            hint="set MINISANDBOX_STORE to a directory on a disk of this node: on a cluster one below the job's "
            "$TMPDIR, elsewhere one on ext4, xfs or btrfs",
        )
    if kind == "overlay":
        raise StoreError(
            f"the store {path} lies on overlayfs",
            reason="the kernel takes no overlay's upper directory on another overlay, and layers are made in one; the "
            "root file system of a container is usually such a place",
            hint="set MINISANDBOX_STORE to a directory on ext4, xfs, btrfs or tmpfs: a volume of the container, or "
            "below /dev/shm for a try",
        )


def set_aside(root: Path, damaged: Path) -> Path:
    """Move something damaged to quarantine by one rename, so that sandboxes over it run on.

    Args:
        root: the store's directory.
        damaged: a layer, a pack or a record in it.

    Returns:
        Where it lies now, until :func:`.collect.collect` removes it.

    Raises:
        OSError: the kernel refused, or it has gone.
    """
    target = root / "quarantine" / f"{damaged.name}.{secrets.token_hex(4)}"
    damaged.rename(target)
    sync_directory(target.parent)
    return target
