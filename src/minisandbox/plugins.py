"""Entry points: the dialects, graders, agents and backends of other distributions (docs/how-to/extend.md)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from minisandbox.errors import PackageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = ("dialects", "graders", "agents", "backends")


def plugin_names(group: str, reserved: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names that other distributions add.

    Args:
        group: one of :data:`GROUPS`; the entry points' group is ``minisandbox.GROUP``.
        reserved: names of this package, which no other may take.

    Raises:
        PackageError: two distributions add the same name, or one adds a name of this package.
    """
    return tuple(_entries(group, reserved))


def load_plugin(group: str, name: str, reserved: Collection[str] = ()) -> object | None:
    """Return the object behind an entry point, or None if no distribution adds that name. Arguments as above.

    Raises:
        PackageError: as for :func:`plugin_names`; or it cannot be imported.
    """
    entry = _entries(group, reserved).get(name)
    if entry is None:
        return None
    try:
        plugin: object = entry.load()
    except Exception as error:  # the module is somebody else's code
        raise PackageError(
            f"{group}: {name!r} of {_distribution(entry)} cannot be loaded",
            reason=f"{type(error).__name__}: {error}",
            hint="update or uninstall that distribution",
        ) from error
    return plugin


def _entries(group: str, reserved: Collection[str]) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes as long as starting a sandbox

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
