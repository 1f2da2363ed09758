"""Find the store's directory, and check that it is private, writable and on a suitable file system."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import StoreError
from minisandbox.host.file_systems import file_system, is_network
from minisandbox.store.disk.durable import sync_directory


def default_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the store's directory.

    Args:
        environment: environment variables; those of the process by default.

    Returns:
        ``$MINISANDBOX_STORE``, else ``$XDG_CACHE_HOME/minisandbox``, else ``~/.cache/minisandbox``; always absolute.

    Raises:
        StoreError: neither variable is set, and the user has no home directory.
    """
    variables = os.environ if environment is None else environment
    if configured := variables.get("MINISANDBOX_STORE"):
        return Path(configured).expanduser().absolute()
    cache = variables.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification requires programs to ignore relative paths.
    if cache.startswith("/"):
        return Path(cache) / "minisandbox"
    home = home_directory(variables)
    if home is None:
        raise StoreError(
            "there is no place for the store",
            reason="HOME is not set, and this user is not in the password file",
            hint="set MINISANDBOX_STORE to a directory of your own",
        )
    return home / ".cache/minisandbox"


def home_directory(environment: Mapping[str, str]) -> Path | None:
    """Return the user's home directory from ``$HOME`` or the password file, or None if neither names it."""
    if home := environment.get("HOME"):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError:
        return None


def is_read_only(path: Path) -> bool:
    """Return whether a store is read-only for this process: on a read-only mount, or owned by another user."""
    try:
        owner = (path / "version").lstat().st_uid
    except OSError:
        return False
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    # Never write to another user's store, even with permission: layers would then have files of several owners, and
    # overlayfs in a sandbox could not copy all of them up.
    return owner != os.geteuid() or not os.access(path, os.W_OK | os.X_OK)


def check_private(path: Path) -> None:
    """Reject a directory in which another user could replace parts of the store by symlinks.

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
    """Reject a file system on which layers cannot be created, or whose locks do not work across machines.

    Raises:
        StoreError: the file system is overlayfs or a network file system.
        OSError: the directory cannot be examined.
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
    """Move a damaged layer or record to quarantine by a rename, so that running sandboxes can still use its files.

    Args:
        root: the store's directory.
        damaged: path of a layer, pack or record in the store.

    Returns:
        The path in quarantine, where the files stay until :func:`.collect.collect` removes them.

    Raises:
        OSError: a system call failed, or ``damaged`` is missing.
    """
    target = root / "quarantine" / f"{damaged.name}.{secrets.token_hex(4)}"
    damaged.rename(target)
    sync_directory(target.parent)
    return target
