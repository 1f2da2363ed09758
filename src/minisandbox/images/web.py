"""Reading URLs with the host's settings: certificates, proxies, credentials, time-outs, retries; no third party."""

from __future__ import annotations

import base64
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPException, InvalidURL, responses
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import url2pathname
from urllib.response import addinfourl

from minisandbox.errors import SourceError
from minisandbox.images.index import IndexSettings, shown, without_credentials
from minisandbox.store.faults import FULL

_ATTEMPTS = 3
_PAUSE = 0.5
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_AGENT = "minisandbox"


@dataclass(frozen=True, slots=True)
class Web:
    """A reader of URLs.

    Attributes:
        settings: the host's.
    """

    settings: IndexSettings

    def read(self, url: str, accept: str = "*/*") -> tuple[bytes, str, str] | None:
        """Read a page.

        Args:
            url: ``https``, ``http`` or ``file``.
            accept: the content types wanted.

        Returns:
            The content, its type, and the URL it came from after redirects; None where the server has no such page.

        Raises:
            SourceError: it cannot be read.
        """
        if urlsplit(url).scheme == "file":
            return _read_file(url)
        with self.open(url, accept) as answer:
            if answer is None:
                return None
            content_type = answer.headers.get_content_type()
            return answer.read(), content_type, answer.geturl()

    @contextmanager
    def open(self, url: str, accept: str = "*/*") -> Iterator[addinfourl | None]:
        """Open a URL; None where the server says that there is nothing.

        Raises:
            SourceError: it cannot be read.
        """
        with _named(url):
            answer = self._open(url, accept)
            if answer is None:
                yield None
                return
            with answer:
                yield answer

    def _open(self, url: str, accept: str) -> addinfourl | None:
        opener = self._opener(url)
        request = _request(url, accept, self.settings)
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                answer: addinfourl = opener.open(request, timeout=self.settings.timeout)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in {404, 410}:
                    return None
                if last or error.code not in _RETRIED:
                    raise
            except OSError as error:
                if last or not isinstance(getattr(error, "reason", error), TimeoutError | ConnectionError):
                    raise
            else:
                return answer
            time.sleep(_PAUSE * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        table = {name.removesuffix("_proxy"): value for name, value in self.settings.proxies}
        if "all" in table:
            table = {"http": table["all"], "https": table["all"], **table}
        proxies = urllib.request.ProxyHandler(table)  # it heeds no_proxy by itself
        context = self._context(urlsplit(url).hostname or "")
        return urllib.request.build_opener(proxies, urllib.request.HTTPSHandler(context=context))

    def _context(self, host: str) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self.settings.cert is not None:
            context.load_verify_locations(self.settings.cert)
        if host in {name.partition(":")[0] for name in self.settings.trusted_hosts}:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def copy_with_limit(source: IO[bytes], target: IO[bytes], limit: int) -> int:
    """Copy a stream, at most ``limit`` bytes of it.

    Returns:
        How many bytes were copied.

    Raises:
        SourceError: there are more.
    """
    copied = 0
    while block := source.read(1 << 16):
        copied += len(block)
        if copied > limit:
            raise SourceError(f"the download is larger than {limit} bytes")
        target.write(block)
    return copied


def _request(url: str, accept: str, settings: IndexSettings) -> urllib.request.Request:
    """A request; credentials go into a header that is not sent on to where a redirect leads."""
    request = urllib.request.Request(  # noqa: S310 - the schemes are checked by whoever lists the URLs
        without_credentials(url), headers={"Accept": accept, "User-Agent": _AGENT}
    )
    if said := authorization(url, settings):
        request.add_unredirected_header("Authorization", said)
    return request


def authorization(url: str, settings: IndexSettings) -> str:
    """Return what tells a URL's server who asks; "" where nothing does."""
    # files of an index are links of its pages, which have no credentials in them: those of its address are theirs too
    known = (urlsplit(one) for one in (url, *settings.urls))
    owner = next((one for one in known if one.username is not None and _server(one) == _server(urlsplit(url))), None)
    if owner is None:
        return ""
    pair = f"{unquote(owner.username or '')}:{unquote(owner.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _server(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _read_file(url: str) -> tuple[bytes, str, str] | None:
    path = file_path(url)
    if path.is_dir():
        index = path / "index.html"
        if not index.is_file():
            links = "".join(f'<a href="{urllib.request.pathname2url(name)}">{name}</a>' for name in os.listdir(path))
            return links.encode(), "text/html", url.rstrip("/") + "/"
        path = index
    if not path.is_file():
        return None
    return path.read_bytes(), "text/html", path.as_uri()


def file_path(url: str) -> Path:
    """Return the path that a ``file://`` URL names."""
    return Path(url2pathname(urlsplit(url).path))


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Say which URL could not be read, and why, without what may be a secret in it."""
    try:
        yield
    except urllib.error.HTTPError as error:
        reason = f"the server answered {error.code} {responses.get(error.code, '')}".rstrip()
        raise SourceError(f"cannot read {shown(url)}", reason=reason) from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in FULL:  # what came could not be kept: no fault of the server
            raise
        reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        if isinstance(error, BadStatusLine) and not isinstance(error, OSError):
            reason = "the server's answer is no HTTP"  # it may repeat what the server was sent
        elif isinstance(error, InvalidURL) or not isinstance(error, OSError | HTTPException):  # which quote addresses
            reason = "the address, or one that it leads to, is none that can be asked"
        hint = "check the network, the proxy and the certificates: pip's settings (`pip config list`) are used"
        raise SourceError(f"cannot read {shown(url)}", reason=reason, hint=hint) from None
