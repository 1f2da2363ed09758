"""Find source archives on the package index, download them once, and verify their hashes."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from minisandbox.errors import SourceError
from minisandbox.images.python.index import index_settings
from minisandbox.images.python.simple_api import IndexLink, listed_files, same_version, version_in
from minisandbox.images.python.web import Web, fetch_file
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import SdistSource
from minisandbox.store import Store

_SHOWN = 12


def fetch_sdist(source: SdistSource, store: Store, settings: IndexSettings | None = None) -> Path:
    """Return the path of a verified source archive; download the archive if it is not in the store.

    Args:
        source: the project and version.
        store: the store for downloads.
        settings: the package index settings; the host's settings by default.

    Returns:
        The path of the archive.

    Raises:
        SourceError: there is no such project, version or archive, or the archive has another hash.
        DiskFull: the disk is full.
    """
    path = store.download_path(source.sha256)
    if path.is_file():
        return path
    web = Web(settings or index_settings())
    links, _ = listed_files(source.name, web)
    return fetch_file(_choose(source, links).url, source.sha256, store, web)[0]


def _choose(source: SdistSource, links: list[IndexLink]) -> IndexLink:
    label = f"{source.name} {source.version}"
    names = ((version_in(source.name, link.filename), link) for link in links if not link.filename.endswith(".whl"))
    archives = [(version, link) for version, link in names if version is not None]
    if not archives:
        raise SourceError(
            f"no index has source archives of {source.name!r}",
            hint="check the name; `pip config list` names the indexes",
        )
    matching = [link for version, link in archives if same_version(version, source.version)]
    if not matching:
        raise SourceError(
            f"there is no source archive of {label}",
            reason=f"there are: {_versions({version for version, _ in archives})}",
            hint="name one of these",
        )
    usable = [link for link in matching if link.sha256 in ("", source.sha256)]
    if not usable:
        hashes = ", ".join(f"{link.filename} {link.sha256}" for link in matching)
        raise SourceError(
            f"the source archive of {label} does not have the sha256 {source.sha256}",
            reason=f"the index has {hashes}",
            hint="correct the hash in the recipe if the archive is the one you want",
        )
    return max(usable, key=lambda link: link.sha256 != "")


def _versions(versions: set[str]) -> str:
    """Return a list of the newest versions, for messages."""
    ordered = sorted(versions, key=_version_order)
    return ("..., " if len(ordered) > _SHOWN else "") + ", ".join(ordered[-_SHOWN:])


def _version_order(text: str) -> tuple[Version, str]:
    try:
        return Version(text), text
    except ValueError:  # InvalidVersion, or thousands of digits
        return Version("0.dev0"), text
