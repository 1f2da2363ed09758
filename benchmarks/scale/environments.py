"""What the environments take: the layers of pinned packages, from the lists of files of their wheels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.scale.blocks import BLOCK, Ledger, directory_bytes
from benchmarks.scale.index import Contents, Member
from benchmarks.scale.pins import Environment, Pin

_PROGRAM = 320
"""Bytes of a program that an installer makes of an entry point."""
_INSTALLER = 3
_TESTS = re.compile("/tests?/")
"""What common.sh's compile leaves out, in a path below site-packages."""
_ABOVE = 2 * BLOCK  # directories above an environment, as far as programs' paths do not lead through them
BYTECODE = "pyc"
"""How keys of byte code begin."""


@dataclass(frozen=True, slots=True)
class ByteCode:
    """How large the byte code of a source is: a line fitted to what the product compiled.

    Attributes:
        base: bytes whatever the source.
        ratio: bytes for each byte of source.
    """

    base: float
    ratio: float

    def size(self, source: int) -> int:
        """Return the bytes of a source's byte code."""
        return round(self.base + self.ratio * source)


@dataclass(frozen=True, slots=True)
class Placed:
    """A file of an installed distribution.

    Attributes:
        path: below the environment's site-packages; ``../`` for what lies elsewhere in the environment.
        key: what makes it equal to another file.
        size: its bytes.
    """

    path: str
    key: Hashable
    size: int


def place(contents: Contents) -> list[Placed]:
    """Return the files that an installation of a distribution writes, without byte code."""
    placed = [_placed(member) for member in contents.members]
    heads = [one.path for one in placed if one.path.endswith((".dist-info/METADATA", ".dist-info/WHEEL"))]
    if heads:
        info = heads[0].rpartition("/")[0]
        placed.append(Placed(f"{info}/INSTALLER", "INSTALLER", _INSTALLER))
        placed.append(Placed(f"{info}/REQUESTED", "REQUESTED", 0))
    if any(one.path.endswith(".dist-info/entry_points.txt") for one in placed):
        placed.append(Placed(f"../../../bin/{contents.file}", ("program", contents.file), _PROGRAM))
    return placed


def _placed(member: Member) -> Placed:
    path, crc, size, program = member
    top, _, rest = path.partition("/")
    if top.endswith(".data") and "/" in rest:  # PEP 427: {name}-{version}.data/{scheme}/...
        scheme, _, below = rest.partition("/")
        path = below if scheme in ("purelib", "platlib") else f"../../../{scheme}/{below}"
    return Placed(path, (crc, size, program), size)


def compiled(placed: Iterable[Placed], python: str, bytecode: ByteCode) -> Iterable[Placed]:
    """Yield the byte code of sources; it has their path in it, so that equal sources elsewhere have other byte code.

    The tests of packages get none.
    """
    for one in placed:
        if one.path.endswith(".py") and not one.path.startswith("../") and not _TESTS.search(one.path):
            folder, _, name = one.path.rpartition("/")
            path = f"{folder}/__pycache__/{name[:-3]}.cpython-{python.replace('.', '')}.pyc"
            yield Placed(path, (BYTECODE, python, one.path, one.key), bytecode.size(one.size))


def add_environment(
    ledger: Ledger,
    environment: Environment,
    contents: Mapping[Pin, Contents],
    bytecode: ByteCode,
) -> None:
    """Count the layer of an environment's packages: files of equal content and mode once, and their directories."""
    source: dict[str, Placed] = {}
    for pin in sorted(environment.pins):
        source.update((one.path, one) for one in place(contents[pin]))
    code = {one.path: one for one in compiled(source.values(), environment.python, bytecode)}
    everything = {**source, **code}
    sizes = {one.key: one.size for one in everything.values()}
    counts = Counter(one.key for one in everything.values())
    names = [*everything, *_folders(everything)]
    folders = _ABOVE + _directories(names)
    ledger.add_layer("packages", ((key, sizes[key], count) for key, count in counts.items()), folders, len(names))


def _folders(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _directories(names: Iterable[str]) -> int:
    inside: dict[str, list[int]] = {"": []}
    for name in names:
        parent, _, last = name.rpartition("/")
        inside.setdefault(parent, []).append(len(last.encode()))
    return sum(directory_bytes(lengths) for lengths in inside.values())
