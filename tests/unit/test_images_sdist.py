"""Source archives from real servers on this machine: both forms of the index, and everything that goes wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minisandbox.errors import SourceError
from minisandbox.images.python.simple_api import version_in
from minisandbox.images.python.web import Web
from minisandbox.images.sources.sdist import fetch_sdist
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import SdistSource
from minisandbox.store import Store

CONTENT = b"an archive"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SOURCE = SdistSource("Some_Project", "1.0", SHA256)
NAME = "some_project-1.0.tar.gz"

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Server:
    """An index: answers by path, and what was asked."""

    answers: dict[str, Answer | Callable[[], Answer]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def page(self, text: str, content_type: str = "text/html") -> None:
        self.answers["/simple/some-project/"] = 200, {"Content-Type": content_type}, text.encode()

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings(index_url=f"{self.url}/simple", timeout=5.0)


def _serve() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers.get("Authorization")))
            answer = state.answers.get(self.path, (404, {}, b"nothing"))
            status, headers, body = answer() if callable(answer) else answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


server = pytest.fixture(_serve, name="server")
other = pytest.fixture(_serve, name="other")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def test_html_index(server: Server, store: Store) -> None:
    server.page(f'<base href="/files/"><a href="{NAME}#sha256={SHA256}">x</a><a>no</a><a href="x-2.0.whl">x</a>')
    server.answers[f"/files/{NAME}"] = 200, {}, CONTENT
    path = fetch_sdist(SOURCE, store, server.settings)
    assert path.read_bytes() == CONTENT
    asked = len(server.asked)
    assert fetch_sdist(SOURCE, store, server.settings) == path
    assert len(server.asked) == asked, "a verified download is not asked for again"


def test_json_index(server: Server, store: Store) -> None:
    files = [{"filename": NAME, "url": f"../../files/{NAME}", "hashes": {"sha256": SHA256}}]
    server.page(json.dumps({"files": files}), "application/vnd.pypi.simple.v1+json")
    server.answers[f"/files/{NAME}"] = 200, {}, CONTENT
    assert fetch_sdist(SOURCE, store, server.settings).read_bytes() == CONTENT


def test_a_page_that_is_no_index(server: Server, store: Store) -> None:
    server.page("[]", "application/vnd.pypi.simple.v1+json")
    with pytest.raises(SourceError, match="not an index page"):
        fetch_sdist(SOURCE, store, server.settings)


@pytest.mark.parametrize(
    ("filename", "version"),
    [
        ("some-project-2.0.zip", "2.0"),
        ("Some.Project-1.0.tar.bz2", "1.0"),
        ("some_project-x-1.0.tar.gz", "x-1.0"),
        ("some_project-3-py3-none-any.whl", "3"),
        ("some_project-3-py3-none.whl", None),
        ("some_project_x-1.0.tar.gz", None),
        ("some_project-1.0.exe", None),
    ],
)
def test_names_of_files(filename: str, version: str | None) -> None:
    assert version_in("some-project", filename) == version


def test_wrong_content_is_not_kept(server: Server, store: Store) -> None:
    server.page(f'<a href="/files/{NAME}">no hash here</a>')
    server.answers[f"/files/{NAME}"] = 200, {}, b"something else"
    with pytest.raises(SourceError, match="does not have the sha256") as caught:
        fetch_sdist(SOURCE, store, server.settings)
    assert hashlib.sha256(b"something else").hexdigest() in (caught.value.reason or "")
    assert list((store.root / "downloads").iterdir()) == []


def test_a_download_that_breaks_off(server: Server, store: Store) -> None:
    server.page(f'<a href="/files/{NAME}#sha256={SHA256}">x</a>')
    server.answers[f"/files/{NAME}"] = 200, {"Content-Length": "1000", "Connection": "close"}, CONTENT
    with pytest.raises(SourceError, match="cannot download") as caught:
        fetch_sdist(SOURCE, store, server.settings)
    assert "broke off after 10 of 1000 bytes" in (caught.value.reason or "")
    assert list((store.root / "downloads").iterdir()) == []


def test_a_full_disk_is_not_the_servers_fault(server: Server) -> None:
    server.answers["/x"] = 200, {}, CONTENT

    def fetch() -> None:
        with Web(server.settings).open(f"{server.url}/x") as answer, open("/dev/full", "wb", buffering=0) as full:
            assert answer is not None
            full.write(answer.read())

    with pytest.raises(OSError, match="No space left") as caught:
        fetch()
    assert caught.value.errno == errno.ENOSPC


def test_a_busy_server_is_asked_again(server: Server, store: Store) -> None:
    page = f'<a href="/files/{NAME}#sha256={SHA256}">x</a>'.encode()
    answers: Iterator[Answer] = iter([(503, {}, b""), (200, {"Content-Type": "text/html"}, page)])
    server.answers["/simple/some-project/"] = lambda: next(answers)
    server.answers[f"/files/{NAME}"] = 200, {}, CONTENT
    assert fetch_sdist(SOURCE, store, server.settings).read_bytes() == CONTENT


def test_a_server_that_refuses(server: Server, store: Store) -> None:
    server.answers["/simple/some-project/"] = 403, {}, b""
    with pytest.raises(SourceError, match="cannot read") as caught:
        fetch_sdist(SOURCE, store, server.settings)
    assert "403" in (caught.value.reason or "")


def test_a_server_that_is_not_there(store: Store) -> None:
    settings = IndexSettings(index_url="http://127.0.0.1:9/simple", timeout=1.0)
    with pytest.raises(SourceError, match="cannot read") as caught:
        fetch_sdist(SOURCE, store, settings)
    assert "pip config list" in (caught.value.hint or "")


def test_one_index_down_and_another_up(server: Server, store: Store) -> None:
    server.page(f'<a href="/files/{NAME}#sha256={SHA256}">x</a>')
    server.answers[f"/files/{NAME}"] = 200, {}, CONTENT
    settings = IndexSettings("http://127.0.0.1:9/simple", (f"{server.url}/simple",), timeout=1.0)
    assert fetch_sdist(SOURCE, store, settings).read_bytes() == CONTENT


def test_credentials_go_to_their_host_only(server: Server, other: Server, store: Store) -> None:
    server.page(f'<a href="/files/{NAME}#sha256={SHA256}">x</a>')
    server.answers[f"/files/{NAME}"] = 302, {"Location": f"{other.url}/elsewhere"}, b""
    other.answers["/elsewhere"] = 200, {}, CONTENT
    url = server.url.replace("http://", "http://me:hunter%322@")
    fetch_sdist(SOURCE, store, IndexSettings(index_url=f"{url}/simple", timeout=5.0))
    assert server.asked == [(path, "Basic bWU6aHVudGVyMjI=") for path in ("/simple/some-project/", f"/files/{NAME}")]
    assert other.asked == [("/elsewhere", None)]


def test_credentials_follow_a_redirect_to_their_own_host(server: Server, store: Store) -> None:
    """Also after pages that were not there, and from several threads."""
    server.page(f'<a href="{server.url}/files/{NAME}#sha256={SHA256}">x</a>')
    server.answers[f"/files/{NAME}"] = 302, {"Location": "/elsewhere"}, b""
    server.answers["/elsewhere"] = 200, {}, CONTENT
    url = server.url.replace("http://", "http://me:secret@")
    settings = IndexSettings(f"{url}/nothing", (f"{url}/simple",), timeout=5.0)
    assert fetch_sdist(SOURCE, store, settings).read_bytes() == CONTENT
    web = Web(settings)
    threads = [threading.Thread(target=web.read, args=(f"{server.url}/x{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 12
    assert {said for _, said in server.asked} == {"Basic bWU6c2VjcmV0"}


def test_links_of_another_server_get_no_credentials(server: Server, other: Server, store: Store) -> None:
    """Nor do those of another port."""
    server.page(f'<a href="{other.url}/{NAME}#sha256={SHA256}">x</a>')
    other.answers[f"/{NAME}"] = 200, {}, CONTENT
    url = server.url.replace("http://", "http://me:secret@")
    fetch_sdist(SOURCE, store, IndexSettings(index_url=f"{url}/simple", timeout=5.0))
    assert other.asked == [(f"/{NAME}", None)]


def test_find_links_directory(tmp_path: Path, store: Store) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / NAME).write_bytes(CONTENT)
    settings = IndexSettings(find_links=(str(tmp_path / "links"),), no_index=True)
    assert fetch_sdist(SOURCE, store, settings).read_bytes() == CONTENT


def test_versions_are_listed_newest_last(server: Server, store: Store) -> None:
    server.page(
        "".join(f'<a href="/f/some_project-{n}.0.tar.gz">x</a>' for n in range(2, 20))
        + f'<a href="/f/some_project-1.{"1" * 5000}.zip">x</a>'
    )
    with pytest.raises(SourceError, match=r"no source archive of Some_Project 1\.0") as caught:
        fetch_sdist(SOURCE, store, server.settings)
    assert (caught.value.reason or "").endswith("17.0, 18.0, 19.0")
