"""Writing a parcel: images as one stream, every content once.

The stream is a tar archive: a head, a list of files for each layer, the contents by their hashes, and an end, without
which it is truncated. It is not compressed; :mod:`minisandbox.images.travel` does that.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

from minisandbox.errors import StoreError
from minisandbox.store import entries as listing
from minisandbox.store.entries import FILE, Entry
from minisandbox.store.faults import store_faults
from minisandbox.store.growing import Readable
from minisandbox.store.parcels import MOST_LIST, PackedLayer, Room, layers_of, pack_layer
from minisandbox.store.reading import open_below
from minisandbox.store.records import ImageRecord
from minisandbox.store.store import Store

FORMAT = 1
HEAD, END = "minisandbox-images.json", "end"
LAYERS, OBJECTS = "layers", "objects"
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        images: names of images.
        layers: how many layers.
        objects: how many different contents.
        bytes: bytes of contents.
        total: bytes that the files of all layers have, one by one.
    """

    images: tuple[str, ...]
    layers: int
    objects: int
    bytes: int
    total: int


def export_images(
    store: Store, names: Iterable[str], out: IO[bytes], *, progress: Callable[[int, int], None] | None = None
) -> Exported:
    """Write images to a stream.

    Args:
        store: where they are; it may be read-only, and sandboxes may run from it.
        names: the images.
        out: where to; nothing of it is of use unless this returns.
        progress: told of (bytes written, bytes of contents in all).

    Returns:
        What was written.

    Raises:
        NotFound: there is no such image, or a layer of it is gone.
        StoreError: a layer is damaged, or a file of it cannot be read.
        DiskFull: where ``out`` writes there is no space.
    """
    images = [store.image(name) for name in dict.fromkeys(names)]
    keys = layers_of(images)
    with store.hold(*keys, frozen=True), store_faults("export images"):
        room = Room(f"the store {store.root}")
        layers = [pack_layer(store, key, room) for key in keys]
        sources = _contents(layers)
        _write(store, out, images, layers, sources, progress)
    size = sum(entry.size for _, entry in sources.values())
    total = sum(entry.size for layer in layers for entry in layer.entries if not entry.same)
    return Exported(tuple(image.name for image in images), len(layers), len(sources), size, total)


def export_part(
    store: Store,
    name: str,
    out: IO[bytes],
    *,
    keys: Collection[str],
    contents: Collection[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write what somebody lacks of an image: lists of layers, or contents of theirs.

    Args:
        store: where it is.
        name: the image.
        out: where to.
        keys: the layers.
        contents: the contents, by hash; None for the lists.
        progress: as for :func:`export_images`.

    Raises:
        NotFound: there is no such image, or a layer of it is gone.
        StoreError: a layer is damaged, or a file of it cannot be read.
    """
    image = store.image(name)
    with store.hold(*keys, frozen=True), store_faults("export images"):
        room = Room(f"image {name!r}")
        layers = [pack_layer(store, key, room) for key in layers_of([image]) if key in keys]
        if contents is None:
            _write(store, out, [image], layers, {}, progress)
        else:
            sources = {digest: one for digest, one in _contents(layers).items() if digest in contents}
            _write(store, out, [image], (), sources, progress)


def _write(
    store: Store,
    out: IO[bytes],
    images: Sequence[ImageRecord],
    listed: Sequence[PackedLayer],
    sources: Mapping[str, tuple[str, Entry]],
    progress: Callable[[int, int], None] | None,
) -> None:
    size = sum(entry.size for _, entry in sources.values())
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, HEAD, _head(images, listed, len(sources), size))
        for layer in listed:
            _add(archive, f"{LAYERS}/{layer.record.key}.json", layer.record.to_json())
            _add(archive, f"{LAYERS}/{layer.record.key}.files", b"".join(_lines(layer.entries)))
        written = 0
        for key, entry, content in read_contents(store, sources):
            _add_content(archive, key, entry, content)
            written += entry.size
            if progress is not None:
                progress(written, size)
        _add(archive, END, b"")


def _head(images: Sequence[ImageRecord], layers: Sequence[PackedLayer], objects: int, size: int) -> bytes:
    head = {
        "format": FORMAT,
        "images": [asdict(image) for image in images],
        "layers": [{"key": layer.record.key, "entries": len(layer.entries)} for layer in layers],
        "objects": objects,
        "bytes": size,
    }
    return json.dumps(head).encode()


def _contents(layers: Sequence[PackedLayer]) -> dict[str, tuple[str, Entry]]:
    """Where each different content lies: (key of a layer, a file of it), by hash."""
    found: dict[str, tuple[str, Entry]] = {}
    for layer in layers:
        for entry in layer.entries:
            if entry.kind == FILE:
                found.setdefault(entry.digest, (layer.record.key, entry))
    return found


def _lines(entries: Sequence[Entry]) -> Iterator[bytes]:
    yield f'{{"format":{listing.FORMAT}}}\n'.encode()
    for entry in entries:
        yield listing.encode(entry)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    archive.addfile(info, io.BytesIO(data))


def _add_content(archive: tarfile.TarFile, key: str, entry: Entry, content: Readable) -> None:
    info = tarfile.TarInfo(f"{OBJECTS}/{entry.digest}")
    info.size, info.mode = entry.size, 0o644
    damaged = StoreError(
        f"layer {key} is damaged: {entry.path} has other content than when it was made",
        hint="run `minisandbox image verify --full`, and build its images again",
    )
    hashed = Hashed(content)
    try:
        archive.addfile(info, hashed)
    except OSError as error:
        if error.errno is not None:  # where the archive is written to
            raise
        raise damaged from error  # tarfile's own: it is shorter
    if hashed.digest != entry.digest or content.read(1):
        raise damaged


def read_contents(store: Store, sources: Mapping[str, tuple[str, Entry]]) -> Iterator[tuple[str, Entry, Readable]]:
    """Yield contents of layers, of frozen ones too, each with its layer and its file.

    Whether a content is what its hash says is for the reader to see.

    Args:
        store: the store; it may be read-only.
        sources: by hash, the key of a layer and a file of it.

    Raises:
        StoreError: a frozen layer is damaged.
        OSError: a file cannot be read.
    """
    frozen = {key for key, _ in sources.values() if store.is_frozen(key)}
    files = (entry for key in frozen for entry in _listed(store, key) if entry.digest in sources)
    pooled = {entry.digest: entry.object_name for entry in files if entry.object_name}
    packed: dict[str, tuple[str, Entry]] = {}
    for digest, (key, entry) in sources.items():
        if key not in frozen:
            with open_content(store, key, entry) as file:
                yield key, entry, file
        elif not entry.size:
            yield key, entry, io.BytesIO()
        elif digest in pooled and store.pool.has(pooled[digest]):
            with store.pool.open(pooled[digest]) as file:
                yield key, entry, file
        else:
            packed[digest] = key, entry
    yield from _unpacked(store, packed)


def _unpacked(store: Store, packed: dict[str, tuple[str, Entry]]) -> Iterator[tuple[str, Entry, Readable]]:
    for pack in store.packs.all() if packed else ():
        with suppress(FileNotFoundError):  # removed since: the layers that needed it were thawed
            for digest, content in pack.contents(frozenset(packed)):
                if digest in packed:  # a pack of somebody else's may have it twice
                    yield (*packed.pop(digest), content)
    for key, entry in packed.values():
        try:
            file = open_content(store, key, entry)
        except FileNotFoundError:
            raise StoreError(
                f"layer {key} is damaged: {entry.path} is in no pack",
                hint="run `minisandbox image verify`, and build its images again",
            ) from None
        with file:  # it was thawed meanwhile
            yield key, entry, file


def _listed(store: Store, key: str) -> Iterator[Entry]:
    return listing.read_entries(store.layer_directory(key), most=MOST_LIST)


def open_content(store: Store, key: str, entry: Entry) -> IO[bytes]:
    """Open a file of a layer for reading; nothing that took its place is followed or waited for.

    Raises:
        StoreError: it is no regular file, or is reached through a link.
        OSError: it cannot be opened.
    """
    return open_below(store.root, f"layers/{key}/tree/{entry.path}")


class Hashed(io.RawIOBase):
    """A stream that hashes what is read from it.

    Args:
        source: the stream.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._hash = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Read like the stream itself."""
        data = self._source.read(size if size >= 0 else _ALL)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        """The SHA-256 of what was read so far."""
        return self._hash.hexdigest()
