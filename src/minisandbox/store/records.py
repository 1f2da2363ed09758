"""The store's records: what it knows of a layer and of an image, as versioned JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self

from minisandbox.errors import StoreError
from minisandbox.store.keys import JSONValue

FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Record:
    def to_json(self) -> bytes:
        """Return the record as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record.

        Args:
            path: its file.

        Returns:
            The record; fields of later minor additions are ignored.

        Raises:
            StoreError: the file is damaged or of a later format.
            FileNotFoundError: there is none.
        """
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Read a record's JSON text.

        Args:
            text: the text.
            where: what errors call it.

        Raises:
            StoreError: it is damaged or of a later format.
        """
        try:
            values = json.loads(text)
            version = values.pop("format")
            known = {f.name for f in fields(cls)}
            if version == FORMAT:
                return cls(**{name: _frozen(value) for name, value in values.items() if name in known})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"record {where} is damaged",
                reason=str(error),
                hint="run `minisandbox image verify`, then build again",
            ) from error
        raise StoreError(
            f"record {where} has format {version!r}", hint="use the MiniSandbox that wrote it, or a later one"
        )


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class LayerRecord(_Record):
    """What is known of a published layer.

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
class ImageRecord(_Record):
    """What is known of an image.

    Attributes:
        name: what people call it.
        key: the hash of everything that decides what it is.
        layers: the keys of its layers, bottom first.
        environment: captured variables.
        workdir: where commands start.
        tests_layer: the key of the layer of hidden tests, or None.
        base_commit: the commit of the repository inside, or "" where there is none.
        created: when it was recorded, seconds since the epoch.
        notes: facts for people: the interpreter's version, the source.
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


@dataclass(frozen=True, slots=True)
class FailureRecord(_Record):
    """What is known of an image whose build failed: enough to look into its last good state.

    Attributes:
        image: the name of the image.
        step: the name of the step that failed.
        key: the key of the layer that the step would have made; its log has that name.
        layers: the keys of the good layers below it, bottom first.
        environment: captured variables.
        workdir: where commands start.
        created: when it failed, seconds since the epoch.
        reason: the message.
    """

    image: str
    step: str
    key: str
    layers: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    workdir: str
    created: float
    reason: str = ""
