"""The package index of build steps, before real servers: what it keeps, what it checks, what it hides."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from minisandbox.errors import InvalidValue, SourceError
from minisandbox.images.python.index import find_uv
from minisandbox.images.python.packages import PackageIndex, Served
from minisandbox.images.python.simple_api import FRESH
from minisandbox.images.python.web import Web
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import IndexView, Package, parse_moment
from minisandbox.store import Store

WHEEL, SDIST = b"a wheel", b"an archive"
NAMES = {"demo_pkg-1.0-py3-none-any.whl": WHEEL, "demo-pkg-0.9.tar.gz": SDIST}
JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Upstream:
    """The index beyond: answers by path, and what was asked."""

    answers: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings(index_url=f"{self.url}/simple", timeout=5.0)

    def list_json(self, **changes: object) -> None:
        rows = [
            {
                "filename": name,
                "url": f"../../files/{name}",
                "hashes": {"sha256": _sha(data)},
                "upload-time": f"202{number}-06-01T00:00:00.000000Z",
                "requires-python": ">=3.6",
                **changes,
            }
            for number, (name, data) in enumerate(NAMES.items())
        ]
        self.answers["/simple/demo-pkg/"] = (JSON_TYPE, json.dumps({"files": rows}).encode())


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    state = Upstream({f"/files/{name}": ("application/octet-stream", data) for name, data in NAMES.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            found = state.answers.get(self.path)
            content_type, body = found or ("text/plain", b"nothing")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    state.list_json()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _get(url: str, accept: str = "text/html") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        body = answer.read()
    assert isinstance(body, bytes)
    return body


def _status(url: str) -> int:
    try:
        _get(url)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_a_page_and_its_files(upstream: Upstream, store: Store) -> None:
    upstream.list_json(**{"core-metadata": {"sha256": _sha(b"metadata")}, "yanked": "a <reason>"})
    upstream.answers["/files/demo_pkg-1.0-py3-none-any.whl.metadata"] = ("text/plain", b"metadata")
    served = Served()
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        page = _get(f"{url}demo-pkg/").decode()
        for name, data in NAMES.items():
            assert f'href="{name}#sha256={_sha(data)}"' in page
        assert 'data-requires-python="&gt;=3.6"' in page
        assert 'data-yanked="a &lt;reason&gt;"' in page
        assert f'data-dist-info-metadata="sha256={_sha(b"metadata")}"' in page
        first = json.loads(_get(f"{url}demo-pkg/", JSON_TYPE))["files"][0]
        assert first == {
            "filename": "demo_pkg-1.0-py3-none-any.whl",
            "url": "demo_pkg-1.0-py3-none-any.whl",
            "hashes": {"sha256": _sha(WHEEL)},
            "requires-python": ">=3.6",
            "yanked": "a <reason>",
            "core-metadata": {"sha256": _sha(b"metadata")},
            "upload-time": "2020-06-01T00:00:00.000000Z",
        }
        assert _get(f"{url}demo-pkg/demo_pkg-1.0-py3-none-any.whl.metadata") == b"metadata"
        assert _get(f"{url}demo-pkg/demo_pkg-1.0-py3-none-any.whl") == WHEEL
    assert served.packages == {
        "demo_pkg-1.0-py3-none-any.whl": Package("demo-pkg", "1.0", "demo_pkg-1.0-py3-none-any.whl", _sha(WHEEL))
    }
    assert store.download_path(_sha(WHEEL)).read_bytes() == WHEEL


def test_what_is_kept_is_not_asked_for_again(upstream: Upstream, store: Store) -> None:
    for _ in range(2):  # another process, as far as the index knows
        with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
            _get(f"{url}demo-pkg/")
            _get(f"{url}demo-pkg/demo-pkg-0.9.tar.gz")
    assert upstream.asked == ["/simple/demo-pkg/", "/files/demo-pkg-0.9.tar.gz"]


def test_only_the_steps_own_address_answers(upstream: Upstream, store: Store) -> None:
    with PackageIndex(store, upstream.settings) as index:
        with index.serve(Served()) as url:
            host = url.split("/", 3)[2]
            assert _status(f"http://{host}/wrong/simple/demo-pkg/") == 404
            assert _status(f"http://{host}/simple/demo-pkg/") == 404
            for path in (
                "Demo_Pkg/",
                "../demo-pkg/",
                "demo-pkg/../../etc/passwd",
                "demo-pkg/other-1.0.tar.gz",
                "a/b/c",
            ):
                assert _status(f"{url}{path}") == 404, path
        assert _status(f"{url}demo-pkg/") == 404, "the step has ended"
    assert not any("other" in path for path in upstream.asked)


def test_a_file_that_is_not_what_the_index_says_is_not_kept(upstream: Upstream, store: Store) -> None:
    upstream.answers["/files/demo-pkg-0.9.tar.gz"] = ("application/octet-stream", b"poison")
    served = Served()
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/demo-pkg-0.9.tar.gz") == 404
    assert "does not have the sha256" in served.complaints[0]
    assert served.packages == {}
    assert list((store.root / "downloads").iterdir()) == []


def test_uploads_after_a_date_are_not_there(upstream: Upstream, store: Store) -> None:
    with PackageIndex(store, upstream.settings) as index, index.serve(Served(IndexView("2021-01-01"))) as url:
        page = _get(f"{url}demo-pkg/")
        assert page.count(b"<a ") == 1
        assert b"demo_pkg-1.0-py3-none-any.whl" in page
        assert _status(f"{url}demo-pkg/demo-pkg-0.9.tar.gz") == 404, "a file that is not listed can be had"


@pytest.mark.parametrize(("date", "found"), [("2021-01-01", True), ("2020-01-01", False)])
def test_uvs_own_dates_work(date: str, found: bool, upstream: Upstream, store: Store) -> None:
    """As in the install commands of rows."""
    metadata = b"Metadata-Version: 2.1\nName: demo-pkg\nVersion: 1.0\n"
    upstream.list_json(**{"core-metadata": {"sha256": _sha(metadata)}})
    upstream.answers["/files/demo_pkg-1.0-py3-none-any.whl.metadata"] = ("text/plain", metadata)
    with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
        command = [str(find_uv()), "pip", "compile", "-", "--no-config", "--no-cache", "--default-index", url]
        done = subprocess.run(
            [*command, "--exclude-newer", date, "--python", sys.executable],
            input="demo-pkg", capture_output=True, text=True, check=False, timeout=60,
            env={"PATH": os.environ["PATH"], "no_proxy": "127.0.0.1"},
        )  # fmt: skip
    assert (done.returncode == 0 and "demo-pkg==1.0" in done.stdout) == found, done.stderr


def test_an_index_that_tells_no_dates_says_so(upstream: Upstream, store: Store) -> None:
    upstream.list_json(**{"upload-time": None})
    served = Served(IndexView("2021-01-01"))
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/") == 404
    assert served.undated


def test_a_lock_needs_no_index_for_what_is_kept(upstream: Upstream, store: Store) -> None:
    name = "demo-pkg-0.9.tar.gz"
    with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
        _get(f"{url}demo-pkg/{name}")
    upstream.answers.clear()
    upstream.asked.clear()
    locked = Served(IndexView(locked=(Package("demo-pkg", "0.9", name, _sha(SDIST)),)))
    with PackageIndex(store, upstream.settings) as index, index.serve(locked) as url:
        assert _get(f"{url}demo-pkg/").count(b"<a ") == 1
        assert _get(f"{url}demo-pkg/{name}") == SDIST
    assert upstream.asked == []


def test_a_lock_whose_file_the_index_has_no_more(upstream: Upstream, store: Store) -> None:
    gone = Package("demo-pkg", "3.0", "demo_pkg-3.0-py3-none-any.whl", "0" * 64)
    served = Served(IndexView(locked=(gone,)))
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/{gone.file}") == 404
    assert served.failed is None, "no fault of the index"
    assert served.complaints == ["the lock's demo_pkg-3.0-py3-none-any.whl is not on the package index any more"]


def test_a_lock_wants_the_very_file(upstream: Upstream, store: Store) -> None:
    name = "demo-pkg-0.9.tar.gz"
    served = Served(IndexView(locked=(Package("demo-pkg", "0.9", name, "1" * 64),)))
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/{name}") == 404
    assert served.complaints


def test_an_unreachable_index_and_an_earlier_answer(upstream: Upstream, store: Store) -> None:
    dead = IndexSettings(index_url="http://127.0.0.1:9/simple", timeout=1.0)
    served = Served()
    with PackageIndex(store, dead) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/") == 404
    assert "cannot read" in served.complaints[0]
    assert served.failed is not None
    with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
        _get(f"{url}demo-pkg/")
    [page] = (store.root / "index").iterdir()
    page.write_text(page.read_text().replace('"fetched": ', '"fetched": 1, "before": '))
    upstream.answers["/simple/demo-pkg/"] = (JSON_TYPE, b"[]")  # what a broken server answers
    served = Served()
    with PackageIndex(store, upstream.settings) as index, index.serve(served) as url:
        assert _get(f"{url}demo-pkg/").count(b"<a ") == 2
    assert "an earlier answer is used" in served.complaints[0]
    assert served.failed is None


def test_one_index_down_that_had_files_before(upstream: Upstream, tmp_path: Path, store: Store) -> None:
    """A second build needs no network for what the first one had."""
    local = tmp_path / "links"
    local.mkdir()
    (local / "demo_pkg-2.0-py3-none-any.whl").write_bytes(WHEEL)
    settings = replace(upstream.settings, find_links=(str(local),))
    with PackageIndex(store, settings) as index, index.serve(Served()) as url:
        assert _get(f"{url}demo-pkg/").count(b"<a ") == 3
        _get(f"{url}demo-pkg/demo-pkg-0.9.tar.gz")
    for page in store.root.glob("index/*"):
        page.write_text(page.read_text().replace('"fetched": ', '"fetched": 1, "before": '))
    upstream.answers.clear()
    upstream.answers["/simple/demo-pkg/"] = (JSON_TYPE, b"[]")  # what a broken server answers
    served = Served()
    with PackageIndex(store, settings) as index, index.serve(served) as url:
        assert _get(f"{url}demo-pkg/").count(b"<a ") == 3
        assert _get(f"{url}demo-pkg/demo-pkg-0.9.tar.gz") == SDIST
    assert "is not an index page" in served.complaints[0]


@pytest.mark.parametrize("tells", [True, False])
def test_one_index_down_and_what_is_wanted_on_no_other(tells: bool, upstream: Upstream, store: Store) -> None:
    """It may be there: the recipe is not to blame, and the index is asked again by the next build."""
    settings = IndexSettings(f"{upstream.url}/simple", ("http://127.0.0.1:9/simple",), timeout=1.0)
    served = Served(IndexView("" if tells else "2001-01-01"))
    with PackageIndex(store, settings) as index, index.serve(served) as url:
        assert _status(f"{url}demo-pkg/") == (200 if tells else 404)
    assert "cannot read http://127.0.0.1:9/simple/demo-pkg/" in served.complaints[0]
    assert (served.failed is None) == tells
    assert not list(store.root.glob("index/*")), "an answer without one of the indexes is not kept"


def test_a_connection_that_is_refused_is_tried_again(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while an index restarts."""
    refusals = [ConnectionRefusedError(), ConnectionRefusedError()]
    connect = socket.create_connection

    def create_connection(*arguments: Any, **options: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return connect(*arguments, **options)

    monkeypatch.setattr("minisandbox.images.http_client.backoff", lambda _: 0.0)
    monkeypatch.setattr("socket.create_connection", create_connection)
    page = Web(upstream.settings).read(f"{upstream.url}/simple/demo-pkg/")
    assert page is not None
    assert not refusals


def test_each_attempt_asks_the_proxy_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.images.http_client.backoff", lambda _: 0.0)
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(20)

        def serve() -> None:
            for _ in range(3):
                connection = proxy.accept()[0]
                with connection, connection.makefile("rb") as file:
                    requests.append(file.readline())

        thread = threading.Thread(target=serve)
        thread.start()
        proxies = (("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}"),)
        with pytest.raises(SourceError, match=r"cannot read https://index\.invalid/"):
            Web(IndexSettings(proxies=proxies, timeout=10.0)).read("https://index.invalid/simple/")
        thread.join()
    assert [line.split()[:2] for line in requests] == [[b"CONNECT", b"index.invalid:443"]] * 3


def test_a_page_older_than_the_date_is_asked_for_anew(upstream: Upstream, store: Store) -> None:
    with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
        _get(f"{url}demo-pkg/")
    [page] = (store.root / "index").iterdir()
    kept = json.loads(page.read_text())
    page.write_text(json.dumps({**kept, "fetched": time.time() - 2 * FRESH}))
    for date, asked in (("2021-01-01", 1), ("2999-01-01", 2)):  # later uploads cannot be before a past date
        with PackageIndex(store, upstream.settings) as index, index.serve(Served(IndexView(date))) as url:
            _get(f"{url}demo-pkg/")
        assert len(upstream.asked) == asked


def test_files_of_this_machine(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "demo_pkg-1.0-py3-none-any.whl").write_bytes(WHEEL)
    (folder / "other-1.0-py3-none-any.whl").write_bytes(b"other")
    settings = IndexSettings(find_links=(str(folder),), no_index=True)
    with PackageIndex(store, settings) as index, index.serve(Served()) as url:
        assert _get(f"{url}demo-pkg/").count(b"<a ") == 1
        assert _get(f"{url}demo-pkg/demo_pkg-1.0-py3-none-any.whl") == WHEEL


def test_a_page_of_the_network_leads_to_no_file_of_this_machine(
    upstream: Upstream, tmp_path: Path, store: Store
) -> None:
    (tmp_path / "demo-pkg-6.6.tar.gz").write_text("secret")
    upstream.answers["/simple/demo-pkg/"] = (
        "text/html",
        f'<a href="{tmp_path.as_uri()}/demo-pkg-6.6.tar.gz">x</a>'.encode(),
    )
    with PackageIndex(store, upstream.settings) as index, index.serve(Served()) as url:
        assert _status(f"{url}demo-pkg/") == 404
        assert _status(f"{url}demo-pkg/demo-pkg-6.6.tar.gz") == 404


@pytest.mark.parametrize("text", ["yesterday", "2024-13-01", ""])
def test_moments_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValue, match="not a date"):
        parse_moment(text)
