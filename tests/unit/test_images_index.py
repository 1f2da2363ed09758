"""The host's package index settings: read as pip and uv read them, shown to a step without their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox import certificates
from minisandbox.errors import BuildError
from minisandbox.images.python.index import (
    default_index_url,
    host_access,
    index_access,
    without_credentials,
)
from minisandbox.index_settings import IndexSettings, host_settings

MAIN, EXTRA = "https://main.invalid/simple", "https://extra.invalid/simple"


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """An environment in which no configuration of this machine is seen."""
    home = str(tmp_path)
    return {"HOME": home, "XDG_CONFIG_HOME": f"{home}/config", "XDG_CONFIG_DIRS": f"{home}/xdg", "VIRTUAL_ENV": home}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_files_then_environment(tmp_path: Path, clean: dict[str, str]) -> None:
    _write(tmp_path / "xdg/pip/pip.conf", "[global]\nindex-url = https://old.invalid\ntimeout = 7\n")
    _write(tmp_path / "config/pip/pip.conf", f"[global]\nindex_url = {MAIN}\n[install]\nfind-links = /a\n  /b\n")
    settings = host_settings(clean)
    assert settings.index_url == MAIN
    assert settings.find_links == ("/a", "/b")
    clean |= {
        "PIP_EXTRA_INDEX_URL": f"{EXTRA} file:///x",
        "PIP_NO_INDEX": "0",
        "PIP_TRUSTED_HOST": "h",
        "PIP_TIMEOUT": "9",
    }
    settings = host_settings(clean)
    assert settings.extra_index_urls == (EXTRA, "file:///x")
    assert (settings.no_index, settings.trusted_hosts) == (False, ("h",))
    assert settings.urls == (MAIN, EXTRA, "file:///x", "/a", "/b")


def test_a_named_file_wins_and_devnull_means_none(tmp_path: Path, clean: dict[str, str]) -> None:
    _write(tmp_path / "config/pip/pip.conf", "[global]\nindex-url = https://old.invalid\n")
    _write(tmp_path / "mine", f"[global]\nindex-url = {MAIN}\n")
    assert host_settings({**clean, "PIP_CONFIG_FILE": str(tmp_path / "mine")}).index_url == MAIN
    assert host_settings({**clean, "PIP_CONFIG_FILE": "/dev/null"}).index_url is None


def test_damaged_files_do_not_stop_us(tmp_path: Path, clean: dict[str, str]) -> None:
    _write(tmp_path / "config/pip/pip.conf", "no section\n")
    _write(tmp_path / "config/uv/uv.toml", "no = [toml")
    assert host_settings({**clean, "PIP_INDEX_URL": MAIN}).index_url == MAIN


def test_uv_where_pip_has_none(tmp_path: Path, clean: dict[str, str]) -> None:
    text = f'[[index]]\nurl = "{MAIN}"\ndefault = true\n[[index]]\nname = "x"\nurl = "{EXTRA}"\n'
    _write(tmp_path / "config/uv/uv.toml", text)
    clean["PIP_CONFIG_FILE"] = "/dev/null"  # a machine's own /etc/pip.conf may name an index
    settings = host_settings(clean)
    assert (settings.index_url, settings.extra_index_urls) == (MAIN, (EXTRA,))
    settings = host_settings(
        {**clean, "UV_DEFAULT_INDEX": "https://env.invalid", "UV_INDEX": "name=https://two.invalid"}
    )
    assert settings.index_url == "https://env.invalid"
    assert settings.extra_index_urls == ("https://two.invalid", EXTRA)


def test_certificates_and_proxies(tmp_path: Path, clean: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").touch()
    clean["PIP_CONFIG_FILE"] = "/dev/null"  # a machine's own /etc/pip.conf may name certificates
    settings = host_settings({**clean, "SSL_CERT_FILE": str(tmp_path / "ca.pem"), "HTTPS_PROXY": "http://p:1"})
    assert settings.cert == tmp_path / "ca.pem"
    assert settings.proxies == (("https_proxy", "http://p:1"),)
    monkeypatch.setattr(certificates, "SYSTEM", (str(tmp_path / "system.pem"),))
    assert host_settings({**clean, "PIP_CERT": "/not/there"}).cert is None
    (tmp_path / "system.pem").touch()
    assert host_settings({**clean, "PIP_CERT": "/not/there"}).cert == tmp_path / "system.pem"
    assert dict(host_settings({**clean, "PIP_PROXY": "http://q:2"}).proxies)["https_proxy"] == "http://q:2"


def test_the_default_index_is_a_url() -> None:
    assert default_index_url().startswith("https://")


def test_servers_are_asked_without_credentials_in_the_address() -> None:
    assert without_credentials("https://a:b@host:8/x?y@z") == "https://host:8/x?y@z"
    assert without_credentials("https://host?y@z") == "https://host?y@z"
    assert without_credentials("/a@b/c") == "/a@b/c"


def test_a_step_reaches_our_index_and_nothing_else() -> None:
    access = index_access("http://127.0.0.1:4711/secret/simple/")
    assert (access.network.mode, access.network.hosts) == ("allow", ("127.0.0.1:4711",))
    assert access.network.private
    url = "http://127.0.0.1:4711/secret/simple/"
    assert access.environment["PIP_INDEX_URL"] == access.environment["UV_DEFAULT_INDEX"] == url
    assert access.environment["no_proxy"] == access.environment["NO_PROXY"] == ""
    assert access.mounts == ()


def test_the_hosts_network_comes_with_its_proxies_and_certificates(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    settings = IndexSettings(index_url=MAIN, cert=tmp_path / "ca.pem", proxies=(("https_proxy", "http://p:1"),))
    access = host_access("http://127.0.0.1:4711/secret/simple/", settings, "install")
    assert access.network.mode == "host"
    assert access.environment["https_proxy"] == "http://p:1"
    assert access.environment["no_proxy"] == "127.0.0.1"
    assert access.environment["SSL_CERT_FILE"] == "/run/minisandbox/certificates.pem"
    assert [mount.source for mount in access.mounts] == [tmp_path / "ca.pem"]
    assert MAIN not in access.environment.values()


def test_credentials_of_proxies_do_not_get_into_a_step() -> None:
    settings = IndexSettings(proxies=(("https_proxy", "http://u:hunter2@p.invalid"),))
    with pytest.raises(BuildError, match="holds credentials") as caught:
        host_access("http://127.0.0.1:1/", settings, "install")
    assert "hunter2" not in str(caught.value)
