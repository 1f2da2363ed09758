"""Load and list named images, which are stacks of layers in a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.errors import NotFound, StoreError
from minisandbox.images.base import BaseEntry, base_entries, base_key, platform_key, write_base
from minisandbox.images.oci.config import volumes
from minisandbox.store import ImageRecord, LayerRecord, Made, Store, step_key
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.sizes import ImageSize
from minisandbox.values import WORKDIR, JSONValue

if TYPE_CHECKING:
    from minisandbox.types import ImageSpec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOST_VARIABLES = (("LANG", "C.UTF-8"), ("PATH", DEFAULT_PATH))
"""Environment variables of images that use the host's ``/usr``."""
HOST_IMAGE = "host"


@dataclass(frozen=True, slots=True)
class Image:
    """An ordered stack of layers, with variables and a workdir; see :func:`build` and :func:`load_image`.

    Attributes:
        name: the name of the image.
        key: the hash of everything that the content and the settings of the image depend on.
        layers: the keys of the layers, bottom first.
        environment: variables that every command sees.
        workdir: the initial directory of commands.
        tests_layer: the key of the layer with the hidden tests, or None.
        commit: the single commit of the image's repository; "" if the image has no repository.
        created: the time when the image was recorded, in seconds since the epoch.
        notes: facts shown to users, for example ``python`` and ``source``.
        store: the store of the layers.
        own_root: whether the image has a complete root file system, as container images have, and does not use the
            host's ``/usr``.
        user: the user of commands; "" for root.
        config: the run configuration of a container image: ``User``, ``Entrypoint``, ``Cmd`` (image-spec, config.md).
        backend: the backend of sandboxes, as in :class:`.ImageSpec`; the store does not record it.
    """

    name: str
    key: str
    layers: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    workdir: PurePosixPath
    tests_layer: str | None
    commit: str
    created: float
    notes: Mapping[str, str]
    store: Store = field(repr=False)
    own_root: bool = False
    user: str = ""
    config: Mapping[str, JSONValue] = field(default_factory=dict, repr=False)
    backend: str = ""

    def spec(self) -> ImageSpec:
        """Return the image in the form that sandboxes are created from.

        Raises:
            NotFound: a layer is no longer in the store.
        """
        from minisandbox.types import ImageSpec  # noqa: PLC0415 - images are listed and pulled without it

        trees = tuple(self.store.layer_tree(key) for key in self.layers)
        return ImageSpec(
            self.name, trees, self.environment, self.workdir, host_usr=not self.own_root,
            base_commit=self.commit or "HEAD", clean=bool(self.commit), user=self.user,
            backend=self.backend, entrypoint=self._entrypoint(), volumes=volumes(self.config),
        )  # fmt: skip

    def _entrypoint(self) -> tuple[str, ...]:
        """Return the configuration's ``Entrypoint``; empty if it is malformed."""
        words = self.config.get("Entrypoint")
        return tuple(word for word in words if isinstance(word, str)) if isinstance(words, list | tuple) else ()

    def tests_dir(self) -> Path | None:
        """Return the host directory of the hidden tests, to be mounted at ``/hidden``; None without hidden tests.

        Raises:
            NotFound: the layer is no longer in the store.
            StoreError: the layer is damaged.
            DiskFull: the layer is frozen (compressed), and there is no space to unpack it.
        """
        if self.tests_layer is None:
            return None
        with self.store.hold(self.tests_layer):  # unpacks the layer if it is frozen
            path = self.store.layer_tree(self.tests_layer) / "hidden"
        if path.is_symlink() or not path.is_dir():  # a symlink could expose any host directory
            raise StoreError(f"{path} is not a directory", reason="the layer is damaged", hint="build the image again")
        return path

    def records(self) -> tuple[LayerRecord, ...]:
        """Return the records of the image's layers, bottom first, the tests layer last.

        Raises:
            NotFound: a layer is no longer in the store.
        """
        keys = (*self.layers, *filter(None, [self.tests_layer]))
        return tuple(self.store.layer(key) for key in keys)


def image_sizes(images: Sequence[Image]) -> dict[str, ImageSize]:
    """Return the unique bytes and the shared bytes of each image, by name.

    Args:
        images: the images; a layer is shared if several of these images contain it.
    """
    layers = {image.name: image.records() for image in images}
    uses = Counter(layer.key for records in layers.values() for layer in records)
    return {
        name: ImageSize(
            unique=sum(layer.bytes for layer in records if uses[layer.key] == 1),
            shared=sum(layer.bytes for layer in records if uses[layer.key] > 1),
        )
        for name, records in layers.items()
    }


def total_size(images: Sequence[Image]) -> int:
    """Return the bytes on disk of all layers of a set of images, counting each layer once."""
    return sum({record.key: record.bytes for image in images for record in image.records()}.values())


def load_image(store: Store, name: str) -> Image:
    """Return an image of the store.

    Args:
        store: the store.
        name: the name of the image, or the reference that it was pulled by, for example ``python:3.12``.

    Raises:
        NotFound: there is no such image.
        StoreError: its record is damaged.
    """
    return image_of(find_record(store, name), store)


def find_record(store: Store, name: str) -> ImageRecord:
    """Return the record of an image by its name or by the reference that it was pulled by; see :func:`load_image`."""
    if not is_reference(name):
        return store.image(name)
    from minisandbox.images.oci.reference import default_name, is_of, origin  # noqa: PLC0415 - most names are not references
    from minisandbox.spec import parse_reference  # noqa: PLC0415 - most names are not references

    namesake = None
    with suppress(NotFound):
        namesake = store.image(default_name(name))
        if is_of(parse_reference(name), namesake.notes):
            return namesake
    for record in archived(store, name):
        return record
    if namesake is None:
        raise NotFound(
            f"{name} is not in the store {store.root}",
            hint=f"minisandbox image pull {name}; `minisandbox image ls` lists what is there",
        )
    raise NotFound(
        f"{name} is not in the store",
        reason=f"there is an image {namesake.name}; {origin(namesake.notes)}",
        hint=f"minisandbox image pull {name} --name NAME",
    )


def archived(store: Store, reference: str) -> list[ImageRecord]:
    """Return the records of images that were imported from archives under a reference, newest first."""
    from minisandbox.images.oci.reference import is_named  # noqa: PLC0415 - most names are not references
    from minisandbox.spec import Remote, parse_reference  # noqa: PLC0415 - most names are not references

    parsed = parse_reference(reference)
    if not isinstance(parsed, Remote):
        return []
    matches = [record for record in store.archived_images() if is_named(reference, record.notes)]
    return sorted(matches, key=lambda record: -record.created)


def is_reference(name: str) -> bool:
    """Return whether a string is a reference: it has characters that names of the store cannot contain."""
    return ":" in name or "/" in name


def list_images(store: Store) -> list[Image]:
    """Return all images of the store, sorted by name."""
    return [image_of(record, store) for record in store.images()]


def host_image(store: Store, name: str = HOST_IMAGE) -> Image:
    """Return the minimal image, which consists of the host's ``/usr`` and a generated ``/etc``.

    Raises:
        DiskFull: there is no space for the base layer.
        StoreError: the host's ``/etc`` cannot be read, or the store cannot be written.
    """
    with store_faults("read the host's /etc"):
        entries = base_entries()
    layer, _ = make_base(store, entries)
    key = step_key(platform_key(), {"kind": "image"})
    image = ImageRecord(name, key, (layer.key,), HOST_VARIABLES, str(WORKDIR), None, "", time.time())
    return image_of(put_if_new(store, image), store)


def make_base(store: Store, entries: tuple[BaseEntry, ...]) -> tuple[LayerRecord, bool]:
    """Return the base layer with these entries, and whether the layer is new in the store."""

    def make(staging: Path) -> Made:
        with store_faults("write the base layer"):
            write_base(entries, staging / "tree")
        return Made(staging / "tree")

    return store.ensure_layer(base_key(entries), parent=None, step={"kind": "base"}, make=make)


def put_if_new(store: Store, record: ImageRecord) -> ImageRecord:
    """Record an image, unless the store already has an equal record; return the record in the store."""
    with suppress(NotFound):
        stored = store.image(record.name)
        if replace(stored, created=record.created) == record:
            return stored
    store.put_image(record)
    return record


def image_of(record: ImageRecord, store: Store) -> Image:
    """Return the image that a record describes."""
    return Image(
        record.name, record.key, record.layers, record.environment, PurePosixPath(record.workdir), record.tests_layer,
        record.base_commit, record.created, record.notes, store, record.own_root, record.user, record.config,
    )  # fmt: skip
