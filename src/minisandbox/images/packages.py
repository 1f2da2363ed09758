"""The package index that build steps see: one on this machine, which alone asks the configured ones and keeps files.

Code of packages runs in build steps. Nothing that it could write is ever read by another build: what is kept is fetched
here, checked against the hash that the index gives, and named by it. Credentials of the configured indexes stay here.
"""

from __future__ import annotations

import html
import json
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from minisandbox.errors import DiskFull, MiniSandboxError, SourceError
from minisandbox.images.download import fetch_file
from minisandbox.images.index import IndexSettings, host_settings
from minisandbox.images.listing import Listings, uploaded_before
from minisandbox.images.lock import Package
from minisandbox.images.simple_api import JSON_TYPE, Link, version_in
from minisandbox.images.torch_builds import cpu_index, has_builds, is_for_cpu
from minisandbox.store import Store

_PROJECT = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_METADATA = ".metadata"
_IDLE = 60.0


@dataclass(slots=True)
class Served:
    """What one build step may get, and what it got.

    Attributes:
        before: uploads from this moment on are not there; None for all.
        only: the names and hashes of the only files that are there; None for all.
        torch_backend: ``"cpu"``: of PyTorch only builds without CUDA are there; "" for all.
        packages: what was fetched, by the file's name.
        complaints: what went wrong with the indexes, for the step's error.
        undated: whether files were left out because the index does not tell when they came.
        failed: the first page or file that no index could give although it should have it; None while all is well.
        full: the disk was full when a file was to be kept.
    """

    before: datetime | None = None
    only: Mapping[str, Package] | None = None
    torch_backend: str = ""
    packages: dict[str, Package] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    undated: bool = False
    failed: SourceError | None = None
    full: DiskFull | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def complain(self, text: str) -> None:
        """Keep one complaint."""
        with self._lock:
            if text not in self.complaints:
                self.complaints.append(text)

    def fetched(self, package: Package) -> None:
        """Note what was fetched."""
        with self._lock:
            self.packages[package.file] = package


class PackageIndex:
    """An index on this machine's loopback, for as long as builds go on. Use it in a ``with`` block.

    Args:
        store: where files are kept, by their hashes.
        settings: the indexes that are asked; the host's by default.
    """

    def __init__(self, store: Store, settings: IndexSettings | None = None) -> None:
        self._store = store
        self._settings = settings
        self._listings: Listings | None = None
        self._cpu_listings: Listings | None = None
        self._not_had: set[str] = set()
        self._sessions: dict[str, Served] = {}
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._hashes: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Begin; the server itself starts when a step first needs it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    @contextmanager
    def serve(self, served: Served) -> Iterator[str]:
        """Serve one build step while the body runs; give the address of its simple index.

        The address holds a secret: other users of this machine cannot ask in the step's name.
        """
        token = secrets.token_urlsafe(18)
        port = self._running().server_address[1]
        self._sessions[token] = served
        try:
            yield f"http://127.0.0.1:{port}/{token}/simple/"
        finally:
            del self._sessions[token]

    def _running(self) -> _Server:
        with self._lock:
            if self._server is None:
                self._settings = self._settings or host_settings()
                self._listings = Listings(self._store, self._settings)
                if not self._settings.no_index:
                    self._cpu_listings = Listings(self._store, cpu_index(self._settings))
                self._server = _Server(self)
                threading.Thread(
                    target=self._server.serve_forever, name="minisandbox-index", daemon=True, args=(0.1,)
                ).start()
            return self._server

    def session(self, token: str) -> Served | None:
        """Return what a secret stands for."""
        return self._sessions.get(token)

    def files(self, project: str, served: Served) -> dict[str, Link]:
        """Return what a step may see of a project.

        Raises:
            SourceError: no index can be asked.
        """
        assert self._listings is not None  # _running() made it before anybody could ask
        if served.only is not None:
            return self._locked_files(project, served)
        files = self._listed(project, served)
        if served.before is None:
            return files
        if any(not link.uploaded for link in files.values()):
            served.undated = True
        return {name: link for name, link in files.items() if uploaded_before(link, served.before)}

    def _listed(self, project: str, served: Served) -> dict[str, Link]:
        """What the indexes have of a project, of the builds that a step may get."""
        assert self._listings is not None
        if served.torch_backend and has_builds(project):
            return self._cpu_builds(project, served)
        listing = self._listings.get(project, before=served.before)
        if listing.complaint:
            served.complain(listing.complaint)
        return dict(listing.files)

    def _cpu_builds(self, project: str, served: Served) -> dict[str, Link]:
        """Builds without CUDA: those of the configured indexes, then those of PyTorch's own."""
        served.complain(f"torch_backend is {served.torch_backend!r}: other builds of {project} are not there")
        found: dict[str, Link] = {}
        failure: SourceError | None = None
        for listings in filter(None, (self._listings, self._cpu_listings)):
            if found and project in self._not_had:  # a server that does not answer is waited for once
                continue
            try:
                listing = listings.get(project, before=served.before)
            except SourceError as error:  # the other one may have what is wanted
                served.complain(str(error))
                self._not_had.add(project)
                failure = error
                continue
            found = {name: link for name, link in listing.files.items() if is_for_cpu(project, name)} | found
        if not found and failure is not None:
            raise failure
        return found

    def _locked_files(self, project: str, served: Served) -> dict[str, Link]:
        """The files of a lock; those that are kept need no index."""
        assert served.only is not None
        assert self._listings is not None
        wanted = {one.file: one for one in served.only.values() if version_in(project, one.file) is not None}
        kept = {one.file for one in wanted.values() if self._store.download_path(one.sha256).is_file()}
        found = {name: Link(f"file:///{quote(name)}", wanted[name].sha256) for name in kept}
        if set(wanted) - kept:
            listed = self._listed(project, served)
            for name in set(wanted) - kept:
                link = listed.get(name)
                if link is not None and link.sha256 in ("", wanted[name].sha256):
                    found[name] = Link(link.url, wanted[name].sha256, link.requires_python)
                else:
                    served.complain(f"the lock's {name} is not on the package index any more")
        return found

    def path_of(self, project: str, name: str, served: Served) -> Path | None:
        """Return a file that a step asks for, fetched and checked; None if there is no such file for it.

        Raises:
            SourceError: it cannot be fetched, or is not what the index says.
            StoreError: it cannot be kept.
        """
        assert self._settings is not None
        plain = name.removesuffix(_METADATA)
        link = self.files(project, served).get(plain)
        if link is None:
            return None
        if plain != name:
            if not link.metadata:
                return None
            return fetch_file(f"{link.url}{_METADATA}", link.metadata, self._store, self._settings)[0]
        path, digest = fetch_file(link.url, link.sha256 or self._hashes.get(link.url, ""), self._store, self._settings)
        self._hashes[link.url] = digest
        served.fetched(Package(project, version_in(project, name) or "", name, digest))
        return path


class _Server(ThreadingHTTPServer):
    """Takes connections on the loopback."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, index: PackageIndex) -> None:
        self.index = index
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    """Answers ``/SECRET/simple/PROJECT/`` and ``/SECRET/simple/PROJECT/FILE``."""

    server: _Server
    timeout = _IDLE

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Nothing: the address holds a secret."""

    def do_GET(self) -> None:
        """Answer."""
        parts = unquote(urlsplit(self.path).path).split("/")
        served = self.server.index.session(parts[1]) if len(parts) == 5 and parts[2] == "simple" else None
        if served is None or _PROJECT.fullmatch(parts[3]) is None:
            self.send_error(404)
            return
        try:
            if parts[4]:
                self._send_file(self.server.index.path_of(parts[3], parts[4], served))
            else:
                self._send_page(parts[3], self.server.index.files(parts[3], served))
        except MiniSandboxError as error:
            served.complain(str(error))
            served.full = error if isinstance(error, DiskFull) else served.full
            served.failed = served.failed or (error if isinstance(error, SourceError) else None)
            with suppress(OSError):
                self.send_error(404 if isinstance(error, SourceError) else 500, "see the build's error")

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self.do_GET()

    def _send_page(self, project: str, files: Mapping[str, Link]) -> None:
        if not files:
            self.send_error(404)
            return
        wants_json = JSON_TYPE in self.headers.get("Accept", "")
        body = json_page(project, files.values()) if wants_json else html_page(files.values())
        self._begin(len(body), JSON_TYPE if wants_json else "text/html; charset=utf-8")
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, path: Path | None) -> None:
        if path is None:
            self.send_error(404)
            return
        with path.open("rb") as file:
            self._begin(path.stat().st_size, "application/octet-stream")
            if self.command == "GET":
                shutil.copyfileobj(file, self.wfile, 1 << 18)

    def _begin(self, length: int, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def json_page(project: str, files: Iterable[Link]) -> bytes:
    """A project's page as PEP 691 has it, with relative addresses."""
    rows: list[dict[str, object]] = []
    for link in files:
        row: dict[str, object] = {"filename": link.filename, "url": quote(link.filename)}
        row["hashes"] = {"sha256": link.sha256} if link.sha256 else {}
        if link.requires_python:
            row["requires-python"] = link.requires_python
        if link.yanked is not None:
            row["yanked"] = link.yanked or True
        if link.uploaded:
            row["upload-time"] = link.uploaded
        if link.metadata:
            row["core-metadata"] = {"sha256": link.metadata}
        rows.append(row)
    return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": rows}).encode()


def html_page(files: Iterable[Link]) -> bytes:
    """A project's page as PEP 503 has it, with relative addresses."""
    lines = ["<!DOCTYPE html>", "<html><body>"]
    for link in files:
        fragment = f"#sha256={link.sha256}" if link.sha256 else ""
        attributes = f' data-requires-python="{html.escape(link.requires_python)}"' if link.requires_python else ""
        if link.yanked is not None:
            attributes += f' data-yanked="{html.escape(link.yanked)}"'
        if link.metadata:
            attributes += f' data-dist-info-metadata="sha256={link.metadata}"'
        lines.append(f'<a href="{quote(link.filename)}{fragment}"{attributes}>{html.escape(link.filename)}</a><br>')
    return "\n".join([*lines, "</body></html>"]).encode()
