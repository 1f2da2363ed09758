"""The server name that a TLS tunnel through the network proxy asks for."""

from __future__ import annotations

import contextlib
import random

import pytest

from minisandbox.egress.rules import HostPort, RefusedError, Rules
from minisandbox.egress.sni import is_complete

A = HostPort("a.example.org", 443)


def server_name(*names: bytes, behind: bytes = b"") -> bytes:
    """The extension by which a client names its host (RFC 6066, section 3)."""
    entries = b"".join(b"\0" + len(name).to_bytes(2) + name for name in names)
    content = len(entries).to_bytes(2) + entries + behind
    return b"\0\0" + len(content).to_bytes(2) + content


def client_hello(name: bytes = b"", *, pieces: int = 1, more: bytes = b"", behind: bytes = b"") -> bytes:
    """A ClientHello (RFC 8446, section 4.1.2), in one record or more."""
    extensions = b"\0\x17\0\0" + (server_name(name) if name else b"") + more
    body = b"\3\3" + b"r" * 32 + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(extensions).to_bytes(2) + extensions + behind
    message = b"\1" + len(body).to_bytes(3) + body
    size = -(-len(message) // pieces)
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(b"\x16\3\1" + len(part).to_bytes(2) + part for part in parts)


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize("name", [b"", b"a.example.org", b"A.Example.ORG."])
def test_a_tls_tunnel_is_known_by_its_first_message(name: bytes, pieces: int) -> None:
    hello = client_hello(name, pieces=pieces)
    assert [is_complete(hello[:size], A) for size in range(len(hello))] == [False] * len(hello)
    assert is_complete(hello, A)
    assert is_complete(hello + b"more", A)


def test_a_tls_tunnel_asks_for_the_host_that_was_allowed() -> None:
    with pytest.raises(RefusedError, match=r"asks for b\.example\.org"):
        is_complete(client_hello(b"b.example.org"), A)
    with pytest.raises(RefusedError, match="asks for"):
        is_complete(client_hello(b"a.example.org\0.b"), A)
    with pytest.raises(RefusedError, match=r"to 192\.0\.2\.7 that asks for b\.example\.org"):
        is_complete(client_hello(b"b.example.org"), HostPort("192.0.2.7", 443))  # an address has no name (RFC 6066)


@pytest.mark.parametrize(
    "hello",
    [
        client_hello(b"a.example.org", more=server_name(b"b.example.org")),
        client_hello(b"a.example.org", more=server_name(b"a.example.org")),
        client_hello(more=server_name(b"a.example.org", b"b.example.org")),
        client_hello(more=server_name(b"a.example.org", behind=b"b.example.org")),
        client_hello(b"a.example.org", behind=server_name(b"b.example.org")),
        client_hello(more=server_name(b"")),
        client_hello(more=server_name()),
    ],
    ids=["twice", "twice the same", "two names", "behind the names", "behind the extensions", "empty", "none"],
)
def test_a_tls_tunnel_says_once_whom_it_asks_for(hello: bytes) -> None:
    with pytest.raises(RefusedError):
        is_complete(hello, A)


def test_a_hello_comes_in_few_pieces() -> None:
    """Each is work of the proxy's."""
    hello = client_hello(b"a.example.org", pieces=10_000)
    with pytest.raises(RefusedError, match="no TLS"):
        is_complete(hello, A)


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0", b"GET / HTTP/1.1", b"\x16\2\1\0\5", b"\x17\3\1\0\5", b"\x16\3\1\0\0", b"\x16\3\1\0\5\2"],
)
def test_what_is_no_tls_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="no TLS"):
        is_complete(data, A)


def test_a_damaged_hello_is_refused_or_waited_for_and_nothing_else() -> None:
    chance = random.Random(7)
    whole = client_hello(b"a.example.org")
    for _ in range(5000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(RefusedError):
            assert is_complete(bytes(damaged), A) in (True, False)
    with pytest.raises(RefusedError):  # a message that never ends
        is_complete((b"\x16\3\1\x40\0" + b"\1\xff\xff\xff" + b"x" * 16380) * 5, A)


def test_what_follows_the_first_message_is_not_looked_at() -> None:
    assert is_complete(client_hello(b"a.example.org") + client_hello(b"b.example.org"), A)
    assert is_complete(client_hello(b"a.example.org") + b"no TLS", A)


def test_a_port_that_was_named_carries_anything() -> None:
    rules = Rules(("a.example.org", "*.b.org:443", "c.org", "c.org:80", "[2001:db8::1]"))
    asked = [("a.example.org", 443), ("a.example.org", 80), ("x.b.org", 443), ("c.org", 80), ("c.org", 443)]
    assert [rules.names_port(HostPort(*one)) for one in asked] == [False, False, True, True, False]
    assert not rules.names_port(HostPort("2001:db8::1", 443))
