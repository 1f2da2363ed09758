"""The store: where layers, image records, logs and downloads lie, and how they get there whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.store.durable import sync_directory, sync_filesystem, write_atomic
from minisandbox.store.faults import store_faults
from minisandbox.store.keys import JSONValue, check_key
from minisandbox.store.locks import hold_lock
from minisandbox.store.paths import default_root
from minisandbox.store.records import ImageRecord, LayerRecord
from minisandbox.store.staging import Staging
from minisandbox.store.trees import measure_tree

VERSION = 1
LOCK_TIMEOUT = 6 * 3600.0

_PARTS = ("layers", "images", "staging", "locks", "logs", "downloads")
_TORN = re.compile(r"\..+\.[0-9a-f]{12}")
_TORN_AGE = 3600.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class Made:
    """What a maker hands to the store.

    Attributes:
        tree: the finished tree, inside the directory that the maker was given.
        facts: what it learned on the way, kept in the layer's record.
    """

    tree: Path
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Store:
    """A store on disk. Make one with :meth:`open`.

    Attributes:
        root: its directory.
    """

    root: Path

    @classmethod
    def open(cls, root: Path | str | None = None) -> Store:
        """Open a store; make it if it is not there; remove what dead makers left in it.

        Args:
            root: its directory; see :func:`default_root`.

        Raises:
            StoreError: the directory cannot be used, is no store, or is of a later version.
            DiskFull: there is no space to make it.
        """
        path = default_root() if root is None else Path(root).expanduser().absolute()
        with store_faults(f"open the store {path}"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_version(path)
            for part in _PARTS:
                (path / part).mkdir(mode=0o700, exist_ok=True)
            Staging(path / "staging").reclaim()
            _remove_torn(path)
        return cls(path)

    # --- layers ---

    def has_layer(self, key: str) -> bool:
        """Whether the layer is published."""
        return self._record(key).is_file()

    def layer_tree(self, key: str) -> Path:
        """Return the directory tree of a published layer.

        Raises:
            NotFound: there is no such layer.
        """
        if not self.has_layer(key):
            raise NotFound(f"layer {key} is not in the store {self.root}", hint="build the image again")
        return self._layer(key) / "tree"

    def layer(self, key: str) -> LayerRecord:
        """Return what is known of a published layer.

        Raises:
            NotFound: there is no such layer.
            StoreError: its record is damaged.
        """
        self.layer_tree(key)
        with store_faults(f"read layer {key}"):
            return LayerRecord.read(self._record(key))

    def layers(self) -> Iterator[LayerRecord]:
        """Yield every published layer, in the order of their keys."""
        for path in sorted((self.root / "layers").iterdir()):
            if (path / "layer.json").is_file():
                yield self.layer(path.name)

    def ensure_layer(
        self,
        key: str,
        *,
        parent: str | None,
        step: Mapping[str, JSONValue],
        make: Callable[[Path], Made],
        on_wait: Callable[[], None] | None = None,
    ) -> tuple[LayerRecord, bool]:
        """Return a layer, making it first if nobody has; several processes that want it make it once.

        Args:
            key: its address.
            parent: the key of the layer below, or None.
            step: what makes it, for its record.
            make: is given an empty directory on the store's file system, and returns what it made there.
            on_wait: called once if another process is making it.

        Returns:
            Its record, and whether this call made it.

        Raises:
            DiskFull: the disk is full; nothing was published.
            StoreError: the store refused, or another maker took longer than six hours.
            BaseException: what ``make`` raised, an ``OSError`` as StoreError; nothing was published.
        """
        if self.has_layer(key):
            return self.layer(key), False
        with self.lock(key, on_wait=on_wait):
            if self.has_layer(key):
                return self.layer(key), False
            with self.staging(f"layer-{key[:12]}") as work:
                begun = time.monotonic()
                made = make(work)
                seconds = round(time.monotonic() - begun, 3)
                unsized = LayerRecord(key, parent, dict(step), seconds, 0, 0, time.time(), dict(made.facts))
                return self._publish(work, made.tree, unsized), True

    def remove_layer(self, key: str) -> None:
        """Remove a layer; nothing happens if it is not there. Its record goes first, so it is never half there.

        Raises:
            StoreError: the kernel refused.
        """
        with store_faults(f"remove layer {key}"), self.staging("removed") as work:
            try:
                self._layer(key).rename(work / "layer")
            except FileNotFoundError:
                return

    # --- images ---

    def put_image(self, record: ImageRecord) -> None:
        """Record an image under its name, in place of an earlier one of that name.

        Raises:
            InvalidValue: the name cannot be a file's.
            DiskFull: there is no space.
        """
        with store_faults(f"record image {record.name}"):
            write_atomic(self._image(record.name), record.to_json())

    def image(self, name: str) -> ImageRecord:
        """Return the record of an image.

        Raises:
            NotFound: there is none of that name.
            StoreError: it is damaged.
        """
        path = self._image(name)
        try:
            with store_faults(f"read image {name}"):
                return ImageRecord.read(path)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise NotFound(
                    f"image {name!r} is not in the store {self.root}",
                    hint="`minisandbox image ls` lists those that are",
                ) from None
            raise

    def images(self) -> list[ImageRecord]:
        """Return every image record, in the order of their names."""
        names = sorted(path.stem for path in (self.root / "images").glob("[!.]*.json"))
        return [self.image(name) for name in names]

    # --- the rest ---

    def lock(self, name: str, *, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Hold the store's lock of that name while the body runs."""
        return hold_lock(self.root / "locks" / f"{check_name(name)}.lock", timeout=LOCK_TIMEOUT, on_wait=on_wait)

    @contextmanager
    def staging(self, label: str) -> Iterator[Path]:
        """Make a private directory for half-made things, removed when the body ends or its process dies.

        Args:
            label: what it is for: part of its name, and what errors call it.

        Raises:
            DiskFull: the disk is full, or the body found it so.
            StoreError: any other refusal of the system, in the body too.
        """
        with store_faults(f"make {label}"), Staging(self.root / "staging").directory(label) as path:
            yield path

    def log_path(self, key: str) -> Path:
        """Return the file for the output of the step that makes a layer."""
        return self.root / "logs" / f"{check_key(key)}.log"

    def download_path(self, sha256: str) -> Path:
        """Return the file for a download with that hash."""
        return self.root / "downloads" / check_key(sha256)

    def _layer(self, key: str) -> Path:
        return self.root / "layers" / check_key(key)

    def _record(self, key: str) -> Path:
        return self._layer(key) / "layer.json"

    def _image(self, name: str) -> Path:
        return self.root / "images" / f"{check_name(name)}.json"

    def _publish(self, work: Path, tree: Path, unsized: LayerRecord) -> LayerRecord:
        with store_faults(f"publish layer {unsized.key}"):
            size = measure_tree(tree)
            record = replace(unsized, bytes=size.bytes, files=size.files)
            whole = work / "publish"
            whole.mkdir(mode=0o700)
            tree.rename(whole / "tree")
            (whole / "layer.json").write_bytes(record.to_json())
            sync_filesystem(whole)
            whole.rename(self._layer(record.key))
            sync_directory(self.root / "layers")
        return record


def check_name(name: str) -> str:
    """Return a name if it can be a file's name here.

    Raises:
        InvalidValue: it is empty, too long, begins with a dot or dash, or has characters such as ``/``.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidValue(f"{name!r} is not a usable name", hint="use letters, digits and . _ @ + = - (200 at most)")
    return name


def _remove_torn(root: Path) -> None:
    """Remove what a killed process had not finished writing (:func:`.write_atomic`)."""
    for directory in (root, root / "images", root / "logs"):
        for path in directory.glob(".*"):
            with suppress(OSError):  # its writer was quicker
                if _TORN.fullmatch(path.name) and time.time() - path.stat().st_mtime > _TORN_AGE:
                    path.unlink()


def _check_version(root: Path) -> None:
    """Refuse a directory that is no store or a later one's; mark an empty one as ours."""
    file = root / "version"
    try:
        text = file.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        if any(not entry.name.startswith((".version.", "lost+found")) for entry in root.iterdir()):
            _check_unmarked(file)
            return
        write_atomic(file, f"{VERSION}\n".encode())
        return
    if text != str(VERSION):
        raise StoreError(
            f"the store {root} has version {text[:20]!r}; this MiniSandbox reads {VERSION}",
            hint="use a later MiniSandbox, or set MINISANDBOX_STORE to another directory",
        )


def _check_unmarked(file: Path) -> None:
    """Accept a directory whose first opener marked it between our two looks; refuse anything else."""
    if file.exists():
        _check_version(file.parent)
        return
    raise StoreError(
        f"{file.parent} is not a store, and not empty",
        reason="it has no file `version`",
        hint="set MINISANDBOX_STORE to an empty or new directory",
    )
