"""Send HTTP requests to a model's server, within time and size limits, and classify failures for retries."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, unquote, urlsplit

from minisandbox import certificates
from minisandbox.errors import BadAnswer, ContextExceeded, InvalidValue, ModelError, ModelRefused, ModelUnavailable
from minisandbox.redaction import SHORTEST_KEY, redact

if TYPE_CHECKING:
    import aiohttp

SESSION_HEADER = "X-Session-Id"
"""The header with the rollout's name, by which a router can send all its requests to the engine with its cache."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of one try, in seconds.

    Attributes:
        connect: maximum time until the connection is established, DNS and TLS included.
        read: maximum time until the first data of the response, and between two reads; None for the value of ``total``.
        total: maximum time of the whole try.
    """

    connect: float = 20.0
    read: float | None = None
    total: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"Timeouts.{name} is {value!r}", hint="give a positive number of seconds")


def check_base(base: str) -> str:
    """Return the address of an API without a trailing slash.

    Raises:
        InvalidValue: ``base`` is not an HTTP address, or contains a user name, password or query.
    """
    hint = "for instance http://localhost:8000/v1"
    try:
        parts = urlsplit(base)
        parts.port  # noqa: B018 - the property raises ValueError for a malformed port
    except ValueError as error:
        raise InvalidValue(f"--api-base is not an address: {error}", hint=hint) from None
    if "@" in parts.netloc or parts.query or parts.fragment:  # omit the address, which may contain a secret
        raise InvalidValue(
            "--api-base contains a user name, password or query",
            reason="the address is recorded with the run and shown in messages",
            hint="give the key in an environment variable: --api-key-env",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValue(f"--api-base {base} is not an http:// or https:// address", hint=hint)
    return base.rstrip("/").removesuffix("/chat/completions")


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        url: the proxy's address, without user name and password.
        user: the user name; "" for a proxy without authentication.
        password: the user's password.
    """

    url: str
    user: str = ""
    password: str = field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Return the proxy's authentication headers."""
        if not self.user:
            return {}
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"Proxy-Authorization": f"Basic {token}"}


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy that the environment sets for an address, or None; loopback addresses never use a proxy.

    Raises:
        InvalidValue: the environment names something other than an HTTP proxy.
    """
    parts = urlsplit(url)
    address = urllib.request.getproxies().get(parts.scheme)
    if not address or _is_loopback(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        raise InvalidValue(
            f"the environment's proxy for {parts.scheme} is not an HTTP proxy",
            hint=f"name an http:// proxy, or add {parts.hostname} to NO_PROXY",
        )
    where = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
    return Proxy(where, unquote(proxy.username or ""), unquote(proxy.password or ""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- failures ---------------------------------------------------------------------------------------------------------

Again = Literal["often", "seldom", "never"]
"""How often to retry: ``often`` after transient failures, ``seldom`` after failures that will probably repeat."""

_LONGEST_WORDS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_BY_CODE = frozenset({"context_length_exceeded", "exceed_context_size_error"})
# Error messages of servers about a conversation that exceeds the context:
# vLLM, OpenAI, DeepSeek: "maximum context length is N tokens"
# SGLang: "longer than the model's context length"
# llama.cpp: "exceeds the available context size"; versions without an error type: "context size exceeded"
# vLLM without max_tokens: "max_tokens must be at least 1, got -N"; vLLM's engine: "maximum model length"
_BY_WORDS = re.compile(
    r"maximum (?:context|model|input) length|model's context length|available context size|context size exceeded"
    r"|exceeds? (?:the )?context (?:window|length|size)|context window exceeds|prompt is too long"
    r"|max_tokens must be at least 1, got -|please reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE,
)
_PASSES = frozenset({408, 409, 425, 429})
_OF_ONE_REQUEST = frozenset({400, 413, 422})
_NO_MONEY = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})
_HINTS: Mapping[int, str] = {
    400: "if an option is named, leave it out, or start the server with support for it",
    401: "check that the variable in --api-key-env has the key of this server",
    403: "check that this key is allowed to use this model",
    404: "check that --model is listed by the server's /models; most servers' --api-base ends with /v1",
    405: "check --api-base: it is not a chat completions API; most servers' ends with /v1",
    407: "give the proxy's user name and password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
}


class Failed(Exception):
    """A failed try of a request.

    Attributes:
        error: the error to raise after the last try.
        again: how often to retry.
        after: the seconds that the server asks to wait, or None.
        named: the text of the error response, in which to search for rejected fields.
    """

    def __init__(self, error: ModelError, again: Again, *, after: float | None = None, named: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.again: Again = again
        self.after = after
        self.named = named


def clean(text: str, secret: str = "") -> str:
    """Return a server's text as one line of bounded length, without control characters and without the key."""
    if len(secret) >= SHORTEST_KEY:
        text = redact(text, secret)
    line = _CONTROL.sub(" ", text).strip()
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]}..."


def failure_of(
    status: int, headers: Mapping[str, str], body: bytes, *, server: str, model: str, secret: str = ""
) -> Failed:
    """Classify an error response: which error to raise, and how often to retry.

    Args:
        status: the HTTP status, or the status in the body if the HTTP status is 200.
        headers: the response's headers.
        body: the body, possibly truncated.
        server: the server's name, for the message.
        model: the requested model.
        secret: the key, which the message must not contain.
    """
    message, codes = _error_text(body, secret)
    what = f"{server} responds {status} for {model!r}: {message or '(empty)'}"
    named = body.decode("utf-8", "replace")
    if is_about_length(status, body):
        error = ContextExceeded(what, hint="shorten the history or the response (--max-tokens), or raise the context")
        return Failed(error, "never", named=named)
    if status in _PASSES or status >= 500:
        if codes & _NO_MONEY:
            refused = ModelRefused(what, reason="the account has no quota left", hint="see the provider's billing page")
            return Failed(refused, "never")
        unavailable = ModelUnavailable(what, hint="if the server is overloaded, lower --model-concurrency")
        return Failed(unavailable, "often", after=retry_after(headers))
    if 300 <= status < 400:
        location = clean(headers.get("Location", "another address"), secret)
        hint = f"redirects are not followed, to protect the key; the server is at {location}: change --api-base"
        return Failed(ModelRefused(what, hint=hint), "never")
    refused = ModelRefused(what, hint=_HINTS.get(status, "look at the server's log"))
    refused.every_request = status not in _OF_ONE_REQUEST
    return Failed(refused, "never", named=named)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait (RFC 9110, 10.2.3), or None."""
    try:
        if "retry-after-ms" in headers:  # sent by OpenAI
            return max(float(headers["retry-after-ms"]) / 1000, 0.0)
        text = headers.get("Retry-After", "")
        if text.strip().isdigit():
            return float(text)
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0) if text else None
    except (ValueError, OverflowError):
        return None


def error_in(body: object) -> tuple[int, bytes] | None:
    """Return the status and text of an error that a server sent with HTTP status 200, or None if there is no error."""
    error = body.get("error") if isinstance(body, Mapping) and not body.get("choices") else None
    if isinstance(body, Mapping) and body.get("object") == "error":
        error = body
    if not error:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    status = code if isinstance(code, int) and 300 <= code < 600 else 500
    return status, json.dumps(body).encode()


def is_about_length(status: int, body: bytes) -> bool:
    """Return whether an error response says that a request exceeds the model's context."""
    message, codes = _error_text(body, "")
    if codes & _BY_CODE and status < 600:
        return True
    # llama.cpp sends 500; with other statuses the same words may mean another error
    return status in (400, 413, 422, 500) and _BY_WORDS.search(message) is not None


def _error_text(body: bytes, secret: str) -> tuple[str, frozenset[str]]:
    """Return the cleaned message of an error response, and its ``code`` and ``type``.

    The body is ``{"error": {"message", "type", "code"}}``, vLLM's old format, ``detail``, or plain text.
    """
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        return clean(body.decode("utf-8", "replace"), secret), frozenset()
    error = value.get("error", value) if isinstance(value, Mapping) else value
    if not isinstance(error, Mapping):
        return clean(str(error), secret), frozenset()
    message = error.get("message") or error.get("detail") or error
    codes = frozenset(str(error.get(name)) for name in ("code", "type"))
    return clean(message if isinstance(message, str) else json.dumps(message), secret), codes


# --- transport --------------------------------------------------------------------------------------------------------

_KEPT_ALIVE = 4.0  # seconds; uvicorn, the HTTP server of vLLM and SGLang, closes idle connections after 5
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
        base: the API's address: ``http://localhost:8000/v1``.
        key: the server's key; "" for a server without keys. Errors and ``repr`` never contain the key.
        timeouts: the time limits of one try.
        largest: maximum bytes of a response.
    """

    def __init__(self, base: str, key: str, timeouts: Timeouts, largest: int) -> None:
        self._base = check_base(base)
        self.server = urlsplit(self._base).netloc
        self._key = key
        self._timeouts = timeouts
        self._largest = largest
        self._client: aiohttp.ClientSession | None = None
        self._proxy = proxy_for(self._base)
        self._closed = False

    async def send(self, path: str, body: bytes | None = None, session: str = "") -> Answer:
        """Send a request and read the response.

        Args:
            path: the path below the API's address: ``/chat/completions``.
            body: the JSON to send with POST; None to send a GET request.
            session: the name of the rollout.

        Raises:
            Failed: there is no response, or the response is too large.
        """
        import aiohttp  # noqa: PLC0415 - takes 0.25 s to import, and only models behind a server need it

        client = self._open()
        # Set the headers per request: aiohttp sends the client's own headers to proxies too, which would leak the key.
        headers = {"Content-Type": "application/json", "User-Agent": _AGENT}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if session:
            headers[SESSION_HEADER] = quote(session, safe=" !#$&'()*+,/:;=?@[]~")
        proxy = self._proxy
        credentials = proxy.headers() if proxy else {}
        tunnel = self._base.startswith("https:")  # HTTPS goes through a tunnel, so a proxy never sees the headers
        try:
            async with client.request(
                "GET" if body is None else "POST",
                f"{self._base}{path}",
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
            import aiohttp  # noqa: PLC0415 - slow to import

            times = self._timeouts
            context = certificates.context() if self._base.startswith("https:") else True
            self._client = aiohttp.ClientSession(
                # no connection limit, because Gate limits the concurrency
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
        import aiohttp  # noqa: PLC0415 - slow to import

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
