"""Summarize a store for the user: the state of each image, and the disk use of each part."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store import entries as listing
from minisandbox.store.collect import Usage
from minisandbox.store.disk.trees import measure_tree
from minisandbox.store.leases import USED
from minisandbox.store.records import BLOBS, ImageRecord
from minisandbox.store.sizes import StoreSizes, stack_of
from minisandbox.store.store import Store


class ImageStatus(enum.Enum):
    """The state of an image."""

    READY = "ready"
    BROKEN = "broken"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """Status of one image or failed build.

    Attributes:
        name: name of the image.
        status: ready, broken (a layer is missing, or the record is damaged), or failed (the build failed).
        record: the image's record; None if the build failed or the record is damaged.
        unique: bytes that removing the image would free.
        shared: bytes that the image shares with other images.
        created: seconds since the epoch when the image was recorded or its build failed.
        used: seconds since the epoch when the image was last used or created.
        uses: number of sandboxes that were created from the image.
        in_use: whether sandboxes of the image exist now.
        pinned: whether the image is protected from garbage collection.
        frozen: whether layers of the image are compressed until their next use.
        detail: why the image is broken or its build failed.
    """

    name: str
    status: ImageStatus
    record: ImageRecord | None
    unique: int = 0
    shared: int = 0
    created: float = 0.0
    used: float = 0.0
    uses: int = 0
    in_use: bool = False
    pinned: bool = False
    frozen: bool = False
    detail: str = ""


def image_rows(store: Store) -> list[ImageRow]:
    """Return a row for each image and failed build of a store, sorted by name."""
    rows: list[ImageRow] = []
    records = store.images(lambda name, error: rows.append(ImageRow(name, ImageStatus.BROKEN, None, detail=error.what)))
    sizes, pins, usage = StoreSizes(store, records), store.pins(), Usage(store)
    rows += [_row(record, sizes, pins, usage) for record in records]
    names = {row.name for row in rows}
    for failure in store.failures():
        if failure.image not in names:
            created, reason = failure.created, failure.reason.partition("\n")[0] or "?"
            detail = f"step {failure.step}: {reason}"
            row = ImageRow(failure.image, ImageStatus.FAILED, None, created=created, used=created, detail=detail)
            rows.append(row)
    return sorted(rows, key=lambda row: row.name)


def _row(record: ImageRecord, sizes: StoreSizes, pins: frozenset[str], usage: Usage) -> ImageRow:
    size, missing = sizes.image(record.name), sizes.missing.get(record.name, [])
    use = usage.of(record)
    return ImageRow(
        record.name, ImageStatus.BROKEN if missing else ImageStatus.READY, record, size.unique, size.shared,
        record.created, use.last, use.count, usage.is_now(record),
        pinned=record.name in pins,
        frozen=any(sizes.layers[key].frozen for key in stack_of(record) if key in sizes.layers),
        detail=f"layer {missing[0][:16]} is missing: build it again" if missing else "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Disk use of one part of a store.

    Attributes:
        name: name of the part, a directory of the store.
        bytes: bytes on disk, each inode counted once.
        count: number of layers, objects or files in the part.
        purpose: description of the content, for the user.
        removal: commands that remove the content, for the user.
    """

    name: str
    bytes: int
    count: int
    purpose: str
    removal: str


_PURPOSES = {
    "downloads": ("sources and packages, so that a rebuild needs no network", "rm -r; the next build fetches again"),
    "index": ("what package indexes listed", "rm -r; the next build asks again"),
    "repositories": ("mirrors of repositories", "rm -r; the next build fetches again"),
    "cache": ("caches of installers", "rm -r; the next build fetches again"),
    "caches": ("caches of RUN --mount=type=cache", "rm -r; the next build begins with empty ones"),
    "logs": ("output of build steps", "image gc, with their layers; image rm --failed"),
    "failed": ("why builds failed", "image rm --failed"),
    "blobs": ("frozen layers; copies of others for push and export", "image gc; frozen layers' with their layers"),
    "quarantine": ("damaged layers", "image gc"),
    "staging": ("what is being made now", "image gc, once its process is gone"),
    "uppers": ("what sandboxes write now", "sandbox prune, once their owner is gone"),
    "runs": ("rollouts of the quickstart", "rm -r, if you do not need them"),
}
_OF_IMAGES = frozenset(("layers", "objects", "images", "pins", "locks"))


def parts(store: Store) -> list[Part]:
    """Return the disk use of each part of a store, largest first."""
    sizes = StoreSizes(store, [])
    layers = [path for path in (store.root / "layers").iterdir() if path.is_dir()]
    # A read-only store cannot be locked.
    orphans = [status.st_blocks * 512 for _, status in store.pool.orphans(lock=False)]
    lists = sum(_disk_bytes(path / name) for path in layers for name in (listing.NAME, "layer.json", USED, BLOBS))
    rows = [
        Part("layers", sizes.total - sizes.blobs + lists, len(layers), "what images are made of", "image rm, image gc"),
        Part("objects", sum(orphans), len(orphans), "files that no layer has any more", "image gc"),
    ]
    for path in sorted(store.root.iterdir()):
        if path.name not in _OF_IMAGES and path.is_dir():
            purpose, removal = _PURPOSES.get(path.name, ("", ""))
            size = measure_tree(path)
            rows.append(Part(path.name, size.bytes, size.files, purpose, removal))
    return sorted((row for row in rows if row.bytes), key=lambda row: -row.bytes)


def apparent_bytes(store: Store) -> int:
    """Return the bytes that all images would take if they shared no layers and no files."""
    sizes = StoreSizes(store, store.images())
    return sum(sizes.image(name).total for name in sizes.images)


def _disk_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0
