"""Every download trusts the same authorities: the system's, or those of SSL_CERT_FILE."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.unit.private_server import make_authority, serve_files

from minisandbox import certificates, wheels
from minisandbox.errors import HostError, MiniSandboxError
from minisandbox.git import run_git
from minisandbox.images.oci.http import RegistryClient
from minisandbox.images.python.index import find_uv
from minisandbox.images.python.web import Web
from minisandbox.index_settings import IndexSettings, host_settings, uv_variables
from minisandbox.models.http import Failed, Timeouts, Transport
from minisandbox.spec import Remote

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
_WHEEL = "private-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index with one package, a git repository, and a registry's manifest."""
    top = tmp_path_factory.mktemp("files")
    package = top / "simple/private"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / _WHEEL, "w") as wheel:
        wheel.writestr("private.py", "")
        wheel.writestr("private-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: private\nVersion: 1.0\n")
        wheel.writestr("private-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("private-1.0.dist-info/RECORD", "")
    (package / "index.html").write_text(f'<a href="{_WHEEL}">{_WHEEL}</a>')
    (top / "v2/private/manifests").mkdir(parents=True)
    (top / "v2/private/manifests/1").write_text("{}")
    subprocess.run(["git", "init", "--quiet", "--bare", top / "private.git"], check=True)
    subprocess.run(["git", "-C", top / "private.git", "update-server-info"], check=True)
    return top


@pytest.fixture
def server(files: Path, authority: Path) -> Iterator[str]:
    with serve_files(files, authority) as address:
        yield address


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose system trusts nobody, and a user without settings."""
    for name in certificates.variables(Path()):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test exports
    for name in [*os.environ]:
        own = name in certificates.variables(Path()) or "proxy" in name.lower()
        if own or name.startswith(("PIP_", "UV_", "SSL_CERT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CERT", "/nonexistent")  # before that of /etc/pip.conf
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setattr(certificates, "SYSTEM", ())


@pytest.fixture(params=["the system's", "SSL_CERT_FILE"])
def trusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, authority: Path, machine: None) -> None:
    if request.param == "SSL_CERT_FILE":
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    else:
        monkeypatch.setattr(certificates, "SYSTEM", ("/nonexistent", str(authority)))


def page(server: str, place: Path) -> None:
    assert Web(host_settings()).read(f"{server}/simple/private/") is not None


def manifest(server: str, place: Path) -> None:
    with RegistryClient(Remote(urlsplit(server).netloc, "private", "1"), pause=lambda _: None).get(
        "manifests/1"
    ) as answer:
        assert answer.read() == b"{}"


def model(server: str, place: Path) -> None:
    async def ask() -> int:
        transport = Transport(f"{server}/v1", "", Timeouts(), 1000)
        try:
            return (await transport.send("/chat/completions", b"{}", "")).status
        finally:
            await transport.close()

    assert asyncio.run(ask()) == 200


def wheel_by_uv(server: str, place: Path) -> None:
    (place / "pip.conf").write_text(f"[global]\nindex-url = {server}/simple\n")
    sha256 = hashlib.sha256((place / _WHEEL).read_bytes()).hexdigest()
    wheels.fetch_wheels(str(find_uv()), place, [f"private==1.0 --hash=sha256:{sha256}"], timeout=60)
    assert (place / "private.py").is_file()


def page_by_the_hubs_library(server: str, place: Path) -> None:
    httpx = pytest.importorskip("httpx")
    certificates.export()
    assert httpx.get(f"{server}/simple/private/").status_code == 200


DOWNLOADS = (page, manifest, model, wheel_by_uv, page_by_the_hubs_library)


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    shutil.copy(files / "simple/private" / _WHEEL, tmp_path)
    return tmp_path


@pytest.mark.parametrize("download", DOWNLOADS)
@pytest.mark.usefixtures("trusted")
def test_a_company_s_authority_is_trusted(server: str, place: Path, download: Callable[[str, Path], None]) -> None:
    download(server, place)


@pytest.mark.parametrize("download", DOWNLOADS)
def test_an_unknown_authority_is_not(server: str, place: Path, download: Callable[[str, Path], None]) -> None:
    httpx = pytest.importorskip("httpx")
    with pytest.raises((MiniSandboxError, Failed, subprocess.SubprocessError, httpx.ConnectError)):
        download(server, place)


def test_git_trusts_what_the_variable_names(server: str, authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["ls-remote", f"{server}/private.git"]
    assert b"certificate" in run_git(command, timeout=60, fetches=True).stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert run_git(command, timeout=60, fetches=True).returncode == 0


def test_the_system_is_asked_where_no_variable_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates.bundle({}) is None
    for name in ("system.pem", "own.pem"):
        (tmp_path / name).touch()
    monkeypatch.setattr(certificates, "SYSTEM", (str(tmp_path / "system.pem"),))
    assert certificates.bundle({}) == tmp_path / "system.pem"
    assert certificates.bundle({"SSL_CERT_FILE": "/not/there"}) == tmp_path / "system.pem"
    for name in certificates.VARIABLES:
        assert certificates.bundle({name: str(tmp_path / "own.pem")}) == tmp_path / "own.pem"


def test_a_malformed_bundle_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no.pem").write_text("no certificate\n")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "no.pem"))
    with pytest.raises(HostError, match=r"cannot read the certificates in .*no\.pem"):
        certificates.context()


def test_uv_gets_the_settings_of_pip() -> None:
    settings = IndexSettings(
        index_url="https://main.invalid", extra_index_urls=("file:///a", "file:///b"), find_links=("/c",),
        cert=Path("/ca.pem"), trusted_hosts=("h",), proxies=(("https_proxy", "http://p:1"),), timeout=7.0,
    )  # fmt: skip
    assert uv_variables(settings) == {
        "UV_DEFAULT_INDEX": "https://main.invalid", "UV_INDEX": "file:///a file:///b", "UV_FIND_LINKS": "/c",
        "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_INSECURE_HOST": "h", "UV_HTTP_TIMEOUT": "7",
        "SSL_CERT_FILE": "/ca.pem", "https_proxy": "http://p:1",
    }  # fmt: skip
