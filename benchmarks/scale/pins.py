"""The datasets' environments: what their exported pins list, each different list once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from minisandbox.spec import Pins, read_pins

_MINOR = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """One distribution of one version.

    Attributes:
        name: the project, as indexes spell it.
        version: as the export has it.
    """

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Environment:
    """One list of pins and the tasks that have it: one layer of the store.

    Attributes:
        python: the interpreter's minor version, such as "3.9".
        pins: what is installed.
        owners: the exports with just these pins.
        skipped: how many entries are conda packages that are no Python distributions.
    """

    python: str
    pins: frozenset[Pin]
    owners: tuple[str, ...]
    skipped: int = 0


def read_environments(folder: Path) -> list[Environment]:
    """Read every export below a folder, as the product reads them.

    Args:
        folder: ``swebench`` (REPO/NUMBER/environment.yml) or ``swesmith`` (REPO.COMMIT/*.yml).

    Returns:
        Each different environment once, those with the most exports first.

    Raises:
        InvalidValue: an export cannot be read.
    """
    return distinct((f"{path.relative_to(folder).parent}", read_pins(path)) for path in sorted(folder.rglob("*.yml")))


def distinct(exports: Iterable[tuple[str, Pins]]) -> list[Environment]:
    """Bring exports with equal pins and interpreters together."""
    owners: dict[tuple[str, frozenset[Pin]], list[str]] = defaultdict(list)
    skipped: dict[tuple[str, frozenset[Pin]], int] = {}
    for owner, export in exports:
        key = (minor_of(export.python), frozenset(pins_of(export.requirements)))
        owners[key].append(owner)
        skipped[key] = len(export.skipped)
    found = [Environment(*key, tuple(names), skipped[key]) for key, names in owners.items()]
    return sorted(found, key=lambda one: (-len(one.owners), one.owners))


def pins_of(requirements: Iterable[str]) -> Iterator[Pin]:
    """Yield the pins among requirements; a line that pins nothing is none."""
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        versions = [one.version for one in requirement.specifier if one.operator in ("==", "===")]
        if len(versions) == 1:
            yield Pin(canonicalize_name(requirement.name), versions[0])


def minor_of(version: str) -> str:
    """Return the minor version of an interpreter: "3.9" for "3.9.20"; "" for what is none."""
    match = _MINOR.match(version)
    return match[0] if match else ""
