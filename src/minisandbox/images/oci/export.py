"""Export images of the store as OCI images: into a layout, into an archive, or to a registry (:mod:`.push`).

By default, the exported image runs in any container engine: hidden tests are left out, and an image that depends on the
host's ``/usr`` is rejected. A private copy (:mod:`.copies`) is for other stores of MiniSandbox.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol

from minisandbox.errors import InvalidValue
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.copies import MEDIA_TYPE, read_copy
from minisandbox.images.oci.pull import STANDARD, Tell, root_key
from minisandbox.store import ImageRecord, Store
from minisandbox.store.blobs.layer_blobs import LayerBlob, ensure_blob
from minisandbox.store.disk.durable import sync_filesystem, written_atomically
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.sizes import stack_of
from minisandbox.values import JSONValue

AGENT = "agent"
"""The note of images with the program of an agent: the name of the step that installs it."""
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"

Document = dict[str, JSONValue]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        images: the names of the exported images.
        layers: the number of distinct layers.
        bytes: the size of the layers' blobs in bytes.
    """

    images: tuple[str, ...]
    layers: int
    bytes: int


class Target(Protocol):
    """The target of an export: a layout or a registry."""

    def layer(self, key: str) -> LayerBlob:
        """Write the blob of a layer. The caller must hold a lease on the layer."""

    def document(self, digest: str, text: bytes) -> None:
        """Write a configuration. The caller must have written all layers before."""


def export_images(
    store: Store,
    names: Iterable[str],
    path: Path,
    *,
    compression: str = "gzip",
    private: bool = False,
    progress: Tell | None = None,
) -> Exported:
    """Write images as an OCI layout, or as an OCI archive that ``podman load``, ``docker load`` and skopeo read.

    Args:
        store: the store of the images.
        names: the names of the images.
        path: a new directory, a file that ends in ``.tar`` and replaces an existing file, or ``-`` for standard output.
        compression: the compression of layers: ``gzip`` or ``zstd``.
        private: whether to write private copies for other stores of MiniSandbox, with hidden tests. Only private copies
            may depend on the host's ``/usr``.
        progress: called for each layer.

    Raises:
        NotFound: there is no such image, or one of its layers is missing.
        InvalidValue: the directory already exists, or an image depends on the host's ``/usr``.
        StoreError: a layer is damaged, or the path cannot be written.
        DiskFull: the disk is full.
    """
    images = [store.image(name) for name in dict.fromkeys(names)]
    for image in images:
        check_portable(image, private=private)
    report, index_rows, archive_rows = progress or (lambda _: None), list[Document](), list[Document]()
    with _staging(store, path) as staging, store_faults(f"write {path}"), _opened(path) as write_file:
        layout = _Layout(store, compression, staging, write_file)
        write_file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        for image in images:
            manifest, config, layers = write_image(store, image, layout, compression, private=private, report=report)
            row = describe(m.MANIFEST, manifest)
            layout.document(str(row["digest"]), manifest)
            tag = f"{repository_of(image.name)}:latest"
            index_rows.append({**row, "annotations": {m.REF_NAME: tag}})
            archive_rows.append({"Config": config, "RepoTags": [tag], "Layers": layers})
        write_file("index.json", to_json({"schemaVersion": 2, "mediaType": m.INDEX, "manifests": index_rows}))
        if not private:
            write_file("manifest.json", json.dumps(archive_rows).encode())  # `docker load` ignores index.json
    return Exported(tuple(image.name for image in images), len(layout.sizes), sum(layout.sizes.values()))


def check_portable(image: ImageRecord, *, private: bool) -> None:
    """Check that other machines can run an image; a private copy may depend on the host's ``/usr``.

    Raises:
        InvalidValue: the image depends on the host's ``/usr``, and the export is not private; or it has an agent's
            program.
    """
    if AGENT in image.notes:
        raise InvalidValue(
            f"image {image.name} has the program of an agent: {image.notes[AGENT]}",
            reason="its licence may forbid copies, and every machine can install it from its registry",
            hint="leave this image out; images of tasks never contain an agent's program",
        )
    if not (image.own_root or private):
        raise InvalidValue(
            f"image {image.name} has no /usr of its own, so no container engine can run it",
            reason="it was built over the host's /usr",
            hint="--private writes a copy for a MiniSandbox on a machine with the same distribution; or build it over "
            "a container image",
        )


def write_image(
    store: Store, image: ImageRecord, target: Target, compression: str, *, private: bool, report: Tell
) -> tuple[bytes, str, list[JSONValue]]:
    """Write an image's layers and configuration to a target.

    Returns:
        The manifest, the path of the configuration in a layout, and the paths of the layers in a layout.
    """
    keys = stack_of(image) if private else tuple(key for key in image.layers if key != root_key())
    blobs = []
    with store.hold(*keys, frozen=True):
        for index, key in enumerate(keys, 1):
            report(f"{image.name}: layer {index} of {len(keys)}: {key[:12]}")
            blobs.append(target.layer(key))
        config = read_copy(store, image).to_json() if private else _config(image, blobs)
    config_descriptor = describe(MEDIA_TYPE if private else _CONFIG, config)
    target.document(str(config_descriptor["digest"]), config)
    layers: list[JSONValue] = [
        {"mediaType": f"{_LAYER}+{compression}", "digest": blob.digest, "size": blob.size} for blob in blobs
    ]
    manifest: Document = {"schemaVersion": 2, "mediaType": m.MANIFEST, "config": config_descriptor, "layers": layers}
    if not private and (notes := _annotations(image)):
        manifest["annotations"] = notes
    return (
        to_json(manifest),
        m.blob_path(str(config_descriptor["digest"])),
        [m.blob_path(blob.digest) for blob in blobs],
    )


def describe(kind: str, text: bytes) -> Document:
    """Return the OCI descriptor of a document: its media type, digest and size."""
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(text).hexdigest()}", "size": len(text)}


def repository_of(name: str) -> str:
    """Return a valid repository name for an image: in lower case, with valid separators.

    ``django__django-11099`` stays unchanged, ``Pandas@1`` becomes ``pandas-1``.
    """
    runs = re.findall(r"[a-z0-9]+|[^a-z0-9]+", name.lower())
    repository = "".join(run if re.fullmatch(r"[a-z0-9]+|[._]|__|-+", run) else "-" for run in runs)
    return repository.strip("._-") or "image"


def _config(image: ImageRecord, blobs: Sequence[LayerBlob]) -> bytes:
    config: Document = {
        **image.config,
        "Env": [f"{name}={value}" for name, value in image.environment],
        "WorkingDir": image.workdir,
        "User": image.user,
    }
    platform = image.notes.get("platform", "")
    target = m.parse_platform(platform) if platform.count("/") in (1, 2) else m.own_platform()
    return to_json(
        {
            "created": datetime.fromtimestamp(image.created, UTC).isoformat(),
            "author": config.pop("Author", ""),
            "os": target.os,
            "architecture": target.architecture,
            **({"variant": target.variant} if target.variant else {}),
            "config": {name: value for name, value in config.items() if value not in ("", None)},
            "rootfs": {"type": "layers", "diff_ids": [blob.diff_id for blob in blobs]},
        }
    )


def _annotations(image: ImageRecord) -> Document:
    """Return the annotations about an image's origin (image-spec, annotations.md)."""
    annotations = {
        "revision": image.base_commit,
        "base.name": image.notes.get("base", image.notes.get("reference", "")),
        "base.digest": image.notes.get("digest", ""),
    }
    return {f"org.opencontainers.image.{name}": text for name, text in annotations.items() if text}


def to_json(document: Mapping[str, JSONValue]) -> bytes:
    """Return a document as compact JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


@dataclass(slots=True)
class _Layout:
    """Target of an export to a layout; writes each blob only once."""

    store: Store
    compression: str
    work: Path
    write_file: Callable[[str, bytes | Path], None]
    sizes: dict[str, int] = field(default_factory=dict)
    _written_layers: dict[str, LayerBlob] = field(default_factory=dict)
    _documents: set[str] = field(default_factory=set)

    def layer(self, key: str) -> LayerBlob:
        """Write the blob of a layer, unless an earlier image contains it."""
        if key not in self._written_layers:
            blob = self._written_layers[key] = ensure_blob(self.store.root, key, self.compression, self.work)
            if blob.digest not in self.sizes:
                self.write_file(m.blob_path(blob.digest), blob.path)
                self.sizes[blob.digest] = blob.size
            if blob.path.parent == self.work:
                blob.path.unlink()
        return self._written_layers[key]

    def document(self, digest: str, text: bytes) -> None:
        """Write a configuration or a manifest."""
        if digest not in self._documents:
            self._documents.add(digest)
            self.write_file(m.blob_path(digest), text)


@contextmanager
def _staging(store: Store, path: Path) -> Iterator[Path]:
    """Create a temporary directory for blobs while the body runs."""
    if store.writable:
        with store.staging("export") as staging:
            yield staging
        return
    with tempfile.TemporaryDirectory(dir=None if path == STANDARD else path.absolute().parent) as staging:
        yield Path(staging)


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[str, bytes | Path], None]]:
    """Open the directory or archive of an export; yield a function that writes a file into it."""
    if path == STANDARD:
        with _archive(sys.stdout.buffer) as write_file:
            yield write_file
        sys.stdout.buffer.flush()
    elif path.suffix == ".tar":
        with written_atomically(path.absolute()) as file, _archive(file) as write_file:
            yield write_file
    else:
        with _directory(path.absolute()) as write_file:
            yield write_file


@contextmanager
def _archive(file: IO[bytes]) -> Iterator[Callable[[str, bytes | Path], None]]:
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:

        def write_file(name: str, content: bytes | Path) -> None:
            info = tarfile.TarInfo(name)
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
                info.size = source.seek(0, io.SEEK_END)
                source.seek(0)
                archive.addfile(info, source)

        yield write_file


@contextmanager
def _directory(path: Path) -> Iterator[Callable[[str, bytes | Path], None]]:
    """Write files to a directory with a temporary name; rename the directory once all files are written."""
    if path.exists():
        raise InvalidValue(f"{path} is there already", hint="give a new directory, or a file that ends in .tar")
    partial_path = path.with_name(f".{path.name}.{secrets.token_hex(6)}")

    def write_file(name: str, content: bytes | Path) -> None:
        (partial_path / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (partial_path / name).write_bytes(content)
        else:
            shutil.copyfile(content, partial_path / name)

    try:
        partial_path.mkdir()
        yield write_file
        sync_filesystem(partial_path)
        partial_path.rename(path)
    except BaseException:  # also on Ctrl-C, leave no incomplete directory
        shutil.rmtree(partial_path, ignore_errors=True)
        raise
