"""What a tunnel through the network proxy may begin with."""

from __future__ import annotations

import contextlib
import random

import pytest

from minisandbox.egress.rules import MOST_HEAD, RefusedError, Rules, Target
from minisandbox.egress.tunnels import Hellos, opens


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
    assert [opens("https", "a.example.org", hello[:size]) for size in range(len(hello))] == [False] * len(hello)
    assert opens("https", "a.example.org", hello)
    assert opens("https", "a.example.org", hello + b"more")


def test_a_tls_tunnel_asks_for_the_host_that_was_allowed() -> None:
    with pytest.raises(RefusedError, match=r"asks for b\.example\.org"):
        opens("https", "a.example.org", client_hello(b"b.example.org"))
    with pytest.raises(RefusedError, match="asks for"):
        opens("https", "a.example.org", client_hello(b"a.example.org\0.b"))
    with pytest.raises(RefusedError, match=r"to 192\.0\.2\.7 that asks for b\.example\.org"):
        opens("https", "192.0.2.7", client_hello(b"b.example.org"))  # an address has no name (RFC 6066)


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
        opens("https", "a.example.org", hello)


CHANGE, EARLY, FINISHED = b"\x14\3\3\0\1\1", b"\x17\3\3\0\5early", b"\x16\3\3\0\x28" + bytes(range(40))
KEYS = b"\x16\3\3\0\7\x10\0\0\3key"


@pytest.mark.parametrize("pieces", [1, 3, 60])
@pytest.mark.parametrize("before", [b"", CHANGE, EARLY + EARLY, EARLY + CHANGE, b"\x16\3\1\0\4\0\0\0\0"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_each_hello_in_the_clear_asks_for_the_host_that_was_allowed(pieces: int, before: bytes, size: int) -> None:
    """A server can have the client say it anew (RFC 8446, section 4.1.4)."""
    for name, refused in ((b"a.example.org", False), (b"", False), (b"b.example.org", True)):
        said = client_hello(b"a.example.org") + before + client_hello(name, pieces=pieces) + EARLY
        watch = Hellos("a.example.org")
        sent = [said[start : start + size] for start in range(0, len(said), size)]
        if refused:
            with pytest.raises(RefusedError, match=r"asks for b\.example\.org"):
                list(map(watch.look, sent))
        else:
            list(map(watch.look, sent))


def test_a_second_hello_is_known_whatever_its_version_and_length() -> None:
    """OpenSSL takes the first byte of a version for nothing, and up to 131,396 bytes."""
    newer = client_hello(b"b.example.org").replace(b"\3\3" + b"r" * 32, b"\4\3" + b"r" * 32)
    padded = client_hello(b"b.example.org", more=b"\0\x15" + (65_000).to_bytes(2) + bytes(65_000), pieces=5)
    for hello in (newer, padded):
        watch = Hellos("a.example.org")
        watch.look(client_hello(b"a.example.org") + CHANGE)
        with pytest.raises(RefusedError, match=r"asks for b\.example\.org"):
            watch.look(hello)


def test_a_hello_comes_in_few_pieces() -> None:
    """Each is work of the proxy's."""
    hello = client_hello(b"a.example.org", pieces=10_000)
    with pytest.raises(RefusedError, match="no TLS"):
        opens("https", "a.example.org", hello)
    watch = Hellos("a.example.org")
    watch.look(client_hello(b"a.example.org"))
    with pytest.raises(RefusedError, match="too many pieces"):
        watch.look(hello)


def test_what_is_encrypted_is_no_hello() -> None:
    watch, chance = Hellos("a.example.org"), random.Random(7)
    watch.look(client_hello(b"a.example.org") + KEYS + CHANGE + FINISHED)
    for _ in range(3000):
        length = chance.choice((16, 40, 200))
        watch.look(b"\x16\3\3" + length.to_bytes(2) + chance.randbytes(length) + EARLY)
    watch.look(b"no TLS at all" * 1000)
    assert len(watch._rest) + len(watch._message) <= 4 * MOST_HEAD


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0", b"GET / HTTP/1.1", b"\x16\2\1\0\5", b"\x17\3\1\0\5", b"\x16\3\1\0\0", b"\x16\3\1\0\5\2"],
)
def test_what_is_no_tls_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="no TLS"):
        opens("https", "a.example.org", data)


def test_a_damaged_hello_is_refused_or_waited_for_and_nothing_else() -> None:
    chance = random.Random(7)
    whole = client_hello(b"a.example.org")
    for _ in range(5000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(RefusedError):
            assert opens("https", "a.example.org", bytes(damaged)) in (True, False)
    with pytest.raises(RefusedError):  # a message that never ends
        opens("https", "a.example.org", (b"\x16\3\1\x40\0" + b"\1\xff\xff\xff" + b"x" * 16380) * 5)


def test_a_tunnel_to_port_80_carries_http() -> None:
    assert opens("http", "a.example.org", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert not opens("http", "a.example.org", b"GET / HT")
    for data in (b"SSH-2.0-x\r\n", b"\x16\3\1", b"PRI * HTTP/2.0\r\n", b"A" * MOST_HEAD):
        with pytest.raises(RefusedError, match="no HTTP"):
            opens("http", "a.example.org", data)


def test_a_port_that_was_named_carries_anything() -> None:
    rules = Rules(("a.example.org", "*.b.org:443", "c.org", "c.org:80", "[2001:db8::1]"))
    asked = [("a.example.org", 443), ("a.example.org", 80), ("x.b.org", 443), ("c.org", 80), ("c.org", 443)]
    assert [rules.expects(Target(*one)) for one in asked] == ["https", "http", "", "", "https"]
    assert rules.expects(Target("2001:db8::1", 443)) == "https"
    assert opens("", "a.example.org", b"")
