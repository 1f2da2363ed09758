"""Serve a caching package index proxy on this machine. Build steps use only this index, not the configured indexes.

Build steps run untrusted code of packages, so a build step must not be able to write files that other builds read. The
proxy therefore fetches all cached files itself, verifies the hash that the index states, and names each file by its
hash. The credentials of the configured indexes never enter a sandbox.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote, unquote, urlsplit

from minisandbox.errors import DiskFull, MiniSandboxError, SourceError
from minisandbox.images.python.index import index_settings
from minisandbox.images.python.simple_api import JSON_TYPE, IndexLink, Listings, html_page, json_page, version_in
from minisandbox.images.python.torch_builds import has_builds, is_for_cpu, with_cpu_index
from minisandbox.images.python.web import Web, fetch_file
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import EVERYTHING, IndexView, Package
from minisandbox.store import Store

_PROJECT = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_METADATA = ".metadata"
_IDLE = 60.0


@dataclass(slots=True)
class Served:
    """The package files that one build step may fetch, and the files that it has fetched.

    Attributes:
        view: the visible files.
        packages: the fetched files, by name.
        complaints: messages about problems of the indexes, for the error if the step fails.
        undated: whether files without an upload time were left out.
        failed: the error of the first page or file that could not be fetched; None if there was none.
        full: the error of a file that could not be stored because the disk was full; None if there was none.
    """

    view: IndexView = EVERYTHING
    packages: dict[str, Package] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    undated: bool = False
    failed: SourceError | None = None
    full: DiskFull | None = None

    def complain(self, text: str) -> None:
        """Record a message for the step's error."""
        if text not in self.complaints:
            self.complaints.append(text)

    def note(self, error: MiniSandboxError) -> None:
        """Record an error."""
        self.complain(str(error))
        self.full = error if isinstance(error, DiskFull) else self.full
        self.failed = self.failed or (error if isinstance(error, SourceError) else None)


class PackageIndex:
    """A package index that listens on this machine's loopback while builds run. Use it in a ``with`` block.

    Args:
        store: the store that keeps files by their hashes.
        settings: the settings of the configured indexes; the host's settings by default.
    """

    def __init__(self, store: Store, settings: IndexSettings | None = None) -> None:
        self._store = store
        self._settings = settings
        self._server: _Server | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Do nothing: the first step that needs the server starts it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @contextmanager
    def serve(self, served: Served) -> Iterator[str]:
        """Serve package files to one build step while the body runs; yield the URL of the step's simple index.

        The URL contains a secret, so that other users of this machine cannot send requests in the step's name.
        """
        with self._lock:
            if self._server is None:
                self._server = _Server(self._store, self._settings or index_settings())
                serve_forever = self._server.serve_forever
                threading.Thread(target=serve_forever, name="minisandbox-index", daemon=True, args=(0.1,)).start()
        server, token = self._server, secrets.token_urlsafe(18)
        server.sessions[token] = served
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{token}/simple/"
        finally:
            del server.sessions[token]


class _Server(ThreadingHTTPServer):
    """The HTTP server, which fetches the files that each step may see."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, store: Store, settings: IndexSettings) -> None:
        self.sessions: dict[str, Served] = {}
        self._store, self._web = store, Web(settings)
        self._all, self._cpu = Listings(store, self._web), Listings(store, Web(with_cpu_index(settings)))
        self._hashes: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""

    def files(self, project: str, served: Served) -> dict[str, IndexLink]:
        """Return the files of a project that a step may see; with a lock, return the locked files and read no index.

        Raises:
            SourceError: an index cannot be read, and the other indexes have no file of the project.
        """
        if served.view.locked is not None:
            packages = (package for package in served.view.locked if version_in(project, package.file) is not None)
            return {package.file: IndexLink(f"/{quote(package.file)}", package.sha256) for package in packages}
        return self._listed(project, served)

    def _listed(self, project: str, served: Served) -> dict[str, IndexLink]:
        is_cpu, cutoff = bool(served.view.torch_backend) and has_builds(project), served.view.before
        listing = (self._cpu if is_cpu else self._all).get(project, before=cutoff)
        links = dict(listing.files)
        if is_cpu:
            served.complain(f"torch_backend is {served.view.torch_backend!r}: other builds of {project} are not there")
            links = {name: link for name, link in links.items() if is_for_cpu(project, name)}
        if cutoff is not None:
            served.undated = served.undated or any(not link.uploaded for link in links.values())
            links = {name: link for name, link in links.items() if link.uploaded_before(cutoff)}
        if listing.failure:
            served.complain(listing.failure)
            if not links:
                raise SourceError(f"no index that can be read has {project}", reason=listing.failure)
        return links

    def path_of(self, project: str, name: str, served: Served) -> Path | None:
        """Return a requested file, fetched and verified; None if the step may see no such file.

        Raises:
            SourceError: the file cannot be fetched, or its hash differs from the hash that the index states.
            StoreError: the file cannot be stored.
        """
        file_name = name.removesuffix(_METADATA)
        link = self.files(project, served).get(file_name)
        if link is None or (file_name != name and not link.metadata):
            return None
        if file_name != name:
            return fetch_file(f"{link.url}{_METADATA}", link.metadata, self._store, self._web)[0]
        url = link.url
        if served.view.locked is not None and not self._store.download_path(link.sha256).is_file():
            listed = self._listed(project, served).get(name)
            if listed is None or listed.sha256 not in ("", link.sha256):
                served.complain(f"the lock's {name} is not on the package index any more")
                return None
            url = listed.url
        path, digest = fetch_file(url, link.sha256 or self._hashes.get(url, ""), self._store, self._web)
        self._hashes[url] = digest
        served.packages[name] = Package(project, version_in(project, name) or "", name, digest)
        return path


class _Handler(BaseHTTPRequestHandler):
    """The request handler for ``/SECRET/simple/PROJECT/`` and ``/SECRET/simple/PROJECT/FILE``."""

    server: _Server
    timeout = _IDLE

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Log nothing, because the URL contains a secret."""

    def do_GET(self) -> None:
        """Send a project's page or a file."""
        parts = unquote(urlsplit(self.path).path).split("/")
        served = self.server.sessions.get(parts[1]) if len(parts) == 5 and parts[2] == "simple" else None
        if served is None or _PROJECT.fullmatch(parts[3]) is None:
            self.send_error(404)
            return
        content_type = JSON_TYPE if JSON_TYPE in self.headers.get("Accept", "") else "text/html; charset=utf-8"
        try:
            body = self._body(parts[3], parts[4], served, content_type)
        except MiniSandboxError as error:
            served.note(error)
            with suppress(OSError):
                self.send_error(404 if isinstance(error, SourceError) else 500, "see the build's error")
            return
        if body is None:
            self.send_error(404)
            return
        with body:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if parts[4] else content_type)
            self.send_header("Content-Length", str(body.seek(0, os.SEEK_END)))
            self.end_headers()
            body.seek(0)
            if self.command == "GET":
                shutil.copyfileobj(body, self.wfile, 1 << 18)

    do_HEAD = do_GET  # noqa: N815 - the name in http.server

    def _body(self, project: str, name: str, served: Served, content_type: str) -> IO[bytes] | None:
        if name:
            path = self.server.path_of(project, name, served)
            return None if path is None else path.open("rb")
        files = self.server.files(project, served)
        page = json_page(project, files.values()) if content_type == JSON_TYPE else html_page(files.values())
        return io.BytesIO(page) if files else None
