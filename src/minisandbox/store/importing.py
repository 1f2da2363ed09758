"""Reading a parcel: a stream of :mod:`.exporting`, or the store of somebody else. Nothing in either is trusted.

What it holds is written below a private directory by the rules of :mod:`.parcels`, every content hashed on the way;
layers then are published as built ones are. What an interruption leaves is invisible, and removed by the next process.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from minisandbox.errors import InvalidValue, MiniSandboxError, NotFound, StoreError
from minisandbox.store import entries as listing
from minisandbox.store import exporting
from minisandbox.store.entries import FILE, LINK, Entry, copy_name
from minisandbox.store.faults import disk_full, fault_point, store_faults
from minisandbox.store.growing import Growth, Readable, write_content
from minisandbox.store.keys import is_key
from minisandbox.store.members import Member, Members
from minisandbox.store.parcels import (
    MOST_LIST,
    PackedLayer,
    Room,
    check_image,
    check_layer,
    layers_of,
    relative_entries,
    unfit,
)
from minisandbox.store.records import ImageRecord, LayerRecord
from minisandbox.store.sizes import stack_of
from minisandbox.store.store import Made, Store

_CHUNK = 1 << 20
_MOST_HEAD, _MOST_RECORD = 1 << 24, 1 << 20
"""Bytes of the head, which has all images, and of a layer's record; objects of JSON take 26 times as much."""
_MOST_IMAGES = 1 << 26
"""Bytes of the records of all images that are taken over from a directory."""
_PRIVILEGED = stat.S_ISUID | stat.S_ISGID

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did.

    Attributes:
        images: names of all images that are there now.
        layers: keys of layers that were not there before.
        present: how many layers were there already.
        bytes: bytes of contents that were read and checked.
        owners: how many files belong to this user now because they cannot belong to whom they did.
        privileges: how many files lost setuid or setgid, which nothing in a sandbox needs.
    """

    images: tuple[str, ...]
    layers: tuple[str, ...]
    present: int
    bytes: int
    owners: int
    privileges: int


def import_stream(
    store: Store, source: Readable, *, where: str, replace: bool = False, progress: Progress | None = None
) -> Imported:
    """Take images over from a stream that :func:`.exporting.export_images` wrote; what is there already is not read.

    Args:
        store: where to.
        source: the stream, not compressed.
        where: what errors call it.
        replace: whether an image may take the place of another of the same name.
        progress: told of (bytes read, bytes of contents needed).

    Returns:
        What was done.

    Raises:
        StoreError: it is truncated, damaged or not what an export writes; nothing of it is visible.
        InvalidValue: there is another image of the same name.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    store.require_writable("import images")
    try:
        return _Import(store, StreamParcel(source, where), replace, progress).run()
    except MiniSandboxError:  # some of ours are ValueErrors as well; they have said it already
        raise
    except (EOFError, ValueError) as error:
        raise _truncated(where, str(error)) from error


def import_store(
    store: Store,
    source: Store,
    names: Iterable[str] | None = None,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Take images over from another store, which is only read.

    Args:
        store: where to.
        source: where from.
        names: the images; all by default.
        replace: whether an image may take the place of another of the same name.
        progress: told of (bytes read, bytes of contents needed).

    Returns:
        What was done.

    Raises:
        NotFound: the source has no such image, or a layer of it is gone.
        StoreError: the source is damaged; nothing of it is visible.
        InvalidValue: there is another image of the same name.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    store.require_writable("import images")
    if store.root.resolve() == source.root.resolve():
        raise InvalidValue(f"{source.root} is the store itself", hint="give another store's directory")
    images = _images_of(source, source.image_names() if names is None else dict.fromkeys(names))
    with source.hold(*layers_of(images), frozen=True):
        return _Import(store, _Other(source, images), replace, progress).run()


def import_parcel(store: Store, parcel: Parcel, *, replace: bool = False, progress: Progress | None = None) -> Imported:
    """Take images over from wherever a parcel comes from, which is asked only for what this store lacks.

    Args:
        store: where to.
        parcel: where from.
        replace: whether an image may take the place of another of the same name.
        progress: told of (bytes read, bytes of contents needed).

    Returns:
        What was done.

    Raises:
        StoreError: the parcel is truncated, damaged or not what an export writes; nothing of it is visible.
        InvalidValue: there is another image of the same name.
        DiskFull: the disk is full; layers that were finished before are kept.
    """
    store.require_writable("import images")
    return _Import(store, parcel, replace, progress).run()


class Parcel(Protocol):
    """Where an import comes from."""

    where: str
    images: list[ImageRecord]

    def layers(self, wanted: set[str]) -> list[PackedLayer]:
        """Layers that are wanted, those below first, each checked as it is read."""

    def contents(self, wanted: set[str]) -> Iterator[tuple[str, Readable]]:
        """Contents that are wanted, by hash, in whatever order."""


class StreamParcel:
    """A parcel from a stream.

    Attributes:
        where: what errors call it.
        images: the records of its images.

    Args:
        source: the stream, not compressed.
        where: what errors call it.
    """

    def __init__(self, source: Readable, where: str) -> None:
        self._members = Members(source)
        self._source = source
        self.where = where
        try:
            head = json.loads(self._text(self._next(exporting.HEAD), _MOST_HEAD))
            if head["format"] != exporting.FORMAT:
                raise unfit(where, f"its format {head['format']!r} is of a later MiniSandbox")
            self.images = [_image(values, where) for values in head["images"]]
            self._keys = [str(layer["key"]) for layer in head["layers"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise unfit(where, f"its head cannot be read: {error}") from error

    def layers(self, wanted: set[str]) -> list[PackedLayer]:
        """Read the lists of files, which come before all contents."""
        found, room = [], Room(self.where)
        for key in self._keys:
            record = self._text(self._next(f"{exporting.LAYERS}/{key}.json"), _MOST_RECORD)
            lines = self._next(f"{exporting.LAYERS}/{key}.files")
            if key in wanted:
                found.append(self._layer(key, LayerRecord.parse(record, self.where), lines, room))
        return found

    def contents(self, wanted: set[str]) -> Iterator[tuple[str, Readable]]:
        """Read on to the end; what is not wanted is passed over."""
        while True:
            member = self._next()
            if member.name == exporting.END:
                while self._source.read(_CHUNK):  # a compressed file's checksum stands at its end
                    pass
                return
            digest = member.name.removeprefix(f"{exporting.OBJECTS}/")
            if not is_key(digest):
                raise unfit(self.where, f"it holds {member.name!r}")
            if digest in wanted:
                yield digest, member

    def _layer(self, key: str, record: LayerRecord, lines: Member, room: Room) -> PackedLayer:
        if record.key != key:
            raise unfit(self.where, "a layer has another key than its record")
        source = io.BytesIO(self._text(lines, MOST_LIST))
        return check_layer(record, listing.parse(listing.lines_of(source, MOST_LIST), self.where), self.where, room)

    def _next(self, name: str | None = None) -> Member:
        member = self._members.next()
        if member is None:
            raise _truncated(self.where, "it ends too early")
        if name is not None and member.name != name:
            raise unfit(self.where, f"it holds {member.name!r} in place of {name!r}")
        return member

    def _text(self, member: Member, most: int) -> bytes:
        if member.size > most:
            raise unfit(self.where, f"{member.name!r} has {member.size} bytes")
        return member.read(member.size)


class _Other:
    """A parcel from another store."""

    def __init__(self, source: Store, images: list[ImageRecord]) -> None:
        self._source = source
        self.where = f"the store {source.root}"
        self.images = images
        self._packed: list[PackedLayer] = []

    def layers(self, wanted: set[str]) -> list[PackedLayer]:
        """Read the lists of files."""
        keys, room = [key for key in layers_of(self.images) if key in wanted], Room(self.where)
        self._packed = [
            check_layer(self._source.layer(key), relative_entries(self._source, key), self.where, room) for key in keys
        ]
        return self._packed

    def contents(self, wanted: set[str]) -> Iterator[tuple[str, Readable]]:
        """Open one file for each content."""
        sources: dict[str, tuple[str, Entry]] = {}
        for layer in self._packed:
            for entry in layer.entries:
                if entry.kind == FILE and entry.digest in wanted:
                    sources.setdefault(entry.digest, (layer.record.key, entry))
        for _, entry, content in exporting.read_contents(self._source, sources):
            yield entry.digest, content


@dataclass(slots=True)
class _Import:
    """One import."""

    store: Store
    parcel: Parcel
    replace: bool
    progress: Progress | None
    owners: int = 0
    privileges: int = 0
    _placed: set[str] = field(default_factory=set)

    def run(self) -> Imported:
        """Check everything, then write contents, then publish layers, then record images."""
        images = [check_image(image, self.parcel.where) for image in self.parcel.images]
        self._check_names(images)
        keys = layers_of(images)
        wanted = {key for key in keys if not self.store.has_layer(key)}
        made: list[str] = []
        read = 0
        with (
            store_faults("import images"),
            self.store.hold(*(key for key in keys if key not in wanted), frozen=True) as hold,
        ):
            if wanted:
                layers = self.parcel.layers(wanted)
                if {layer.record.key for layer in layers} != wanted:
                    raise unfit(self.parcel.where, "an image has layers that are not in it")
                with self.store.staging("import") as work:
                    read = self._receive(layers, work)
                    for layer in layers:
                        made += self._publish(layer, work)
                        hold.add(layer.record.key)
            fault_point("imported")
            for image in images:
                if not self._has(image):
                    self.store.put_image(image)
        names = tuple(image.name for image in images)
        return Imported(names, tuple(made), len(keys) - len(made), read, self.owners, self.privileges)

    def _check_names(self, images: list[ImageRecord]) -> None:
        for image in images:
            with suppress(NotFound):
                known = self.store.image(image.name)
                if known.key != image.key and not self.replace:
                    raise InvalidValue(
                        f"there is another image {image.name!r} in the store {self.store.root}",
                        hint="replace it with --replace, or remove it first: minisandbox image rm",
                    )

    def _has(self, image: ImageRecord) -> bool:
        with suppress(NotFound):
            known = self.store.image(image.name)
            return known.key == image.key and stack_of(known) == stack_of(image)
        return False

    def _receive(self, layers: list[PackedLayer], work: Path) -> int:
        """Write every content that is needed, each checked against its hash; return their bytes."""
        sizes: dict[str, int] = {}
        for layer in layers:
            for entry in layer.entries:
                if entry.kind == FILE and sizes.setdefault(entry.digest, entry.size) != entry.size:
                    raise unfit(self.parcel.where, f"content {entry.digest[:16]} has two sizes")
        needed = sum(sizes.values())
        free = os.statvfs(work)
        if needed > free.f_bavail * free.f_frsize:
            raise disk_full(f"import {needed >> 20} MiB from {self.parcel.where}")
        blobs = work / "contents"
        blobs.mkdir(mode=0o700)
        here = self._take_from_pool(layers, blobs)
        waiting, read = sizes.keys() - here, 0
        for digest, source in self.parcel.contents(waiting):
            if digest not in waiting:
                raise unfit(self.parcel.where, f"content {digest[:16]} is there twice")
            if not write_content(blobs / digest, source, digest, sizes[digest]):
                raise unfit(self.parcel.where, f"content {digest[:16]} is not what its hash says: the file is damaged")
            waiting.discard(digest)
            read += sizes[digest]
            fault_point("content-received")
            if self.progress is not None:
                self.progress(read, needed)
        if waiting:
            raise unfit(self.parcel.where, f"{len(waiting)} contents of its layers are not in it")
        return read

    def _take_from_pool(self, layers: list[PackedLayer], blobs: Path) -> set[str]:
        """Copy contents that equal files of this store have; return their hashes."""
        found: set[str] = set()
        for entry in (entry for layer in layers for entry in layer.entries):
            if entry.kind != FILE or entry.digest in found or not entry.size:
                continue
            path = blobs / entry.digest
            try:
                with self.store.pool.path(copy_name(self._owned(entry).object, 0)).open("rb") as file:
                    sound = write_content(path, file, entry.digest, entry.size)
            except FileNotFoundError:
                continue
            if sound:
                found.add(entry.digest)
            else:  # the sound one comes
                path.unlink()
        return found

    def _publish(self, layer: PackedLayer, work: Path) -> list[str]:
        record = layer.record

        def make(staging: Path) -> Made:
            tree = staging / "tree"
            entries = [self._local(entry) for entry in layer.entries]
            growth = Growth(tree, work / "contents", self._placed)
            return Made(tree, record.facts, float(record.seconds), lambda link: growth.run(entries, link))

        _, new = self.store.ensure_layer(record.key, parent=record.parent, step=record.step, make=make)
        return [record.key] if new else []

    def _local(self, entry: Entry) -> Entry:
        """An entry as it can be here, counted where it changes."""
        self.privileges += entry.kind == FILE and bool(entry.mode & _PRIVILEGED)
        self.owners += os.geteuid() != 0 and (entry.uid, entry.gid) != (0, 0)
        return self._owned(entry)

    def _owned(self, entry: Entry) -> Entry:
        """An entry as it can be here: an ordinary user's files are its own, and none has privileges."""
        mode, uid, gid = entry.mode, entry.uid, entry.gid
        if entry.kind == FILE:
            mode &= ~_PRIVILEGED
        if os.geteuid() != 0:
            uid, gid = os.geteuid(), os.getegid()
        if entry.kind == LINK:
            mode = 0o777  # symlink(7): its permissions are these, and never used
        return dataclasses.replace(entry, mode=mode, uid=uid, gid=gid)


def _images_of(source: Store, names: Iterable[str]) -> list[ImageRecord]:
    """The records of another store's images, checked before anything is made of them."""
    found, size = [], 0
    for name in names:
        found.append(check_image(source.image(name), f"the store {source.root}"))
        size += len(found[-1].to_json())
        if size > _MOST_IMAGES:
            raise unfit(f"the store {source.root}", "the records of its images are too large; name some of them")
    return found


def _image(values: dict[str, object], where: str) -> ImageRecord:
    return ImageRecord.parse(json.dumps({**values, "format": 1}).encode(), where)


def _truncated(where: str, reason: str) -> StoreError:
    return StoreError(
        f"{where} is truncated, or not what an export writes",
        reason=reason,
        hint="compare its size with the original, and copy it again; nothing of it was imported",
    )
