"""Send requests to a container registry: authenticate, retry, and raise errors with hints (distribution-spec 1.1)."""

from __future__ import annotations

import email.message
import functools
import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

from minisandbox import __version__
from minisandbox.errors import MiniSandboxError, NotFound, RegistryError
from minisandbox.images.http_client import ATTEMPTS, HttpClient, retry_after, split_url
from minisandbox.images.oci.auth import Credentials, auth_files, find_credentials
from minisandbox.redaction import redact
from minisandbox.spec import DOCKER_HUB, Remote

TIMEOUT = 30.0
"""Seconds for a connection, and for each read of a response."""
_LIMITED = 300.0
"""Seconds to wait if a registry rejects a request because of a rate limit, without a Retry-After header."""
_RATE = re.compile(r"([0-9]{1,9});w=([0-9]{1,9})")
_MOST_ERROR = 1 << 16
_MOST_TOKEN = 1 << 20
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_CODE = re.compile(r"[A-Z_]{1,60}")
_SERVERS = {DOCKER_HUB: "registry-1.docker.io"}
_CERTIFICATES = ("/etc/containers/certs.d", "/etc/docker/certs.d")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_AGENT = {"User-Agent": f"minisandbox/{__version__}"}


Body = bytes | Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A registry's limit on pulls per client (docs.docker.com, "Pull usage and limits").

    Attributes:
        count: the number of pulls per window.
        window: the length of the window in seconds.
        remaining: the number of remaining pulls; None if unknown.
    """

    count: int
    window: float
    remaining: int | None = None

    @classmethod
    def parse(cls, headers: email.message.Message) -> Self | None:
        """Parse a response's headers like ``RateLimit-Limit: 100;w=21600``; return None if it has no such header."""
        limit = _RATE.fullmatch(headers.get("RateLimit-Limit", ""))
        remaining = _RATE.fullmatch(headers.get("RateLimit-Remaining", ""))
        return cls(int(limit[1]), float(limit[2]), int(remaining[1]) if remaining else None) if limit else None

    @property
    def pause(self) -> float:
        """The minimum number of seconds between two requests that keeps the client below the limit."""
        return max(self.window / max(self.count, 1), 1.0)

    def __str__(self) -> str:
        """Return the limit for messages, for example ``100 in 6 hours``."""
        return f"{self.count} in {self.window / 3600:g} hours"


@dataclass(slots=True)
class RegistryClient:
    """A client of one repository in a registry. Threads may share it.

    Attributes:
        remote: the repository.
        pause: a function that sleeps for the given seconds.
        rights: the access to request if the registry's challenge has no scope: ``pull`` or ``pull,push``.
    """

    remote: Remote
    pause: Callable[[float], None] = time.sleep
    rights: str = "pull"
    _authorization: str = ""
    _scheme: str = ""
    _secrets: list[str] = field(default_factory=list)

    def get(self, path: str, accept: str = "*/*", offset: int = 0) -> http.client.HTTPResponse:
        """Request a resource of the repository; the caller closes the response.

        Args:
            path: the path below ``/v2/NAME/``.
            accept: the accepted media types.
            offset: the number of bytes to skip; a registry that does not support range requests sends all bytes.

        Raises:
            NotFound: the registry has no such resource.
            RegistryError: the request failed, or the registry refused it.
        """
        return self.request("GET", path, {"Accept": accept, **({"Range": f"bytes={offset}-"} if offset else {})})

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Body | None = None
    ) -> http.client.HTTPResponse:
        """Send a request; the caller closes the response.

        Args:
            method: the HTTP method, for example ``PUT``.
            path: the path below ``/v2/NAME/``, or a URL that the registry sent.
            headers: further headers.
            body: the body, or a function that returns the body. With a function, a request is repeated only after
                logging in, not after a failure.

        Raises:
            NotFound: the registry has no such resource.
            RegistryError: the request failed, or the registry refused it.
        """
        try:
            try:
                return self._open(method, path, headers or {}, body)
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                with error:
                    self._log_in(error.headers.get_all("WWW-Authenticate") or [])
            return self._open(method, path, headers or {}, body)
        except urllib.error.HTTPError as error:
            with error:
                self._explain(error, f"/{path}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MiniSandboxError):  # some MiniSandboxErrors are also OSErrors
                raise
            raise self._unreachable(error) from None

    # --- requests ---

    def _open(self, method: str, path: str, headers: Mapping[str, str], body: Body | None) -> http.client.HTTPResponse:
        base = self._base()
        url = urllib.parse.urljoin(f"{base}/v2/{self.remote.repository}/", path)
        is_own = url.startswith(f"{base}/")
        if not is_own and url.partition(":")[0] not in self._schemes:
            raise urllib.error.URLError(f"it sends its clients to {url[:100]!r}")
        content, attempts = (body(), 1) if callable(body) else (body, ATTEMPTS)
        request = urllib.request.Request(url, content, {**_AGENT, **headers}, method=method)  # noqa: S310 - checked
        if self._authorization and is_own:  # never send credentials to another server
            request.add_unredirected_header("Authorization", self._authorization)
        return self._opener().open(request, timeout=TIMEOUT, attempts=attempts, pause=self.pause)

    @property
    def _schemes(self) -> tuple[str, ...]:
        return ("http", "https") if self._may_be_plain else ("https",)

    @property
    def _may_be_plain(self) -> bool:
        """Return whether plain HTTP is allowed: the registry is on this machine, or a configuration file allows it."""
        return self.remote.insecure or split_url(f"//{self.remote.host}").hostname in _LOCAL

    def _base(self) -> str:
        server = _SERVERS.get(self.remote.host, self.remote.host)
        if not self._scheme:
            self._scheme = "http" if self._may_be_plain and not self._speaks_tls(server) else "https"
        return f"{self._scheme}://{server}"

    def _speaks_tls(self, server: str) -> bool:
        # The first client loads no certificates, which a server without TLS does not need.
        clients = dict.fromkeys((_http_client(self.remote.host, True, self._schemes), self._opener()))
        return all(self._accepts(server, client) for client in clients)

    def _accepts(self, server: str, client: HttpClient) -> bool:
        try:
            with client.open(urllib.request.Request(f"https://{server}/v2/"), timeout=TIMEOUT):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            return False

    def _opener(self) -> HttpClient:
        return _http_client(self.remote.host, self.remote.insecure, self._schemes)

    # --- authentication ---

    def _log_in(self, challenges: list[str]) -> None:
        credentials = find_credentials(self.remote.host, self.remote.repository)
        self._secrets = [credentials.secret, credentials.basic().partition(" ")[2]] if credentials else []
        for challenge in challenges:
            scheme, _, parameters = challenge.strip().partition(" ")
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(parameters)), credentials)}"
                return
            if scheme.lower() == "basic" and credentials is not None and credentials.user:
                self._authorization = credentials.basic()
                return

    def _token(self, challenge: dict[str, str], credentials: Credentials | None) -> str:
        """Request a bearer token from the registry's token server (distribution, spec/auth/token.md and oauth.md)."""
        realm = challenge.get("realm", "")
        realm_parts = split_url(realm)
        may_be_plain = self.remote.insecure or (self._may_be_plain and realm_parts.hostname in _LOCAL)
        if realm_parts.scheme != "https" and not (realm_parts.scheme == "http" and may_be_plain):
            raise RegistryError(
                f"registry {self.remote.host} sends its clients to {realm[:100]!r} for a token",
                reason="credentials are not sent without TLS",
                hint="mark the registry as insecure in registries.conf if that is meant",
            )
        scope = challenge.get("scope") or f"repository:{self.remote.repository}:{self.rights}"
        parameters = {"service": challenge.get("service", ""), "scope": scope}
        form = None
        if credentials is not None and not credentials.user:
            refresh = {"grant_type": "refresh_token", "refresh_token": credentials.secret, "client_id": "minisandbox"}
            form = urllib.parse.urlencode(parameters | refresh).encode()
        query = "" if form else ("&" if "?" in realm else "?") + urllib.parse.urlencode(parameters)
        request = urllib.request.Request(realm + query, form)  # noqa: S310 - checked above
        if credentials is not None and credentials.user:
            request.add_unredirected_header("Authorization", credentials.basic())
        try:
            with self._opener().open(request, timeout=TIMEOUT) as response:
                document = json.loads(response.read(_MOST_TOKEN))
        except urllib.error.HTTPError as error:
            with error:
                self._explain(error)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError):
            document = None
        token = (document.get("token") or document.get("access_token")) if isinstance(document, dict) else None
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
            raise RegistryError(
                f"registry {self.remote.host}: its token server's answer has no token", hint="try again"
            )
        self._secrets.append(token)
        return token

    # --- errors ---

    def _explain(self, error: urllib.error.HTTPError, path: str = "") -> NoReturn:
        """Raise a NotFound or RegistryError that explains an unsuccessful response."""
        message = self._server_message(error)
        verb = "deliver" if self.rights == "pull" else "take"
        subject = f"registry {self.remote.host} does not {verb} {self.remote.repository}"
        status = f"it answered {error.code} {http.client.responses.get(error.code, '')}".rstrip() + message
        if error.code == 404 and "/blobs/" in path:
            digest = path.rpartition("/")[2]
            raise NotFound(f"{self.remote} lacks the blob {digest}", reason=status, hint="push the whole image again")
        if error.code == 404:
            raise NotFound(f"{self.remote} is not in its registry", reason=status, hint="check the name and the tag")
        if error.code in (401, 403):
            raise RegistryError(f"{subject}: access denied", reason=status, hint=self._how_to_log_in())
        if error.code == 429:
            limit = RateLimit.parse(error.headers)
            wait = retry_after(error.headers.get("Retry-After"), limit.pause if limit else _LIMITED)
            raise _transient(
                f"{subject}: too many requests",
                f"{status}; {f'it allows {limit}; ' if limit else ''}try again in {wait / 60:.0f} min",
                "wait, log in (registries allow more to users), or set up a mirror in registries.conf",
                wait=wait,
            )
        hint = "check the reference and the registry"
        if error.code >= 500:
            hint = "the registry is in trouble: try again later, or use a mirror (registries.conf)"
            raise _transient(subject, status, hint)
        raise RegistryError(subject, reason=status, hint=hint)

    def _how_to_log_in(self) -> str:
        if self._secrets:
            return "the credentials that were found are not accepted, or do not allow it: log in again"
        files = ", ".join(str(file) for file in auth_files())
        return (
            f"check the name; if the image is private, log in: `podman login {self.remote.host}` or `docker login`. "
            f"Credentials are read from {files}"
        )

    def _server_message(self, error: urllib.error.HTTPError) -> str:
        """Return the registry's error message with secrets redacted (distribution-spec, "Error Codes")."""
        try:
            rows = json.loads(error.read(_MOST_ERROR))["errors"]
            errors = [(str(row["code"]), str(row.get("message", ""))) for row in rows[:3]]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ""
        for secret in filter(None, self._secrets):
            errors = [(code, redact(error_message, secret)) for code, error_message in errors]
        message = "; ".join(f"{code}: {error_message[:120]}" for code, error_message in errors if _CODE.fullmatch(code))
        return f" ({message})" if message else ""

    def _unreachable(self, error: OSError | http.client.HTTPException | ValueError) -> RegistryError:
        cause = getattr(error, "reason", "") or error
        reason = "" if isinstance(error, http.client.HTTPException) else str(cause)
        hint = "check the name of the registry, the network and the proxy (https_proxy)"
        if isinstance(cause, ssl.SSLCertVerificationError):
            path = f"{_CERTIFICATES[0]}/{self.remote.host}/ca.crt"
            hint = f"put its certificate into {path} or the system's store, or mark it as insecure in registries.conf"
        elif isinstance(error, TimeoutError) or isinstance(cause, TimeoutError):
            reason = f"it did not answer within {TIMEOUT:.0f} seconds"
        reason = reason or f"its answer is no HTTP ({type(error).__name__})"
        return _transient(f"registry {self.remote.host} cannot be reached", reason, hint)


@functools.lru_cache(8)
def _http_client(host: str, insecure: bool, schemes: tuple[str, ...]) -> HttpClient:
    """Return the HTTP client of a registry; share it, because certificates take milliseconds and megabytes."""
    paths = [path for folder in _CERTIFICATES for path in sorted(Path(folder, host).glob("*.crt"))]
    return HttpClient(authorities=paths, verify=not insecure, schemes=schemes)


def _transient(summary: str, reason: str, hint: str, wait: float | None = None) -> RegistryError:
    """Return the error for a transient failure, after which a retry may succeed."""
    error = RegistryError(summary, wait=wait, reason=reason, hint=hint)
    error.transient = True
    return error
