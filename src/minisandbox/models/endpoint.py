"""The address of a model's server, its proxy, and its timeouts."""

from __future__ import annotations

import base64
import ipaddress
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from minisandbox.errors import InvalidValue

SESSION_HEADER = "X-Session-Id"
"""The header that names the rollout, so that a router can send all its requests to the engine with its cache."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of one try, in seconds.

    Attributes:
        connect: until the connection is established, DNS and TLS included.
        read: until the first data of the response, and between two reads; None for the value of ``total``.
        total: the whole try.
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
