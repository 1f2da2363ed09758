"""Check the server name in the ClientHello of a TLS tunnel; no I/O.

Later messages are not checked, because a client can name another host in the encrypted part of the connection anyway.
"""

from __future__ import annotations

from .rules import MOST_HEAD, HostPort, RefusedError, shown

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME = 22, b"\x01", b"\0\0"
_LONGEST_RECORD = 1 << 14
_MOST_RECORDS = 64
"""Maximum records that a ClientHello may span; clients use one or two."""
_NOT_TLS = "a tunnel to port 443 that carries no TLS"


def is_complete(data: bytes, target: HostPort) -> bool:
    """Return whether a tunnel's first bytes contain a complete ClientHello, and check its server name.

    Args:
        data: all bytes that the client has sent so far.
        target: target of the tunnel.

    Raises:
        RefusedError: the bytes are not TLS, or name another host.
    """
    message = _first_message(data)
    if _is_short(message):
        if len(data) > MOST_HEAD:
            raise RefusedError(_NOT_TLS)
        return False
    name = server_name(message[4 : _end(message)])
    if name not in ("", target.host):  # a client names no host for an address (RFC 6066, section 3)
        raise RefusedError(f"a tunnel to {target.host} that asks for {shown(name)}")
    return True


def _first_message(data: bytes) -> bytes:
    """Return the received part of the first handshake message, joined from its records (RFC 8446, section 5.1)."""
    message, records = b"", 0
    while data and _is_short(message):
        header, length, records = data[:5], int.from_bytes(data[3:5]), records + 1
        if header[0] != _HANDSHAKE or header[1:2] not in (b"", b"\x03") or records > _MOST_RECORDS:
            raise RefusedError(_NOT_TLS)
        if len(header) == 5 and not 0 < length <= _LONGEST_RECORD:
            raise RefusedError(_NOT_TLS)
        message, data = message + data[5 : 5 + length], data[5 + length :]
        if message[:1] not in (b"", _CLIENT_HELLO):
            raise RefusedError(_NOT_TLS)
    return message


def _is_short(message: bytes) -> bool:
    """Return whether a handshake message is incomplete."""
    return len(message) < 4 or len(message) < _end(message)


def _end(message: bytes) -> int:
    return 4 + int.from_bytes(message[1:4])


def server_name(hello: bytes) -> str:
    """Return the host that a ClientHello names, or "" if it names none (RFC 6066, section 3).

    Raises:
        RefusedError: the message is malformed, or names a host twice, because servers differ in which name they use.
    """
    # skip the version and the random bytes, then the session id, the cipher suites and the compression methods
    _, remaining = _cut(hello, 34)
    for width in (1, 2, 1):
        _, remaining = _field(remaining, width)
    server, extensions = "", _last_field(remaining, 2) if remaining else b""
    while extensions:
        kind, extensions = _cut(extensions, 2)
        content, extensions = _field(extensions, 2)
        if kind == _SERVER_NAME:
            name_kind, name = _cut(_last_field(content, 2), 1)
            host = _last_field(name, 2)
            if server or name_kind != b"\0" or not host:
                raise RefusedError(_NOT_TLS)
            server = host.decode("latin-1").lower().removesuffix(".") or "."
    return server


def _last_field(data: bytes, width: int) -> bytes:
    """Return the field behind a length prefix of ``width`` bytes; refuse any data after it."""
    content, excess = _field(data, width)
    if excess:
        raise RefusedError(_NOT_TLS)
    return content


def _field(data: bytes, width: int) -> tuple[bytes, bytes]:
    """Split data into the field behind a length prefix of ``width`` bytes and the remaining bytes."""
    length, remaining = _cut(data, width)
    return _cut(remaining, int.from_bytes(length))


def _cut(data: bytes, size: int) -> tuple[bytes, bytes]:
    if len(data) < size:
        raise RefusedError(_NOT_TLS)
    return data[:size], data[size:]
