"""Where the store lies when nobody says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from minisandbox.errors import StoreError


def default_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the store's directory.

    Args:
        environment: where to look; the process's own environment by default.

    Returns:
        ``$MINISANDBOX_STORE``, else ``$XDG_CACHE_HOME/minisandbox``, else ``~/.cache/minisandbox``; always absolute.

    Raises:
        StoreError: nobody says where, and there is no home directory.
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
    """Return the user's home: ``$HOME``, else what the password file says; None where neither does."""
    if home := environment.get("HOME"):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError:
        return None
