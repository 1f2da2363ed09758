"""Source archives: found on the index, downloaded once, verified."""

from __future__ import annotations

from pathlib import Path

from packaging.version import InvalidVersion, Version

from minisandbox.errors import SourceError
from minisandbox.images.download import receive
from minisandbox.images.index import IndexSettings, host_settings
from minisandbox.images.recipe import SdistSource
from minisandbox.images.simple_api import Archive, find_archives, same_version
from minisandbox.images.web import Web
from minisandbox.store import Store
from minisandbox.store.durable import sync_directory
from minisandbox.store.faults import store_faults

_SHOWN = 12


def fetch_sdist(source: SdistSource, store: Store, settings: IndexSettings | None = None) -> Path:
    """Return a verified source archive, downloading it first if the store has it not.

    Args:
        source: which one.
        store: where downloads are kept.
        settings: the package index's; the host's by default.

    Returns:
        The archive's file; its name is its hash.

    Raises:
        SourceError: there is no such project, version or archive, or its hash is another.
        DiskFull: there is no space for it.
    """
    path = store.download_path(source.sha256)
    if path.is_file():
        return path
    with store.lock(f"download-{source.sha256}"):
        if not path.is_file():
            chosen = settings or host_settings()
            _download(_choose(source, find_archives(source.name, chosen)), source, store, chosen)
    return path


def _choose(source: SdistSource, archives: list[Archive]) -> Archive:
    label = f"{source.name} {source.version}"
    if not archives:
        raise SourceError(
            f"no index has source archives of {source.name!r}",
            hint="check the name; `pip config list` names the indexes",
        )
    matching = [one for one in archives if same_version(one.version, source.version)]
    if not matching:
        raise SourceError(
            f"there is no source archive of {label}",
            reason=f"there are: {_versions(archives)}",
            hint="name one of these",
        )
    ranked = sorted(matching, key=lambda one: (one.sha256 != source.sha256, one.sha256 != ""))
    if ranked[0].sha256 not in {"", source.sha256}:
        listed = ", ".join(f"{one.filename} {one.sha256}" for one in ranked)
        raise _wrong_hash(label, source.sha256, f"the index has {listed}")
    return ranked[0]


def _download(archive: Archive, source: SdistSource, store: Store, settings: IndexSettings) -> None:
    with store.staging("download") as work, store_faults(f"download {archive.filename}"):
        part = work / "part"
        digest = receive(archive.url, part, Web(settings))
        if digest != source.sha256:
            raise _wrong_hash(archive.filename, source.sha256, f"what came has {digest}")
        path = store.download_path(source.sha256)
        part.replace(path)
        sync_directory(path.parent)


def _wrong_hash(label: str, wanted: str, reason: str) -> SourceError:
    return SourceError(
        f"the source archive of {label} does not have the sha256 {wanted}",
        reason=reason,
        hint="correct the hash in the recipe if the archive is the one you want",
    )


def _versions(archives: list[Archive]) -> str:
    """The newest versions, for people."""
    ordered = sorted({one.version for one in archives}, key=_version_order)
    return ("..., " if len(ordered) > _SHOWN else "") + ", ".join(ordered[-_SHOWN:])


def _version_order(text: str) -> tuple[Version, str]:
    try:
        return Version(text), text
    except InvalidVersion:
        return Version("0.dev0"), text
