"""Cache what listing and garbage collection read of every image and layer, in one file for all of a kind.

A row is used only while the files that it was read from have the same inodes and mtimes. A killed process leaves the
old index or the new one. Small stores have no index.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minisandbox.errors import StoreError
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.reading import read_below

_FORMAT = 1
_FEW = 100
"""Minimum number of changed rows for writing the index again."""
_SETTLED = 2 * 10**9
"""Minimum age of a file in nanoseconds, because a change within the same clock tick would not change its mtime."""
_MOST = 1 << 30

Row = Sequence[Any]
Rows = dict[str, Row]


def read_rows(root: Path, folder: str, files: Sequence[str], read: Callable[[str], Row | None], *, cache: bool) -> Rows:
    """Return a row for each visible name in a folder of the store, sorted by name; read only changed rows.

    Args:
        root: the store's directory.
        folder: the folder, whose index is ``FOLDER.index``.
        files: suffixes that turn a name into the paths of the files that its row depends on.
        read: returns the row of a name, or None if there is no row; the row must be JSON.
        cache: whether to use the index; False for another user's store, whose index may be malformed.

    Raises:
        OSError: the folder cannot be read.
    """
    names = sorted(name for name in os.listdir(root / folder) if not name.startswith("."))
    index = _load(root, folder) if cache else {}
    rows, changed_count = dict[str, tuple[list[int], Row]](), len(index.keys() - names)
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile, or unfinished
            signature = _signature(f"{root}/{folder}/{name}", files)
            recorded_signature, row = index.get(name) or (None, None)
            if signature != recorded_signature:
                changed_count += 1
                row = read(name)
            if row is not None:
                rows[name] = signature, row
    if cache and changed_count >= _FEW:
        _save(root, folder, rows)
    return {name: row for name, (_, row) in rows.items()}


def _signature(path: str, files: Sequence[str]) -> list[int]:
    statuses = [os.lstat(f"{path}{suffix}") for suffix in files]
    return [number for status in statuses for number in (status.st_mtime_ns, status.st_ino)]


def _load(root: Path, folder: str) -> Mapping[str, tuple[list[int], Row]]:
    try:
        index = json.loads(read_below(root, f"{folder}.index", _MOST))
        rows = index["rows"] if index["format"] == _FORMAT else {}
        return {name: (signature, row) for name, (signature, row) in rows.items()}
    except (StoreError, OSError, ValueError, KeyError, TypeError):  # missing or damaged: read everything
        return {}


def _save(root: Path, folder: str, rows: Mapping[str, tuple[list[int], Row]]) -> None:
    latest = time.time_ns() - _SETTLED
    settled = {name: row for name, row in rows.items() if max(row[0][::2]) < latest}
    text = json.dumps({"format": _FORMAT, "rows": settled}, separators=(",", ":"))
    with suppress(OSError):  # the disk may be full
        write_atomic(root / f"{folder}.index", text.encode("ascii"))
