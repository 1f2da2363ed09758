"""The base layer: an allow-list, the same for the same host."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minisandbox.images.base import BaseEntry, base_entries, base_key, platform_key, write_base


def _host(root: Path) -> Path:
    """A host of our own with things that must not travel."""
    (root / "usr/lib").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "lib64").mkdir()
    (root / "etc/ssl/certs").mkdir(parents=True)
    (root / "etc/ssl/private").mkdir()
    (root / "etc/ssl/private/key").write_text("secret")
    (root / "etc/ssl/certs/real.pem").write_text("cert")
    (root / "etc/ssl/certs/hash.0").symlink_to("real.pem")
    (root / "etc/ssl/certs/usr.pem").symlink_to("/usr/share/x.pem")
    (root / "opt").mkdir()
    (root / "opt/local.pem").write_text("local")
    (root / "etc/ssl/certs/local.pem").symlink_to("../../../opt/local.pem")
    (root / "etc/ssl/certs/up").symlink_to("../private")
    (root / "etc/ssl/certs/loop").symlink_to(".")
    (root / "etc/alternatives").mkdir()
    (root / "etc/alternatives/vi").symlink_to("/usr/bin/vim")
    (root / "etc/alternatives/odd").symlink_to("../../opt/local.pem")
    (root / "etc/hostname").write_text("secret")
    (root / "etc/machine-id").write_text("secret")
    (root / "etc/passwd").write_text("secret:x:0:0::/:/bin/sh")
    (root / "etc/localtime").symlink_to("/usr/share/zoneinfo/UTC")
    return root


def _by_path(entries: tuple[BaseEntry, ...]) -> dict[str, BaseEntry]:
    return {entry.path: entry for entry in entries}


def test_only_the_allow_list_travels(tmp_path: Path) -> None:
    entries = base_entries(_host(tmp_path))
    found = _by_path(entries)
    assert not any(b"secret" in entry.data for entry in entries)
    assert not {"etc/hostname", "etc/machine-id", "etc/ssl/private", "etc/ssl/certs/up", "etc/alternatives/odd"} & set(
        found
    )
    assert found["etc/ssl/certs/hash.0"].data == b"real.pem"
    assert found["etc/ssl/certs/usr.pem"].data == b"/usr/share/x.pem"
    local = found["etc/ssl/certs/local.pem"]
    assert (stat.S_ISREG(local.mode), local.data) == (True, b"local")
    assert found["etc/alternatives/vi"].data == b"/usr/bin/vim"
    assert found["etc/localtime"].data == b"/usr/share/zoneinfo/UTC"
    assert found["etc/passwd"].data.startswith(b"root:x:0:0:")
    assert found["etc/hosts"].data == b"../run/hosts"
    assert found["etc/resolv.conf"].data == b"../run/resolv.conf"


def test_top_level_follows_the_host(tmp_path: Path) -> None:
    found = _by_path(base_entries(_host(tmp_path)))
    assert (stat.S_ISLNK(found["bin"].mode), found["bin"].data) == (True, b"usr/bin")
    assert stat.S_ISDIR(found["lib64"].mode)
    assert "sbin" not in found


def test_key_follows_the_content(tmp_path: Path) -> None:
    host = _host(tmp_path / "host")
    key = base_key(base_entries(host))
    assert base_key(base_entries(host)) == key
    (host / "etc/services").write_text("ssh 22/tcp\n")
    assert base_key(base_entries(host)) != key


def test_the_platform_is_the_distribution_not_its_upgrades(tmp_path: Path) -> None:
    host = _host(tmp_path / "host")
    (host / "usr/lib/os-release").write_text('NAME="Some"\nID=some\nVERSION_ID="12"\nBUILD_ID=1\n')
    (host / "etc/os-release").symlink_to("../usr/lib/os-release")
    key = platform_key(host)
    for name in ("ld.so.cache", "debian_version", "services", "ssl/certs/new.pem"):
        (host / "etc" / name).write_text("what an upgrade brings")
    (host / "etc/localtime").unlink()
    (host / "lib32").symlink_to("usr/lib32")
    (host / "usr/lib/os-release").write_text('ID="some"\nNAME="Some"\nVERSION_ID=12\nBUILD_ID=2\n')
    assert platform_key(host) == key
    (host / "usr/lib/os-release").write_text("ID=some\nVERSION_ID=13\n")
    assert platform_key(host) != key
    (host / "etc/os-release").unlink()
    (host / "usr/lib/os-release").unlink()
    assert platform_key(host) not in ("", key)


def test_written_as_listed(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        write_base(base_entries(), tmp_path / "tree")
    finally:
        os.umask(old)
    for entry in base_entries():
        info = os.lstat(tmp_path / "tree" / entry.path)
        assert stat.S_IFMT(info.st_mode) == stat.S_IFMT(entry.mode)
        if not stat.S_ISLNK(entry.mode):
            assert stat.S_IMODE(info.st_mode) == stat.S_IMODE(entry.mode), entry.path
    modes = {name: stat.S_IMODE(os.stat(tmp_path / "tree" / name).st_mode) for name in ("root", "tmp", "var/tmp", ".")}
    assert modes == {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, ".": 0o755}
