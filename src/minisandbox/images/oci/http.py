"""Requests to a registry: its authentication, retries, and errors that say what to do (distribution-spec 1.1)."""

from __future__ import annotations

import email.message
import email.utils
import http.client
import json
import random
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn, Self, cast

from minisandbox import __version__, certificates
from minisandbox.errors import NotFound, RegistryError
from minisandbox.images.oci.auth import Credentials, auth_files, find_credentials
from minisandbox.images.oci.reference import DOCKER_HUB, Remote

ATTEMPTS = 5
TIMEOUT = 30.0
"""Seconds for a connection, and for each piece of an answer."""
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE = 120.0
_LIMITED = 300.0
"""Seconds to wait where a registry limits requests and does not say for how long."""
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
    """How many images a registry gives to one client (docs.docker.com, "Pull usage and limits").

    Attributes:
        count: how many in the window.
        window: its seconds.
        left: how many are left; None where the answer does not say.
    """

    count: int
    window: float
    left: int | None = None

    @classmethod
    def parse(cls, headers: email.message.Message) -> Self | None:
        """Return what the headers of an answer say, such as ``RateLimit-Limit: 100;w=21600``."""
        limit = _RATE.fullmatch(headers.get("RateLimit-Limit", ""))
        left = _RATE.fullmatch(headers.get("RateLimit-Remaining", ""))
        return cls(int(limit[1]), float(limit[2]), int(left[1]) if left else None) if limit else None

    @property
    def pause(self) -> float:
        """The seconds between requests that never meet the limit."""
        return max(self.window / max(self.count, 1), 1.0)

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.count} in {self.window / 3600:g} hours"


@dataclass(slots=True)
class Connection:
    """The API of one registry for one repository. Threads may share it.

    Attributes:
        place: which.
        pause: sleeps for so many seconds.
        rights: what is asked for where the registry does not say: ``pull``, or ``pull,push``.
    """

    place: Remote
    pause: Callable[[float], None] = time.sleep
    rights: str = "pull"
    _authorization: str = ""
    _scheme: str = ""
    _secrets: list[str] = field(default_factory=list)
    _opened_by: urllib.request.OpenerDirector | None = None

    def rest(self) -> None:
        """Forget what takes memory and can be had again: one of hundreds of connections may be used much later."""
        self._opened_by = None

    def get(self, path: str, accept: str = "*/*", offset: int = 0) -> http.client.HTTPResponse:
        """Open a resource of the repository; the caller closes it.

        Args:
            path: below ``/v2/NAME/``.
            accept: the media types wanted.
            offset: bytes to leave out, where the registry can.

        Raises:
            NotFound: the registry has no such thing.
            RegistryError: it cannot be had.
        """
        return self.request("GET", path, {"Accept": accept, **({"Range": f"bytes={offset}-"} if offset else {})})

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Body | None = None
    ) -> http.client.HTTPResponse:
        """Make a request; the caller closes the answer.

        Args:
            method: such as ``PUT``.
            path: below ``/v2/NAME/``, or an address that the registry sent.
            headers: further headers.
            body: what is sent; or what makes it, and then the request is repeated only to log in.

        Raises:
            NotFound: the registry has no such thing.
            RegistryError: it fails, or the registry refuses.
        """
        logged_in = False
        attempt = ATTEMPTS - 1 if callable(body) else 0
        while True:
            try:
                return self._open(method, path, headers or {}, body() if callable(body) else body)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 401 and not logged_in:
                        logged_in = True
                        self._log_in(error.headers.get_all("WWW-Authenticate") or [])
                        continue
                    wait = _retry_after(error.headers.get("Retry-After"), backoff(attempt))
                    if error.code not in _RETRIED or attempt == ATTEMPTS - 1 or wait > _LONGEST_PAUSE:
                        self._explain(error, f"/{path}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                if attempt == ATTEMPTS - 1 or _is_final(error):
                    raise self._unreachable(error) from None
                wait = backoff(attempt)
            self.pause(wait)
            attempt += 1

    # --- requests ---

    def _open(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | Iterable[bytes] | None
    ) -> http.client.HTTPResponse:
        base = self._base()
        url = urllib.parse.urljoin(f"{base}/v2/{self.place.repository}/", path)
        own = url.startswith(f"{base}/")
        if not own and url.partition(":")[0] not in self._schemes:
            raise urllib.error.URLError(f"it sends its clients to {url[:100]!r}")
        request = urllib.request.Request(url, body, {**_AGENT, **headers}, method=method)  # noqa: S310 - checked
        if self._authorization and own:  # not for where a redirect leads
            request.add_unredirected_header("Authorization", self._authorization)
        return cast("http.client.HTTPResponse", self._opener().open(request, timeout=TIMEOUT))

    @property
    def _schemes(self) -> tuple[str, ...]:
        return ("http", "https") if self._may_be_plain else ("https",)

    @property
    def _may_be_plain(self) -> bool:
        """Whether the registry may be asked without TLS: on this machine, or where a configuration says so."""
        return self.place.insecure or _split(f"//{self.place.host}").hostname in _LOCAL

    def _base(self) -> str:
        server = _SERVERS.get(self.place.host, self.place.host)
        if not self._scheme:
            self._scheme = "http" if self._may_be_plain and not self._speaks_tls(server) else "https"
        return f"{self._scheme}://{server}"

    def _speaks_tls(self, server: str) -> bool:
        try:
            with self._opener().open(f"https://{server}/v2/", timeout=TIMEOUT):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            return False

    def _opener(self) -> urllib.request.OpenerDirector:
        if self._opened_by is None:  # loading the certificates takes longer than a request
            self._opened_by = self._new_opener()
        return self._opened_by

    def _new_opener(self) -> urllib.request.OpenerDirector:
        context = certificates.context()
        for folder in _CERTIFICATES:
            for file in sorted(Path(folder, self.place.host).glob("*.crt")):
                context.load_verify_locations(file)
        if self.place.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _Redirects(self._schemes))

    # --- authentication ---

    def _log_in(self, challenges: list[str]) -> None:
        known = find_credentials(self.place.host, self.place.repository)
        self._secrets = [known.secret, known.basic().partition(" ")[2]] if known else []
        for challenge in challenges:
            scheme, _, rest = challenge.strip().partition(" ")
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(rest)), known)}"
                return
            if scheme.lower() == "basic" and known is not None and known.user:
                self._authorization = known.basic()
                return

    def _token(self, challenge: dict[str, str], known: Credentials | None) -> str:
        """Get a token (distribution, spec/auth/token.md and oauth.md)."""
        realm = challenge.get("realm", "")
        place = _split(realm)
        plain = self.place.insecure or (self._may_be_plain and place.hostname in _LOCAL)
        if place.scheme != "https" and not (place.scheme == "http" and plain):
            raise RegistryError(
                f"registry {self.place.host} sends its clients to {realm[:100]!r} for a token",
                reason="credentials are not sent without TLS",
                hint="mark the registry as insecure in registries.conf if that is meant",
            )
        scope = challenge.get("scope") or f"repository:{self.place.repository}:{self.rights}"
        values = {"service": challenge.get("service", ""), "scope": scope}
        data = None
        if known is not None and not known.user:
            more = {"grant_type": "refresh_token", "refresh_token": known.secret, "client_id": "minisandbox"}
            data = urllib.parse.urlencode(values | more).encode()
        query = "" if data else ("&" if "?" in realm else "?") + urllib.parse.urlencode(values)
        request = urllib.request.Request(realm + query, data)  # noqa: S310 - checked above
        if known is not None and known.user:
            request.add_unredirected_header("Authorization", known.basic())
        try:
            with self._opener().open(request, timeout=TIMEOUT) as answer:
                found = json.loads(answer.read(_MOST_TOKEN))
        except urllib.error.HTTPError as error:
            with error:
                self._explain(error)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError):
            found = None
        token = (found.get("token") or found.get("access_token")) if isinstance(found, dict) else None
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
            raise RegistryError(f"registry {self.place.host}: its token server's answer has no token", hint="try again")
        self._secrets.append(token)
        return token

    # --- errors ---

    def _explain(self, error: urllib.error.HTTPError, path: str = "") -> NoReturn:
        """Raise the error that an answer stands for."""
        said = self._said(error)
        verb = "deliver" if self.rights == "pull" else "take"
        what = f"registry {self.place.host} does not {verb} {self.place.repository}"
        status = f"it answered {error.code} {http.client.responses.get(error.code, '')}".rstrip() + said
        if error.code == 404 and "/blobs/" in path:
            digest = path.rpartition("/")[2]
            raise NotFound(f"{self.place} lacks the blob {digest}", reason=status, hint="push the whole image again")
        if error.code == 404:
            raise NotFound(f"{self.place} is not in its registry", reason=status, hint="check the name and the tag")
        if error.code in (401, 403):
            raise RegistryError(f"{what}: access denied", reason=status, hint=self._how_to_log_in())
        if error.code == 429:
            limit = RateLimit.parse(error.headers)
            wait = _retry_after(error.headers.get("Retry-After"), limit.pause if limit else _LIMITED)
            raise _transient(
                f"{what}: too many requests",
                f"{status}; {f'it allows {limit}; ' if limit else ''}try again in {wait / 60:.0f} min",
                "wait, log in (registries allow more to users), or set up a mirror in registries.conf",
                wait=wait,
            )
        hint = "check the reference and the registry"
        if error.code >= 500:
            hint = "the registry is in trouble: try again later, or use a mirror (registries.conf)"
            raise _transient(what, status, hint)
        raise RegistryError(what, reason=status, hint=hint)

    def _how_to_log_in(self) -> str:
        if self._secrets:
            return "the credentials that were found are not accepted, or do not allow it: log in again"
        files = ", ".join(str(file) for file in auth_files())
        return (
            f"check the name; if the image is private, log in: `podman login {self.place.host}` or `docker login`. "
            f"Credentials are read from {files}"
        )

    def _said(self, error: urllib.error.HTTPError) -> str:
        """What the registry's own error says (distribution-spec, "Error Codes"), without what may be a secret."""
        try:
            rows = json.loads(error.read(_MOST_ERROR))["errors"]
            texts = [(str(row["code"]), str(row.get("message", ""))) for row in rows[:3]]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ""
        for secret in filter(None, self._secrets):
            texts = [(code, said.replace(secret, "***")) for code, said in texts]
        text = "; ".join(f"{code}: {said[:120]}" for code, said in texts if _CODE.fullmatch(code))
        return f" ({text})" if text else ""

    def _unreachable(self, error: OSError | http.client.HTTPException | ValueError) -> RegistryError:
        cause = getattr(error, "reason", "") or error
        reason = "" if isinstance(error, http.client.HTTPException) else str(cause)
        hint = "check the name of the registry, the network and the proxy (https_proxy)"
        if isinstance(cause, ssl.SSLCertVerificationError):
            place = f"{_CERTIFICATES[0]}/{self.place.host}/ca.crt"
            hint = f"put its certificate into {place} or the system's store, or mark it as insecure in registries.conf"
        elif isinstance(error, TimeoutError) or isinstance(cause, TimeoutError):
            reason = f"it did not answer within {TIMEOUT:.0f} seconds"
        reason = reason or f"its answer is no HTTP ({type(error).__name__})"
        return _transient(f"registry {self.place.host} cannot be reached", reason, hint)


def _transient(what: str, reason: str, hint: str, wait: float | None = None) -> RegistryError:
    """Return the error of a request that another attempt may bring through."""
    error = RegistryError(what, wait=wait, reason=reason, hint=hint)
    error.transient = True
    return error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but only to these schemes."""

    def __init__(self, schemes: tuple[str, ...]) -> None:
        self._schemes = schemes

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> http.client.HTTPResponse | None:
        """Follow a redirect."""
        try:
            return cast("http.client.HTTPResponse | None", super().http_error_302(req, fp, code, msg, headers))
        except ValueError:  # its address is malformed
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
        """Return the request for where a redirect leads."""
        scheme = _split(newurl).scheme
        if scheme not in self._schemes:
            fp.close()
            raise urllib.error.URLError(f"it redirects to an address of {scheme!r}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _split(url: str) -> urllib.parse.SplitResult:
    """Split a URL; a malformed one has no part."""
    try:
        return urllib.parse.urlsplit(url)
    except ValueError:
        return urllib.parse.urlsplit("")


def _is_final(error: OSError | http.client.HTTPException | ValueError) -> bool:
    """Whether another attempt would fail as well."""
    cause = getattr(error, "reason", error)
    if type(error) is urllib.error.URLError and isinstance(cause, str):  # an address that cannot be asked
        return True
    return isinstance(cause, ssl.SSLError | ValueError) or (
        isinstance(cause, OSError) and cause.errno in (-2, -5)  # netdb.h: EAI_NONAME, EAI_NODATA
    )


def backoff(attempt: int) -> float:
    """Return the seconds to wait after an attempt."""
    return 0.5 * float(1 << attempt) * (1 + random.random() / 4)  # noqa: S311 - so that clients do not return together


def _retry_after(text: str | None, usual: float) -> float:
    """Seconds that a registry asks to wait: a number, or a date (RFC 9110, section 10.2.3); else the usual ones."""
    if text is None:
        return usual
    try:
        if text.strip().isdigit():
            return float(text)
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return usual


def read_bounded(answer: http.client.HTTPResponse, most: int) -> bytes | None:
    """Read an answer; None where it is longer.

    Raises:
        HTTPException: it breaks off.
    """
    data = answer.read(most + 1)
    if len(data) <= most and answer.length:
        raise http.client.IncompleteRead(data, answer.length)
    return None if len(data) > most else data
