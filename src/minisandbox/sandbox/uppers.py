"""Uppers on disk: the writes of a build, which become the next layer."""

from __future__ import annotations

import os
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.store.trees import remove_tree
from minisandbox.types import Limits


def prepare(upper: Path) -> None:
    """Make the directories that the overlays need in an empty host directory.

    Raises:
        InvalidValue: it is not an existing, empty directory of this user's.
    """
    if not upper.is_absolute() or upper.is_symlink() or not upper.is_dir() or any(upper.iterdir()):
        raise InvalidValue(f"upper {upper} is not an absolute path of an empty directory")
    if (owner := upper.stat().st_uid) != os.geteuid():
        raise InvalidValue(
            f"upper {upper} belongs to the user {owner}",
            reason="what is setuid inside is so on disk, and that user could run it",
            hint="give a directory of your own: mktemp -d",
        )
    upper.chmod(0o700)  # other users must not see it
    for name in ("tree", "work", "usr", "usr-work"):
        (upper / name).mkdir()
        (upper / name).chmod(0o755)


def check_limits(limits: Limits | None) -> None:
    """Refuse a limit of the disk, of which an upper on disk has none: no quota of the kernel's counts one directory.

    Raises:
        InvalidValue: a limit was given that is not the default.
    """
    if isinstance(limits, Limits) and limits.disk != Limits().disk:  # Core.create refuses other types
        raise InvalidValue(
            f"Limits.disk={limits.disk} and upper= cannot be combined",
            reason="what is written to an upper on disk is limited by that disk alone",
            hint="leave out Limits.disk, and give a directory on a file system of that size; or leave out upper=",
        )


def finish(upper: Path) -> None:
    """Turn a finished upper into a layer: one ``tree``, nothing else."""
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
