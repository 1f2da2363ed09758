"""Read and write the store's named records: images, pins and failed builds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.store.disk.durable import sync_directory, write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.paths import set_aside
from minisandbox.store.index import Row, read_rows
from minisandbox.store.records import FailureRecord, ImageRecord

NAMES = "names"
"""Name of the note that lists the references by which an archive names the image."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The named records of a store.

    Attributes:
        root: the store's directory.
        writable: whether this process may change the store. Sandboxes can also run from a read-only store.
    """

    root: Path
    writable: bool = True

    def require_writable(self, what: str) -> None:
        """Raise an error if the store is read-only.

        Raises:
            StoreError: the store is read-only.
        """
        if not self.writable:
            raise StoreError(
                f"cannot {what}: the store {self.root} is read-only",
                reason="its file system is mounted read-only, or it belongs to another user",
                hint="run from it as it is; to change it, set MINISANDBOX_STORE to your own directory and take its "
                f"images over: MINISANDBOX_STORE={self.root} minisandbox image export --private IMAGE FILE.tar; "
                "minisandbox image import --private FILE.tar",
            )

    @contextmanager
    def _changing(self, action: str) -> Iterator[None]:
        """Raise an error if the store is read-only; convert OSErrors of the body as :func:`store_faults` does.

        Raises:
            StoreError: the store is read-only.
        """
        self.require_writable(action)
        with store_faults(action):
            yield

    # --- images ---

    def put_image(self, record: ImageRecord) -> None:
        """Write an image's record and replace an earlier record of the same name.

        Raises:
            InvalidValue: the name cannot be used as a file name.
            DiskFull: the disk is full.
        """
        with self._changing(f"record image {record.name}"):
            marker = self.root / "archived" / check_name(record.name)
            if NAMES in record.notes:
                marker.touch(mode=0o600)
            write_atomic(self._image(record.name), record.to_json())
            if NAMES not in record.notes:
                marker.unlink(missing_ok=True)
            self._failure(record.name).unlink(missing_ok=True)

    def image(self, name: str) -> ImageRecord:
        """Return the record of an image.

        Raises:
            NotFound: there is no image of that name.
            StoreError: the record is damaged.
        """
        with store_faults(f"read image {name}"):
            try:
                return ImageRecord.read(self.root, f"images/{check_name(name)}.json")
            except FileNotFoundError:
                raise self._no_image(name) from None

    def _no_image(self, name: str) -> NotFound:
        hint = "`minisandbox image ls` lists those that are"
        return NotFound(f"image {name!r} is not in the store {self.root}", hint=hint)

    def image_names(self) -> list[str]:
        """Return the names of all images, sorted."""
        return sorted(path.stem for path in (self.root / "images").glob("[!.]*.json"))

    def images(self, on_damaged: Callable[[str, StoreError], None] | None = None) -> list[ImageRecord]:
        """Return every image record, sorted by name.

        Args:
            on_damaged: called with the name and the error of each damaged record; None raises the error.

        Raises:
            StoreError: a record is damaged.
        """

        def read(file_name: str) -> Row | None:
            name = file_name.removesuffix(".json")
            try:
                return [asdict(self.image(name))]
            except NotFound:  # another process has removed the image
                return None
            except StoreError as error:
                if on_damaged is None:
                    raise
                on_damaged(name, error)
                return None

        with store_faults("list images"):
            rows = read_rows(self.root, "images", ("",), read, cache=self.writable)
        return [ImageRecord.of(columns) for (columns,) in rows.values()]

    def archived_images(self) -> list[ImageRecord]:
        """Return the image records with a note :data:`NAMES`, without reading the other records.

        Raises:
            StoreError: a record is damaged.
        """
        names = self.image_names()
        with suppress(FileNotFoundError):  # a read-only store of an earlier version lacks the folder
            names = sorted(os.listdir(self.root / "archived"))
        records = []
        for name in names:
            with suppress(NotFound):  # another process has removed the image
                records.append(self.image(name))
        return records

    def remove_image(self, name: str) -> None:
        """Remove an image's record and pin; a later garbage collection removes the image's layers.

        Raises:
            NotFound: there is no image of that name.
            StoreError: a system call failed.
        """
        with self._changing(f"remove image {name}"):
            try:
                self._image(name).unlink()
            except FileNotFoundError:
                raise self._no_image(name) from None
            for folder in ("pins", "archived"):
                (self.root / folder / name).unlink(missing_ok=True)
            sync_directory(self.root / "images")

    def pin(self, name: str) -> None:
        """Protect an image from garbage collection; :meth:`remove_image` removes the image and its pin.

        Raises:
            NotFound: there is no image of that name.
            StoreError: a system call failed.
        """
        with self._changing(f"pin image {name}"):
            self.image(name)
            (self.root / "pins" / check_name(name)).touch(mode=0o600)

    def unpin(self, name: str) -> None:
        """Allow garbage collection of an image again; do nothing if the image is not pinned.

        Raises:
            StoreError: a system call failed.
        """
        with self._changing(f"unpin image {name}"):
            (self.root / "pins" / check_name(name)).unlink(missing_ok=True)

    def pins(self) -> frozenset[str]:
        """Return the names of the pinned images."""
        # Earlier versions created stores without the directory `pins`.
        with store_faults("list pins"), suppress(FileNotFoundError):
            return frozenset(os.listdir(self.root / "pins"))
        return frozenset()

    # --- failed builds ---

    def put_failure(self, record: FailureRecord) -> None:
        """Record a failed build. :meth:`put_image` removes the record when a later build succeeds.

        Raises:
            InvalidValue: the name cannot be used as a file name.
            DiskFull: the disk is full.
        """
        with self._changing(f"record the failure of {record.image}"):
            write_atomic(self._failure(record.image), record.to_json())

    def failure(self, name: str) -> FailureRecord:
        """Return the record of an image's failed build.

        Raises:
            NotFound: there is no record of a failed build of that image.
            StoreError: the record is damaged.
        """
        with store_faults(f"read the failure of {name}"):
            try:
                return FailureRecord.read(self.root, f"failed/{check_name(name)}.json")
            except FileNotFoundError:
                raise NotFound(
                    f"the store {self.root} knows of no failed build of {name!r}",
                    hint="`minisandbox image build` keeps one where a step fails; the image itself opens with "
                    "`minisandbox sandbox shell --image`",
                ) from None

    def failures(self) -> list[FailureRecord]:
        """Return the records of all failed builds, sorted by image name."""
        return [self.failure(path.stem) for path in sorted((self.root / "failed").glob("[!.]*.json"))]

    def remove_failure(self, name: str) -> None:
        """Remove the record of a failed build; do nothing if there is none."""
        with self._changing(f"forget the failure of {name}"):
            self._failure(name).unlink(missing_ok=True)

    def quarantine_image(self, name: str) -> None:
        """Move an image's damaged record to quarantine; the next build of the image writes a new record.

        Raises:
            StoreError: a system call failed.
        """
        with self._changing(f"put the record of {name} into quarantine"), suppress(FileNotFoundError):
            set_aside(self.root, self._image(name))

    def _image(self, name: str) -> Path:
        return self.root / "images" / f"{check_name(name)}.json"

    def _failure(self, name: str) -> Path:
        return self.root / "failed" / f"{check_name(name)}.json"


def check_name(name: str) -> str:
    """Return the name if the store can use it as a file name.

    Raises:
        InvalidValue: the name is empty, is longer than 200 characters, does not start with a letter, digit or
            underscore, or contains a character other than letters, digits and ``._@+=-``.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidValue(f"{name!r} is not a usable name", hint="use letters, digits and . _ @ + = - (200 at most)")
    return name
