"""Push an image of the store to a registry; upload only blobs that the registry lacks (distribution-spec, "Push")."""

from __future__ import annotations

import http.client
import io
import re
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from minisandbox.errors import InvalidValue, NotFound, RegistryError
from minisandbox.images.http_client import ATTEMPTS, backoff
from minisandbox.images.image import find_record
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.export import Document, check_portable, describe, to_json, write_image
from minisandbox.images.oci.http import RegistryClient
from minisandbox.images.oci.pull import LOST, PULLED, Tell
from minisandbox.images.oci.reference import locations_of
from minisandbox.spec import Remote, parse_reference
from minisandbox.store import ImageRecord, Store
from minisandbox.store.blobs.freezing import remove_copies
from minisandbox.store.blobs.layer_blobs import LayerBlob, ensure_blob, known_blob, note_place, read_blobs
from minisandbox.values import JSONValue

_AT_ONCE = 4
_CHUNK = 1 << 20
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_PULLED = re.compile(r"(\w+) (sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}) ([0-9]{1,18}) (\S+) (\S+)")
_BINARY = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push.

    Attributes:
        reference: the pushed reference.
        digest: the digest of the manifest.
        layers: the number of layers.
        sent: the number of sent layers; the registry had the other layers.
        bytes: the size of the sent layers in bytes.
        lost: a description of file properties that were lost when the image was pulled or built, for example owners;
            "" if nothing was lost.
    """

    reference: str
    digest: str
    layers: int
    sent: int
    bytes: int
    lost: str = ""


def push(
    name: str,
    reference: str,
    *,
    store: Store,
    compression: str = "gzip",
    private: bool = False,
    progress: Tell | None = None,
) -> Pushed:
    """Push an image to a registry.

    Args:
        name: the name of the image, or the reference that it was pulled by.
        reference: the target: ``HOST/NAME[:TAG]``.
        store: the store of the image.
        compression: the compression of layers: ``gzip`` or ``zstd``.
        private: whether to push a private copy for other stores of MiniSandbox, with hidden tests. Only a private copy
            may depend on the host's ``/usr``.
        progress: called for each layer.

    Raises:
        InvalidValue: the reference is not a tag in a registry, or the image depends on the host's ``/usr``.
        NotFound: the image does not exist, or the repository does not exist and the registry does not create it.
        RegistryError: a request failed, or the registry rejected it.
        StoreError: a layer is damaged.
        DiskFull: the disk is full.
    """
    target = _target(reference)
    store.require_writable("push an image")
    image = find_record(store, name)
    check_portable(image, private=private)
    with _Registry(store, locations_of(target)[-1], compression, private, progress or (lambda _: None)) as registry:
        digest = str(registry.image(image, target.tag)["digest"])
        return registry.pushed(str(target), digest, image.notes.get(LOST, ""))


def push_set(
    names: Iterable[str],
    reference: str,
    *,
    store: Store,
    files: Sequence[Path] = (),
    compression: str = "gzip",
    private: bool = False,
    progress: Tell | None = None,
) -> Pushed:
    """Push images to one repository, each with its name as its tag, and an index of them that :func:`pull_set` reads.

    Args:
        names: the names of the images.
        reference: the target of the index: ``HOST/NAME[:TAG]``.
        store: the store of the images.
        files: files that travel with the set, for example validation results.
        compression: the compression of layers: ``gzip`` or ``zstd``.
        private: whether to push private copies; see :func:`push`.
        progress: called for each layer.

    Raises:
        InvalidValue: the reference is not a tag in a registry, an image depends on the host's ``/usr``, two images have
            the same tag, or a file cannot be read.
        NotFound: an image does not exist, or the repository does not exist and the registry does not create it.
        RegistryError: a request failed, or the registry rejected it; the same call resumes.
        StoreError: a layer is damaged.
        DiskFull: the disk is full.
    """
    target = _target(reference)
    store.require_writable("push images")
    images: dict[str, ImageRecord] = {}
    for image in map(store.image, dict.fromkeys(names)):
        check_portable(image, private=private)
        if tag_of(image.name) in (target.tag, *images):
            raise InvalidValue(f"two of {reference} have the tag {tag_of(image.name)}", hint="push them as two sets")
        images[tag_of(image.name)] = image
    contents = {path.name: read_file(path) for path in files}
    with _Registry(store, locations_of(target)[-1], compression, private, progress or (lambda _: None)) as registry:
        rows: list[JSONValue] = [
            {**registry.image(image, tag), "annotations": {m.REF_NAME: image.name}} for tag, image in images.items()
        ]
        if contents:
            rows.append(registry.files(contents))
        index: Document = {"schemaVersion": 2, "mediaType": m.INDEX, "artifactType": m.SET, "manifests": rows}
        digest = str(registry.manifest(m.INDEX, to_json(index), target.tag)["digest"])
        lost = dict.fromkeys(image.notes[LOST] for image in images.values() if LOST in image.notes)
        return registry.pushed(str(target), digest, "; ".join(lost))


def tag_of(name: str) -> str:
    """Return the tag of an image in the repository of its set: its name, with the characters that tags allow."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:128]


def _target(reference: str) -> Remote:
    target = parse_reference(reference)
    if not isinstance(target, Remote) or target.digest:
        raise InvalidValue(
            f"cannot push to {reference}", reason="it is no tag of a registry", hint="write HOST/NAME[:TAG]"
        )
    return target


def read_file(path: Path) -> bytes:
    """Read a file that travels with a set.

    Raises:
        InvalidValue: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(m.MOST_FILE + 1)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read", reason=error.strerror) from None
    if len(content) > m.MOST_FILE:
        raise InvalidValue(f"{path} is larger than {m.MOST_FILE} bytes", hint="publish it in another way")
    return content


@dataclass(slots=True)
class _Registry:
    """A repository as the target of :func:`.export.write_image`; uploads a blob while the next layer is compressed.

    Attributes:
        store: the store of the layers.
        target: the tag to push.
        compression: the compression of layers.
        private: whether to push a private copy.
        report: called for each blob.
        sent: the number of sent layers.
        size: the size of the sent layers in bytes.
    """

    store: Store
    target: Remote
    compression: str
    private: bool
    report: Tell
    sent: int = 0
    size: int = 0
    _blobs: dict[str, LayerBlob] = field(default_factory=dict)
    _new_keys: list[str] = field(default_factory=list)
    _uploads: dict[str, Future[None]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_AT_ONCE, "push"))
    _files: ExitStack = field(default_factory=ExitStack)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _connection: RegistryClient = field(init=False)

    def __post_init__(self) -> None:
        self._connection = RegistryClient(self.target, self._pause, "pull,push")

    def layer(self, key: str) -> LayerBlob:
        """Send the blob of a layer, unless this or another repository of the registry already has it."""
        if key not in self._blobs:
            self._blobs[key] = self._layer(key)
            self._new_keys.append(key)
        return self._blobs[key]

    def _layer(self, key: str) -> LayerBlob:
        for job in self._uploads.values():
            if job.done():
                job.result()
        missing_digests, session = set[str](), ""
        for blob, origin in self._candidates(key):
            if blob.digest in self._uploads or self._has(blob.digest):
                return blob
            missing_digests.add(blob.digest)
            if origin != self.target.repository and not (session := self._begin(blob.digest, origin)):
                return blob
        blob = ensure_blob(self.store.root, key, self.compression)
        if blob.digest not in self._uploads and (blob.digest in missing_digests or not self._has(blob.digest)):
            file = self._files.enter_context(blob.path.open("rb"))  # stay readable after garbage collection
            self._uploads[blob.digest] = self._pool.submit(self._send, blob.digest, blob.size, file, session)
            self.sent, self.size = self.sent + 1, self.size + blob.size
        return blob

    def document(self, digest: str, text: bytes) -> None:
        """Wait for all layers, then send a configuration."""
        for job in self._uploads.values():
            job.result()
        if not self._has(digest):
            self._send(digest, len(text), io.BytesIO(text), "")

    def image(self, image: ImageRecord, tag: str) -> Document:
        """Send an image, record that the registry has its layers, and remove their local blobs; return the descriptor.

        Args:
            image: the image.
            tag: the tag of its manifest.
        """
        text, *_ = write_image(self.store, image, self, self.compression, private=self.private, report=self.report)
        descriptor = self.manifest(m.MANIFEST, text, tag)
        for key in self._new_keys:
            note_place(self.store.root, key, self.target.host, self.target.repository)
        digests = {self._blobs[key].digest for key in self._new_keys}
        remove_copies(self.store, self.compression, [*(digests & self._uploads.keys())])
        self._new_keys.clear()
        return descriptor

    def files(self, contents: Mapping[str, bytes]) -> Document:
        """Send files by name as an artifact (image-spec, manifest.md); return the descriptor."""
        layers: list[JSONValue] = []
        for name, content in contents.items():
            descriptor = describe("application/octet-stream", content)
            self.document(str(descriptor["digest"]), content)
            layers.append({**descriptor, "annotations": {m.TITLE: name}})
        config = describe(m.EMPTY, b"{}")
        self.document(str(config["digest"]), b"{}")
        manifest: Document = {"schemaVersion": 2, "mediaType": m.MANIFEST, "artifactType": m.FILES, "config": config}
        descriptor = self.manifest(m.MANIFEST, to_json({**manifest, "layers": layers}), "")
        return {**descriptor, "artifactType": m.FILES}

    def manifest(self, kind: str, text: bytes, tag: str) -> Document:
        """Send a manifest or an index with a tag, or by its digest if the tag is empty; return the descriptor."""
        descriptor = describe(kind, text)
        self._connection.request(
            "PUT", f"manifests/{tag or descriptor['digest']}", {"Content-Type": kind}, text
        ).close()
        return descriptor

    def pushed(self, reference: str, digest: str, lost: str) -> Pushed:
        """Return the result."""
        return Pushed(reference, digest, len(self._blobs), self.sent, self.size, lost)

    def __enter__(self) -> Self:
        """Use the registry in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel running uploads; keep the blobs for the next attempt."""
        self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    def _pause(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise RegistryError(f"the push to {self.target} was given up")

    # --- requests ---

    def _has(self, digest: str) -> bool:
        try:
            self._connection.request("HEAD", f"blobs/{digest}").close()
        except NotFound:
            return False
        return True

    def _candidates(self, key: str) -> Iterator[tuple[LayerBlob, str]]:
        """Yield (blob, repository) for each blob of a layer that the registry may already have."""
        if (recorded := known_blob(self.store.root, key, self.compression)) is not None:
            record = read_blobs(self.store.root, key)
            yield recorded, (record.places if record is not None else {}).get(self.target.host, self.target.repository)
        layer = self.store.layer(key)
        # The fact may be malformed if the record was imported. A private copy cannot use the original blob.
        match = _PULLED.fullmatch(layer.facts.get(PULLED, ""))
        if match and match[1] == self.compression and not self.private:
            _, digest, size, host, repository = match.groups()
            blob = LayerBlob(self.store.root, str(layer.step.get("diff_id", "")), digest, int(size))
            yield blob, repository if host == self.target.host else self.target.repository

    def _begin(self, digest: str = "", origin: str = "") -> str:
        """Start an upload; return its URL, or "" if the registry mounted the blob from another repository."""
        query = urllib.parse.urlencode({"mount": digest, "from": origin}) if origin else ""
        with self._connection.request("POST", f"blobs/uploads/?{query}".rstrip("?"), _BINARY, b"") as response:
            return "" if response.status == 201 else self._address(response)

    def _send(self, digest: str, size: int, file: IO[bytes], session: str) -> None:
        """Send a blob; resume after an interruption."""
        for attempt in range(ATTEMPTS):
            try:
                if attempt and self._has(digest):  # the blob was received, but the response was lost
                    break
                session, sent = self._progress(session) if session and attempt else (session or self._begin(), 0)
                self._put(session, digest, file, sent, size)
                break
            except RegistryError as error:
                if attempt == ATTEMPTS - 1 or not error.transient:
                    raise
            except NotFound:  # the upload session has expired: start a new one
                if attempt == ATTEMPTS - 1:
                    raise
                session = ""
            self._pause(backoff(attempt))
        file.close()

    def _put(self, session: str, digest: str, file: IO[bytes], sent: int, size: int) -> None:
        """Send a blob, or the rest of it, and finish the upload by the same request."""
        self.report(f"sending {size - sent} bytes" + (f", from byte {sent} on" if sent else ""))
        headers = {**_BINARY, "Content-Length": str(size - sent)}
        if sent:
            headers["Content-Range"] = f"{sent}-{size - 1}"
        address = f"{session}{'&' if '?' in session else '?'}{urllib.parse.urlencode({'digest': digest})}"
        self._connection.request("PUT", address, headers, lambda: self._chunks(file, sent)).close()

    def _progress(self, session: str) -> tuple[str, int]:
        """Return the URL for resuming an upload, and the number of bytes that the registry has received."""
        with self._connection.request("GET", session) as response:
            match = _RANGE.fullmatch(response.headers.get("Range", ""))
            return self._address(response), int(match[1]) + 1 if match and match[1] != "0" else 0

    def _address(self, response: http.client.HTTPResponse) -> str:
        address = response.headers.get("Location", "")
        if not address:
            raise RegistryError(
                f"registry {self.target.host} does not say where to send a blob",
                reason=f"its answer {response.status} has no Location",
                hint="check the host in the reference: is it a registry?",
            )
        return address

    def _chunks(self, file: IO[bytes], start: int) -> Iterator[bytes]:
        file.seek(start)
        while chunk := file.read(_CHUNK):
            if self._cancelled.is_set():
                raise RegistryError(f"the push to {self.target} was given up")
            yield chunk
