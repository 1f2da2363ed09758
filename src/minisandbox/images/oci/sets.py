"""Pull sets of images: an index in a repository that names the images, and files that travel with them.

:func:`.push.push_set` writes them. Engines pull each image of a set by its tag; ORAS reads the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.http import RegistryClient
from minisandbox.images.oci.prefetch import Pulled, pull_all
from minisandbox.images.oci.pull import JOBS
from minisandbox.images.oci.push import tag_of
from minisandbox.images.oci.reference import locations_of
from minisandbox.images.oci.registry import read_blob, read_manifest
from minisandbox.images.progress import Progress
from minisandbox.spec import OciBase, Remote, parse_reference
from minisandbox.store import Store
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import store_faults

_MOST_FILES = 1000


@dataclass(frozen=True, slots=True)
class SetIndex:
    """The content of a set's index.

    Attributes:
        reference: the reference of the set.
        digest: the digest of the index; ``HOST/NAME@DIGEST`` pins the set.
        images: the digest of each image's manifest, by the image's name.
        files: the digest of the manifest of the set's files, or "".
    """

    reference: Remote
    digest: str
    images: dict[str, str]
    files: str


def read_set(reference: str) -> SetIndex:
    """Request and parse the index of a set.

    Raises:
        InvalidValue: the reference is malformed or is not a set in a registry.
        NotFound: the registry has no such set.
        RegistryError: a request failed.
        ImageRefused: the index is malformed.
    """
    remote = parse_reference(reference)
    if not isinstance(remote, Remote):
        raise InvalidValue(f"{reference} is not in a registry", hint="`minisandbox image import` reads files")
    digest, text = read_manifest(_client(remote), remote.version, str(remote))
    index = m.parse_object(text, f"the index of {remote}")
    if index.get("artifactType") != m.SET:
        raise InvalidValue(f"{remote} is not a set of images", hint=f"minisandbox image pull {reference}")
    entries = m.manifests(index, f"the index of {remote}")
    files = next((entry.digest for entry in entries if not entry.name), "")
    return SetIndex(remote, digest, {entry.name: entry.digest for entry in entries if entry.name}, files)


def pull_set(
    index: SetIndex,
    *,
    store: Store,
    only: Sequence[str] = (),
    private: bool = False,
    jobs: int = JOBS,
    progress: Progress | None = None,
    on_remaining: Callable[[str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Pulled:
    """Pull the images of a set by the names that they have in it; see :func:`pull_all`.

    Args:
        index: the set.
        store: the store for the images.
        only: names or globs of the images to pull; all if empty.
        private: whether the images may be private copies, whose records are trusted.
        jobs: the number of images to pull in parallel.
        progress: called when the pull of each image starts and ends.
        on_remaining: called with a description of the remaining pulls.
        note: called with the total size, and with the reason of each wait.

    Raises:
        NotFound: the set has no image that a name or glob matches.
        DiskFull: the layers do not fit into the store; nothing was pulled.
    """
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in index.images):
            raise NotFound(f"{index.reference} has no image {pattern!r}", hint="check --only")
    repository = f"{index.reference.host}/{index.reference.repository}"
    names = {
        OciBase(f"{repository}:{tag_of(name)}@{digest}"): name
        for name, digest in index.images.items()
        if not only or any(fnmatchcase(name, pattern) for pattern in only)
    }
    return pull_all(
        [*names], store=store, jobs=jobs, names=names, private=private, progress=progress, on_remaining=on_remaining,
        note=note,
    )  # fmt: skip


def fetch_files(index: SetIndex, folder: Path) -> list[Path]:
    """Write the files that travel with a set into a directory, and return their paths.

    Raises:
        RegistryError: a request failed.
        ImageRefused: the manifest of the files is malformed, or a file has another digest.
        StoreError: a file cannot be written.
    """
    paths: list[Path] = []
    if not index.files:
        return paths
    client, subject = _client(index.reference), f"the files of {index.reference}"
    _, text = read_manifest(client, index.files, subject)
    rows = m.parse_object(text, subject).get("layers")
    if not isinstance(rows, list) or len(rows) > _MOST_FILES:
        raise m.malformed(subject, f"'layers' is no list of at most {_MOST_FILES}")
    with store_faults(f"write {subject} to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            descriptor = m.descriptor(row, subject)
            if descriptor.title in ("", ".", "..") or PurePosixPath(descriptor.title).name != descriptor.title:
                raise m.malformed(subject, f"a file is named {descriptor.title!r}")
            write_atomic(folder / descriptor.title, read_blob(client, descriptor, m.MOST_FILE, subject))
            paths.append(folder / descriptor.title)
    return paths


def _client(reference: Remote) -> RegistryClient:
    return RegistryClient(locations_of(reference)[-1], time.sleep)
