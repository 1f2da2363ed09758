"""Read URLs of package indexes with the host's certificates, proxies and credentials; cache files by their hash."""

from __future__ import annotations

import base64
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from minisandbox.errors import SourceError
from minisandbox.images.http_client import HttpClient
from minisandbox.images.python.index import without_credentials
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import shown
from minisandbox.store import Store
from minisandbox.store.disk.durable import sync_directory
from minisandbox.store.disk.faults import FULL, store_faults

_ATTEMPTS = 3
_GONE = frozenset({404, 410})
_BLOCK = 1 << 18
_HINT = "check the network, the proxy and the certificates: pip's settings (`pip config list`) are used"


class Page(NamedTuple):
    """A page of a package index.

    Attributes:
        content: the content of the page.
        content_type: the media type of the page.
        url: the URL after redirects.
    """

    content: bytes
    content_type: str
    url: str


@dataclass(slots=True)
class Web:
    """A reader of URLs. Threads may share it.

    Attributes:
        settings: the package index settings of the host.
    """

    settings: IndexSettings
    _clients: dict[bool, HttpClient] = field(default_factory=dict)

    def read(self, url: str, accept: str = "*/*") -> Page | None:
        """Read a page from an ``https``, ``http`` or ``file`` URL; a directory is read as a page of links to its files.

        Args:
            url: the URL of the page.
            accept: the accepted content types.

        Returns:
            The page; None if the server has no such page.

        Raises:
            SourceError: the URL cannot be read.
        """
        if urlsplit(url).scheme == "file":
            return _local_page(Path(urllib.request.url2pathname(urlsplit(url).path)))
        with self.open(url, accept) as response:
            if response is None:
                return None
            return Page(response.read(), response.headers.get_content_type(), response.geturl())

    @contextmanager
    def open(self, url: str, accept: str = "*/*") -> Iterator[HTTPResponse | None]:
        """Open a URL; yield None if the server has no such page.

        Raises:
            SourceError: the URL cannot be read.
        """
        summary = f"cannot read {shown(url)}"
        headers = {"Accept": accept, "User-Agent": "minisandbox"}
        request = urllib.request.Request(without_credentials(url), headers=headers)  # noqa: S310 - _may_link checked the scheme
        try:
            with self.client(url).open(request, timeout=self.settings.timeout, attempts=_ATTEMPTS) as response:
                yield response
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _GONE:
                raise SourceError(summary, reason=f"the server answered {error.code} {error.reason}".rstrip()) from None
            yield None
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in FULL:  # a full disk is not a network error
                raise
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
            raise SourceError(summary, reason=reason, hint=_HINT) from None

    def client(self, url: str) -> HttpClient:
        """Return the HTTP client for a URL. For hosts that the user trusts, it does not verify certificates."""
        verify = urlsplit(url).hostname not in {name.partition(":")[0] for name in self.settings.trusted_hosts}
        if verify not in self._clients:
            proxies = {name.removesuffix("_proxy"): value for name, value in self.settings.proxies}
            if "all" in proxies:
                proxies = {"http": proxies["all"], "https": proxies["all"], **proxies}
            authorities = [self.settings.cert] if self.settings.cert is not None else []
            self._clients[verify] = HttpClient(
                urllib.request.ProxyHandler(proxies),  # urllib itself applies no_proxy
                _Credentials(self.settings.urls),
                authorities=authorities,
                verify=verify,
            )
        return self._clients[verify]


class _Credentials(urllib.request.BaseHandler):
    """A urllib handler that sends the credentials of an index to the server of that index only."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._headers: dict[tuple[str, str | None, int | None], str] = {}
        for parts in map(urlsplit, urls):
            if parts.username is not None:
                login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                self._headers.setdefault(_server(parts), "Basic " + base64.b64encode(login.encode()).decode())

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        """Add the credentials to a request; urllib also calls this for redirected requests."""
        if credentials := self._headers.get(_server(urlsplit(request.full_url))):
            request.add_unredirected_header("Authorization", credentials)
        return request

    https_request = http_request


def _server(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _local_page(path: Path) -> Page | None:
    if path.is_dir() and not (path / "index.html").is_file():
        links = "".join(f'<a href="{urllib.request.pathname2url(name)}">{name}</a>' for name in os.listdir(path))
        return Page(links.encode(), "text/html", f"{path.as_uri()}/")
    path = path / "index.html" if path.is_dir() else path
    return Page(path.read_bytes(), "text/html", path.as_uri()) if path.is_file() else None


def fetch_file(url: str, sha256: str, store: Store, web: Web) -> tuple[Path, str]:
    """Return a file and its hash from the store's downloads; download the file if it is missing.

    Args:
        url: the URL of the file.
        sha256: the expected hash; "" if the index states none.
        store: the store that keeps downloads by their hashes.
        web: the reader of URLs.

    Raises:
        SourceError: the file cannot be downloaded, or has another hash.
        DiskFull: the disk is full.
    """
    if sha256 and (path := store.download_path(sha256)).is_file():
        return path, sha256
    with store.lock(f"download-{sha256 or hashlib.sha256(url.encode()).hexdigest()}"):
        if sha256 and (path := store.download_path(sha256)).is_file():
            return path, sha256
        return _download(url, sha256, store, web)


def _download(url: str, sha256: str, store: Store, web: Web) -> tuple[Path, str]:
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    with store.staging("download") as staging, store_faults(f"download {name}"):
        partial_path = staging / "part"
        digest = _receive(url, partial_path, web)
        if sha256 not in ("", digest):
            raise SourceError(
                f"{name} does not have the sha256 {sha256}",
                reason=f"what came has {digest}",
                hint="the index and its file do not fit: nothing was kept; try again, or correct the hash",
            )
        path = store.download_path(digest)
        partial_path.replace(path)
        sync_directory(path.parent)
    return path, digest


def _receive(url: str, path: Path, web: Web) -> str:
    """Download a URL into a new file; return its hash."""
    digest, received = hashlib.sha256(), 0
    with path.open("xb") as target, web.open(url) as response:
        if response is None:
            hint = "try again, or name another version"
            raise SourceError(f"{shown(url)} is listed on the index, but not there", hint=hint)
        while block := response.read(_BLOCK):
            digest.update(block)
            received += target.write(block)
        stated_size = response.headers.get("Content-Length", str(received))
        if stated_size != str(received):
            reason = f"the connection broke off after {received} of {stated_size} bytes"
            raise SourceError(f"cannot download {shown(url)}", reason=reason, hint="try again")
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
