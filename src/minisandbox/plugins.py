"""Load the dialects, graders, agents, recipes and backends that other distributions provide (docs/how-to/extend.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from minisandbox.errors import PackageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = ("dialects", "graders", "agents", "backends", "recipes")


def plugin_names(group: str, reserved: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the plug-ins in a group.

    Args:
        group: one of :data:`GROUPS`; the entry point group is ``minisandbox.GROUP``.
        reserved: names of this package, which plug-ins may not use.

    Raises:
        PackageError: two distributions use the same name, or one uses a reserved name.
    """
    return tuple(_entries(group, reserved))


def load_plugin(group: str, name: str, reserved: Collection[str] = ()) -> object | None:
    """Import and return a plug-in, or None if no distribution provides it.

    Args:
        group: one of :data:`GROUPS`.
        name: name of the plug-in.
        reserved: names of this package, which plug-ins may not use.

    Raises:
        PackageError: as for :func:`plugin_names`, or the plug-in cannot be imported.
    """
    entry = _entries(group, reserved).get(name)
    if entry is None:
        return None
    try:
        plugin: object = entry.load()
    except Exception as error:  # third-party code may raise anything
        raise PackageError(
            f"{group}: {name!r} of {_distribution(entry)} cannot be loaded",
            reason=f"{type(error).__name__}: {error}",
            hint="update or uninstall that distribution",
        ) from error
    return plugin


def _entries(group: str, reserved: Collection[str]) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes as long as the start of a sandbox

    entries: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=f"minisandbox.{group}"), key=lambda entry: (entry.name, entry.value)):
        owner = _distribution(entries[entry.name]) if entry.name in entries else "MiniSandbox"
        if entry.name in entries or entry.name in reserved:
            raise PackageError(
                f"{group}: {entry.name!r} of {_distribution(entry)} is already a name of {owner}",
                hint="uninstall one of them, or rename its entry point",
            )
        entries[entry.name] = entry
    return entries


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
