"""Parse the proxy's requests and decide which to allow and how to forward them; no I/O.

Requests are parsed strictly. An ambiguous request is refused, so that the server cannot read it differently from this
check (RFC 9112, section 11). :mod:`.sni` checks the server names of TLS tunnels.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from minisandbox.launch.setup import PROXY_PORT

REFUSED = "refused: "
"""Prefix of the report of a refusal."""
MOST_HEAD = 1 << 16
MOST_CHUNK_LINE = 1024
_MOST_LENGTH = 1 << 62
_LONGEST_NAME = 253
HTTPS = 443
_DEFAULT_PORTS = (80, HTTPS)

REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,31}) ([\x21-\x7e]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\x20-\x7e\x80-\xff\t]*)")
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"(?i:http)://([^/?#@\\]+)((?:[/?][^#\\]*)?)")
_LABEL = re.compile("[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile("[0-9]+|0x[0-9a-f]*")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\x20-\x7e\t]*)?")

_HOP_BY_HOP = {
    "connection", "keep-alive", "max-forwards", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te",
    "trailer", "upgrade",
}  # fmt: skip
_ECHOES = ("TRACE", "TRACK")
_FRAMING = {"host", "content-length", "transfer-encoding"}

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""First half of an ISATAP interface identifier; its second half is an IPv4 address (RFC 5214, section 6.1)."""
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NEVER = tuple(
    (ipaddress.ip_network(text), kind)
    for text, kind in (
        ("0.0.0.0/8", "this host"), ("169.254.0.0/16", "link-local"), ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"), ("198.51.100.0/24", "documentation"), ("203.0.113.0/24", "documentation"),
        ("192.88.99.0/24", "6to4"), ("224.0.0.0/4", "multicast"), ("240.0.0.0/4", "reserved"),
        # metadata services of clouds, whose addresses lie in otherwise public or private ranges
        ("168.63.129.16/32", "metadata"), ("100.100.100.200/32", "metadata"),
        ("fd00:ec2::/64", "metadata"), ("fd20:ce::254/128", "metadata"), ("fd00:42::42/128", "metadata"),
        ("::ffff:0:0/96", "IPv4-mapped"), ("2001::/23", "reserved"), ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"), ("3fff::/20", "documentation"),
    )
)  # fmt: skip
_PRIVATE = tuple(
    (ipaddress.ip_network(text), kind)
    for text, kind in (
        ("127.0.0.0/8", "loopback"), ("10.0.0.0/8", "private"), ("172.16.0.0/12", "private"),
        ("192.168.0.0/16", "private"), ("100.64.0.0/10", "private"), ("198.18.0.0/15", "private"),
        ("::1/128", "loopback"), ("fc00::/7", "private"),
    )
)  # fmt: skip


class RefusedError(Exception):
    """A request is refused.

    Args:
        why: the reason, in one line.
        public_message: message for code inside the sandbox; "" for the full reason.
    """

    def __init__(self, reason: str, public_message: str = "") -> None:
        super().__init__(reason)
        self.public_message = public_message or reason


class HostPort(NamedTuple):
    """The destination of a request.

    Attributes:
        host: a name in lower case without a trailing dot, or an IP address in canonical form.
        port: the port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


OWN = HostPort("127.0.0.1", PROXY_PORT)
"""The proxy's address inside a sandbox."""


def parse_authority(text: str, default_port: int | None = None) -> HostPort:
    """Read ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``.

    Raises:
        RefusedError: the text has another form, or there is neither a port nor a default.
    """
    match = _AUTHORITY.fullmatch(text)
    port = int(match[2]) if match and match[2] else default_port
    if match is None or port is None or not 1 <= port <= 0xFFFF:
        raise RefusedError(f"{shown(text)} does not name a host and a port")
    return HostPort(_host(match[1]), port)


def _host(text: str) -> str:
    name = text.strip("[]").lower().removesuffix(".")
    try:
        # inet_aton(3) reads names that end in a number as addresses: 127.1 and 0x7f000001 are loopback
        if text.startswith("[") or _NUMBER.fullmatch(name.rpartition(".")[2]):
            return str(ipaddress.IPv6Address(name) if text.startswith("[") else ipaddress.IPv4Address(name))
    except ValueError:
        raise RefusedError(f"{shown(text)} is not an IP address in its usual form") from None
    if len(name) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise RefusedError(f"{shown(text)} is not a host name")
    return name


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    return ":" in host or host.rpartition(".")[2].isdecimal()


def shown(text: str | bytes) -> str:
    """Convert text from a sandbox to printable ASCII of limited length, for one line of a log."""
    printable = ascii(text.decode("latin-1") if isinstance(text, bytes) else text)[1:-1]
    return printable if len(printable) <= 200 else f"{printable[:200]}..."


# --- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """The hosts that one sandbox may reach.

    Attributes:
        hosts: patterns as in :meth:`minisandbox.types.Network.allow`.
        private: whether private and loopback addresses are allowed.
    """

    hosts: tuple[str, ...]
    private: bool = False

    def check_name(self, target: HostPort) -> None:
        """Check that a pattern allows a target.

        Raises:
            RefusedError: no pattern matches.
        """
        if not any(_fits(pattern, target) for pattern in self.hosts):
            raise RefusedError(f"{target} is not on this sandbox's allow-list")

    def names_port(self, target: HostPort) -> bool:
        """Return whether a matching pattern names the target's port, so that tunnels may carry any protocol."""
        return any(_names_port(pattern) and _fits(pattern, target) for pattern in self.hosts)

    def check_address(self, address: str, *, is_local: bool = False) -> None:
        """Check that an address is public, or private with :attr:`private` set.

        Args:
            address: the IP address.
            is_local: whether the address belongs to this machine.

        Raises:
            RefusedError: the address is not allowed.
        """
        kind, always_refused = _kind(ipaddress.ip_address(address))
        if not kind and is_local:
            kind = "this machine's own"
        if always_refused or (kind and not self.private):
            hint = "" if always_refused else "; Network.allow(..., private=True) would permit it"
            raise RefusedError(f"the address {address} is refused: {kind}{hint}")


def _names_port(pattern: str) -> bool:
    return not pattern.endswith("]") and ":" in pattern


def _fits(pattern: str, target: HostPort) -> bool:
    name, port = pattern, ""
    if _names_port(pattern):
        name, _, port = pattern.rpartition(":")
    if target.port != int(port) if port else target.port not in _DEFAULT_PORTS:
        return False
    if name == "*":
        return True
    if name.startswith("*."):
        return target.host.endswith(name[1:]) and len(target.host) >= len(name)
    return target.host == name.strip("[]")


def _kind(address: _Address) -> tuple[str, bool]:
    """Return the kind of a special address, or "" for a public one, and whether it is always refused.

    The ranges are those of IANA's special-purpose registries. ``ipaddress`` is not used, because its ranges depend on
    the version of Python.
    """
    if address.version == 6 and int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return "ISATAP", True
    for kinds, always_refused in ((_NEVER, True), (_PRIVATE, False)):
        for network, kind in kinds:
            if address.version == network.version and address in network:
                return kind, always_refused
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:  # in a network without IPv4, names may have only these addresses (RFC 6052)
            kind, always_refused = _kind(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
            return (f"NAT64 of {kind}" if kind else ""), bool(kind) or always_refused
        if address not in _GLOBAL_UNICAST:
            return "reserved or link-local", True
    return "", False


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """The head of a request.

    Attributes:
        method: ``CONNECT``, or a method to forward.
        target: destination of the request.
        path: the path and query; "" for CONNECT.
        fields: header fields to forward, in order, without ``Host``.
        length: bytes of the body; None for a chunked body.
        version: version of HTTP, which is forwarded because an HTTP/1.0 client cannot read a chunked response.
    """

    method: str
    target: HostPort
    path: str
    fields: tuple[tuple[str, str], ...]
    length: int | None = 0
    version: str = "1.1"

    def head(self, *, absolute: bool = False) -> bytes:
        """Return the head to forward.

        Args:
            absolute: whether to use an absolute URL, because the next hop is a proxy too.
        """
        host = str(self.target).removesuffix(":80")
        lines = [
            f"{self.method} {f'http://{host}' if absolute else ''}{self.path} HTTP/{self.version}",
            f"Host: {host}",
        ]
        lines += [f"{name}: {value}" for name, value in self.fields]
        return "\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1")


def parse_request(head: bytes, *, server: HostPort | None = None) -> ProxyRequest:
    """Parse the head of a request.

    Args:
        head: the request up to, but without, the empty line.
        server: the destination of requests to the proxy's own address; None refuses these requests.

    Raises:
        RefusedError: the request is ambiguous, malformed, or not for a proxy.
    """
    line, *lines = head.split(b"\r\n")
    match = REQUEST_LINE.fullmatch(line)
    if match is None:
        raise RefusedError(f"malformed request line {shown(line)}")
    method, target = match[1].decode(), match[2].decode()
    fields = _parse_fields(lines)
    if method == "CONNECT":
        if any(name in ("content-length", "transfer-encoding") for name, _ in fields):
            raise RefusedError("CONNECT with a body")
        tunnel_end = parse_authority(target)
        return ProxyRequest(method, server if server and tunnel_end == OWN else tunnel_end, "", ())
    if method in _ECHOES:
        raise RefusedError(f"{method}: its answer repeats the request, in which a proxy's password may be")
    if server is not None and target.startswith("/"):
        target = f"http://{OWN}{target}"
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise RefusedError(f"{method} {shown(target)}: this proxy takes CONNECT host:port and http:// requests")
    destination = parse_authority(absolute[1], 80)
    _check_host(fields, destination, is_required=match[3] == b"1")
    path = absolute[2] if absolute[2].startswith("/") else f"/{absolute[2]}"
    destination = server if server and destination == OWN else destination
    length = _body_length(fields, is_http_1_1=match[3] == b"1")
    return ProxyRequest(method, destination, path, _forwarded_fields(fields), length, f"1.{match[3].decode()}")


def _parse_fields(lines: Sequence[bytes]) -> list[tuple[str, str]]:
    fields: list[tuple[str, str]] = []
    for line in lines:
        match = _FIELD.fullmatch(line)  # no folding, no control characters, no space before the colon
        if match is None:
            raise RefusedError(f"malformed header line {shown(line)}")
        name = match[1].decode().lower()
        if name in _FRAMING and any(name == field_name for field_name, _ in fields):
            raise RefusedError(f"more than one {name} header")
        fields.append((name, match[2].decode("latin-1").strip(" \t")))
    return fields


def _check_host(fields: Sequence[tuple[str, str]], target: HostPort, *, is_required: bool) -> None:
    host_field = dict(fields).get("host")
    if host_field is None and is_required:
        raise RefusedError("a request without a Host header")
    if host_field is not None and parse_authority(host_field, 80) != target:
        raise RefusedError(f"the Host header {shown(host_field)} does not fit the request for {target}")


def _body_length(fields: Sequence[tuple[str, str]], *, is_http_1_1: bool) -> int | None:
    field_values = dict(fields)
    length, coding = field_values.get("content-length"), field_values.get("transfer-encoding")
    if coding is not None:
        if length is not None or coding.lower() != "chunked" or not is_http_1_1:
            raise RefusedError("an ambiguous length: Transfer-Encoding that is not 'chunked' alone")
        return None
    if length is None:
        return 0
    if not re.fullmatch("[0-9]{1,19}", length) or int(length) > _MOST_LENGTH:
        raise RefusedError(f"malformed Content-Length {shown(length)}")
    return int(length)


def _forwarded_fields(fields: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the header fields to forward: all but hop-by-hop fields and ``Host``."""
    options = {option.strip().lower() for name, value in fields if name == "connection" for option in value.split(",")}
    if options & _FRAMING:
        raise RefusedError("a Connection header that names Host or the body's length")
    dropped_names = _HOP_BY_HOP | options | {"host"}
    return tuple((name, value) for name, value in fields if name not in dropped_names)


def chunk_size(line: bytes) -> int:
    """Return the size in the line before a chunk.

    Raises:
        RefusedError: the line is malformed.
    """
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise RefusedError(f"malformed chunk size {shown(line)}")
    return int(match[1], 16)


def answer(status: str, reason: str) -> bytes:
    """Return a response with one line of text. The status line repeats it, because many clients show only that line."""
    body = f"{reason}\n".encode("ascii", "replace")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode("ascii", "replace") + body


# --- upstream proxies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upstream:
    """The upstream proxies of this machine, from environment variables.

    Attributes:
        tunnel: URL of the proxy for CONNECT, or "".
        plain: URL of the proxy for plain HTTP, or "".
        bypass: hosts to reach directly, in the format of ``no_proxy``.
    """

    tunnel: str = ""
    plain: str = ""
    bypass: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Upstream:
        """Read the standard proxy variables; lower case takes precedence over upper case."""

        def value(*names: str) -> str:
            values = (environ.get(spelling, "") for name in names for spelling in (name, name.upper()))
            return next(filter(None, values), "")

        return cls(value("https_proxy", "all_proxy"), value("http_proxy", "all_proxy"), value("no_proxy"))

    def proxy_for(self, request: ProxyRequest) -> Hop | None:
        """Return the upstream proxy for a request, or None for a direct connection."""
        url = self.tunnel if request.method == "CONNECT" else self.plain
        # a loopback address means this machine, and not that of the upstream proxy
        is_direct = not url or _is_loopback(request.target.host) or self._bypassed(request.target)
        return None if is_direct else parse_hop(url)

    def _bypassed(self, target: HostPort) -> bool:
        return any(_bypasses(entry, target) for entry in re.split(r"[,\s]+", self.bypass.lower()) if entry)


def _is_loopback(host: str) -> bool:
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def _bypasses(entry: str, target: HostPort) -> bool:
    if entry == "*":
        return True
    name, colon, port = entry.rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.endswith("]")):
        if int(port) != target.port:
            return False
        entry = name
    entry = entry.strip("[]").removeprefix("*").strip(".")
    try:
        return ipaddress.ip_address(target.host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and (target.host == entry or target.host.endswith(f".{entry}"))


class Hop(NamedTuple):
    """An upstream proxy.

    Attributes:
        host: its name or address.
        port: its port.
        authorization: value of the Proxy-Authorization header, or "".
    """

    host: str
    port: int
    authorization: str


def parse_hop(url: str) -> Hop:
    """Parse the URL of a proxy: ``http://user:password@host:port``.

    Raises:
        ValueError: the URL is malformed, or not an http:// URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError:  # the error's text may contain a part of a password
        raise ValueError("invalid address of a proxy; in passwords, '/', '#' and '@' are %2F, %23 and %40") from None
    if parts.scheme.lower() != "http" or not parts.hostname:
        raise ValueError(f"the proxy's address begins with {parts.scheme}://, only http:// is supported")
    authorization = ""
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(credentials.encode()).decode()}"
    return Hop(parts.hostname, port, authorization)


def not_a_tunnel(head: bytes) -> str:
    """Return why a response to CONNECT opened no tunnel, or "" if it did (RFC 9110, section 9.3.6)."""
    status = re.match(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |\r|$)", head)
    if not status or not status[1].startswith(b"2"):
        return status[1].decode() if status else "no HTTP"
    for name, _, value in (line.partition(b":") for line in head.lower().split(b"\n")):
        if name.strip() == b"transfer-encoding" or (name.strip() == b"content-length" and value.strip(b" \t\r0")):
            return "with a page"
    return ""
