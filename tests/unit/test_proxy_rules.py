"""What the network proxy believes and allows."""

from __future__ import annotations

import contextlib
import time

import pytest

from minisandbox.cli.common.sandbox_options import parse_network
from minisandbox.cli.main import parser
from minisandbox.egress.rules import (
    MOST_HEAD,
    Hop,
    HostPort,
    ProxyRequest,
    RefusedError,
    Rules,
    Upstream,
    answer,
    chunk_size,
    not_a_tunnel,
    parse_authority,
    parse_hop,
    parse_request,
    shown,
)
from minisandbox.errors import InvalidValue
from minisandbox.sandbox.network import check_network
from minisandbox.types import Network

# --- what an owner writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("Packages.Example.ORG.", "packages.example.org"),
        ("*.Example.org:443", "*.example.org:443"),
        ("b\u00fccher.example", "xn--bcher-kva.example"),
        ("*.b\u00fccher.example", "*.xn--bcher-kva.example"),
        ("*", "*"),
        ("*:08443", "*:8443"),
        ("registry", "registry"),
        ("192.0.2.7:8080", "192.0.2.7:8080"),
        ("2001:DB8::1", "[2001:db8::1]"),
        ("[2001:db8:0::1]:080", "[2001:db8::1]:80"),
    ],
)
def test_a_pattern_has_one_spelling(pattern: str, kept: str) -> None:
    assert Network.allow(pattern, pattern) == Network("allow", (kept,))


@pytest.mark.parametrize(
    "pattern",
    [
        "", ".", "**", "*.*.org", "a*.org", "a..b", "-a.org", "a_.b-", "a b", "user@host", "host/path",
        "http://host",
        "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "1.2.3.4.5", "*.1.2.3.4", "host:", "host:0", "host:65536",
        "host:x",
        "[::1", "::1]", "fe80::1%lo", "\u00e9" * 80, "a" * 64, ".".join(["a" * 60] * 5), "a\0b", "a\n",
    ],
)  # fmt: skip
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(InvalidValue):
        Network.allow(pattern)


def test_an_allow_list_is_never_empty_nor_endless() -> None:
    for arguments in (("allow",), ("off", ("host",)), ("host", ("host",)), ("on",)):
        with pytest.raises(InvalidValue):
            Network(*arguments)
    with pytest.raises(InvalidValue, match="513 hosts, more than 512"):
        Network.allow(*(f"h{number}" for number in range(513)))
    with pytest.raises(InvalidValue):
        Network.allow(17)  # type: ignore[arg-type] # the same


def test_an_address_that_would_be_refused_is_refused_at_once() -> None:
    with pytest.raises(InvalidValue, match="private=True"):
        check_network(Network.allow("10.1.2.3"))
    assert check_network(Network.allow("10.1.2.3", private=True)).private
    with pytest.raises(InvalidValue, match="link-local"):
        check_network(Network.allow("169.254.169.254", private=True))
    assert check_network(Network.off()) == Network.off()


@pytest.mark.parametrize("url", ["socks5://127.0.0.1:1", "https://proxy:3128", "http://"])
def test_an_upstream_proxy_of_another_kind_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("https_proxy", url.replace("://", "://me:secret@"))
    check_network(Network.off())
    with pytest.raises(InvalidValue, match="only http://") as raised:
        check_network(Network.allow("host"))
    assert "secret" not in str(raised.value)


# --- names and addresses ---------------------------------------------------------------------------------------------

RULES = Rules(("packages.example.org", "*.files.example.org", "*.any.org:8443", "192.0.2.7", "[2001:db8::1]:81"))


@pytest.mark.parametrize(
    "authority",
    [
        "packages.example.org:443", "packages.example.org:80", "PACKAGES.Example.org.:443", "a.files.example.org:443",
        "a.b.files.example.org:80", "x.any.org:8443", "192.0.2.7:80", "[2001:db8::1]:81", "[2001:DB8:0:0::1]:81",
    ],
)  # fmt: skip
def test_named(authority: str) -> None:
    RULES.check_name(parse_authority(authority))


def test_every_host_has_its_usual_ports_and_a_public_address() -> None:
    everything = Rules(("*", "*:8443"))
    for authority in ("a.org:80", "a.org:443", "b.a.org:8443", "1.1.1.1:443", "[2606:4700::1]:443"):
        everything.check_name(parse_authority(authority))
    with pytest.raises(RefusedError):
        everything.check_name(parse_authority("a.org:22"))
    with pytest.raises(RefusedError):
        everything.check_address("10.0.0.1")
    assert check_network(Network.allow("*")) == check_network(Network.allow("*", "*"))


@pytest.mark.parametrize(
    "authority",
    [
        "packages.example.org:22", "example.org:443", "files.example.org:443", ".files.example.org:443",
        "xfiles.example.org:443", "evil-packages.example.org:443", "packages.example.org.evil.org:443",
        "x.any.org:443",
        "any.org:8443", "192.0.2.8:80", "[2001:db8::1]:80", "[2001:db8::2]:81", "[::ffff:192.0.2.7]:80",
        "3221225991:80",
        "packages.example.org..:443", "packages.example.org\0.evil.org:443", "packages.example.org%2e:443",
        "packages.example.org@evil.org:443", "evil.org#packages.example.org:443", "0xc0.0.2.7:80", "192.0.519:80",
        "xn--packges-.example.org:443", "p\u00e1ckages.example.org:443", "2001:db8::1:81",
        "packages.example.org:0443x",
        "packages.example.org:", "packages.example.org", ":443", "packages.example.org:70000", "[192.0.2.7]:80",
        "packages.example.org:443:443", " packages.example.org:443", "[2001:db8::1%25lo]:81", "192.0.2.07:80",
    ],
)  # fmt: skip
def test_not_named(authority: str) -> None:
    with pytest.raises(RefusedError):
        RULES.check_name(parse_authority(authority))


PUBLIC = ["1.1.1.1", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "64:ff9b::101:101"]
PUBLIC += ["2606:4700::100:5efe:101:101", "2606:4700::5eff:101:101", "2606:4700:0:5efe::1"]  # no ISATAP
PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "198.18.0.1",
    "::1",
    "fc00::1", "fdff::1", "64:ff9b::a00:1",
]  # fmt: skip
NEVER = [
    "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "192.0.0.1", "192.0.2.1", "192.88.99.1", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16", "100.100.100.200", "::",
    "::ffff:1.1.1.1", "::ffff:127.0.0.1", "::127.0.0.1", "::1.1.1.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1",
    "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:101:101::", "3fff::1", "fe80::1", "fec0::1", "ff02::1",
    "ff0e::1",
    "fd00:ec2::254", "fd20:ce::254", "4000::1", "5f00::1", "::ffff:0:127.0.0.1",
    "2606:4700::5efe:a9fe:a9fe", "2606:4700::200:5efe:101:101", "fd00::5efe:7f00:1", "fc00::200:5efe:a00:1",
]  # fmt: skip


@pytest.mark.parametrize("private", [False, True])
def test_addresses(private: bool) -> None:
    rules = Rules(("host",), private)
    # a private address behind a translator is nobody's package index
    fine = {*PUBLIC, *(PRIVATE if private else [])} - {"64:ff9b::a00:1"}
    for address in (*PUBLIC, *PRIVATE, *NEVER):
        if address in fine:
            rules.check_address(address)
            continue
        with pytest.raises(RefusedError) as raised:
            rules.check_address(address)
        assert address in str(raised.value)
        assert ("private=True" in str(raised.value)) is (address in PRIVATE and address != "64:ff9b::a00:1")


def test_this_machines_own_addresses_are_private_ones() -> None:
    with pytest.raises(RefusedError, match="this machine's own"):
        Rules(("host",)).check_address("1.1.1.1", is_local=True)
    Rules(("host",), private=True).check_address("1.1.1.1", is_local=True)


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_tunnel() -> None:
    head = b"CONNECT Packages.example.org:443 HTTP/1.1\r\nHost: other\r\nProxy-Authorization: Basic x"
    assert parse_request(head) == ProxyRequest("CONNECT", HostPort("packages.example.org", 443), "", ())


def test_a_plain_request_is_written_anew() -> None:
    request = parse_request(
        b"POST http://Files.example.org:8080/a%20b?q=http://c HTTP/1.1\r\nhost: files.example.org:8080\r\n"
        b"User-Agent: \t curl \xe9 \r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\nProxy-Connection: keep-alive\r\n"
        b"Proxy-Authorization: Basic x\r\nMax-Forwards: 0\r\nTE: trailers\r\nUpgrade: h2c\r\n"
        b"Content-Length: 5\r\nAccept:"
    )
    assert request.length == 5
    assert request.head() == (
        b"POST /a%20b?q=http://c HTTP/1.1\r\nHost: files.example.org:8080\r\nuser-agent: curl \xe9\r\n"
        b"content-length: 5\r\naccept: \r\nConnection: close\r\n\r\n"
    )
    assert request.head(absolute=True).startswith(b"POST http://files.example.org:8080/a%20b?q=http://c HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("head", "path"),
    [
        (b"GET http://h HTTP/1.0", "/"),
        (b"GET http://h?x HTTP/1.1\r\nHost: h", "/?x"),
        (b"GET HTTP://h./y HTTP/1.1\r\nHost: H:80", "/y"),
    ],
)
def test_paths_and_versions(head: bytes, path: str) -> None:
    request = parse_request(head)
    assert (request.path, request.target) == (path, HostPort("h", 80))
    assert request.head().startswith(f"GET {path} HTTP/{request.version}\r\nHost: h\r\n".encode())


def test_a_body_in_chunks() -> None:
    request = parse_request(b"POST http://h/ HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked")
    assert request.length is None
    assert b"transfer-encoding: Chunked" in request.head()
    assert [chunk_size(line) for line in (b"0", b"1f", b"0A ;x=y", b"a;b")] == [0, 31, 10, 10]
    for line in (b"", b"-1", b"0x1", b"+1", b"1 1", b"g", b"f" * 16, b"1\n", b"1\r", b" 1", b"1;\0", b"1_0"):
        with pytest.raises(RefusedError):
            chunk_size(line)


PLAIN = b"POST http://h/ HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"", b"GET", b"GET / HTTP/1.1\r\nHost: h", b"GET h HTTP/1.1", b"GET https://h/ HTTP/1.1\r\nHost: h",
        b"GET ftp://h/ HTTP/1.1\r\nHost: h", b"get http://h/ HTTP/1.1\r\nHost: h",
        b"GET  http://h/ HTTP/1.1\r\nHost: h",
        b"GET http://h/ HTTP/2.0\r\nHost: h", b"GET http://h/ HTTP/1.1 \r\nHost: h",
        b"GET http://h/\tHTTP/1.1\r\nHost: h",
        b"GET http://h/ HTTP/0.9", b"GET http://h/\0 HTTP/1.1\r\nHost: h", b"\r\nGET http://h/ HTTP/1.1\r\nHost: h",
        b"GET http://h/#x HTTP/1.1\r\nHost: h", b"GET http://u@h/ HTTP/1.1\r\nHost: h",
        b"GET http:///x HTTP/1.1\r\nHost: h",
        b"GET http://h\\.evil/ HTTP/1.1\r\nHost: h", b"GET http://h/\xe9 HTTP/1.1\r\nHost: h",
        b"TRACE http://h/ HTTP/1.1\r\nHost: h", b"TRACK http://h/ HTTP/1.1\r\nHost: h",
        b"OPTIONS * HTTP/1.1\r\nHost: h", b"GET http://h/ HTTP/1.1", b"GET http://h/ HTTP/1.1\r\nHost: other",
        b"GET http://h/ HTTP/1.1\r\nHost: h:81", b"GET http://h/ HTTP/1.0\r\nHost: other",
        b"GET http://h/ HTTP/1.1\r\nHost: h\r\nHost: h", b"GET http://h/ HTTP/1.1\r\nHost:",
        b"GET http://h/ HTTP/1.1\nHost: h",
        PLAIN + b"Content-Length: 1\r\nContent-Length: 1", PLAIN + b"Content-Length: 1\r\ncontent-length: 2",
        PLAIN + b"Content-Length: +1", PLAIN + b"Content-Length: 1, 1", PLAIN + b"Content-Length: 0x1",
        PLAIN + b"Content-Length: -1", PLAIN + b"Content-Length:", PLAIN + b"Content-Length: " + b"9" * 19,
        PLAIN + b"Content-Length: 1\r\nTransfer-Encoding: chunked", PLAIN + b"Transfer-Encoding: gzip, chunked",
        PLAIN + b"Transfer-Encoding: identity", PLAIN + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        PLAIN + b"Transfer-Encoding: \x0bchunked", PLAIN + b"Transfer-Encoding : chunked",
        PLAIN.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked",
        PLAIN + b"Connection: content-length\r\nContent-Length: 1", PLAIN + b"Connection: close, Host",
        PLAIN + b"X: y\r\n folded: z", PLAIN + b"\tX: y", PLAIN + b"X y", PLAIN + b": y", PLAIN + b"X: a\0b",
        PLAIN + b"X: a\rb", PLAIN + b"X: a\nY: b", PLAIN + b"X\xe9: y", PLAIN + b"X: a\x7fb",
        b"CONNECT h HTTP/1.1", b"CONNECT h: HTTP/1.1", b"CONNECT http://h:443 HTTP/1.1", b"CONNECT h:443/ HTTP/1.1",
        b"CONNECT u@h:443 HTTP/1.1", b"CONNECT h:443 HTTP/1.1\r\nContent-Length: 1",
        b"CONNECT h:443 HTTP/1.1\r\nTransfer-Encoding: chunked", b"CONNECT h:443 HTTP/1.1\r\nbroken",
    ],
)  # fmt: skip
def test_ambiguous_and_malformed_requests(head: bytes) -> None:
    with pytest.raises(RefusedError) as raised:
        parse_request(head)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "filler", [b"X: " + b" " * MOST_HEAD + b"x", b"X:" + b"\t" * MOST_HEAD + b"\0", b"a:\r\n" * 16000]
)
def test_a_head_takes_no_long_time_to_read(filler: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(RefusedError):
        parse_request(PLAIN + filler.removesuffix(b"\r\n"))
    assert time.process_time() - started < 1


def test_what_a_sandbox_sent_is_one_short_line_in_a_log() -> None:
    assert shown("a\r\nb\x1b[0m\u202e") == "a\\r\\nb\\x1b[0m\\u202e"
    assert len(shown(b"x" * 100_000)) < 210


def test_an_answer_says_why_twice() -> None:
    head, _, body = answer("403", "refused").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 refused\r\n")
    assert body == b"refused\n"
    assert f"Content-Length: {len(body)}".encode() in head


# --- a proxy beyond ours ---------------------------------------------------------------------------------------------


def test_the_proxies_of_an_environment() -> None:
    assert Upstream.of({}) == Upstream()
    everything = {"HTTPS_PROXY": "http://a", "https_proxy": "http://b", "ALL_PROXY": "http://c", "NO_PROXY": "x"}
    assert Upstream.of(everything) == Upstream("http://b", "http://c", "x")


def test_the_way_out() -> None:
    upstream = Upstream(
        "http://me:p%40ss@proxy:3128/", "proxy2:80", "localhost, .inner.org,10.0.0.0/8 *.star.org,odd:81"
    )

    def way(host: str, port: int = 443, method: str = "CONNECT") -> Hop | None:
        return upstream.proxy_for(ProxyRequest(method, HostPort(host, port), "/", ()))

    assert way("example.org") == Hop("proxy", 3128, "Basic bWU6cEBzcw==")
    assert way("example.org", 80, "GET") == Hop("proxy2", 80, "")
    assert way("odd") == way("11.0.0.1") == way("xinner.org") == way("example.org")
    for host, port in (
        ("localhost", 1),
        ("inner.org", 1),
        ("a.inner.org", 1),
        ("10.2.3.4", 1),
        ("a.star.org", 1),
        ("odd", 81),
    ):
        assert way(host, port) is None
    assert Upstream("http://a", "", "*").proxy_for(ProxyRequest("CONNECT", HostPort("h", 443), "", ())) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_this_machines_loopback_is_not_the_proxys(host: str) -> None:
    upstream = Upstream("http://a", "http://a", "")
    assert upstream.proxy_for(ProxyRequest("GET", HostPort(host, 80), "/", ())) is None
    assert upstream.proxy_for(ProxyRequest("GET", HostPort("10.0.0.1", 80), "/", ())) is not None


@pytest.mark.parametrize(
    "url", ["http://me:T0P/S3CRET@h", "http://me:T0P#S3CRET@h", "http://me:T0PS3CRET@[::1", "http://a:T0P\u2100S3@h"]
)
def test_a_proxys_address_that_is_none_is_not_told(url: str) -> None:
    with pytest.raises(ValueError, match="invalid address of a proxy; in passwords") as caught:
        parse_hop(url)
    assert "T0P" not in str(caught.value)


def test_answers_of_a_proxy() -> None:
    fine = b"HTTP/1.0 200 Connection established\r\nX-Content-Length: 5\r\nContent-Length: 0"
    assert [not_a_tunnel(head) for head in (fine, b"HTTP/1.1 204", b"HTTP/1.1 200 OK\r\nContent-Length: 00 ")] == [
        ""
    ] * 3
    assert [not_a_tunnel(head) for head in (b"HTTP/1.1 407 no", b"HTTP/1.1 302 x")] == ["407", "302"]
    for head in (b"HTTP/1.1 2000", b"", b"SSH-2.0", b"HTTP/2 200", b"HTTP/1.1 007"):
        assert not_a_tunnel(head) == "no HTTP"
    for fields in (
        b"content-length :1\r\nA: b",
        b"Content-Length: 7\r\nContent-Length: 0",
        b"Transfer-Encoding: x",
        b"Content-Length: -1",
    ):
        assert not_a_tunnel(b"HTTP/1.1 200 OK\r\n" + fields) == "with a page"
    assert parse_hop("proxy:8080") == Hop("proxy", 8080, "")


# --- the command line ------------------------------------------------------------------------------------------------


def test_what_the_command_line_says() -> None:
    def network(*words: str) -> Network:
        return parse_network(parser(["sandbox", "shell"]).parse_args(["sandbox", "shell", *words]))

    assert network() == Network.off()
    assert network("--network", "host") == Network.host()
    assert network("--allow", "a.org", "--allow", "*.B.org:81") == Network.allow("a.org", "*.b.org:81")
    assert network("--allow", "10.0.0.1", "--allow-private") == Network.allow("10.0.0.1", private=True)
    for words in (("--allow-private",), ("--network", "host", "--allow", "a.org"), ("--allow", "*a")):
        with pytest.raises(InvalidValue):
            network(*words)
