"""Disk use of a store's layers and images, each inode counted once, and what a removal would free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from minisandbox.errors import NotFound, StoreError
from minisandbox.store import entries as listing
from minisandbox.store.blobs.kept import COLD, known_blob
from minisandbox.store.entries import PRIVATE
from minisandbox.store.records import ImageRecord, LayerRecord
from minisandbox.store.store import Store

BLOB = "blob "
"""How the names of frozen layers' blobs begin, among those of objects."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Disk use of one layer.

    Attributes:
        record: what is known of it.
        private: bytes of what only this layer can have: directories, small files, links, its records.
        objects: bytes of each object of the pool that it has, or of its blob, by name.
        frozen: whether its blob is all there is of its files.
    """

    record: LayerRecord
    private: int
    objects: Mapping[str, int] = field(repr=False)
    frozen: bool = False

    @property
    def total(self) -> int:
        """Bytes of everything in it, as if it were alone."""
        return self.private + sum(self.objects.values())


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Disk use of one image among the images of its store.

    Attributes:
        unique: bytes that go with it: of inodes that no other image has.
        shared: bytes of inodes that other images have too.
    """

    unique: int
    shared: int

    @property
    def total(self) -> int:
        """Bytes of all its layers, every inode once."""
        return self.unique + self.shared


def stack_of(image: ImageRecord) -> tuple[str, ...]:
    """Return the keys of all layers of an image, the tests layer included."""
    return (*image.layers, *([image.tests_layer] if image.tests_layer is not None else []))


def measure_layer(store: Store, key: str) -> LayerSize:
    """Measure one layer: by its blob if it is frozen, else by the list of its files.

    Args:
        store: the store.
        key: the layer.

    Raises:
        NotFound: the layer is missing.
        StoreError: its record, its list or the record of its blobs is damaged.
    """
    record, path = store.layer(key), store.layer_directory(key) / listing.NAME
    private, objects = 0, dict[str, int]()
    try:
        private += path.lstat().st_size
        if store.is_frozen(key):
            blob = known_blob(store.root, key, COLD)
            return LayerSize(record, private, {f"{BLOB}{blob.digest}": blob.size} if blob else {}, frozen=True)
        for entry in listing.read_entries(store.layer_directory(key)):
            if entry.copy != PRIVATE:
                objects[entry.object_name] = entry.disk
            else:
                private += 0 if entry.same else entry.disk
    except FileNotFoundError as error:
        raise StoreError(f"layer {key} has no list of its files", hint="run `minisandbox image verify`") from error
    return LayerSize(record, private, objects)


class StoreSizes:
    """The sizes of everything in a store at one moment.

    Args:
        store: the store.
        images: its images.

    Attributes:
        layers: the sizes of all layers, by key; damaged ones are missing.
        damaged: the keys of layers whose record or list of files cannot be read.
        images: the images, by name.
        missing: by image, the keys of layers that are not there or damaged.
    """

    def __init__(self, store: Store, images: Iterable[ImageRecord]) -> None:
        self.images = {image.name: image for image in images}
        self.layers: dict[str, LayerSize] = {}
        self.damaged: list[str] = []
        for key in store.layer_keys():
            with suppress(NotFound):  # removed since
                try:
                    self.layers[key] = measure_layer(store, key)
                except StoreError:
                    self.damaged.append(key)
        stacks = {name: stack_of(image) for name, image in self.images.items()}
        self.missing = {
            name: lost for name, stack in stacks.items() if (lost := [key for key in stack if key not in self.layers])
        }
        self._stacks = {name: [key for key in stack if key in self.layers] for name, stack in stacks.items()}

    @cached_property
    def uses(self) -> Counter[str]:
        """How many images have each layer."""
        return Counter(key for stack in self._stacks.values() for key in set(stack))

    @property
    def total(self) -> int:
        """Bytes of all layers together, every inode once."""
        return self.together(self.layers)

    @property
    def blobs(self) -> int:
        """Bytes of the total that blobs of frozen layers take."""
        objects = {name: size for layer in self.layers.values() if layer.frozen for name, size in layer.objects.items()}
        return sum(objects.values())

    def together(self, keys: Iterable[str]) -> int:
        """Return the bytes that some layers take together, every inode once."""
        chosen = [self.layers[key] for key in set(keys)]
        objects: dict[str, int] = {}
        for layer in chosen:
            objects.update(layer.objects)
        return sum(layer.private for layer in chosen) + sum(objects.values())

    def freed(self, keys: Iterable[str]) -> int:
        """Return the bytes that would be free if some layers were removed: of inodes that no other layer has."""
        removal = Removal(self)
        return sum(removal.take(key) for key in set(keys))

    @cached_property
    def owners(self) -> Counter[str]:
        """How many layers have each object."""
        return Counter(name for layer in self.layers.values() for name in layer.objects)

    def image(self, name: str) -> ImageSize:
        """Return the disk use of an image; ``unique`` is what its removal would free."""
        unique = self.freed(self.only_of([name]))
        return ImageSize(unique, self.together(self._stacks[name]) - unique)

    def only_of(self, names: Iterable[str]) -> set[str]:
        """Return the keys of layers that no image but these has."""
        excluded = set(names)
        needed = {key for name, stack in self._stacks.items() if name not in excluded for key in stack}
        return {key for name in excluded for key in self._stacks[name]} - needed


class Removal:
    """The bytes freed as layers are removed one after the other.

    Args:
        sizes: the store as it is.
        stay: keys of layers that stay although no image has them any more.
    """

    def __init__(self, sizes: StoreSizes, stay: Collection[str] = ()) -> None:
        self._sizes, self._stay = sizes, stay
        self._taken: Counter[str] = Counter()
        self._uses = Counter(sizes.uses)

    def take_image(self, name: str) -> int:
        """Remove an image in thought; return the bytes that this frees."""
        stack = {*stack_of(self._sizes.images[name])}
        self._uses.subtract(stack)
        return sum(self.take(key) for key in stack if not self._uses[key] and key not in self._stay)

    def take(self, key: str) -> int:
        """Remove a layer in thought; return the bytes that this frees, the earlier ones being gone."""
        layer = self._sizes.layers.get(key)
        if layer is None:
            return 0
        self._taken.update(layer.objects.keys())  # a mapping's values would be added up
        owners = self._sizes.owners
        return layer.private + sum(size for name, size in layer.objects.items() if self._taken[name] == owners[name])
