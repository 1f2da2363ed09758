"""What a tunnel through the proxy of sandboxes begins with; pure, nothing here touches a socket.

A port says what its tunnels carry: to port 80 HTTP, to port 443 TLS for the host that was asked for.
"""

from __future__ import annotations

from .rules import MOST_HEAD, REQUEST_LINE, RefusedError, shown

_LONGEST_RECORD = 1 << 14
_HANDSHAKE, _RECORDS = 22, (20, 21, 22, 23, 24)
_CLIENT_HELLO = 1
_LONGEST_HELLO = 1 << 18
"""Bytes: more than servers take (OpenSSL 131,396)."""
_MOST_PARTS = 64
"""Records that one ClientHello may come in: clients use one or two, and each is work of the proxy's."""
_NO_TLS = "a tunnel to port 443 that carries no TLS"


def opens(expected: str, host: str, data: bytes) -> bool:
    """Whether the first bytes of a tunnel are enough to see that it carries what it may.

    Args:
        expected: as :meth:`.rules.Rules.expects` says.
        host: the host that was asked for.
        data: what the client has sent so far.

    Raises:
        RefusedError: it carries something else, or asks for another host.
    """
    if expected == "https":
        hellos = Hellos(host)
        hellos.look(data)
        if not hellos.begun and (data[:1] not in (b"", b"\x16") or len(data) > MOST_HEAD):
            raise RefusedError(_NO_TLS)
        return hellos.begun
    if expected == "http":
        line, end, _ = data.partition(b"\r\n")
        if end and REQUEST_LINE.fullmatch(line):
            return True
        if end or len(data) >= MOST_HEAD or not (b"A" <= data[:1] <= b"Z" or not data):
            raise RefusedError(f"a tunnel to port 80 of {host} that carries no HTTP")
        return False
    return True


class Hellos:
    """Looks into each ClientHello that a client sends in the clear: a server can ask for a second one.

    A tunnel must begin with one, in records of nothing else (RFC 8446, sections 4.1.2 and 5.1). The second may come
    after early data (section 4.1.4), and in several records too; what is encrypted looks like none.

    Args:
        host: the host that was asked for.

    Attributes:
        begun: whether the first was there.
    """

    def __init__(self, host: str) -> None:
        self.begun = False
        self._host = host
        self._rest = self._message = b""
        self._skipped = self._parts = 0
        self._over = False

    def look(self, data: bytes) -> None:
        """Look at what comes next, before the server gets it.

        Raises:
            RefusedError: it is no TLS from the beginning, or has the end of a ClientHello that asks for another host,
                or one in too many pieces.
        """
        data, position = self._rest + data, 0
        while not self._over:
            step = min(self._skipped, len(data) - position)
            self._skipped, position = self._skipped - step, position + step
            if self._skipped or len(data) - position < 5:
                break
            kind, major = data[position], data[position + 1]
            length = int.from_bytes(data[position + 3 : position + 5])
            self._over = kind not in _RECORDS or major != 3  # no TLS any more, and no server goes on
            if not self.begun:
                self._check_first(kind, major, length, data[position + 5 : position + 5 + length])
            if kind != _HANDSHAKE:
                self._skipped = 5 + length
            elif len(data) - position < 5 + length:
                break
            else:
                self._take(data[position + 5 : position + 5 + length])
                position += 5 + length
        self._rest = b"" if self._over else data[position:]

    def _check_first(self, kind: int, major: int, length: int, content: bytes) -> None:
        """Check a record, perhaps not whole yet, that the first ClientHello comes in."""
        message = self._message + content
        fits = (kind, major) == (_HANDSHAKE, 3) and 0 < length <= _LONGEST_RECORD
        if not fits or self._parts == _MOST_PARTS or message[:1] not in (b"", b"\x01"):
            raise RefusedError(_NO_TLS)
        if len(message) >= 4 and len(message) >= (end := 4 + int.from_bytes(message[1:4])):
            _check_server_name(message[4:end], self._host)
            self.begun = True

    def _take(self, record: bytes) -> None:
        """Take what a record has of messages; what can be none, being encrypted, is dropped."""
        data, position = self._message + record, 0
        self._parts += 1
        while len(data) - position >= 4:
            end = position + 4 + int.from_bytes(data[position + 1 : position + 4])
            is_hello = data[position] == _CLIENT_HELLO
            if end - position > _LONGEST_HELLO or (self._parts > _MOST_PARTS and not is_hello):
                if not self.begun:
                    raise RefusedError(_NO_TLS)
                position = len(data)
            elif len(data) < end:
                if self._parts > _MOST_PARTS:
                    raise RefusedError(f"a tunnel to {self._host} whose ClientHello comes in too many pieces")
                break
            else:
                if is_hello:
                    _check_server_name(data[position + 4 : end], self._host)
                position, self._parts = end, 1
        self._message = data[position:]
        if not self._message:
            self._parts = 0


def _check_server_name(hello: bytes, host: str) -> None:
    if (name := _server_name(hello)) not in ("", host):  # an address has none (RFC 6066)
        raise RefusedError(f"a tunnel to {host} that asks for {shown(name)}")


def _server_name(hello: bytes) -> str:
    """The host that a ClientHello names, "" if it names none (RFC 6066, section 3).

    One that says it in more than one way is refused: which of the names a server goes by is that server's choice.
    """
    _, rest = _cut(hello, 34)  # version, random
    for width in (1, 2, 1):  # session, cipher suites, compression methods
        _, rest = _field(rest, width)
    found, extensions = "", _whole(rest, 2) if rest else b""
    while extensions:
        kind, extensions = _cut(extensions, 2)
        content, extensions = _field(extensions, 2)
        if kind == b"\0\0":
            name_kind, name = _cut(_whole(content, 2), 1)
            host = _whole(name, 2)
            if found or name_kind != b"\0" or not host:
                raise RefusedError(_NO_TLS)
            found = host.decode("latin-1").lower().removesuffix(".") or "."
    return found


def _whole(data: bytes, width: int) -> bytes:
    """A field that tells its length in so many bytes, and has nothing behind it."""
    content, more = _field(data, width)
    if more:
        raise RefusedError(_NO_TLS)
    return content


def _field(data: bytes, width: int) -> tuple[bytes, bytes]:
    """A field that tells its length in so many bytes, and what is behind it."""
    length, rest = _cut(data, width)
    return _cut(rest, int.from_bytes(length))


def _cut(data: bytes, size: int) -> tuple[bytes, bytes]:
    if len(data) < size:
        raise RefusedError(_NO_TLS)
    return data[:size], data[size:]
