"""The store's records of layers and of images, as versioned JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self, cast

from minisandbox.errors import StoreError
from minisandbox.store.disk.reading import read_below
from minisandbox.types import JSONValue

FORMAT = 1
BLOBS = "blobs.json"
"""The file of a layer's :class:`BlobRecord`."""
MOST = 1 << 22
"""Bytes that a record's file may have; objects of JSON take 26 times as much."""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A record in a JSON file of its own."""

    def to_json(self) -> bytes:
        """Return the record as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def read(cls, root: Path, name: str) -> Self:
        """Read a record.

        Args:
            root: the store's directory.
            name: its file, relative to that.

        Returns:
            The record; fields of later minor additions are ignored.

        Raises:
            StoreError: the file is damaged, too large, no file at all, or of a later format.
            FileNotFoundError: the record is missing.
        """
        return cls.parse(read_below(root, name, MOST), f"{root}/{name}")

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Read a record's JSON text.

        Args:
            text: the text.
            where: what errors call it.

        Raises:
            StoreError: the record is damaged or of a later format.
        """
        try:
            values = json.loads(text)
            version = values.pop("format")
            names = {f.name for f in fields(cls)}
            if version == FORMAT:
                cls._check(values)
                return cls(**{name: _frozen(value) for name, value in values.items() if name in names})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"record {where} is damaged",
                reason=str(error),
                hint="run `minisandbox image verify`, then build again",
            ) from error
        raise StoreError(
            f"record {where} has format {version!r}", hint="use the MiniSandbox that wrote it, or a later one"
        )

    @classmethod
    def _check(cls, values: Mapping[str, object]) -> None:
        for column in fields(cls):
            if column.name in values and not _FITS[str(column.type)](values[column.name]):
                raise ValueError(f"{column.name} is {repr(values[column.name])[:80]}")


def is_number(value: object) -> bool:
    """Return whether a value can be a size, a point in time or a duration: finite, and not negative."""
    return type(value) in (int, float) and 0 <= cast("float", value) < 1 << 63


def _is_mapping_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_list_of_pairs(value: object) -> bool:
    return isinstance(value, list) and all(_is_list_of_texts(pair) and len(pair) == 2 for pair in value)


_FITS: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: is_number(value) and isinstance(value, int),
    "float": is_number,
    "tuple[str, ...]": _is_list_of_texts,
    "tuple[tuple[str, str], ...]": _is_list_of_pairs,
    "Mapping[str, str]": _is_mapping_of_texts,
    "Mapping[str, int]": lambda value: isinstance(value, dict) and all(type(one) is int for one in value.values()),
    "Mapping[str, JSONValue]": lambda value: isinstance(value, dict),
}
"""For the type of each field, whether a value of JSON can be one."""


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class LayerRecord(StoreRecord):
    """The record of a published layer.

    Attributes:
        key: its address.
        parent: the key of the layer it was made over, or None.
        step: what made it (the canonical step that the key hashes).
        seconds: wall seconds it took to make.
        bytes: bytes its tree takes on disk, every inode once.
        files: names in its tree that are not directories.
        created: when it was published, seconds since the epoch.
        facts: what its maker learned on the way: an interpreter's version, a commit, exact versions.
        imported: whether it was made elsewhere and taken over.
    """

    key: str
    parent: str | None
    step: Mapping[str, JSONValue]
    seconds: float
    bytes: int
    files: int
    created: float
    facts: Mapping[str, str] = field(default_factory=dict)
    imported: bool = False


@dataclass(frozen=True, slots=True)
class BlobRecord(StoreRecord):
    """The record of a layer's compressed forms, which may have been removed from the store.

    Attributes:
        diff_id: the digest of its tar.
        digests: of its blobs, by compression.
        sizes: bytes of its blobs, by compression.
        places: registries to which it was pushed: for a host, one of its repositories.
    """

    diff_id: str
    digests: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageRecord(StoreRecord):
    """The record of an image.

    Attributes:
        name: what people call it.
        key: the hash of everything that decides what it is.
        layers: the keys of its layers, bottom first.
        environment: captured variables.
        workdir: where commands start.
        tests_layer: the key of the layer of hidden tests, or None.
        base_commit: the commit of the repository inside, or "" without a repository.
        created: when it was recorded, seconds since the epoch.
        notes: facts for people: the interpreter's version, the source.
        own_root: whether its root is its own tree, without the host's ``/usr``.
        user: as whom its commands run; "" for root.
        config: how a container image wants to be run: ``User``, ``Entrypoint``, ``Cmd`` (image-spec, config.md).
    """

    name: str
    key: str
    layers: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    workdir: str
    tests_layer: str | None
    base_commit: str
    created: float
    notes: Mapping[str, str] = field(default_factory=dict)
    own_root: bool = False
    user: str = ""
    config: Mapping[str, JSONValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailureRecord(StoreRecord):
    """The record of a failed build, with what opening its last good state needs.

    Attributes:
        image: the name of the image.
        step: the name of the step that failed.
        key: the key of the layer that the step would have made; its log has that name.
        layers: the keys of the good layers below it, bottom first.
        environment: captured variables.
        workdir: where commands start.
        created: when it failed, seconds since the epoch.
        reason: the message.
        own_root: whether the root is the layers' own, without the host's ``/usr``.
    """

    image: str
    step: str
    key: str
    layers: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    workdir: str
    created: float
    reason: str = ""
    own_root: bool = False


def is_frozen(layer: Path) -> bool:
    """Return whether a layer has a blob instead of its tree.

    Args:
        layer: its directory.
    """
    return not (layer / "tree").exists() and (layer / BLOBS).exists()
