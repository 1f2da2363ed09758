"""Packages from an index of files: shown to the step for its time, with the directories that its pages link to."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.faults import fill_disk_at

from minisandbox.errors import DiskFull, IndexUnavailable
from minisandbox.images import build, build_all, installed_interpreters
from minisandbox.sandbox import Sandbox
from minisandbox.spec import PythonRecipe
from minisandbox.store import Store

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

METADATA = "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py2.py3-none-any\n"


def _make_index(root: Path) -> str:
    (root / "packages").mkdir(parents=True)
    (root / "simple/tiny-demo").mkdir(parents=True)
    name = "tiny_demo-1.0-py2.py3-none-any.whl"
    with zipfile.ZipFile(root / "packages" / name, "w") as wheel:
        files = {"tiny_demo.py": "x = 1\n"}
        files |= {"tiny_demo-1.0.dist-info/METADATA": METADATA, "tiny_demo-1.0.dist-info/WHEEL": WHEEL}
        record = "".join(f"{path},,\n" for path in [*files, "tiny_demo-1.0.dist-info/RECORD"])
        for path, text in {**files, "tiny_demo-1.0.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)
    (root / "simple/tiny-demo/index.html").write_text(f'<a href="../../packages/{name}">{name}</a>')
    return (root / "simple").as_uri()


@pytest.mark.once
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_packages_from_an_index_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    own = [one for one in installed_interpreters() if one.own_prefix]
    chosen = [one for one in own if (tuple(map(int, one.minor.split("."))) >= (3, 8)) == (tool == "uv")]
    if not chosen:
        pytest.skip(f"no interpreter with a prefix of its own that {tool} is used for")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", _make_index(tmp_path / "mirror"))
    store = Store.open(tmp_path / "store")
    recipe = PythonRecipe(python=chosen[0].version, requirements=("tiny-demo==1.0",))
    image = build(recipe, store=store, name="tiny")
    with Sandbox.create(image.spec()) as box:
        result = box.exec("python -c 'import tiny_demo; print(tiny_demo.x)'; ls -A /run").check()
    assert result.stdout == "1\nhosts\nlock\nresolv.conf\n"
    assert "tiny-demo==1.0" in image.records()[-1].facts["lock"].splitlines()


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """An index beyond the network, of the same files."""
    _make_index(tmp_path / "mirror")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "mirror")))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    thread.join()
    server.server_close()


def python_with_index(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of an interpreter to build with; one index alone is configured."""
    own = [one for one in installed_interpreters() if one.own_prefix]
    if not own:
        pytest.skip("no interpreter with a prefix of its own")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    return own[0].version


def test_a_download_that_finds_the_disk_full_is_no_failure_of_the_step(
    tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be kept has been removed when the step ends: then there is room again."""
    python = python_with_index(served, monkeypatch)
    fill_disk_at("downloaded", monkeypatch.setattr)
    store = Store.open(tmp_path / "store")
    with pytest.raises(DiskFull, match="tiny_demo"):
        build(PythonRecipe(python=python, requirements=("tiny-demo==1.0",)), store=store, name="tiny")
    assert store.failures() == []


def test_an_index_that_is_down_is_no_fault_of_the_recipe(
    tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_with_index("http://127.0.0.1:9/simple", monkeypatch)
    store = Store.open(tmp_path / "store")
    recipe = PythonRecipe(python=python, requirements=("tiny-demo==1.0",))
    found = build_all({"tiny": lambda: recipe}, store=store, retry_failed=False)
    assert isinstance(found.failures["tiny"], IndexUnavailable)
    assert "cannot read http://127.0.0.1:9/simple/tiny-demo/" in (found.failures["tiny"].reason or "")
    assert store.failures() == []
    monkeypatch.setenv("PIP_INDEX_URL", served)
    assert set(build_all({"tiny": lambda: recipe}, store=store, retry_failed=False).images) == {"tiny"}
