"""The engines by name, in the order of the table. Their modules are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from benchmarks.engines.engine import Engine

ENGINES = {
    "host": ("host:Host", "bare host"),
    "minisandbox": ("minisandbox:AsRoot", "MiniSandbox, root"),
    "minisandbox-user": ("minisandbox:AsUser", "MiniSandbox, user"),
    "bubblewrap-command": ("bubblewrap:OneCommand", "bubblewrap, one command"),
    "bubblewrap": ("bubblewrap:WithShell", "bubblewrap"),
    "kern": ("packaged:Kern", "kern, one command"),
    "sandlock": ("packaged:Sandlock", "sandlock, one command"),
    "podman": ("podman:Podman", "podman"),
    "docker": ("docker:Docker", "docker"),
    "original": ("original:Original", "original's way"),
}


def engine_class(name: str) -> type[Engine]:
    """Return an engine's class."""
    module, _, attribute = ENGINES[name][0].partition(":")
    found: type[Engine] = getattr(importlib.import_module(f"benchmarks.engines.{module}"), attribute)
    return found


def chosen(names: Iterable[str]) -> dict[str, str]:
    """Return the headings of the engines that names stand for, each with its variants, and of the bare host.

    Raises:
        ValueError: there is no such engine.
    """
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"there is no engine {name!r}: {', '.join(ENGINES)}")
    prefixes = tuple(f"{name}-" for name in ("host", *names))
    return {name: heading for name, (_, heading) in ENGINES.items() if f"{name}-".startswith(prefixes)}
