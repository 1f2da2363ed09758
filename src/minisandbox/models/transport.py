"""Send one HTTP request to a model's server, with timeouts, size limits and proxies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import aiohttp

from minisandbox import certificates
from minisandbox.errors import BadAnswer, InvalidValue, ModelRefused, ModelUnavailable
from minisandbox.models.endpoint import SESSION_HEADER, Timeouts, check_base, proxy_for
from minisandbox.models.refusals import Failed, clean

_KEPT_ALIVE = 4.0  # seconds; less than the 5 after which uvicorn (vLLM, SGLang) closes idle connections
LARGEST_REFUSAL = 64 * 1024
"""Maximum bytes to read from an error response."""
_AGENT = "minisandbox"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response.

    Attributes:
        status: the HTTP status.
        headers: the headers, with case-insensitive names.
        body: the body; of a long error response, only the first :data:`LARGEST_REFUSAL` bytes.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Send requests to one server, on one event loop. Redirects are not followed; cookies and ``.netrc`` are ignored.

    Args:
        base: the API's address, without ``/chat/completions``.
        key: the server's key; "" for a server without keys. Errors and ``repr`` never contain the key.
        timeouts: the time limits of one try.
        largest: maximum bytes of a response.
    """

    def __init__(self, base: str, key: str, timeouts: Timeouts, largest: int) -> None:
        self._url = f"{check_base(base)}/chat/completions"
        self.server = urlsplit(self._url).netloc
        self._key = key
        self._timeouts = timeouts
        self._largest = largest
        self._client: aiohttp.ClientSession | None = None
        self._proxy = proxy_for(self._url)
        self._closed = False

    async def post(self, body: bytes, session: str) -> Answer:
        """Send a request and read the response.

        Raises:
            Failed: there is no response, or the response is too large.
        """
        client = self._open()
        # set the headers per request: aiohttp would send the client's headers, and so the key, to proxies too
        headers = {"Content-Type": "application/json", "User-Agent": _AGENT}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if session:
            headers[SESSION_HEADER] = quote(session, safe=" !#$&'()*+,/:;=?@[]~")
        proxy = self._proxy
        credentials = proxy.headers() if proxy else {}
        tunnel = self._url.startswith("https:")  # a tunnel hides the request's headers from the proxy
        try:
            async with client.post(
                self._url,
                data=body,
                headers=headers if tunnel else headers | credentials,
                proxy=proxy.url if proxy else None,
                proxy_headers=credentials if tunnel else None,
                allow_redirects=False,
            ) as response:
                return Answer(response.status, response.headers, await self._read(response))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # do not chain: aiohttp's errors contain the request with the key
            raise self._failure(error) from None

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _open(self) -> aiohttp.ClientSession:
        """Return the client, created on first use because it belongs to the running event loop."""
        if self._closed:
            raise InvalidValue("this model is closed", hint="open another one")
        if self._client is None:
            times = self._timeouts
            context = certificates.context() if self._url.startswith("https:") else True
            self._client = aiohttp.ClientSession(
                # no connection limit, because the gate limits concurrency
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_ALIVE, ssl=context),
                timeout=aiohttp.ClientTimeout(total=times.total, connect=times.connect, sock_read=times.read),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._client

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the body; reject a successful response over the size limit, and truncate a long error response."""
        largest = self._largest if response.status == 200 else LARGEST_REFUSAL
        body = bytearray()
        if (response.content_length or 0) <= largest or response.status != 200:
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > largest:
                    break
            else:
                return bytes(body)
        response.close()  # without this, aiohttp would read the rest of the response
        if response.status == 200:
            error = BadAnswer(
                f"{self.server} sent a response of more than {largest} bytes",
                reason="the model probably does not stop",
                hint="lower --max-tokens",
            )
            raise Failed(error, "seldom")
        return bytes(body[:largest])

    def _failure(self, error: Exception) -> Failed:
        # quote only an OSError: other aiohttp errors quote the response, which may contain a part of the key
        detail = f": {error}" if isinstance(error, OSError) and str(error) else ""
        cause = clean(f"{type(error).__name__}{detail}", self._key)
        where = f"no response from {self.server}"
        if isinstance(error, aiohttp.ClientHttpProxyError) and error.status in (401, 403, 407):
            refused = ModelRefused(f"the proxy refused to connect to {self.server}: {error.status}", hint=_PROXY_HINT)
            return Failed(refused, "never")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return Failed(ModelRefused(f"{where}: {cause}", reason="an untrusted certificate", hint=_TLS_HINT), "never")
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Failed(ModelUnavailable(f"{where}: no connection in {self._timeouts.connect:g} s"), "often")
        if isinstance(error, TimeoutError):
            limits = f"{self._timeouts.total:g} s"
            hint = "raise --model-timeout, or lower --max-tokens or --model-concurrency"
            return Failed(ModelUnavailable(f"{where} within {limits}", hint=hint), "seldom")
        return Failed(ModelUnavailable(f"{where}: {cause}", hint="check that the server runs, and --api-base"), "often")


_TLS_HINT = "add its authority to the system's store, or name a file that has it: SSL_CERT_FILE=FILE"
_PROXY_HINT = "set HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT, or name the server in NO_PROXY"
