"""Where a model's server is, how it is reached, and how long that may take."""

from __future__ import annotations

import base64
import ipaddress
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from minisandbox.errors import InvalidValue

SESSION_HEADER = "X-Session-Id"
"""Names the rollout, so that a router can send all of its requests to the engine that has its cache."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long one try may take, in seconds.

    Attributes:
        connect: until there is a connection, names and TLS included.
        read: between two pieces of the answer, and until its first; None: as long as the whole.
        total: the whole.
    """

    connect: float = 20.0
    read: float | None = None
    total: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"Timeouts.{name} is {value!r}", hint="give seconds, more than 0")


def check_base(base: str) -> str:
    """Return the address of an API without the slash at its end.

    Raises:
        InvalidValue: it cannot be one, or it has a secret in it.
    """
    hint = "for instance http://localhost:8000/v1"
    try:
        parts = urlsplit(base)
        parts.port  # noqa: B018 - the property raises where it is no number
    except ValueError as error:
        raise InvalidValue(f"--api-base is not an address: {error}", hint=hint) from None
    if "@" in parts.netloc or parts.query or parts.fragment:  # not shown: it may be a secret
        raise InvalidValue(
            "--api-base has a name, a password or a query in it",
            reason="it is kept with the run, and shown in messages",
            hint="give the key in an environment variable: --api-key-env",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValue(f"--api-base {base}: no http:// or https:// address", hint=hint)
    return base.rstrip("/").removesuffix("/chat/completions")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy of HTTP.

    Attributes:
        url: where it is, without name and password.
        user: whom it lets through; "" for everybody.
        password: the user's.
    """

    url: str
    user: str = ""
    password: str = field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Return what tells the proxy who asks."""
        if not self.user:
            return {}
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"Proxy-Authorization": f"Basic {token}"}


def proxy_for(url: str) -> Proxy | None:
    """Find the proxy that the environment names for an address; never one for this machine itself.

    Raises:
        InvalidValue: what the environment names is no HTTP proxy.
    """
    parts = urlsplit(url)
    found = urllib.request.getproxies().get(parts.scheme)
    if not found or _is_here(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urlsplit(found if "://" in found else f"http://{found}")
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        raise InvalidValue(
            f"the environment's proxy for {parts.scheme} is no HTTP proxy",
            hint=f"an http:// proxy, or {parts.hostname} in NO_PROXY",
        )
    where = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
    return Proxy(where, unquote(proxy.username or ""), unquote(proxy.password or ""))


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
