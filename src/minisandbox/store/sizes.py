"""Measure the disk use of layers and images, each inode counted once, and the space that a removal would free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter

from minisandbox.errors import NotFound, StoreError
from minisandbox.store import entries as listing
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.entries import PRIVATE
from minisandbox.store.index import Row, read_rows
from minisandbox.store.records import ImageRecord
from minisandbox.store.store import Store

BLOB = "blob "
"""Prefix of the names of blobs in :attr:`LayerSize.objects`, which distinguishes them from pool objects."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Disk use of one layer.

    Attributes:
        kind: kind of the step that made the layer.
        parent: key of the layer below, or None.
        created: seconds since the epoch when the layer was published.
        imported: whether the layer was built on another machine and imported.
        private: bytes that other layers cannot share: directories, symbolic links, empty and hard-linked files, and the
            file list.
        objects: bytes of each pool object in the layer, or of the blob of a frozen layer, by name.
        total: bytes of the layer, including objects that other layers share.
        frozen: whether the layer has a blob instead of a tree.
    """

    kind: str
    parent: str | None
    created: float
    imported: bool
    private: int
    objects: Mapping[str, int] = field(repr=False)
    total: int
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Disk use of one image in a store.

    Attributes:
        unique: bytes of inodes that only this image has, and that its removal would free.
        shared: bytes of inodes that other images have too.
    """

    unique: int
    shared: int

    @property
    def total(self) -> int:
        """Bytes of all layers of the image, each inode counted once."""
        return self.unique + self.shared


_fields = attrgetter(*LayerSize.__slots__)


def stack_of(image: ImageRecord) -> tuple[str, ...]:
    """Return the keys of all layers of an image, including the tests layer."""
    return (*image.layers, *([image.tests_layer] if image.tests_layer is not None else []))


def measure_layer(store: Store, key: str) -> LayerSize:
    """Measure a layer: a frozen layer by its blob, any other layer by the list of its files.

    Args:
        store: the store.
        key: key of the layer.

    Raises:
        NotFound: the layer is missing.
        StoreError: the layer's record, file list or blob record is damaged.
    """
    record, path = store.layer(key), store.layer_directory(key) / listing.NAME
    private, objects, is_frozen = 0, dict[str, int](), store.is_frozen(key)
    try:
        private += path.lstat().st_size
        if is_frozen:
            from minisandbox.store.blobs.layer_blobs import COLD, known_blob  # noqa: PLC0415 - few layers are frozen

            blob = known_blob(store.root, key, COLD)
            objects = {f"{BLOB}{blob.digest}": blob.size} if blob else {}
        else:
            for entry in listing.read_entries(store.layer_directory(key)):
                if entry.copy != PRIVATE:
                    objects[entry.object_name] = entry.disk
                else:
                    private += 0 if entry.same else entry.disk
    except FileNotFoundError as error:
        raise StoreError(f"layer {key} has no list of its files", hint="run `minisandbox image verify`") from error
    kind, total = str(record.step.get("kind", "?")), private + sum(objects.values())
    return LayerSize(kind, record.parent, record.created, record.imported, private, objects, total, is_frozen)


class StoreSizes:
    """Snapshot of the sizes of all layers and images in a store.

    Args:
        store: the store.
        images: the store's images.

    Attributes:
        layers: sizes of all undamaged layers, by key.
        damaged: keys of layers whose record or list of files cannot be read.
        images: the images, by name.
        missing: keys of missing or damaged layers, by name of the image; intact images are left out.
    """

    def __init__(self, store: Store, images: Iterable[ImageRecord]) -> None:
        self.images = {image.name: image for image in images}
        self.damaged: list[str] = []

        def measure(key: str) -> Row | None:
            try:
                return [*_fields(measure_layer(store, key))]
            except NotFound:  # another process has removed the layer
                return None
            except StoreError:
                self.damaged.append(key)
                return None

        with store_faults("list layers"):
            rows = read_rows(store.root, "layers", ("", "/layer.json"), measure, cache=store.writable)
        self.layers = {key: LayerSize(*row) for key, row in rows.items()}
        stacks = {name: stack_of(image) for name, image in self.images.items()}
        self.missing = {
            name: missing_keys
            for name, stack in stacks.items()
            if (missing_keys := [key for key in stack if key not in self.layers])
        }
        self._stacks = {name: [key for key in stack if key in self.layers] for name, stack in stacks.items()}

    @cached_property
    def uses(self) -> Counter[str]:
        """Number of images that contain each layer, by key."""
        return Counter(key for stack in self._stacks.values() for key in set(stack))

    @property
    def total(self) -> int:
        """Bytes of all layers together, each inode counted once."""
        return self.together(self.layers)

    @property
    def blobs(self) -> int:
        """Bytes of the blobs of frozen layers, which :attr:`total` includes."""
        objects = {name: size for layer in self.layers.values() if layer.frozen for name, size in layer.objects.items()}
        return sum(objects.values())

    def together(self, keys: Iterable[str]) -> int:
        """Return the bytes that the given layers take together, each inode counted once."""
        layers = [self.layers[key] for key in set(keys)]
        objects: dict[str, int] = {}
        for layer in layers:
            objects.update(layer.objects)
        return sum(layer.private for layer in layers) + sum(objects.values())

    def freed(self, keys: Iterable[str]) -> int:
        """Return the bytes that removing the given layers would free: those of inodes that no other layer has."""
        layers, owners, counts = [self.layers[key] for key in set(keys)], self.owners, dict[str, int]()
        size = 0
        for layer in layers:
            size += layer.private
            for name, object_size in layer.objects.items():
                counts[name] = count = counts.get(name, 0) + 1
                if count == owners[name]:
                    size += object_size
        return size

    @cached_property
    def owners(self) -> Counter[str]:
        """Number of layers that contain each object, by name."""
        return Counter(name for layer in self.layers.values() for name in layer.objects)

    def image(self, name: str) -> ImageSize:
        """Return the disk use of an image."""
        unique = self.freed(self.only_of([name]))
        total = sum(self.layers[key].total for key in self._stacks[name])  # a stack has no inode twice
        return ImageSize(unique, total - unique)

    def only_of(self, names: Iterable[str]) -> set[str]:
        """Return the keys of layers that only the given images have."""
        counts = Counter(chain.from_iterable(set(self._stacks[name]) for name in set(names)))
        return {key for key, count in counts.items() if count == self.uses[key]}


class Removal:
    """Simulate removing layers one by one, and compute the bytes that each removal frees.

    Args:
        sizes: sizes before the first removal.
        kept_keys: keys of layers that are kept even if no image contains them any more.
    """

    def __init__(self, sizes: StoreSizes, kept_keys: Collection[str] = ()) -> None:
        self._sizes, self._kept_keys = sizes, kept_keys
        self._removed_counts: Counter[str] = Counter()
        self._uses = Counter(sizes.uses)

    def take_image(self, name: str) -> int:
        """Simulate the removal of an image; return the bytes that the removal frees."""
        stack = {*stack_of(self._sizes.images[name])}
        self._uses.subtract(stack)
        return sum(self.take(key) for key in stack if not self._uses[key] and key not in self._kept_keys)

    def take(self, key: str) -> int:
        """Simulate the removal of a layer; return the bytes that become free, given the earlier removals."""
        layer = self._sizes.layers.get(key)
        if layer is None:
            return 0
        # Pass the keys, because Counter.update() would add the values of a mapping.
        self._removed_counts.update(layer.objects.keys())
        owners = self._sizes.owners
        return layer.private + sum(
            size for name, size in layer.objects.items() if self._removed_counts[name] == owners[name]
        )
