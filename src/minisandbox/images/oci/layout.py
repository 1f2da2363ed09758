"""Read images from OCI layouts, and from archives of ``docker save``, ``podman save`` and ``skopeo copy``."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, ClassVar, Self, cast

from minisandbox.errors import ImageRefused, NotFound, StoreError
from minisandbox.images.oci import manifest as m
from minisandbox.store.blobs.streams import LONGEST_MAGIC, Blob, LayerStream, is_packed, require_room
from minisandbox.store.blobs.tarstream import FILE, HARD_LINK, LINK, TarReader
from minisandbox.store.disk.reading import open_below

_MOST_ARCHIVE = 1 << 40
_MOST_MEMBERS = 20_000
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LayoutDirectory:
    """The files of an OCI layout in a directory.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def name(self) -> str:
        """The name for error messages."""
        return str(self.path)

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.path / name).is_file()

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file; reject symlinks.

        Raises:
            ImageRefused: the file is missing, or not a regular file.
        """
        try:
            file = open_below(self.path, name)
        except FileNotFoundError:
            raise _missing(self.name, name) from None
        except (StoreError, OSError) as error:
            raise ImageRefused(f"{self.name}: cannot read {name}", reason=str(error)) from error
        with file:
            yield file


@dataclass(slots=True)
class Archive:
    """The files of a tar archive on disk.

    Attributes:
        path: the uncompressed archive.
        name: the archive's name in errors.
    """

    path: Path
    name: str
    _extents: dict[str, tuple[int, int]] = field(default_factory=dict)
    _links: dict[str, str] = field(default_factory=dict)

    def read_index(self) -> None:
        """Read the archive's headers, and index its members by name.

        Raises:
            ImageRefused: the archive is malformed.
        """
        with self.path.open("rb") as file:
            stream = _Seekable(file, self.name)
            reader = TarReader(stream)
            for member in reader:
                name = posixpath.normpath(os.fsdecode(member.name))
                if len(self._extents) + len(self._links) > _MOST_MEMBERS:
                    reader.refuse(f"it has more than {_MOST_MEMBERS} entries", member.name)
                if member.kind == FILE:
                    self._extents[name] = (stream.position, member.size)
                elif member.kind == LINK:  # before version 25, docker save writes equal layers as links
                    target = os.fsdecode(member.target)
                    self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
                elif member.kind == HARD_LINK:
                    self._links[name] = posixpath.normpath(os.fsdecode(member.target))

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return name in self._extents

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file.

        Raises:
            ImageRefused: the file is missing.
        """
        extent = self._extents.get(name) or self._extents.get(self._links.get(name, ""))
        if extent is None:
            raise _missing(self.name, name)
        offset, size = extent
        with self.path.open("rb") as file:
            file.seek(offset)
            yield cast("IO[bytes]", _FileRange(file, size))


Files = LayoutDirectory | Archive


def _missing(image: str, name: str) -> ImageRefused:
    return ImageRefused(
        f"{image} has no file {name!r}",
        reason="it is no image of this kind, or was not written completely",
        hint="check the path; `oci:` is for layouts, `oci-archive:` and `docker-archive:` for their archives",
    )


def open_archive(path: Path, staging: Path) -> Archive:
    """Open an archive; decompress it first if it is compressed.

    Args:
        path: the archive.
        staging: a private directory for the decompressed archive.

    Raises:
        NotFound: the file is missing.
        ImageRefused: the file is not an archive, or is malformed.
        OSError: the file cannot be read or decompressed.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file", hint="give an archive of `docker save` or `podman save`")
    archive = Archive(path, str(path))
    with path.open("rb") as file:
        if is_packed(file.read(LONGEST_MAGIC)):
            file.seek(0)
            archive.path = staging / "archive"
            _decompress(file, archive.path, archive.name)
    archive.read_index()
    return archive


def _decompress(file: IO[bytes], target: Path, name: str) -> None:
    with LayerStream(Blob(file, "", name), _MOST_ARCHIVE) as stream, target.open("xb") as tar:
        while chunk := stream.some(_CHUNK):
            require_room(tar.fileno(), len(chunk), f"unpack {name}")
            tar.write(chunk)


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """Source of an image in files of this machine, which needs no download.

    Attributes:
        files: the files of the layout or archive.
        tag: the image's tag; "" if there is only one image.
    """

    files: Files
    tag: str
    remote: ClassVar[None] = None

    @property
    def name(self) -> str:
        """The image's name in messages."""
        return self.files.name + (f":{self.tag}" if self.tag else "")

    def tagged(self, tag: str) -> Self:
        """Return a source for the image with this tag."""
        return replace(self, tag=tag)

    def prefetch(self, layers: Sequence[m.Layer]) -> None:
        """Do nothing: the blobs are on this machine."""

    def give_up(self) -> None:
        """Do nothing: there is no download to cancel."""

    def published(self, layer: m.Layer) -> None:
        """Do nothing: there is no download to remove."""

    def _unclear(self, matches: Sequence[object], tags: Sequence[str]) -> NotFound:
        """Return the error for a tag that does not match exactly one image."""
        return NotFound(
            f"{self.name}: it has {len(matches)} images{' of this tag' if self.tag else ''}",
            reason=f"its tags: {', '.join(tags) or 'none has a tag'}",
            hint=f"write one of them after the path, such as {self.files.name}:{tags[-1]}" if tags else "",
        )


@dataclass(frozen=True, slots=True)
class OciLayout(_OnDisk):
    """An image in an OCI layout (image-layout.md)."""

    @property
    def kind(self) -> str:
        """The transport of the image's reference: ``oci`` or ``oci-archive``."""
        return "oci" if isinstance(self.files, LayoutDirectory) else "oci-archive"

    def tags(self) -> list[str]:
        """Return the tags of all images in the layout; "" for an image without a tag."""
        return list(dict.fromkeys(descriptor.name for descriptor in self._index()))

    def manifest(self, platform: m.Platform) -> m.Manifest:
        """Return the manifest for a platform."""
        entry = self._index_entry(platform)
        manifest_digest, manifest = m.find_manifest(
            entry.digest, lambda digest: (digest, self._blob(digest, m.MOST_MANIFEST)), platform, self.name
        )
        config, layers = m.layers_of(manifest, self.name)
        config_text, names = self._blob(config.digest, m.MOST_CONFIG), (entry.name, entry.image)
        return m.Manifest(manifest_digest, config_text, tuple(layers), config.media_type, names)

    @contextmanager
    def layer(self, layer: m.Layer) -> Iterator[Blob]:
        """Open the blob of a layer."""
        path = m.blob_path(layer.blob.digest)
        if layer.blob.is_foreign and not self.files.has(path):
            raise m.foreign_layer(self.name, layer.blob)
        with self.files.open(path) as file:
            yield Blob(file, layer.blob.digest, f"{self.name}: layer {layer.blob.digest}")

    def _index(self) -> list[m.Descriptor]:
        label = f"{self.files.name}: index.json"
        return m.manifests(m.parse_object(read(self.files, "index.json", m.MOST_MANIFEST), label), label)

    def _index_entry(self, platform: m.Platform) -> m.Descriptor:
        entries = self._index()
        tagged = [entry for entry in entries if not self.tag or entry.name == self.tag]
        suitable = [entry for entry in tagged if entry.platform is not None and platform.fits(entry.platform)]
        for candidates in (tagged, suitable):
            if len(candidates) == 1:
                return candidates[0]
        raise self._unclear(tagged, sorted({entry.name for entry in entries if entry.name}))

    def _blob(self, digest: str, limit: int) -> bytes:
        with self.files.open(m.blob_path(digest)) as file:
            return _bounded(Blob(file, digest, f"{self.name}: {digest}"), limit)


@dataclass(frozen=True, slots=True)
class DockerArchive(_OnDisk):
    """An image in an archive of ``docker save`` (moby, image/spec/v1.2.md)."""

    kind: ClassVar = "docker-archive"

    def tags(self) -> list[str]:
        """Return the first tag of each image in the archive; "" for an image without a tag."""
        return [next(iter(_names(row)), "") for row in self._rows()]

    def manifest(self, platform: m.Platform) -> m.Manifest:  # noqa: ARG002 - an archive has one platform
        """Create a manifest from the image's entry in ``manifest.json``."""
        row = self._row()
        config = read(self.files, m.text_of(row, "Config"), m.MOST_CONFIG)
        layers = tuple(m.Descriptor(name, -1) for name in m.texts_of(row, "Layers"))
        return m.Manifest(f"sha256:{hashlib.sha256(config).hexdigest()}", config, layers, names=_names(row))

    @contextmanager
    def layer(self, layer: m.Layer) -> Iterator[Blob]:
        """Open the tar of a layer. The caller must verify its diff_id, because the archive has no digest of the tar."""
        with self.files.open(posixpath.normpath(layer.blob.digest)) as file:
            yield Blob(file, "", f"{self.name}: layer {layer.blob.digest}")

    def _rows(self) -> list[m.JSONObject]:
        label = f"{self.name}: manifest.json"
        rows = m.parse_json(read(self.files, "manifest.json", m.MOST_CONFIG), label)
        images = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
        if not images or images != rows:
            raise m.malformed(label, "it is no list of images")
        return images

    def _row(self) -> m.JSONObject:
        rows = self._rows()
        tagged = [row for row in rows if not self.tag or self.tag in _tags(row)]
        if len(tagged) != 1:
            raise self._unclear(tagged, [tag for row in rows for tag in _tags(row)])
        return tagged[0]


def _names(row: m.JSONObject) -> tuple[str, ...]:
    rows = row.get("RepoTags")
    return tuple(tag for tag in rows if isinstance(tag, str)) if isinstance(rows, list) else ()


def _tags(row: m.JSONObject) -> tuple[str, ...]:
    """Return the names of an image, each with and without the prefix that engines add."""
    names = _names(row)
    short_names = (
        name.removeprefix("docker.io/").removeprefix("library/").removeprefix("localhost/") for name in names
    )
    return tuple(dict.fromkeys((*names, *short_names)))


def read(files: Files, name: str, limit: int) -> bytes:
    """Read a small file.

    Raises:
        ImageRefused: the file is missing or too large.
    """
    with files.open(name) as file:
        return _bounded(Blob(file, "", f"{files.name}: {name}"), limit)


def _bounded(blob: Blob, limit: int) -> bytes:
    chunks, remaining = [], limit + 1
    while remaining and (chunk := blob.read(remaining)):
        chunks.append(chunk)
        remaining -= len(chunk)
    if not remaining:
        raise ImageRefused(f"{blob.name} has more than {limit} bytes", hint="it is no image that can be used")
    blob.check()
    return b"".join(chunks)


class _Seekable:
    """A stream of an archive on disk; it seeks instead of reading the content of members."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self.name = name

    @property
    def position(self) -> int:
        """The position of the next byte."""
        return self._file.tell()

    def some(self, limit: int) -> bytes:
        """Read up to ``limit`` bytes."""
        return self._file.read(min(limit, _CHUNK))

    def exactly(self, size: int) -> bytes:
        """Read ``size`` bytes, or fewer at the end of the file."""
        return self._file.read(size)

    def skip(self, size: int) -> bool:
        """Skip ``size`` bytes; return False if the file is shorter."""
        if self._file.tell() + size > self._end:
            return False
        self._file.seek(size, os.SEEK_CUR)
        return True


class _FileRange:
    """A byte range of a file, with a ``read`` method."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._remaining = size

    def read(self, size: int) -> bytes:
        """Read up to ``size`` bytes of the range."""
        chunk = self._file.read(min(size, self._remaining))
        self._remaining -= len(chunk)
        return chunk
