"""Collect garbage: remove old images, unreferenced layers and leftovers that no process is using."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import NotFound, StoreError
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.locks import LOCK_FILE, hold_lock, open_locked
from minisandbox.store.disk.staging import reclaim, remove_torn
from minisandbox.store.disk.trees import measure_tree, remove_tree
from minisandbox.store.leases import Use, in_use, use_of
from minisandbox.store.records import FailureRecord, ImageRecord
from minisandbox.store.sizes import Removal, StoreSizes, stack_of
from minisandbox.store.store import Store

BLOB, PART = ".blob", ".part"
"""Suffixes of complete and partial downloads of a pull. The pull removes its downloads after unpacking them."""
_BLOB_SECONDS = 7 * 86400.0
GRACE = 3600.0
"""Seconds to keep an unreferenced layer after its last use, so that a resumed or retried build can reuse it."""


@dataclass(slots=True)
class Collected:
    """The images, layers and leftovers that were removed; in a dry run, those that would be removed.

    Attributes:
        images: names of the removed images.
        layers: keys of the removed layers.
        spared: keys of layers that no image references, kept because they are in use or were used recently.
        frozen: names of images that were frozen instead of removed.
        leftovers: one line for each removed leftover, for example of a dead process, or a quarantined layer.
        orphans: number of removed pool objects that no layer linked to.
        freed: number of bytes freed.
        size: bytes that the remaining layers take, each inode counted once.
    """

    images: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    spared: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    orphans: int = 0
    freed: int = 0
    size: int = 0


def collect(
    store: Store,
    *,
    budget: int | None = None,
    unused_for: float | None = None,
    keep: Collection[str] = (),
    grace: float = GRACE,
    freeze: bool = False,
    dry_run: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Collected:
    """Remove leftovers, unreferenced layers and unused images, and further images until the store fits its budget.

    Other processes may run sandboxes and builds meanwhile, because layers in use are never removed. Images that
    are pinned, named in ``keep``, in use or used within ``grace`` are kept, even if the store exceeds its budget.

    Args:
        store: the store.
        budget: maximum bytes of all layers; the least recently used images are removed until the layers fit.
        unused_for: seconds; images whose last use is longer ago are removed.
        keep: names of images to keep.
        grace: seconds to keep a layer after it was created or last used.
        freeze: freeze images that are too old instead of removing them. To meet the budget, freeze images first, and
            remove images only if the layers still exceed the budget.
        dry_run: remove nothing, only report what would be removed.
        progress: called with a description of each removed item.

    Returns:
        The removed images, layers and leftovers.

    Raises:
        StoreError: the store is read-only, a record is damaged, or a system call failed.
    """
    store.require_writable("collect what is not needed")
    collected, report = Collected(), progress or (lambda _: None)
    if freeze:
        _freeze_first(store, collected, budget, unused_for, frozenset(keep) | store.pins(), grace, dry_run, report)
        unused_for = None
        budget = None if dry_run else budget  # a dry run cannot know how many images to remove after freezing
    with store_faults("collect what is not needed"), store.alone():
        collection = _Collection(store, collected, grace, dry_run, report)
        collection.leftovers()
        sizes = StoreSizes(store, store.images())
        image_names = collection.choose(sizes, frozenset(keep) | store.pins(), budget, unused_for)
        collection.remove(sizes, image_names, copy_age=grace if budget is None else 0.0)
    return collected


def remove_images(
    store: Store,
    names: Iterable[str],
    *,
    failures: Collection[str] = (),
    dry_run: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Collected:
    """Remove images by name, failed builds, and the layers that nothing else references.

    A layer in use is kept; :func:`collect` removes it later.

    Args:
        store: the store.
        names: the images.
        failures: names of images whose failed builds are removed: their records, logs and intermediate layers.
        dry_run: remove nothing, only report what would be removed.
        progress: called with a description of each removed item.

    Returns:
        The removed images, layers and leftovers.

    Raises:
        NotFound: an image of ``names`` does not exist; nothing was removed.
        StoreError: the store is read-only, a record is damaged, or a system call failed.
    """
    store.require_writable("remove images")
    image_names, collected = list(dict.fromkeys(names)), Collected()
    for name in image_names:
        store.image(name)
    with store_faults("remove images"), store.alone():
        sizes = StoreSizes(store, store.images())
        collection = _Collection(store, collected, 0.0, dry_run, progress or (lambda _: None), frozenset(failures))
        exclusive = sizes.only_of(image_names) | collection.remove_failures()
        collection.remove(sizes, image_names, candidates=exclusive)
    return collected


def idle_images(
    store: Store, images: Iterable[ImageRecord], *, keep: Collection[str] = (), grace: float = 0.0
) -> list[tuple[float, str]]:
    """Return (time of last use, name) of images that are not in use, least recently used first.

    Args:
        store: the store.
        images: the images to choose from.
        keep: names of images to leave out.
        grace: seconds; images used within this time are left out too.
    """
    now, usage = time.time(), Usage(store)
    candidates = sorted((usage.of(image).last, image.name, image) for image in images if image.name not in keep)
    return [(used, name) for used, name, image in candidates if now - used >= grace and not usage.is_now(image)]


def _freeze_first(
    store: Store,
    collected: Collected,
    budget: int | None,
    unused_for: float | None,
    keep: Collection[str],
    grace: float,
    dry_run: bool,
    report: Callable[[str], None],
) -> None:
    """Freeze images that are too old, then the least recently used images until the layers fit the budget."""
    from minisandbox.store.blobs import freezing  # noqa: PLC0415 - a pull does not need it

    images = store.images()
    sizes, now = StoreSizes(store, images), time.time()
    idle = idle_images(store, images, keep=keep, grace=grace)
    old = [name for used, name in idle if unused_for is not None and now - used > unused_for]
    frozen = freezing.freeze(store, old, dry_run=dry_run, progress=report)
    size, collected.frozen = sizes.total - frozen.freed, frozen.images
    for _, name in idle:
        if budget is None or size <= budget:
            return
        if name not in old:
            frozen = freezing.freeze(store, [name], dry_run=dry_run, progress=report)
            size -= frozen.freed
            collected.frozen += frozen.images


def remove_download(store: Store, path: Path) -> bool:
    """Remove a downloaded blob, complete or partial, unless a pull is receiving it; return whether it was removed.

    Args:
        store: the store.
        path: path of the complete or the partial download.
    """
    with suppress(StoreError), hold_lock(store.root / "locks" / f"download-{path.stem}.lock", timeout=0):
        path.with_suffix(BLOB).unlink(missing_ok=True)
        path.with_suffix(PART).unlink(missing_ok=True)
        return True
    return False


class Usage:
    """Past and present use of images; looks at each layer once.

    Args:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self._folder = store.root / "layers"
        self._uses: dict[str, Use] = {}
        self._held: dict[str, bool] = {}

    def of(self, image: ImageRecord) -> Use:
        """Return an image's usage: the minimum over its layers, because each of its sandboxes uses all layers."""
        uses = [self._use(key) for key in image.layers] or [Use(0, 0.0)]
        return Use(min(use.count for use in uses), max(image.created, min(use.last for use in uses)))

    def is_now(self, image: ImageRecord) -> bool:
        """Return whether all layers of an image are in use; a single layer may be in use by another image."""
        return bool(image.layers) and all(map(self._is_held, reversed(image.layers)))

    def _use(self, key: str) -> Use:
        if key not in self._uses:
            self._uses[key] = use_of(self._folder / key, 0.0)
        return self._uses[key]

    def _is_held(self, key: str) -> bool:
        if key not in self._held:
            self._held[key] = in_use(self._folder / key)
        return self._held[key]


@dataclass(slots=True)
class _Collection:
    """State of one garbage collection."""

    store: Store
    result: Collected
    grace: float
    dry_run: bool
    report: Callable[[str], None]
    forgotten: frozenset[str] = frozenset()
    """Names of images whose failed builds are removed."""

    def choose(
        self, sizes: StoreSizes, keep: Collection[str], budget: int | None, unused_for: float | None
    ) -> list[str]:
        """Return the names of images to remove, least recently used first."""
        now, image_names = time.time(), []
        failed = self._failed_layers()
        kept_keys = {key for key in sizes.layers if key in failed or self._fresh(sizes, key)}
        removal = Removal(sizes, kept_keys)
        size = sizes.total - sum(
            removal.take(key) for key in sizes.layers if not sizes.uses[key] and key not in kept_keys
        )
        for last_use, name in idle_images(self.store, sizes.images.values(), keep=keep, grace=self.grace):
            is_old = unused_for is not None and now - last_use > unused_for
            is_too_large = budget is not None and size > budget
            if is_old or is_too_large:
                image_names.append(name)
                size -= removal.take_image(name)
        return image_names

    def _failed_layers(self) -> set[str]:
        return {key for failure in self._failures() for key in failure.layers}

    def _failures(self) -> list[FailureRecord]:
        """Return the records of failed builds, except those that are being removed."""
        return [failure for failure in self.store.failures() if failure.image not in self.forgotten]

    def remove_failures(self) -> set[str]:
        """Remove the failed builds of :attr:`forgotten`; return the keys of their layers, which images may share."""
        layers = set[str]()
        for failure in self.store.failures():
            if failure.image in self.forgotten:
                layers |= {*failure.layers}
                self.result.leftovers.append(f"failed build of {failure.image}: step {failure.step}")
                if not self.dry_run:
                    self.store.remove_failure(failure.image)
        if self.forgotten:
            self.remove_logs(0.0)
        return layers

    def remove(
        self,
        sizes: StoreSizes,
        names: Iterable[str],
        *,
        candidates: Collection[str] | None = None,
        copy_age: float = math.inf,
    ) -> None:
        """Remove images, and layers that nothing references any more.

        Args:
            sizes: sizes of the store's layers before the removal.
            names: the images.
            candidates: keys of the layers that may be removed; None allows all layers.
            copy_age: minimum age in seconds of removed blobs, if the layer also has a tree.
        """
        images = self.remove_images(sizes, names)
        self.remove_layers(sizes, images, candidates)
        self.blobs(copy_age)
        self.orphans()
        freed = sizes.freed(self.result.layers)
        self.result.size = sizes.total - freed
        self.result.freed += freed

    def remove_images(self, sizes: StoreSizes, names: Iterable[str]) -> list[ImageRecord]:
        """Remove the records of images; return the remaining images."""
        removed = set()
        for name in names:
            removed.add(name)
            self.result.images.append(name)
            self.report(f"image {name}")
            if not self.dry_run:
                with suppress(NotFound):  # another process has removed the image
                    self.store.remove_image(name)
        return [image for name, image in sizes.images.items() if name not in removed]

    def remove_layers(self, sizes: StoreSizes, images: list[ImageRecord], candidates: Collection[str] | None) -> None:
        """Remove the layers that no image and no failed build references, unless they are in use."""
        needed = {key for image in images for key in stack_of(image)} | self._failed_layers()
        for key in sizes.layers:
            if key in needed or (candidates is not None and key not in candidates):
                continue
            if self._fresh(sizes, key):
                self.result.spared.append(key)
            elif self.dry_run:
                (self.result.spared if in_use(self.store.layer_directory(key)) else self.result.layers).append(key)
            elif self.store.remove_unused_layer(key):
                self.result.layers.append(key)
                self.store.log_path(key).unlink(missing_ok=True)
                self.report(f"layer {key[:16]}")
            else:
                self.result.spared.append(key)

    def leftovers(self) -> None:
        """Remove leftovers of dead processes, quarantined files, old downloads, and logs whose layer does not exist."""
        if not self.dry_run:
            for count, kind in ((reclaim(self.store.root), "directories"), (remove_torn(self.store.root), "files")):
                self.result.leftovers += [f"{count} unfinished {kind} of dead processes"] if count else []
        for path in sorted((self.store.root / "locks").iterdir()):
            self._dead_lock(path)
        for path in sorted((self.store.root / "quarantine").iterdir()):
            self._quarantined(path)
        for path in sorted((self.store.root / "downloads").iterdir()):
            with suppress(FileNotFoundError):
                status = path.stat()
                if _older(status.st_mtime, {PART: self.grace, BLOB: _BLOB_SECONDS}.get(path.suffix, math.inf)):
                    self._download(path, status.st_blocks * 512)
        self.remove_logs(self.grace)

    def _download(self, path: Path, size: int) -> None:
        if self.dry_run or remove_download(self.store, path):
            self._leftover(f"download {path.name[:16]} of an unfinished pull", size)

    def blobs(self, grace: float) -> None:
        """Remove blobs of removed layers, and old blobs of layers that also have a tree.

        Args:
            grace: minimum age in seconds of removed blobs, if the layer also has a tree.
        """
        from minisandbox.store.blobs import freezing, layer_blobs  # noqa: PLC0415 - a pull needs neither

        frozen, copies = freezing.blob_names(self.store)
        for path in sorted((self.store.root / layer_blobs.FOLDER).glob("[!.]*")):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.name in copies:
                    if _older(status.st_mtime, grace):
                        description = f"copy {path.name[:16]} of a layer for push and export"
                        self._remove(path, description, status.st_blocks * 512)
                elif path.name not in frozen and not self.dry_run:  # its size was counted with the layer
                    path.unlink()

    def remove_logs(self, grace: float) -> None:
        """Remove logs of steps whose layer does not exist, unless a failed build refers to the log."""
        failed = {failure.key for failure in self._failures()}
        for path in sorted((self.store.root / "logs").glob("[!.]*.log")):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.stem not in failed and not self.store.has_layer(path.stem) and _older(status.st_mtime, grace):
                    self._remove(path, f"log of step {path.stem[:16]}", status.st_blocks * 512)

    def orphans(self) -> None:
        """Remove pool objects that no layer links to."""
        # Only count the objects; their bytes were already counted with the removed layers.
        self.result.orphans = self.store.pool.remove_orphans(dry_run=self.dry_run)[0]
        if self.result.orphans and not self.result.layers:
            self.report(f"{self.result.orphans} objects that no layer has")

    def _fresh(self, sizes: StoreSizes, key: str) -> bool:
        created = sizes.layers[key].created
        return self.grace > 0 and not _older(use_of(self.store.layer_directory(key), created).last, self.grace)

    def _dead_lock(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            fd = open_locked(path, LOCK_FILE & ~os.O_CREAT)
            if fd is None:
                return
            try:
                # Unlink before unlocking, as hold_lock() does.
                self._remove(path, f"lock {path.name} of a dead process", 0)
            finally:
                os.close(fd)

    def _quarantined(self, path: Path) -> None:
        if path.is_dir() and in_use(path):
            return
        self._remove(path, f"quarantined {path.name[:16]}", measure_tree(path).bytes if path.is_dir() else 0)

    def _remove(self, path: Path, description: str, size: int) -> None:
        """Remove and report a leftover file or directory."""
        self._leftover(description, size)
        if self.dry_run:
            return
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)

    def _leftover(self, description: str, size: int) -> None:
        self.result.leftovers.append(description)
        self.result.freed += size
        self.report(description)


def _older(timestamp: float, seconds: float) -> bool:
    return time.time() - timestamp >= seconds
