"""Exact rebuilding: what a lock says is what comes, whatever the index has by then; packages of a date."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minisandbox.errors import BuildError
from minisandbox.images import Interpreter, build, installed_interpreters, lock_of, read_lock
from minisandbox.images.image import Image
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store

pytestmark = [pytest.mark.kernel, pytest.mark.slow]


@dataclass
class Index:
    """A package index whose packages come and go."""

    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    url: str = ""

    def add_wheel(
        self,
        name: str,
        version: str,
        uploaded: str,
        code: str = "x = 1\n",
        tag: str = "py2.py3-none-any",
        needs: str = "",
    ) -> None:
        info = f"{name}-{version}.dist-info"
        texts = {
            f"{name}.py": f"{code}version = {version!r}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as wheel:
            for path, text in texts.items():
                wheel.writestr(path, text)
        self.files[f"{name}-{version}-{tag}.whl"] = data.getvalue(), uploaded

    def page(self, project: str, local: bool) -> bytes:
        rows = [
            {
                "filename": name,
                "url": f"/files/{name}",
                "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
                "upload-time": uploaded,
            }
            for name, (data, uploaded) in self.files.items()
            if name.startswith(f"{project.replace('-', '_')}-") and ("+" in name) == local
        ]
        return json.dumps({"files": rows}).encode()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rpartition("/")[2]
            page = self.path.startswith(("/simple/", "/cpu/"))
            body = state.page(name, self.path.startswith("/cpu/")) if page else state.files.get(name, (b"", ""))[0]
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", state.url)
    monkeypatch.setattr("minisandbox.images.python.torch_builds._CPU_INDEX", state.url.replace("/simple", "/cpu"))
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One for all: the interpreters' layers cost more than everything else here."""
    return Store.open(tmp_path_factory.mktemp("locked") / "store")


@pytest.fixture(params=["uv", "pip"])
def interpreter(request: pytest.FixtureRequest) -> Interpreter:
    own = [one for one in installed_interpreters() if one.own_prefix]
    chosen = [one for one in own if (tuple(map(int, one.minor.split("."))) >= (3, 8)) == (request.param == "uv")]
    if not chosen:
        pytest.skip(f"no interpreter with a prefix of its own that {request.param} is used for")
    return chosen[0]


def _versions(image: Image, *names: str) -> str:
    code = "; ".join(f"import {name}; print({name}.version)" for name in names)
    with Sandbox.create(image.spec()) as box:
        return box.exec(["python", "-c", code]).check().stdout


def test_a_lock_gives_the_same_when_the_index_has_moved_on(
    index: Index, interpreter: Interpreter, store: Store, tmp_path: Path
) -> None:
    index.add_wheel("tinydemo", "1.0", "2020-01-01T00:00:00Z")
    index.add_wheel("tinytool", "1.0", "2020-01-01T00:00:00Z")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.py").write_text("x = 1\n")
    recipe = PythonRecipe(
        python=interpreter.version,
        requirements=("tinydemo",),  # no pin at all
        source=LocalSource(tmp_path / "source"),
        install=("python -m pip install --quiet tinytool",),
    )
    image = build(recipe, store=store, name="first")
    assert _versions(image, "tinydemo", "tinytool") == "1.0\n1.0\n"
    path = tmp_path / "first.toml"
    path.write_text(lock_of("first", image.records()).to_toml())
    lock = read_lock(path)
    assert lock.python["version"] == interpreter.version
    assert [one.file for one in lock.steps["requirements"]] == ["tinydemo-1.0-py2.py3-none-any.whl"]
    assert [one.file for one in lock.steps["install"]] == ["tinytool-1.0-py2.py3-none-any.whl"]

    index.add_wheel("tinydemo", "2.0", "2024-01-01T00:00:00Z")
    index.add_wheel("tinytool", "2.0", "2024-01-01T00:00:00Z")
    _forget_index(store)
    later = replace(recipe, requirements=("tinydemo>=0",))  # the same, and not found in the store
    newer = build(later, store=store, name="newer")
    assert _versions(newer, "tinydemo", "tinytool") == "2.0\n2.0\n"
    dated = build(replace(later, exclude_newer="2022-01-01"), store=store, name="dated")
    assert _versions(dated, "tinydemo", "tinytool") == "1.0\n1.0\n"

    locked, wheel = replace(recipe, lock=lock), "tinytool-1.0-py2.py3-none-any.whl"
    kept = index.files.pop(wheel)
    store.download_path(hashlib.sha256(kept[0]).hexdigest()).unlink()
    _forget_index(store)
    with pytest.raises(BuildError, match="install") as caught:
        build(locked, store=store, name="again")
    assert f"{wheel} is not on the package index any more" in (caught.value.reason or "")
    index.files[wheel] = kept
    _forget_index(store)
    again = build(locked, store=store, name="again")
    assert _versions(again, "tinydemo", "tinytool") == "1.0\n1.0\n"
    assert lock_of("first", again.records()) == lock
    changed = lock_of("first", newer.records())
    assert (changed.python, changed.base) == (lock.python, lock.base)
    assert changed.installed["tinydemo"] == "2.0"


def _forget_index(store: Store) -> None:
    for page in (store.root / "index").iterdir():
        page.unlink()


POISON = """
import os
for place in ("PIP_CACHE_DIR", "UV_CACHE_DIR"):
    for folder, _, names in os.walk(os.environ[place]):
        for name in names:
            open(os.path.join(folder, name), "wb").write(b"poison")
"""


def test_code_of_one_build_leaves_nothing_for_another(
    index: Index, interpreter: Interpreter, store: Store, tmp_path: Path
) -> None:
    """Code that a build runs writes wherever tools keep what they fetched; the next build of its victim is clean."""
    index.add_wheel("victim", "1.0", "2020-01-01T00:00:00Z")
    source = tmp_path / "source"
    source.mkdir()
    (source / "poison.py").write_text(POISON)
    for path in (store.root / "downloads").iterdir():
        path.unlink()
    attack = ("python -m pip install victim", "/run/minisandbox/uv cache dir; python poison.py")
    build(
        PythonRecipe(python=interpreter.version, source=LocalSource(source), install=attack), store=store, name="attack"
    )
    downloads = {path.name: path.read_bytes() for path in (store.root / "downloads").iterdir()}
    assert len(downloads) == 1
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in downloads.items())
    clean = build(PythonRecipe(python=interpreter.version, requirements=("victim",)), store=store, name="clean")
    assert _versions(clean, "victim") == "1.0\n"


@pytest.mark.once
def test_pytorch_without_cuda(tmp_path: Path, index: Index, store: Store, interpreter: Interpreter) -> None:
    """Its own index has the build for the CPU; pins of the other one, of CUDA's libraries and a dependency get it."""
    tag = f"py2.py3-none-manylinux2014_{platform.machine()}"
    index.add_wheel("torch", "1.0", "2020-01-01T00:00:00Z", tag=tag, needs="Requires-Dist: nvidia-cublas-cu12\n")
    index.add_wheel("torch", "1.0+cpu", "2020-01-01T00:00:00Z", tag=tag)
    index.add_wheel("nvidia_cublas_cu12", "1.0", "2020-01-01T00:00:00Z")
    index.add_wheel("vision", "1.0", "2020-01-01T00:00:00Z", needs="Requires-Dist: torch>=1\n")
    pins = ("torch==1.0+cu121", "nvidia-cublas-cu12==1.0", "vision==1.0")
    recipe = PythonRecipe(python=interpreter.version, requirements=pins, torch_backend="cpu")
    image = build(recipe, store=store, name="cpu")
    assert _versions(image, "torch", "vision") == "1.0+cpu\n1.0\n"
    (tmp_path / "lock").write_text(lock_of("cpu", image.records()).to_toml())
    lock = read_lock(tmp_path / "lock")
    assert (lock.torch_backend, lock.installed["torch"]) == ("cpu", "1.0+cpu")
    assert not any(name.startswith("nvidia") for name in lock.installed)
    again = build(replace(recipe, lock=lock), store=store, name="again")
    assert lock_of("cpu", again.records()) == lock
    index.files.pop(f"torch-1.0+cpu-{tag}.whl")
    with pytest.raises(BuildError, match=r"other builds of torch are not there"):
        build(replace(recipe, requirements=("torch==1.0",)), store=Store.open(tmp_path / "empty"), name="none")
