"""Fetch an image from a registry: request its manifest, download blobs in parallel, and resume partial downloads."""

from __future__ import annotations

import hashlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from minisandbox.errors import DiskFull, ImageRefused, MiniSandboxError, NotFound, RegistryError
from minisandbox.images.http_client import ATTEMPTS, backoff, read_bounded
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.http import RateLimit, RegistryClient
from minisandbox.images.oci.reference import locations_of
from minisandbox.spec import Remote
from minisandbox.store import Store
from minisandbox.store.blobs.streams import Blob, check_digest, check_hash, new_hash, require_room
from minisandbox.store.collect import BLOB, PART, remove_download
from minisandbox.store.disk.faults import store_faults

_AT_ONCE = 4
_CHUNK = 1 << 18
_SLOWEST = 1 << 10
_PATIENCE = 60.0
"""Seconds over which the transfer rate of a blob is averaged. An average below 1 KiB per second counts as a stall."""


class _Interrupted(Exception):
    """The response was truncated or stalled, so a retry may resume the download."""


@dataclass(slots=True)
class Registry:
    """An image in a registry, with the interface of a layout or an archive (:mod:`.layout`); see :func:`open_registry`.

    Attributes:
        reference: the image.
        store: the store for downloads.
        report: called for each blob.
        on_layer: called for each layer when it has been published in the store.
        limit: the rate limit from the manifest's response; None if unknown.
        cached_manifest: the manifest; None before the first request.
        connect: returns the client of a repository, which several images may share; None for an own client.
    """

    reference: Remote
    store: Store
    report: Callable[[str], None] = lambda _: None
    on_layer: Callable[[m.Layer], None] = lambda _: None
    limit: RateLimit | None = None
    cached_manifest: m.Manifest | None = None
    connect: Callable[[Remote], RegistryClient] | None = None
    _connection: RegistryClient | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_AT_ONCE, "blob"))
    _downloads: dict[str, Future[Path]] = field(default_factory=dict)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _published_paths: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The image's name in messages."""
        return str(self.reference)

    @property
    def remote(self) -> Remote:
        """The repository that the image's blobs come from."""
        return self.reference

    def manifest(self, platform: m.Platform) -> m.Manifest:
        """Return the manifest for a platform from the first mirror or registry that has it; request it only once."""
        if self.cached_manifest is None:
            self.cached_manifest = self._request_manifest(platform)
        return self.cached_manifest

    def _request_manifest(self, platform: m.Platform) -> m.Manifest:
        remotes = locations_of(self.reference)
        for remote in remotes[:-1]:
            try:
                return self._manifest_from(self._client(remote), platform)
            except (RegistryError, NotFound) as error:
                self.report(f"mirror {remote.host}: {error.what}")
        return self._manifest_from(self._client(remotes[-1]), platform)

    def _client(self, remote: Remote) -> RegistryClient:
        return RegistryClient(remote, self._pause) if self.connect is None else self.connect(remote)

    def _manifest_from(self, connection: RegistryClient, platform: m.Platform) -> m.Manifest:
        digest, manifest = m.find_manifest(
            self.reference.version, lambda version: self._text(connection, version), platform, self.name
        )
        descriptor, layers = m.layers_of(manifest, self.name)
        self._connection = connection
        config = read_blob(connection, descriptor, m.MOST_CONFIG, f"the configuration of {self.name}")
        return m.Manifest(digest, config, tuple(layers), descriptor.media_type)

    def _text(self, connection: RegistryClient, version: str) -> tuple[str, bytes]:
        return read_manifest(connection, version, self.name, self._note_limit)

    def _note_limit(self, limit: RateLimit | None) -> None:
        self.limit = limit

    # --- blobs ---

    @property
    def _ready_connection(self) -> RegistryClient:
        """The connection to the registry that sent the manifest."""
        assert self._connection is not None
        return self._connection

    def prefetch(self, layers: Sequence[m.Layer]) -> None:
        """Start to fetch the blobs of layers in the background."""
        for layer in layers:
            self._begin(layer.blob)

    @contextmanager
    def layer(self, layer: m.Layer) -> Iterator[Blob]:
        """Wait for the blob of a layer and open it; remove the blob if it is malformed."""
        with self._opened(layer.blob) as (file, path):
            try:
                yield Blob(file, layer.blob.digest, f"{self.name}: layer {layer.blob.digest}")
            except ImageRefused:
                path.unlink(missing_ok=True)
                raise
        self._downloads.pop(layer.blob.digest, None)

    @contextmanager
    def _opened(self, blob: m.Descriptor) -> Iterator[tuple[IO[bytes], Path]]:
        """Wait for a blob and open it; fetch the blob again if another pull has removed it."""
        for _ in range(ATTEMPTS):
            try:
                path = self._begin(blob).result()
            except NotFound as error:
                raise m.foreign_layer(self.name, blob) if blob.is_foreign else error from error
            except RegistryError:  # forget the failed download, so that a retry starts a new one
                self._downloads.pop(blob.digest, None)
                raise
            try:
                file = path.open("rb")
            except FileNotFoundError:
                self._downloads.pop(blob.digest, None)
                continue
            with file:
                yield file, path
            return
        raise RegistryError(f"{blob.digest} is removed again and again by other pulls", hint="pull one after the other")

    def published(self, layer: m.Layer) -> None:
        """Remove the blob of a published layer, and report the layer."""
        path = self._path(layer.blob.digest)
        path.unlink(missing_ok=True)
        self._published_paths.append(path)
        self.on_layer(layer)

    def _begin(self, blob: m.Descriptor) -> Future[Path]:
        if blob.digest not in self._downloads:
            self._downloads[blob.digest] = self._pool.submit(self._fetch, blob)
        return self._downloads[blob.digest]

    def _path(self, digest: str) -> Path:
        algorithm, _, digits = digest.partition(":")
        key = digits if algorithm == "sha256" else hashlib.sha256(digest.encode()).hexdigest()
        return self.store.download_path(key).with_suffix(BLOB)

    def _fetch(self, blob: m.Descriptor) -> Path:
        path = self._path(blob.digest)
        partial_path = path.with_suffix(PART)
        with self.store.lock(f"download-{path.stem}"):
            if path.is_file():
                return path
            try:
                with store_faults(f"download {blob.digest}"):
                    for attempt in range(ATTEMPTS):
                        if self._receive(blob, partial_path, is_last=attempt == ATTEMPTS - 1):
                            os.rename(partial_path, path)
                            return path
                        self._pause(backoff(attempt))
            except (ImageRefused, DiskFull):
                partial_path.unlink(missing_ok=True)
                raise
        raise AssertionError("the last attempt returns or raises")

    def _receive(self, blob: m.Descriptor, partial_path: Path, *, is_last: bool) -> bool:
        """Receive the rest of a blob; return whether it is complete and has its digest.

        Raises:
            RegistryError: the last attempt was interrupted.
            ImageRefused: the last attempt received a blob with another digest, or the registry sent too many bytes.
        """
        connection = self._ready_connection
        hasher = new_hash(blob.digest)
        with partial_path.open("a+b") as file:
            received = _rehash(file, hasher)
            try:
                if received < blob.size:
                    self._append(connection, blob, file, hasher, received)
            except _Interrupted as error:
                if is_last:
                    raise RegistryError(
                        f"registry {connection.remote.host} breaks off while it sends {blob.digest}",
                        reason=str(error),
                        hint="run the same command again: it resumes",
                    ) from None
                return False
            try:
                check_hash(hasher, blob.digest, f"a layer that registry {connection.remote.host} sends")
            except ImageRefused:
                file.truncate(0)  # discard the damaged download; the retry starts at byte 0
                if is_last:
                    raise
                return False
            file.flush()
            os.fsync(file.fileno())
            return True

    def _append(
        self, connection: RegistryClient, blob: m.Descriptor, file: IO[bytes], hasher: hashlib._Hash, received: int
    ) -> None:
        require_room(file.fileno(), blob.size - received, f"download {blob.digest}")
        self.report(f"fetching {blob.digest[:19]}" + (f", from byte {received} on" if received else ""))
        with connection.get(f"blobs/{blob.digest}", offset=received) as response:
            if received and response.status != 206:  # the registry ignored the Range header
                file.truncate(0)
                raise _Interrupted("it cannot resume")
            if response.headers.get_content_type() == "text/html":
                raise _Interrupted("it answers with a page: is a proxy or a login page in its place?")
            window_start, window_bytes = time.monotonic(), 0
            for chunk in _chunks(response):
                if self._cancelled.is_set():
                    raise RegistryError(f"the download of {blob.digest} was given up")
                received += len(chunk)
                window_bytes += len(chunk)
                if received > blob.size:
                    raise ImageRefused(
                        f"registry {connection.remote.host} sends more than the {blob.size} bytes of {blob.digest}",
                        hint="nothing was published; the registry is damaged, or lies",
                    )
                hasher.update(chunk)
                file.write(chunk)
                if time.monotonic() - window_start > _PATIENCE:
                    if window_bytes < _SLOWEST * _PATIENCE:
                        raise _Interrupted(f"it sends less than {_SLOWEST} bytes a second")
                    window_start, window_bytes = time.monotonic(), 0
        if received < blob.size:
            raise _Interrupted(f"{received} of {blob.size} bytes came")

    def _pause(self, seconds: float) -> None:
        """Sleep between attempts.

        Raises:
            RegistryError: the pull was cancelled.
        """
        if self._cancelled.wait(seconds):
            raise RegistryError(f"the pull of {self.name} was given up")

    def give_up(self) -> None:
        """Let running downloads fail; the bytes received so far are kept for the next attempt."""
        self._cancelled.set()

    def close(self) -> None:
        """Cancel running downloads; keep partial downloads for the next attempt."""
        self.give_up()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for path in self._published_paths:  # a late download may have created the file again
            remove_download(self.store, path)


@contextmanager
def open_registry(reference: Remote, store: Store, report: Callable[[str], None]) -> Iterator[Registry]:
    """Open an image in a registry as the source of a pull; cancel its downloads when the body ends.

    Args:
        reference: the image.
        store: the store for downloads.
        report: called for each blob.
    """
    registry = Registry(reference, store, report)
    try:
        yield registry
    finally:
        registry.close()


def read_manifest(
    connection: RegistryClient,
    version: str,
    name: str,
    on_limit: Callable[[RateLimit | None], None] = lambda _: None,
) -> tuple[str, bytes]:
    """Request a manifest or an index; return its verified digest and its text.

    Args:
        connection: the repository.
        version: the tag or digest.
        name: the image's name in errors.
        on_limit: called with the rate limit that the response states.

    Raises:
        NotFound: the repository has no such manifest.
        RegistryError: the request failed, or the response is no manifest.
        ImageRefused: the text has another digest.
    """
    with _truncation_errors(name), connection.get(f"manifests/{version}", m.ACCEPTED) as response:
        text = read_bounded(response, m.MOST_MANIFEST)
        on_limit(RateLimit.parse(response.headers))
        stated_digest = response.headers.get("Docker-Content-Digest", "")
        media_type = response.headers.get_content_type()
    if text is None or text.lstrip()[:1] != b"{":
        raise RegistryError(
            f"{connection.remote.host} answers with {media_type}, not with a manifest",
            reason="it is no registry, or a proxy or login page answers in its place",
            hint="check the host in the reference, and the proxy",
        )
    digest = version if ":" in version else stated_digest or f"sha256:{hashlib.sha256(text).hexdigest()}"
    check_hash(new_hash(check_digest(digest), text), digest, f"the manifest that {connection.remote.host} sends")
    return digest, text


def read_blob(connection: RegistryClient, descriptor: m.Descriptor, limit: int, subject: str) -> bytes:
    """Request a small blob, for example a configuration, and verify its digest.

    Raises:
        NotFound: the repository has no such blob.
        RegistryError: the request failed.
        ImageRefused: the blob is larger than ``limit`` bytes, or has another digest.
    """
    with _truncation_errors(subject), connection.get(f"blobs/{descriptor.digest}") as response:
        text = read_bounded(response, limit)
    if text is None:
        raise m.malformed(subject, f"it has more than {limit} bytes")
    digest = descriptor.digest
    check_hash(new_hash(digest, text), digest, f"{subject} that {connection.remote.host} sends")
    return text


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the content of a response in pieces; raise :class:`_Interrupted` if the network fails."""
    try:
        while chunk := response.read1(_CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from None


def _rehash(file: IO[bytes], hasher: hashlib._Hash) -> int:
    """Hash the bytes that earlier attempts have received; return their number."""
    file.seek(0)
    received = 0
    while chunk := file.read(_CHUNK):
        hasher.update(chunk)
        received += len(chunk)
    return received


@contextmanager
def _truncation_errors(name: str) -> Iterator[None]:
    """Convert the error for a truncated response in the body to a RegistryError."""
    try:
        yield
    except MiniSandboxError:
        raise
    except (http.client.HTTPException, OSError) as error:
        raise RegistryError(
            f"the registry's answer about {name} breaks off", reason=type(error).__name__, hint="try again"
        ) from None
