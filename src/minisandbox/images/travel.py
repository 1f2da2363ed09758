"""Images in one compressed file: from one machine to another, or between the stores of two users."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from minisandbox.compression import MAGIC, CorruptedError, Decompressed, compressor
from minisandbox.errors import StoreError
from minisandbox.store import Store
from minisandbox.store.durable import written_atomically
from minisandbox.store.exporting import Exported, export_images
from minisandbox.store.faults import store_faults
from minisandbox.store.importing import Imported, import_store, import_stream

LEVEL = 3
"""Zstandard's own default: on two cores it keeps up with a disk."""
STANDARD = Path("-")

Progress = Callable[[int, int], None]


def export_file(store: Store, names: Iterable[str], path: Path, *, progress: Progress | None = None) -> Exported:
    """Write images to one file, every content once; the file appears when it is whole.

    Args:
        store: where they are; it may be read-only, and sandboxes may run from it.
        names: the images.
        path: the file; an earlier one is replaced. ``-`` is standard output.
        progress: told of (bytes of contents written, bytes of contents in all).

    Returns:
        What was written.

    Raises:
        NotFound: there is no such image, or a layer of it is gone.
        StoreError: a layer is damaged, or the file cannot be written.
        DiskFull: there is no space for the file.
    """
    with store_faults(f"write {path}"), _written(path) as file, compressor(file, LEVEL, threads=-1) as out:
        return export_images(store, names, out, progress=progress)


def import_file(store: Store, path: Path, *, replace: bool = False, progress: Progress | None = None) -> Imported:
    """Take images over from a file that :func:`export_file` wrote; every content is checked against its hash.

    Layers that are there already are not read. The file can do no harm to this host: names and modes are checked before
    anything is written, below a directory of its own. What runs in the images is the word of whoever made them.

    Args:
        store: where to.
        path: the file; ``-`` is standard input.
        replace: whether an image may take the place of another of the same name.
        progress: told of (bytes of contents read, bytes of contents needed).

    Returns:
        What was done.

    Raises:
        StoreError: the file cannot be read, is truncated, damaged or no export; nothing of it is visible.
        InvalidValue: there is another image of the same name.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    with store_faults(f"read {path}"), _opened(path) as file:
        return import_stream(store, Unpacked(file, str(path)), where=str(path), replace=replace, progress=progress)


def import_directory(
    store: Store,
    directory: Path,
    names: Iterable[str] | None = None,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Take images over from another store's directory, which is only read.

    Args:
        store: where to.
        directory: the other store; it may be another user's, or mounted read-only.
        names: the images; all by default.
        replace: whether an image may take the place of another of the same name.
        progress: told of (bytes of contents read, bytes of contents needed).

    Returns:
        What was done.

    Raises:
        NotFound: there is no store, or it has no such image.
        StoreError: the other store is damaged; nothing of it is visible.
        InvalidValue: there is another image of the same name.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    source = Store.open(directory, read_only=True)
    return import_store(store, source, names, replace=replace, progress=progress)


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with written_atomically(path) as file:
        yield file


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    with path.open("rb") as file:
        yield file


class Unpacked:
    """What a compressed file holds.

    Args:
        file: the file.
        where: what errors call it.

    Raises:
        StoreError: it is not compressed as an export is.
    """

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._where = where
        head = file.read(len(MAGIC))
        if head != MAGIC:
            raise StoreError(
                f"{where} is not a file of images",
                reason="it is empty" if not head else "it does not begin as a zstd file does",
                hint="give a file that `minisandbox image export` wrote, or another store's directory",
            )
        self._reader = Decompressed(file, head)

    def read(self, size: int = -1, /) -> bytes:
        """Read what was compressed.

        Raises:
            StoreError: a byte of the file is not what was written.
        """
        try:
            return self._reader.read(size)
        except CorruptedError as error:
            raise StoreError(
                f"{self._where} is damaged", reason=str(error), hint="copy it again; nothing of it was imported"
            ) from error
