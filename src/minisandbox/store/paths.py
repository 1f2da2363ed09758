"""Where the store lies when nobody says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the store's directory.

    Args:
        environment: where to look; the process's own environment by default.

    Returns:
        ``$MINISANDBOX_STORE``, else ``$XDG_CACHE_HOME/minisandbox``, else ``~/.cache/minisandbox``; always absolute.
    """
    env = os.environ if environment is None else environment
    if chosen := env.get("MINISANDBOX_STORE"):
        return Path(chosen).expanduser().absolute()
    cache = env.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative values are invalid and are ignored.
    base = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return base / "minisandbox"
