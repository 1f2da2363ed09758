"""Define values that need no class: JSON values, sizes in bytes, and the path of a repository."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from minisandbox.errors import InvalidValue

JSONValue = None | bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"]
WORKDIR = PurePosixPath("/testbed")
"""The path of the repository in a built image."""
KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

MAX_SIZE = 1 << 62
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": 1024 * GiB}


def parse_size(value: int | str) -> int:
    """Convert a size to bytes.

    Args:
        value: bytes as an int, or text such as ``"512M"``, ``"2G"``, ``"64KiB"`` (powers of 1024).

    Returns:
        The size in bytes.

    Raises:
        InvalidValue: the text is not a size, or the size is negative or larger than 2**62 bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MAX_SIZE:
            raise InvalidValue(f"size {value} is not between 0 and {MAX_SIZE} bytes", hint="give text such as '2G'")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{value!r} is not a size", hint="give bytes as an int, or text such as '512M' or '2G'")
    size = float(match[1]) * _UNIT_BYTES[match[2].upper()]
    if size > MAX_SIZE:
        raise InvalidValue(f"size {value!r} is too large", hint=f"give at most {MAX_SIZE} bytes")
    return int(size)


def human_size(size: float) -> str:
    """Format bytes: ``93.1 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < KiB:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= KiB
    return f"{size:.1f} TiB"
