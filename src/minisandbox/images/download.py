"""Files from an index, fetched by the host: verified, kept under their hashes, fetched once whoever asks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from minisandbox.errors import SourceError
from minisandbox.images.index import IndexSettings, shown
from minisandbox.images.web import Web, copy_with_limit, file_path
from minisandbox.store import Store
from minisandbox.store.durable import sync_directory
from minisandbox.store.faults import fault_point, store_faults

_LIMIT = 8 << 30


def fetch_file(url: str, sha256: str, store: Store, settings: IndexSettings) -> tuple[Path, str]:
    """Return a file and its hash, from the store's downloads or from where the index says.

    Args:
        url: where it is; a file of this machine is used where it lies, once it was checked.
        sha256: the hash it must have; "" where the index gives none.
        store: where downloads are kept.
        settings: the host's.

    Raises:
        SourceError: it cannot be had, or has another hash.
        DiskFull: there is no space for it.
    """
    if sha256 and (path := store.download_path(sha256)).is_file():
        return path, sha256
    if urlsplit(url).scheme == "file":
        return _local(url, sha256)
    with store.lock(f"download-{sha256 or hashlib.sha256(url.encode()).hexdigest()}"):
        if sha256 and store.download_path(sha256).is_file():
            return store.download_path(sha256), sha256
        return _download(url, sha256, store, settings)


def _local(url: str, sha256: str) -> tuple[Path, str]:
    path = file_path(url)
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > _LIMIT:
                raise SourceError(f"{path} is too large", reason=f"it has {size} bytes, holes included")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"cannot read {path}", reason=error.strerror) from error
    _check(url, sha256, digest)
    return path, digest


def _download(url: str, sha256: str, store: Store, settings: IndexSettings) -> tuple[Path, str]:
    with store.staging("download") as work, store_faults(f"download {_name(url)}"):
        part = work / "part"
        digest = receive(url, part, Web(settings))
        fault_point("downloaded")
        _check(url, sha256, digest)
        path = store.download_path(digest)
        part.replace(path)
        sync_directory(path.parent)
    return path, digest


def _check(url: str, wanted: str, found: str) -> None:
    if wanted and wanted != found:
        raise SourceError(
            f"{_name(url)} does not have the sha256 {wanted}",
            reason=f"what came has {found}",
            hint="the index and its file do not fit: nothing was kept; try again, or correct the hash",
        )


def receive(url: str, path: Path, web: Web) -> str:
    """Write the content of a URL into a new file; return its sha256.

    Raises:
        SourceError: it cannot be read, is not there, or broke off.
        OSError: the file cannot be written.
    """
    with path.open("xb") as target:
        if url.startswith("file:"):
            with file_path(url).open("rb") as local:
                copy_with_limit(local, target, _LIMIT)
        else:
            _receive_from_network(url, target, web)
        target.flush()
        os.fsync(target.fileno())
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def _receive_from_network(url: str, target: IO[bytes], web: Web) -> None:
    with web.open(url) as answer:
        if answer is None:
            raise SourceError(
                f"{shown(url)} is listed on the index, but not there",
                hint="try again, or name another version",
            )
        _check_length(url, answer.headers.get("Content-Length"), copy_with_limit(answer, target, _LIMIT))


def _check_length(url: str, announced: str | None, came: int) -> None:
    if announced is not None and announced.isdigit() and int(announced) != came:
        reason = f"the connection broke off after {came} of {announced} bytes"
        raise SourceError(f"cannot download {shown(url)}", reason=reason, hint="try again")


def _name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])
