"""A small registry (distribution-spec 1.1) on this machine, which misbehaves as a test tells it to."""

from __future__ import annotations

import base64
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.unit.oci_tools import MadeImage, digest

from minisandbox.images import http_client
from minisandbox.images.oci import push, registry

Fault = Callable[["Handler"], bool]
"""Answers in the registry's place; returns whether it did."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer as the registry would, unless a fault is due."""
        registry = self.server.registry
        registry.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        registry.methods.append(f"{self.command} {self.path.partition('?')[0]}")
        if self.path.startswith("/token"):
            self._token()
            return
        for pattern, faults in registry.faults.items():
            if re.search(pattern, self.path) and faults and faults.pop(0)(self):
                return
        if registry.token and self.headers.get("Authorization") != f"Bearer {registry.token}":
            here = f"http://127.0.0.1:{registry.port}/token"
            self.send(
                401, b"{}", {"WWW-Authenticate": f'Bearer realm="{here}",service="here",scope="repository:x:pull"'}
            )
        elif registry.basic and not registry.token and self.headers.get("Authorization") != registry.basic_header:
            self.send(401, b"{}", {"WWW-Authenticate": 'Basic realm="here"'})
        else:
            self._serve(registry)

    do_POST = do_HEAD = do_PUT = do_PATCH = do_GET  # noqa: N815

    def _token(self) -> None:
        registry = self.server.registry
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if self.command == "POST":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            query = {name: values[0] for name, values in parse_qs(body).items()}
            registry.requests.append(("refresh", query))
        known = "refresh_token" in query or self.headers.get("Authorization") == registry.basic_header
        if registry.basic and not known:
            self.send(401, b'{"errors": [{"code": "UNAUTHORIZED", "message": "who are you"}]}')
        else:
            self.send(200, b'{"token": "%s"}' % registry.token.encode())

    def read_body(self, most: int = 1 << 40) -> bytes:
        """Read what the client sends."""
        return self.rfile.read(min(most, int(self.headers.get("Content-Length") or 0)))

    def _push(self, registry: Registry) -> None:
        """Take blobs and manifests (distribution-spec, "Push")."""
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        name, data = path.rpartition("/")[2], self.read_body()
        if self.command == "POST":
            mounted = query.get("mount", [""])[0]
            if mounted in registry.blobs:
                self.send(201, b"")
                return
            name = f"upload{secrets.token_hex(4)}"  # as registries do: a name is not used again
            registry.uploads[name] = b""
        elif "/manifests/" in path:
            registry.manifests |= {name: data, digest(data): data}
            self.send(201, b"")
            return
        elif name not in registry.uploads:
            self.send(404, b'{"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]}')
            return
        else:
            registry.uploads[name] += data
        taken = registry.uploads[name]
        if self.command == "PUT":
            fits = digest(taken) == query["digest"][0]
            registry.blobs |= {digest(taken): taken} if fits else {}
            self.send(201 if fits else 400, b"" if fits else b'{"errors": [{"code": "DIGEST_INVALID"}]}')
            return
        place = {"Location": f"/v2/team/app/blobs/uploads/{name}?state=x", "Range": f"0-{max(len(taken) - 1, 0)}"}
        self.send(204 if self.command == "GET" else 202, b"", place)

    def _serve(self, registry: Registry) -> None:
        if self.command in ("POST", "PUT", "PATCH") or "/uploads/" in self.path:
            self._push(registry)
            return
        kind, _, name = self.path.rpartition("/")
        blob = registry.manifests.get(name) if kind.endswith("manifests") else registry.blobs.get(name)
        if blob is None:
            self.send(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}')
            return
        more = {"Docker-Content-Digest": digest(blob), "Content-Type": "application/json"}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if start and registry.resumes:
            self.send(206, blob[int(start[1]) :], more)
        else:
            self.send(200, blob, more)

    def send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        """Send an answer; with a length that its body has not, the connection ends after it."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = length is not None


class Server(ThreadingHTTPServer):
    """The server of a registry."""

    daemon_threads = True
    registry: Registry

    def handle_error(self, *_: object) -> None:
        """Print nothing: a client that hangs up is what some tests are about."""


@dataclass
class Registry:
    """What a registry holds, and how it misbehaves.

    Attributes:
        port: where it listens.
        faults: for paths that match, what the first, second, ... request meets.
        requests: (path, headers) of each.
        methods: method and path of each.
        uploads: what came of blobs that are pushed.
        token: what a client must have from the token server; "" for none.
        basic: ``USER:PASSWORD`` that is asked for; "" for none.
        resumes: whether it answers ranges.
    """

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    token: str = ""
    basic: str = ""
    resumes: bool = True

    @property
    def basic_header(self) -> str:
        """What a client that has logged in sends."""
        return "Basic " + base64.b64encode(self.basic.encode()).decode()

    def add(self, image: MadeImage, tag: str) -> str:
        """Hold an image; return its reference."""
        self.blobs |= image.blobs
        self.manifests |= {tag: image.manifest, digest(image.manifest): image.manifest}
        return f"127.0.0.1:{self.port}/team/app:{tag}"

    def paths(self, word: str) -> list[str]:
        """The paths asked for that have a word in them."""
        return [path for path, _ in self.requests if word in path]


@contextmanager
def serve() -> Iterator[Registry]:
    """Run a registry."""
    server = Server(("127.0.0.1", 0), Handler)
    server.registry = Registry(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def isolate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let pulls wait for nothing, read no file of this machine, and use no proxy."""
    monkeypatch.setattr(http_client, "backoff", lambda _: 0.0)
    monkeypatch.setattr(registry, "backoff", lambda _: 0.0)
    monkeypatch.setattr(push, "backoff", lambda _: 0.0)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "registries.conf").touch()


def answer(status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> Fault:
    """A fault that answers this."""

    def give(handler: Handler) -> bool:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.send(status, body, more, length=length)
        return True

    return give


def hang_up(handler: Handler) -> bool:
    """A fault that closes the connection without an answer."""
    handler.close_connection = True
    return True


def cut_after(count: int) -> Fault:
    """A fault that sends only so many bytes of a blob, from where it was asked for."""

    def give(handler: Handler) -> bool:
        blob = handler.server.registry.blobs[handler.path.rpartition("/")[2]]
        start = int((re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "") or [0, 0])[1])
        rest = blob[start:]
        handler.send(206 if start else 200, rest[:count], length=len(rest))
        return True

    return give
