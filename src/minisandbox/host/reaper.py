"""Remove the control groups and records of dead owners."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.host import registry
from minisandbox.launch.kernel import cgroups

_GROUP, _RECORDS = "control group", "records"
_PATIENCE = 0.2
"""Seconds to retry removing the control groups of a dead owner; busy groups are left to the next start."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A resource whose owner is dead.

    Attributes:
        kind: ``records``, ``control group`` or ``directory``.
        path: where it lies.
        owner: the dead owner's name.
    """

    kind: str
    path: Path
    owner: str

    def remove(self) -> bool:
        """Remove the resource unless it is in use; return whether it is gone."""
        if self.kind == _GROUP:
            cgroups.remove_owner(str(self.path), _PATIENCE)
        elif not registry.control_groups(self.path):  # otherwise the next reaper needs the recorded paths
            registry.remove_directory(self.path)
        return not os.path.lexists(self.path)


def leftovers(runtime: Path) -> Iterator[Leftover]:
    """Yield the control groups and records of dead owners.

    An owner may have run in another control group than this process, so each owner records the paths of its groups.
    """
    dead_directories = [
        directory for directory in registry.owner_directories(runtime) if registry.is_dead(directory.name)
    ]
    groups = {Path(group): name for name, group in cgroups.owners(cgroups.find_roots()) if registry.is_dead(name)}
    groups |= {group: directory.name for directory in dead_directories for group in registry.control_groups(directory)}
    yield from (Leftover(_GROUP, path, name) for path, name in groups.items())
    yield from (Leftover(_RECORDS, directory, directory.name) for directory in dead_directories)


def reap(runtime: Path) -> list[Leftover]:
    """Remove the control groups and records of dead owners; return those that were removed."""
    return [leftover for leftover in leftovers(runtime) if leftover.remove()]


def reap_groups(name: str) -> None:
    """Remove the control groups of an owner that has ended its sandboxes.

    Args:
        name: see :func:`.registry.owner_name`.
    """
    for owner, directory in cgroups.owners(cgroups.find_roots()):
        if owner == name:
            cgroups.remove_owner(directory)
