"""Tokens in addresses, and credentials that an index sends back: not in errors, nor on the pages of build steps."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from minisandbox.errors import InvalidValue, SourceError
from minisandbox.images.download import fetch_file
from minisandbox.images.echoes import Secrets
from minisandbox.images.index import IndexSettings, host_settings, shown
from minisandbox.images.mirrors import _failure
from minisandbox.images.packages import PackageIndex, Served
from minisandbox.images.recipe import GitSource
from minisandbox.images.simple_api import JSON_TYPE, Link, find_archives, listed_files
from minisandbox.images.web import Web
from minisandbox.store import Store

TOKEN = "TOKENTOKEN123"
USER, PASSWORD = "me@work", "p#ss/W0rd%x"
PAIR = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
GOOD = "demo-1.0-py3-none-any.whl"


@dataclass
class Server:
    """An index: answers by path without the query."""

    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> IndexSettings:
        own = f"http://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}"
        return IndexSettings(index_url=f"{own}/simple", timeout=5.0)

    def page(self, body: str, content_type: str = "text/html") -> None:
        self.answers["/simple/demo/"] = 200, {"Content-Type": content_type}, body.encode()

    def files(self, *rows: dict[str, object]) -> None:
        good = {"url": f"/files/{GOOD}", "hashes": {"sha256": "1" * 64}}
        self.page(json.dumps({"files": [good, *({"url": "/files/demo-0.9.tar.gz"} | row for row in rows)]}), JSON_TYPE)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers.get("Authorization", "")))
            status, headers, body = state.answers.get(self.path.partition("?")[0], (404, {}, b"nothing"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        state.port = listening.server_port
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield state
        listening.shutdown()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


# --- queries ---------------------------------------------------------------------------------------------------------


def test_messages_have_neither_credentials_nor_queries() -> None:
    assert shown(f"https://a:b@host:8/x.whl?sig={TOKEN}#{TOKEN}") == "https://host:8/x.whl"
    assert shown(f"file:///x?{TOKEN}") == "file:///x"
    assert shown("/a@b/c?d#e") == "/a@b/c?d#e"  # a directory


FAILURES: dict[str, tuple[int, dict[str, str], bytes]] = {
    "missing": (404, {}, b""),
    "refused": (403, {}, TOKEN.encode()),
    "another file": (200, {}, b"x"),
    "broken off": (200, {"Content-Length": "1000"}, b"x"),
    "leads to a blank": (302, {"Location": f"/a b?sig={TOKEN}\x7f"}, b""),
    "leads elsewhere": (302, {"Location": f"ftp://host/?sig={TOKEN}"}, b""),
    "leads to no port": (302, {"Location": f"http://host:{TOKEN}/"}, b""),
    "leads nowhere": (302, {"Location": f"/nothing?sig={TOKEN}"}, b""),
}


@pytest.mark.parametrize("answer", FAILURES.values(), ids=FAILURES.keys())
def test_a_file_whose_signed_address_fails(
    answer: tuple[int, dict[str, str], bytes], server: Server, store: Store
) -> None:
    server.answers[f"/files/{GOOD}"] = answer
    with pytest.raises(SourceError) as caught:
        fetch_file(f"{server.url}/files/{GOOD}?sig={TOKEN}", "0" * 64, store, server.settings)
    assert server.asked[0][0] == f"/files/{GOOD}?sig={TOKEN}", "it is fetched from where it is"
    assert GOOD in str(caught.value)
    assert TOKEN not in f"{caught.value} {caught.value.reason} {caught.value.hint}"


@pytest.mark.parametrize("address", ["{}/a b?sig=TOKENTOKEN123", "{}/a\x7f?sig=TOKENTOKEN123", "x?sig=TOKENTOKEN123"])
def test_an_address_that_is_none_is_not_quoted(address: str, server: Server) -> None:
    with pytest.raises(SourceError, match="none that can be asked") as caught:
        Web(server.settings).read(f"{address.format(server.url)}")
    assert TOKEN not in f"{caught.value.reason}"


def test_a_page_that_is_none(server: Server) -> None:
    server.answers["/simple/demo/"] = 302, {"Location": f"/page?sig={TOKEN}"}, b""
    server.answers["/page"] = 200, {"Content-Type": JSON_TYPE}, b"[]"
    with pytest.raises(SourceError, match="not an index page") as caught:
        listed_files("demo", server.settings)
    assert TOKEN not in str(caught.value)


def test_what_a_step_asked_for_in_vain_is_told_without_its_query(server: Server, store: Store) -> None:
    server.page(f'<a href="/files/{GOOD}?sig={TOKEN}">x</a>')
    served = Served()
    with PackageIndex(store, server.settings) as index, index.serve(served) as url, pytest.raises(OSError, match="404"):
        urllib.request.urlopen(f"{url}demo/{GOOD}", timeout=10)
    assert GOOD in " ".join(served.complaints)
    assert TOKEN not in " ".join(served.complaints)


def test_a_repositorys_address_is_told_without_its_query() -> None:
    source = GitSource(f"https://a:b@host/x?t={TOKEN}", "0" * 40)
    for said in (source.url, f"https://host/x?t={TOKEN}/", f"https://host/x?t={TOKEN}/info/refs"):
        told = str(_failure(source, f"fatal: unable to access '{said}'"))
        assert TOKEN not in told
        assert "a:b" not in told


# --- what an index repeats -------------------------------------------------------------------------------------------

SAID: dict[str, Callable[[str], dict[str, object]]] = {
    "file": lambda text: {"url": f"/files/demo-0.9-{quote(text, safe='')}.tar.gz"},
    "file, encoded twice": lambda text: {"url": f"/files/demo-0.9-{quote(quote(text, safe=''))}.tar.gz"},
    "directory": lambda text: {"url": f"/{quote(text)}/demo-0.9.tar.gz"},
    "query": lambda text: {"url": f"/files/demo-0.9.tar.gz?token={quote(text, safe='')}"},
    "requires-python": lambda text: {"requires-python": f">=3 {text}"},
    "yanked": lambda text: {"yanked": text},
    "upload-time": lambda text: {"upload-time": text},
    "hash": lambda text: {"hashes": {"sha256": text}},
    "core-metadata": lambda text: {"core-metadata": {"sha256": text}},
    "dist-info-metadata": lambda text: {"dist-info-metadata": {"sha256": text}},
}
FORMS = [PASSWORD, quote(PASSWORD, safe=""), PAIR, PAIR.rstrip("="), f"Basic {PAIR}", f"{USER}:{PASSWORD}"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("say", SAID.values(), ids=SAID.keys())
def test_an_entry_that_repeats_credentials_is_left_out(
    say: Callable[[str], dict[str, object]], form: str, server: Server, store: Store
) -> None:
    server.files(say(form))
    told, served = "", Served()
    with PackageIndex(store, server.settings) as index, index.serve(served) as url:
        for accept in ("text/html", JSON_TYPE):
            request = urllib.request.Request(f"{url}demo/", headers={"Accept": accept})
            told += urllib.request.urlopen(request, timeout=10).read().decode()
    assert GOOD in told
    assert "demo-0.9" not in told
    assert "1 files are left out" in " ".join(served.complaints)
    kept = " ".join(path.read_text() for path in (store.root / "index").iterdir())
    assert all(one.casefold() not in f"{told} {served.complaints} {kept}".casefold() for one in FORMS)
    with pytest.raises(SourceError, match="repeats a password"):
        find_archives("demo", server.settings)


def test_a_page_of_html_is_looked_through_too(server: Server) -> None:
    attributes = ("requires-python", "yanked", "core-metadata", "dist-info-metadata")
    rows = [f'<a href="/f/demo-{n}.zip" data-{name}="sha256={PASSWORD}">x</a>' for n, name in enumerate(attributes)]
    server.page("".join([*rows, f'<a href="/f/demo-9.zip#sha256={PAIR}">x</a><a href="/f/demo-10.zip">{PASSWORD}</a>']))
    listed = listed_files("demo", server.settings)
    assert [link.filename for link in listed.files] == ["demo-10.zip"]
    assert listed.left_out == 5


def test_an_earlier_answer_that_repeats_credentials_is_not_used(server: Server, store: Store) -> None:
    server.files()
    with PackageIndex(store, server.settings) as index, index.serve(Served()) as url:
        urllib.request.urlopen(f"{url}demo/", timeout=10).close()
    [path] = (store.root / "index").iterdir()
    kept = json.loads(path.read_text())
    del kept["left_out"]
    kept["files"].append(kept["files"][0] | {"url": f"{server.url}/files/demo-0.9.tar.gz", "yanked": PASSWORD})
    path.write_text(json.dumps(kept))
    with PackageIndex(store, server.settings) as index, index.serve(served := Served()) as url:
        assert b"demo-0.9" not in urllib.request.urlopen(f"{url}demo/", timeout=10).read()
    assert "1 files are left out" in " ".join(served.complaints)


def test_links_with_the_indexs_own_credentials_are_kept_without_them(server: Server) -> None:
    own = (server.settings.index_url or "").removesuffix("/simple")
    server.page(
        f'<a href="{own}/files/{GOOD}">x</a><a href="http://other:one@127.0.0.1:{server.port}/demo-2.zip">x</a>'
    )
    assert [link.url for link in listed_files("demo", server.settings).files] == [
        f"{server.url}/files/{GOOD}",
        f"http://other:one@127.0.0.1:{server.port}/demo-2.zip",
    ]


ADDRESSES = ["http://me:abc@h/s", "http://public@h/s", "http://me:simple@h/simple", "http://h/s", "/links/a@b"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_innocent_entries_stay(address: str) -> None:
    link = Link("https://h/abc/public/simple/demo-1.0.whl", "1" * 64, ">=3.6", "me")
    assert not Secrets.of(IndexSettings(index_url=address)).are_in(link.texts())


@pytest.mark.parametrize("token", ["http://abcdefgh12345678@h/s", "http://abcdefgh12345678:@h/s"])
def test_a_name_without_a_password_is_a_token(token: str) -> None:
    assert Secrets.of(IndexSettings(extra_index_urls=(token,))).are_in(["x-ABCDEFGH12345678.whl"])


def test_passwords_of_proxies_count_too() -> None:
    proxies = (("https_proxy", "me:hunter22@proxy:3128"), ("no_proxy", "[,a:b@c"))
    assert Secrets.of(IndexSettings(proxies=proxies)).are_in(["x hunter22"])


@pytest.mark.parametrize(
    ("address", "fit"),
    [
        ("https://h/x.git?token=T0PS3CRET#T0PS3CRET", "https://h/x.git"),
        ("https://u:p@h:8/@scope/x", "https://h:8/@scope/x"),
        ("https://u:T0P@T0PS3CRET@h/x.git", "https://h/x.git"),
        ("https:/u:T0PS3CRET@h/x.git", "https:/h/x.git"),
        ("https//u:T0PS3CRET@h/x.git", "https//h/x.git"),
        ("u:T0PS3CRET@h:x.git", "h:x.git"),
        ("u:T0PS3CRET@h/simple", "h/simple"),
        ("https://u:T0PS3CRET@[::1/x.git", "https://[::1/x.git"),
        ("http://u:T0P/S3CRET@h/x", "http://h/x"),
        ("http://u:T0P#S3CRET@h/x", "http://h/x"),
        ("corp=https://u:T0PS3CRET@h/x", "corp=https://h/x"),
        ("git@h.org:o/x.git", "h.org:o/x.git"),
        ("ssh://git@h.org:22/x.git", "ssh://h.org:22/x.git"),
        ("https://[::1]:8/x", "https://[::1]:8/x"),
        ("/home/me@corp/a#b?c", "/home/me@corp/a#b?c"),
        ("file:///home/me@corp/x", "file:///home/me@corp/x"),
        ("h.org:o/x.git", "h.org:o/x.git"),
    ],
)
def test_addresses_are_shown_without_secrets_mistyped_or_not(address: str, fit: str) -> None:
    assert shown(address) == fit


@pytest.mark.parametrize("url", ["https:/u:T0PS3CRET@h/::x", "u:T0PS3CRET@h::x", "https://u:T0PS3CRET@h/x\n"])
def test_what_is_no_address_is_told_without_secrets(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        GitSource(url, "0" * 40)
    assert "T0PS3CRET" not in str(caught.value)


SAID_BY_GIT = [
    "remote: you are me and T0PS3CRET",
    "fatal: remote error: T0PS%33CRET",
    "fatal: remote error: " + base64.b64encode(b"me:T0P@T0PS3CRET").decode(),
    "fatal: unable to access 'http://T0PS3CRET@h:1/x.git/'",
    "fatal: remote error: token=S1GNATURE",
    "fatal: remote error: S1GNATURE",
]


@pytest.mark.parametrize("said", SAID_BY_GIT)
def test_git_servers_that_repeat_an_address(said: str) -> None:
    source = GitSource("http://me:T0P@T0PS3CRET@h:1/x.git?token=S1GNATURE", "0" * 40)
    told = str(_failure(source, f"fatal: first\n{said}\nfatal: last\n"))
    assert "fatal: first" in told
    assert "fatal: last" in told
    assert "repeats a secret" in told
    for secret in ("T0PS3CRET", "T0PS%33CRET", "S1GNATURE", said.rsplit(maxsplit=1)[-1]):
        assert secret not in told
    plain = GitSource("https://h/x.git", "0" * 40)
    assert said in str(_failure(plain, f"{said}\n"))


@pytest.mark.parametrize("name", ["", "corp=", "a-b.c="])
def test_names_of_uvs_indexes_are_no_part_of_their_addresses(name: str, tmp_path: Path) -> None:
    environment = {"UV_DEFAULT_INDEX": f"{name}https://u:pw@h/simple", "HOME": str(tmp_path)}
    assert host_settings({**environment, "UV_INDEX": f"{name}https://o/simple"}).urls[-2:] == (
        "https://u:pw@h/simple",
        "https://o/simple",
    )


def test_a_token_in_the_place_of_a_user() -> None:
    source = GitSource("https://T0KEN0F16LETTERS0RM0RE:x-oauth-basic@h/x.git", "0" * 40)
    assert "T0KEN" not in str(_failure(source, "remote: T0KEN0F16LETTERS0RM0RE said"))
