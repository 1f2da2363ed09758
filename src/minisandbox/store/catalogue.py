"""The store's records by name: images, pins, failed builds."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.store.disk.durable import sync_directory, write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.paths import set_aside
from minisandbox.store.records import FailureRecord, ImageRecord

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The records of a store by name.

    Attributes:
        root: the store's directory.
        writable: whether this process may change it; images of one that it may not change can be run all the same.
    """

    root: Path
    writable: bool = True

    def require_writable(self, what: str) -> None:
        """Refuse to change a store that is opened for reading.

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

    # --- images ---

    def put_image(self, record: ImageRecord) -> None:
        """Record an image under its name, in place of an earlier one of that name.

        Raises:
            InvalidValue: the name cannot be a file's.
            DiskFull: there is no space.
        """
        self.require_writable(f"record image {record.name}")
        with store_faults(f"record image {record.name}"):
            write_atomic(self._image(record.name), record.to_json())
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
        """Return the names of all images, in order."""
        return sorted(path.stem for path in (self.root / "images").glob("[!.]*.json"))

    def images(self) -> list[ImageRecord]:
        """Return every image record, in the order of their names.

        Raises:
            StoreError: a record is damaged.
        """
        records = []
        for name in self.image_names():
            with suppress(NotFound):  # removed since
                records.append(self.image(name))
        return records

    def images_with(self, text: str) -> list[ImageRecord]:
        """Return the image records that hold a string of ASCII; the others are not parsed.

        Raises:
            StoreError: a matching record is damaged.
        """
        records = []
        for name in self.image_names():
            with suppress(NotFound, FileNotFoundError), store_faults(f"read image {name}"):
                if text.encode() in (self.root / f"images/{name}.json").read_bytes():
                    records.append(self.image(name))
        return records

    def remove_image(self, name: str) -> None:
        """Forget an image, and that it is pinned; its layers stay until they are collected.

        Raises:
            NotFound: there is no image of that name.
            StoreError: the kernel refused.
        """
        self.require_writable(f"remove image {name}")
        with store_faults(f"remove image {name}"):
            try:
                self._image(name).unlink()
            except FileNotFoundError:
                raise self._no_image(name) from None
            (self.root / "pins" / name).unlink(missing_ok=True)
            sync_directory(self.root / "images")

    def pin(self, name: str) -> None:
        """Keep an image from ever being collected; removing it by its name takes the pin along.

        Raises:
            NotFound: there is no image of that name.
            StoreError: the kernel refused.
        """
        self.require_writable(f"pin image {name}")
        self.image(name)
        with store_faults(f"pin image {name}"):
            (self.root / "pins" / check_name(name)).touch(mode=0o600)

    def unpin(self, name: str) -> None:
        """Let an image be collected again; nothing happens if it is not pinned.

        Raises:
            StoreError: the kernel refused.
        """
        self.require_writable(f"unpin image {name}")
        with store_faults(f"unpin image {name}"):
            (self.root / "pins" / check_name(name)).unlink(missing_ok=True)

    def pins(self) -> frozenset[str]:
        """Return the names of the pinned images."""
        # a store that is only read may be from before there were pins
        with store_faults("list pins"), suppress(FileNotFoundError):
            return frozenset(os.listdir(self.root / "pins"))
        return frozenset()

    # --- failed builds ---

    def put_failure(self, record: FailureRecord) -> None:
        """Record that an image could not be built; recording the image removes it.

        Raises:
            InvalidValue: the name cannot be a file's.
            DiskFull: there is no space.
        """
        self.require_writable(f"record the failure of {record.image}")
        with store_faults(f"record the failure of {record.image}"):
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
        """Return the records of all failed builds, in the order of the images' names."""
        return [self.failure(path.stem) for path in sorted((self.root / "failed").glob("[!.]*.json"))]

    def remove_failure(self, name: str) -> None:
        """Forget a failed build; nothing happens if it did not fail."""
        self.require_writable(f"forget the failure of {name}")
        with store_faults(f"forget the failure of {name}"):
            self._failure(name).unlink(missing_ok=True)

    def quarantine_image(self, name: str) -> None:
        """Take a damaged record of an image out of use; building the image makes it anew.

        Raises:
            StoreError: the kernel refused.
        """
        self.require_writable(f"put the record of {name} into quarantine")
        with store_faults(f"put the record of {name} into quarantine"), suppress(FileNotFoundError):
            set_aside(self.root, self._image(name))

    def _image(self, name: str) -> Path:
        return self.root / "images" / f"{check_name(name)}.json"

    def _failure(self, name: str) -> Path:
        return self.root / "failed" / f"{check_name(name)}.json"


def check_name(name: str) -> str:
    """Return a name if it can be a file's name here.

    Raises:
        InvalidValue: the name is empty, too long, begins with a dot or dash, or has characters such as ``/``.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidValue(f"{name!r} is not a usable name", hint="use letters, digits and . _ @ + = - (200 at most)")
    return name
