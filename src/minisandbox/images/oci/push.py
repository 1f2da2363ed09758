"""Push an image of the store to a registry; upload only blobs that the registry lacks (distribution-spec, "Push")."""

from __future__ import annotations

import http.client
import io
import re
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from minisandbox.errors import InvalidValue, NotFound, RegistryError
from minisandbox.images.http_client import ATTEMPTS, backoff
from minisandbox.images.image import find_record
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.export import check_portable, describe, write_image
from minisandbox.images.oci.http import RegistryClient
from minisandbox.images.oci.pull import PULLED, Tell
from minisandbox.images.oci.reference import locations_of
from minisandbox.spec import Remote, parse_reference
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import remove_copies
from minisandbox.store.blobs.layer_blobs import LayerBlob, ensure_blob, known_blob, note_place, read_blobs

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
    target = parse_reference(reference)
    if not isinstance(target, Remote) or target.digest:
        raise InvalidValue(
            f"cannot push to {reference}", reason="it is no tag of a registry", hint="write HOST/NAME[:TAG]"
        )
    store.require_writable("push an image")
    image = find_record(store, name)
    check_portable(image, private=private)
    registry = _Registry(store, locations_of(target)[-1], compression, private, progress or (lambda _: None))
    try:
        manifest, _, layers = write_image(store, image, registry, compression, private=private, report=registry.report)
        digest = registry.publish(manifest)
    finally:
        registry.close()
    lost = image.notes.get("not as in the image", "")
    return Pushed(str(target), digest, len(layers), registry.sent, registry.size, lost)


@dataclass(slots=True)
class _Registry:
    """A registry as the target of :func:`.export.write_image`; uploads a blob while the next layer is compressed.

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
    _keys: list[str] = field(default_factory=list)
    _uploads: dict[str, Future[None]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_AT_ONCE, "push"))
    _files: ExitStack = field(default_factory=ExitStack)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _connection: RegistryClient = field(init=False)

    def __post_init__(self) -> None:
        self._connection = RegistryClient(self.target, self._pause, "pull,push")

    def layer(self, key: str) -> LayerBlob:
        """Send the blob of a layer, unless this or another repository of the registry already has it."""
        for job in self._uploads.values():
            if job.done():
                job.result()
        self._keys.append(key)
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

    def publish(self, manifest: bytes) -> str:
        """Send the manifest, record that the registry has the layers, and remove the local blobs; return the digest."""
        digest = str(describe(m.MANIFEST, manifest)["digest"])
        path = f"manifests/{self.target.tag}"
        self._connection.request("PUT", path, {"Content-Type": m.MANIFEST}, manifest).close()
        for key in self._keys:
            note_place(self.store.root, key, self.target.host, self.target.repository)
        remove_copies(self.store, self.compression, list(self._uploads))
        return digest

    def close(self) -> None:
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
                    return
                session, sent = self._progress(session) if session and attempt else (session or self._begin(), 0)
                if sent < size:
                    session = self._append(session, file, sent, size)
                self._finish(session, digest)
                return
            except RegistryError as error:
                if attempt == ATTEMPTS - 1 or not error.transient:
                    raise
            except NotFound:  # the upload session has expired: start a new one
                if attempt == ATTEMPTS - 1:
                    raise
                session = ""
            self._pause(backoff(attempt))

    def _append(self, session: str, file: IO[bytes], sent: int, size: int) -> str:
        self.report(f"sending {size - sent} bytes" + (f", from byte {sent} on" if sent else ""))
        headers = {**_BINARY, "Content-Length": str(size - sent)}
        if sent:
            headers["Content-Range"] = f"{sent}-{size - 1}"
        with self._connection.request("PATCH", session, headers, lambda: self._chunks(file, sent)) as response:
            return self._address(response)

    def _progress(self, session: str) -> tuple[str, int]:
        """Return the URL for resuming an upload, and the number of bytes that the registry has received."""
        with self._connection.request("GET", session) as response:
            match = _RANGE.fullmatch(response.headers.get("Range", ""))
            return self._address(response), int(match[1]) + 1 if match and match[1] != "0" else 0

    def _finish(self, session: str, digest: str) -> None:
        address = f"{session}{'&' if '?' in session else '?'}{urllib.parse.urlencode({'digest': digest})}"
        self._connection.request("PUT", address, _BINARY, b"").close()

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
