"""Parcels: images on their way from one store to another. Whatever comes in one is checked before it is used.

Owners in a parcel are relative: 0 is whoever owns the store. It says what files hold, never where on a host they lie.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue, StoreError
from minisandbox.store import entries as listing
from minisandbox.store.catalogue import check_name
from minisandbox.store.entries import DIRECTORY, FILE, LINK, PRIVATE, Entry
from minisandbox.store.keys import check_key, is_key
from minisandbox.store.reading import open_folder
from minisandbox.store.records import ImageRecord, LayerRecord, is_number
from minisandbox.store.scanning import describe, walk
from minisandbox.store.sizes import stack_of
from minisandbox.store.store import Store

_LONGEST_NAME, _LONGEST_PATH, _LONGEST_TARGET = 255, 3000, 4095
_MOST_OWNERS = 65536
_MOST_BYTES = 1 << 44
_LEAST_LINE = 64
MOST_LIST = 1 << 28
"""Bytes of a layer's list of files in a parcel; objects of JSON take 26 times as much, of one line at a time."""
MOST_MEMORY = 2 << 30
"""Bytes of memory for the lists and records of all layers of a parcel: some 2.3 million files, which take 900 each."""
_OF_JSON = 26
_ENTRY = 384
"""Bytes of memory that an entry takes without its path, target and attributes."""
_MOST_ATTRIBUTES, _LONGEST_ATTRIBUTE, _LONGEST_VALUE = 128, 255, 1 << 16
"""Attributes of one file, and what the kernel lets the name and the value of one have (xattr(7))."""
_OPAQUE = frozenset((b"y".hex(), b"x".hex()))
_COMMIT = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer in a parcel.

    Attributes:
        record: what is known of it.
        entries: its files, with relative owners.
    """

    record: LayerRecord
    entries: tuple[Entry, ...]


class Room:
    """The memory that there is for the lists and records of all layers of a parcel together.

    Args:
        where: what errors call the parcel.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = MOST_MEMORY

    def collect(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the entries of one layer.

        Raises:
            StoreError: there is no room for them beside those of the layers before.
        """
        return tuple(self._counted(entries))

    def add(self, record: LayerRecord) -> None:
        """Count a layer's record.

        Raises:
            StoreError: as above.
        """
        self._take(_OF_JSON * len(record.to_json()))

    def _counted(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            texts = (entry.path, entry.target, entry.same, *chain.from_iterable(entry.attributes))
            own = _ENTRY + sum(map(sys.getsizeof, texts)) + 64 * len(entry.attributes)
            self._take(own * 3 // 2)  # while the layers are published, indexes and copies come on top: up to 0.4 of it
            yield entry

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise StoreError(
                f"{self._where} has too many files in its layers",
                reason=f"what lists them takes more than {MOST_MEMORY >> 20} MiB of memory",
                hint="export fewer images at once; from a store's directory, import some of them by name",
            )


def pack_layer(store: Store, key: str, room: Room) -> PackedLayer:
    """List a layer of a store for a parcel.

    Raises:
        NotFound: it is not there.
        StoreError: its record or its list is damaged, or has more than a parcel may have; or it has no list, and is
            somebody else's.
        OSError: a layer of an earlier MiniSandbox, which has no list, cannot be read.
    """
    record = store.layer(key)
    room.add(record)
    return PackedLayer(record, room.collect(relative_entries(store, key)))


def relative_entries(store: Store, key: str) -> Iterator[Entry]:
    """Yield a layer's files, with relative owners; raises as :func:`pack_layer` does."""
    owner = (store.root / "version").lstat().st_uid
    return (_relative(entry, owner) for entry in entries_of(store, key))


def entries_of(store: Store, key: str) -> Iterator[Entry]:
    """Yield what a layer's list says, or what is there where it has none, in a store of this user's or of root's."""
    directory = store.layer_directory(key)
    if os.path.lexists(directory / listing.NAME):
        yield from listing.read_entries(directory, most=MOST_LIST)
        return
    with _way_to(store, key) as way:
        first: dict[int, str] = {}
        listed = 0
        for path, info in walk(way / "tree"):
            listed += len(path) + _LEAST_LINE
            if listed > MOST_LIST:
                raise unfit(f"layer {key[:16]} of the store {store.root}", "it has too many files")
            entry = describe(path, f"{way}/tree/{path}", info)
            if info.st_nlink > 1 and entry.kind != DIRECTORY:
                known = first.setdefault(info.st_ino, path)
                entry = entry if known == path else replace(entry, same=known)
            yield entry


@contextmanager
def _way_to(store: Store, key: str) -> Iterator[Path]:
    """A way to a layer's directory that nobody else can change: its tree is walked by path, not through links."""
    place = store.root
    with ExitStack() as opened:
        for folders in ([], ["layers"], [key]):
            fd = open_folder(place, folders)
            opened.callback(os.close, fd)
            if (owner := os.fstat(fd).st_uid) not in (0, os.geteuid()):
                raise StoreError(
                    f"layer {key[:16]} of the store {store.root} cannot be read",
                    reason=f"an earlier MiniSandbox made it, without a list of files, and it belongs to user {owner}",
                    hint="have that user export its images to a file (`minisandbox image export`), and import the file",
                )
            place = Path(f"/proc/self/fd/{fd}")
        os.close(open_folder(place, ["tree"]))
        yield place


def _relative(entry: Entry, owner: int) -> Entry:
    """An ordinary user's files are all the user's own; root's have the owners that sandboxes see."""
    entry = replace(entry, disk=0, copy=PRIVATE)
    return entry if owner == 0 else replace(entry, uid=0, gid=0)


def layers_of(images: Sequence[ImageRecord]) -> list[str]:
    """Return the keys of all layers of some images, each once, those below before those above."""
    return list(dict.fromkeys(key for image in images for key in stack_of(image)))


# --- what comes in ---------------------------------------------------------------------------------------------------


def check_image(record: ImageRecord, where: str) -> ImageRecord:
    """Return an image's record if everything in it can be used.

    Raises:
        StoreError: something in it cannot.
    """
    try:
        check_name(record.name)
        for key in (record.key, *stack_of(record)):
            check_key(key)
        path = PurePosixPath(record.workdir)
        names = [name for name, _ in record.environment]
        pairs = (*record.environment, *record.notes.items())
        fine = (
            _are_texts([record.workdir, *(text for pair in pairs for text in pair)])
            and bool(record.layers)
            and path.is_absolute()
            and len(os.fsencode(path)) <= _LONGEST_PATH
            and is_number(record.created)
            and ".." not in path.parts
            and _COMMIT.fullmatch(record.base_commit) is not None
            and all(name and "=" not in name for name in names)
        )
    except (InvalidValue, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise unfit(where, f"the record of an image: {error}") from error
    if not fine:
        raise unfit(where, f"the record of image {record.name!r}: a field has a value that it cannot have")
    return record


def check_layer(record: LayerRecord, entries: Iterable[Entry], where: str, room: Room) -> PackedLayer:
    """Return a layer of a parcel if everything in it can be used; each entry is checked before the next is read.

    Args:
        record: what is known of it.
        entries: its files, with relative owners.
        where: what errors call the parcel.
        room: for the lists of all its layers.

    Raises:
        StoreError: a path leads out of the tree or through a link, an owner, a size or an attribute cannot be, ...
    """
    try:
        room.add(record)
        check_key(record.key)
        if record.parent is not None:
            check_key(record.parent)
        facts = (text for pair in record.facts.items() for text in pair)
        fine = is_number(record.seconds) and _are_texts(facts) and bool(record.step.keys())
    except (InvalidValue, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise unfit(where, f"the record of a layer: {error}") from error
    if not fine:
        raise unfit(where, f"the record of layer {record.key[:16]}: a field has a value that it cannot have")
    return PackedLayer(record, room.collect(_checked(entries, f"layer {record.key[:16]}", where)))


def _are_texts(values: Iterable[object]) -> bool:
    """Whether these are what a record's type promises, without what no variable can hold."""
    return all(isinstance(value, str) and "\0" not in value for value in values)


def _checked(entries: Iterable[Entry], layer: str, where: str) -> Iterator[Entry]:
    directories: set[str] = set()
    others: dict[str, str] = {}
    for entry in entries:
        try:
            problem = next(_problems(entry, directories, others), None)
        except UnicodeEncodeError:
            problem = f"{entry.path[:200]!r} or its target has half of a surrogate pair"
        if problem is not None:
            raise unfit(where, f"{layer}: {problem}")
        if entry.kind == DIRECTORY:
            directories.add(entry.path)
        else:
            others[entry.path] = entry.kind
        yield entry
    if not directories:
        raise unfit(where, f"{layer}: it does not begin with its own directory")


def _problems(entry: Entry, directories: set[str], others: dict[str, str]) -> Iterator[str]:
    """What is wrong with an entry, given the paths of those before it."""
    path = entry.path
    if not directories and (path or entry.kind != DIRECTORY):
        yield "it does not begin with its own directory"
    if directories:
        yield from _bad_path(path)
        if path.rpartition("/")[0] not in directories:
            yield f"{path[:200]!r} is in no directory"
    if path in directories or path in others:
        yield f"{path[:200]!r} is there twice"
    if entry.same and others.get(entry.same) != entry.kind:
        yield f"{path[:200]!r} is a name of nothing"
    yield from _bad_values(entry)


def _bad_path(path: str) -> Iterator[str]:
    names = path.split("/")
    encoded = os.fsencode(path)
    too_long = len(encoded) > _LONGEST_PATH or any(len(os.fsencode(name)) > _LONGEST_NAME for name in names)
    if too_long or "\0" in path or any(name in ("", ".", "..") for name in names):
        yield f"{path[:200]!r} is no path in a tree"


def _bad_values(entry: Entry) -> Iterator[str]:
    what = repr(entry.path[:200])
    if not 0 <= entry.mode <= 0o7777:
        yield f"{what} has mode {entry.mode:o}"
    if not (0 <= entry.uid < _MOST_OWNERS and 0 <= entry.gid < _MOST_OWNERS):
        yield f"{what} has owner {entry.uid}:{entry.gid}"
    if not 0 <= entry.size <= _MOST_BYTES or abs(entry.mtime) >= 1 << 62:
        yield f"{what} has size {entry.size} and mtime {entry.mtime}"
    if entry.kind == FILE and not is_key(entry.digest):
        yield f"{what} has no hash"
    if entry.kind == LINK and ("\0" in entry.target or not 0 < len(os.fsencode(entry.target)) <= _LONGEST_TARGET):
        yield f"{what} points nowhere"
    yield from _bad_attributes(entry, what)


def _bad_attributes(entry: Entry, what: str) -> Iterator[str]:
    if len(entry.attributes) > _MOST_ATTRIBUTES:
        yield f"{what} has {len(entry.attributes)} attributes"
    for name, value in entry.attributes:
        opaque = name == "user.overlay.opaque" and value in _OPAQUE
        if not opaque and (not name.startswith("user.") or name.startswith("user.overlay.")):
            yield f"{what} has the attribute {name[:100]!r}, which is not taken from elsewhere"
        if len(value) % 2 or any(digit not in "0123456789abcdef" for digit in value):
            yield f"{what} has an attribute that is no bytes"
        if len(name) > _LONGEST_ATTRIBUTE or len(value) > 2 * _LONGEST_VALUE:
            yield f"{what} has the attribute {name[:100]!r}, which is too long"


def unfit(where: str, reason: str) -> StoreError:
    """Return the error for a parcel that is not what an export makes."""
    return StoreError(
        f"{where} cannot be imported", reason=reason, hint="export it again, with `minisandbox image export`"
    )
