"""Credentials and tokens in addresses of indexes and repositories: not in errors, nor on the pages of build steps."""

from __future__ import annotations

import base64
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from minisandbox.errors import InvalidValue, SourceError
from minisandbox.images.python.packages import PackageIndex, Served
from minisandbox.images.python.simple_api import listed_files
from minisandbox.images.python.web import Web, fetch_file
from minisandbox.images.sources.mirrors import _failure
from minisandbox.index_settings import IndexSettings, host_settings
from minisandbox.spec import CheckOut, GitSource, shown
from minisandbox.store import Store

TOKEN = "TOKENTOKEN123"
USER, PASSWORD = "me@work", "p#ss/W0rd%x"
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
    "leads nowhere": (302, {"Location": f"/nothing?sig={TOKEN}"}, b""),
}


@pytest.mark.parametrize("answer", FAILURES.values(), ids=FAILURES.keys())
def test_a_file_whose_signed_address_fails(
    answer: tuple[int, dict[str, str], bytes], server: Server, store: Store
) -> None:
    server.answers[f"/files/{GOOD}"] = answer
    with pytest.raises(SourceError) as caught:
        fetch_file(f"{server.url}/files/{GOOD}?sig={TOKEN}", "0" * 64, store, Web(server.settings))
    assert server.asked[0][0] == f"/files/{GOOD}?sig={TOKEN}", "it is fetched from where it is"
    assert GOOD in str(caught.value)
    assert TOKEN not in f"{caught.value} {caught.value.reason} {caught.value.hint}"


def test_a_page_that_is_none(server: Server) -> None:
    server.answers["/simple/demo/"] = 302, {"Location": f"/page?sig={TOKEN}"}, b""
    server.answers["/page"] = 200, {"Content-Type": "application/vnd.pypi.simple.v1+json"}, b"[]"
    with pytest.raises(SourceError, match="not an index page") as caught:
        listed_files("demo", Web(server.settings))
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


def test_a_step_sees_neither_the_indexs_address_nor_its_credentials(server: Server, store: Store) -> None:
    own = (server.settings.index_url or "").removesuffix("/simple")
    server.page(f'<a href="{own}/files/{GOOD}?sig={TOKEN}">x</a>')
    server.answers[f"/files/{GOOD}"] = 200, {}, b"x"
    with PackageIndex(store, server.settings) as index, index.serve(Served()) as url:
        page = urllib.request.urlopen(f"{url}demo/", timeout=10).read().decode()
        assert urllib.request.urlopen(f"{url}demo/{GOOD}", timeout=10).read() == b"x"
    assert f'href="{GOOD}"' in page
    assert all(secret not in page for secret in (TOKEN, str(server.port), quote(PASSWORD, safe="")))
    pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert {said for _, said in server.asked} == {f"Basic {pair}"}


@pytest.mark.parametrize(
    ("address", "fit"),
    [
        ("https://h/x.git?token=T0PS3CRET#T0PS3CRET", "https://h/x.git"),
        ("https://u:p@h:8/@scope/x", "https://h:8/@scope/x"),
        ("https://u:T0P@T0PS3CRET@h/x.git", "https://h/x.git"),
        ("u:T0PS3CRET@h:x.git", "h:x.git"),
        ("u:T0PS3CRET@h/simple", "h/simple"),
        ("corp=https://u:T0PS3CRET@h/x", "corp=https://h/x"),
        ("git@h.org:o/x.git", "h.org:o/x.git"),
        ("ssh://git@h.org:22/x.git", "ssh://h.org:22/x.git"),
        ("https://[::1]:8/x", "https://[::1]:8/x"),
        ("/home/me@corp/a#b?c", "/home/me@corp/a#b?c"),
        ("file:///home/me@corp/x", "file:///home/me@corp/x"),
        ("h.org:o/x.git", "h.org:o/x.git"),
    ],
)
def test_addresses_are_shown_without_secrets(address: str, fit: str) -> None:
    assert shown(address) == fit


@pytest.mark.parametrize("url", ["u:T0PS3CRET@h::x", "https://u:T0PS3CRET@h/x\n"])
def test_what_is_no_address_is_told_without_secrets(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        CheckOut(GitSource(url, "0" * 40))
    assert "T0PS3CRET" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "corp=", "a-b.c="])
def test_names_of_uvs_indexes_are_no_part_of_their_addresses(name: str, tmp_path: Path) -> None:
    environment = {"UV_DEFAULT_INDEX": f"{name}https://u:pw@h/simple", "HOME": str(tmp_path)}
    assert host_settings({**environment, "UV_INDEX": f"{name}https://o/simple"}).urls[-2:] == (
        "https://u:pw@h/simple",
        "https://o/simple",
    )
