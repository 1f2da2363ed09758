"""Define the store's records of layers, blobs, images and failed builds, kept as versioned JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self, cast

from minisandbox.errors import StoreError
from minisandbox.store.disk.reading import read_below
from minisandbox.values import JSONValue

FORMAT = 1
BLOBS = "blobs.json"
"""Name of the file with a layer's :class:`BlobRecord`."""
MOST = 1 << 22
"""Maximum bytes of a record's file; JSON takes up to 26 times as much memory when it is parsed."""


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A record that is kept in its own JSON file."""

    def to_json(self) -> bytes:
        """Return the record as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def read(cls, root: Path, name: str) -> Self:
        """Read a record.

        Args:
            root: the store's directory.
            name: path of the record's file, relative to ``root``.

        Returns:
            The record; unknown fields, which later versions may add, are ignored.

        Raises:
            StoreError: the file is damaged, too large, not a regular file, or has a later format.
            FileNotFoundError: the record is missing.
        """
        return cls.parse(read_below(root, name, MOST), f"{root}/{name}")

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Parse the JSON text of a record.

        Args:
            text: the JSON text.
            where: name of the record in error messages.

        Raises:
            StoreError: the record is damaged or has a later format.
        """
        try:
            columns = json.loads(text)
            version = columns.pop("format")
            if version == FORMAT:
                cls._check(columns)
                return cls.of(columns)
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
    def of(cls, columns: Mapping[str, object]) -> Self:
        """Return the record with these fields, whose types must be right; ignore unknown fields."""
        return cls(**{column.name: _frozen(columns[column.name]) for column in fields(cls) if column.name in columns})

    @classmethod
    def _check(cls, columns: Mapping[str, object]) -> None:
        for column in fields(cls):
            if column.name in columns and not _FITS[str(column.type)](columns[column.name]):
                raise ValueError(f"{column.name} is {repr(columns[column.name])[:80]}")


def is_number(value: object) -> bool:
    """Return whether a value is a valid size, time or duration: a finite number that is not negative."""
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
"""For each field type, a function that returns whether a JSON value fits the type."""


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if type(value) is list else value


@dataclass(frozen=True, slots=True)
class LayerRecord(StoreRecord):
    """The record of a published layer.

    Attributes:
        key: key of the layer.
        parent: key of the layer below, or None.
        step: the canonical build step, which the key hashes.
        seconds: wall time of the build step in seconds.
        bytes: bytes of the layer's tree on disk, each inode counted once.
        files: number of names in the tree that are not directories.
        created: seconds since the epoch when the layer was published.
        facts: facts that the build step collected, for example the interpreter's version, the commit and package
            versions.
        imported: whether the layer was built on another machine and imported.
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
    """The record of a layer's blobs, some of which may have been removed from the store.

    Attributes:
        diff_id: digest of the layer's uncompressed tar.
        digests: digest of each blob, by compression.
        sizes: bytes of each blob, by compression.
        places: for each registry host that has the blobs, a repository with them.
    """

    diff_id: str
    digests: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageRecord(StoreRecord):
    """The record of an image.

    Attributes:
        name: name of the image.
        key: hash of everything that determines the image's content.
        layers: keys of the layers, bottom first.
        environment: captured environment variables.
        workdir: working directory of commands.
        tests_layer: key of the layer with the hidden tests, or None.
        base_commit: commit of the repository in the image, or "" without a repository.
        created: seconds since the epoch when the image was recorded.
        notes: facts for the user: the interpreter's version, the source.
        own_root: whether the image has a complete root file system and does not use the host's ``/usr``.
        user: user who runs the commands; "" for root.
        config: run settings of a container image: ``User``, ``Entrypoint``, ``Cmd`` (image-spec, config.md).
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
    """The record of a failed build, with the data to open a sandbox in the state before the failed step.

    Attributes:
        image: name of the image.
        step: name of the failed step.
        key: key of the layer that the step would have created; also the name of the step's log file.
        layers: keys of the layers below the failed step, bottom first.
        environment: captured environment variables.
        workdir: working directory of commands.
        created: seconds since the epoch when the build failed.
        reason: the error message.
        own_root: whether the layers have a complete root file system and do not use the host's ``/usr``.
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
    """Return whether a layer has a blob instead of a tree.

    Args:
        layer: directory of the layer.
    """
    return not (layer / "tree").exists() and (layer / BLOBS).exists()
