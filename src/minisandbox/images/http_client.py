"""Send HTTP requests to registries and package indexes with urllib; handle certificates, redirects and retries."""

from __future__ import annotations

import email.utils
import errno
import http.client
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, cast
from urllib.parse import SplitResult, urlsplit

from minisandbox import certificates

ATTEMPTS = 5
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE = 120.0
_FINAL = (errno.ENOENT, -2, -5)  # no such file of certificates; netdb.h: EAI_NONAME, EAI_NODATA


class HttpClient:
    """A client that opens URLs. Threads may share it.

    Args:
        authorities: files with additional trusted certificate authorities.
        verify: whether certificates are verified.
        schemes: the URL schemes that redirects may lead to.
        handlers: additional urllib handlers, for example a ProxyHandler. By default, environment variables set the
            proxies.
    """

    def __init__(
        self,
        *handlers: urllib.request.BaseHandler,
        authorities: Iterable[Path] = (),
        verify: bool = True,
        schemes: Collection[str] = ("http", "https"),
    ) -> None:
        https = _Https(partial(_tls_context, tuple(authorities), verify=verify))
        self._opener = urllib.request.build_opener(https, _Redirects(schemes), *handlers)

    def open(
        self,
        request: urllib.request.Request,
        *,
        timeout: float,
        attempts: int = 1,
        pause: Callable[[float], None] = time.sleep,
    ) -> http.client.HTTPResponse:
        """Send a request and retry after transient failures; the caller closes the response.

        Args:
            request: the request.
            timeout: seconds for the connection, and for each read of the response.
            attempts: the maximum number of attempts.
            pause: a function that sleeps for the given seconds.

        Raises:
            HTTPError: the status is an error; the caller closes the exception.
            OSError: the connection failed or was lost.
            HTTPException: the response is malformed.
            ValueError: the URL of the request or of a redirect is malformed.
        """
        for attempt in range(attempts):
            is_last, wait = attempt == attempts - 1, backoff(attempt)
            try:
                response = self._opener.open(copy(request), timeout=timeout)  # ProxyHandler modifies the request
                return cast("http.client.HTTPResponse", response)
            except urllib.error.HTTPError as error:
                wait = retry_after(error.headers.get("Retry-After"), wait)
                if is_last or error.code not in _RETRIED or wait > _LONGEST_PAUSE:
                    raise
                error.close()
            except (OSError, http.client.HTTPException, ValueError) as error:
                if is_last or _is_final(error):
                    raise
            pause(wait)
        raise AssertionError("the last attempt returns or raises")


def backoff(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt (exponential backoff with jitter)."""
    return 0.5 * float(1 << attempt) * (1 + random.random() / 4)  # noqa: S311 - the jitter spreads the clients' retries


def retry_after(header: str | None, default: float) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date (RFC 9110, section 10.2.3)."""
    if header is None:
        return default
    try:
        if header.strip().isdigit():
            return float(header)
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return default


def read_bounded(response: http.client.HTTPResponse, limit: int) -> bytes | None:
    """Read a response; return None if it is longer than the limit.

    Raises:
        HTTPException: the response was truncated.
    """
    content = response.read(limit + 1)
    if len(content) <= limit and response.length:
        raise http.client.IncompleteRead(content, response.length)
    return None if len(content) > limit else content


def split_url(url: str) -> SplitResult:
    """Split a URL; return empty parts if the URL is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _tls_context(authorities: Iterable[Path], *, verify: bool) -> ssl.SSLContext:
    if verify:
        context = certificates.context()
        for path in authorities:
            context.load_verify_locations(path)
        return context
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _Https(urllib.request.HTTPSHandler):
    """A urllib handler that loads certificates, which takes 20 ms, only if a URL needs TLS."""

    def __init__(self, new_context: Callable[[], ssl.SSLContext]) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)
        self._new_context = lru_cache(1)(new_context)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Connect with the client's TLS context."""
        return self.do_open(http.client.HTTPSConnection, req, context=self._new_context())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A urllib handler that follows redirects only to allowed URL schemes."""

    def __init__(self, schemes: Collection[str]) -> None:
        self._schemes = schemes

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> http.client.HTTPResponse | None:
        """Follow a redirect; close the response if the redirect's URL is malformed."""
        try:
            return cast("http.client.HTTPResponse | None", super().http_error_302(req, fp, code, msg, headers))
        except ValueError:
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request for the target of a redirect.

        Raises:
            URLError: the target has a scheme that is not allowed.
        """
        scheme = split_url(newurl).scheme
        if scheme not in self._schemes:
            fp.close()
            raise urllib.error.URLError(f"it redirects to an address of {scheme!r}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_final(error: OSError | http.client.HTTPException | ValueError) -> bool:
    """Return whether another attempt would fail as well."""
    cause = getattr(error, "reason", error)
    if type(error) is urllib.error.URLError and isinstance(cause, str):  # the URL is invalid
        return True
    return isinstance(cause, ssl.SSLError | ValueError) or (isinstance(cause, OSError) and cause.errno in _FINAL)
