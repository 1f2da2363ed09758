"""Import the images of an OCI layout or of an archive: what :mod:`.export`, podman, docker and skopeo write."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisandbox.errors import ImageRefused, InvalidValue
from minisandbox.images.image import Image
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.export import STANDARD
from minisandbox.images.oci.layout import Directory, DockerArchive, Layout, open_archive
from minisandbox.images.oci.pull import Tell, refuse_other, silent, take
from minisandbox.images.oci.reference import Local, image_name
from minisandbox.store import Store


def import_images(
    path: Path,
    *,
    store: Store,
    name: str | None = None,
    platform: str | None = None,
    private: bool = False,
    replace: bool = False,
    progress: Tell | None = None,
) -> list[Image]:
    """Import every image of a layout or an archive.

    Layers that are there already are not unpacked.

    Args:
        path: the directory or the file; ``-``: standard input.
        store: where the images go.
        name: what the only image is called; by default each after its tag, and a copy as it was.
        platform: such as ``linux/arm64``; this machine's by default.
        private: whether they may be copies from another store (:mod:`.copies`), whose records are believed.
        replace: whether an image may take the place of another of its name.
        progress: told of each layer.

    Raises:
        NotFound: the path is not there, or has no image for the platform.
        InvalidValue: there is another image of the same name.
        ImageRefused: an image is malformed or hostile.
        DiskFull: there is no space; finished layers are kept.
    """
    wanted, tell = m.own_platform() if platform is None else m.parse_platform(platform), progress or silent
    store.require_writable("import images")
    if (path / "version").is_file() and (path / "layers").is_dir():
        raise InvalidValue(
            f"{path} is a store", hint=f"export its images first: MINISANDBOX_STORE={path} minisandbox image export"
        )
    with _opened(path, store) as source:
        tags = source.tags()
        if name is not None and len(tags) != 1:
            raise InvalidValue(f"{path} has {len(tags)} images", hint="leave out --name")
        return [_take(store, source.tagged(tag), path, name, wanted, private, replace, tell) for tag in tags]


def _take(
    store: Store,
    source: Layout | DockerArchive,
    path: Path,
    name: str | None,
    platform: m.Platform,
    private: bool,
    replace: bool,
    tell: Tell,
) -> Image:
    place = Local(source.kind, path.absolute(), source.tag)
    name = name if private or name is not None else tag_name(source.tag, path)
    if name is not None and not replace:
        refuse_other(store, name, place)
    try:
        return take(store, source, str(place), name, platform, private=private, replace=replace, tell=tell)
    except ImageRefused as error:
        raise error.about(str(path))  # noqa: B904 - it is the same error


def tag_name(tag: str, path: Path) -> str:
    """Return what an imported image is called: as its tag, without what engines add to it, or else as its file."""
    text = tag.removeprefix("localhost/").removesuffix(":latest")
    if not text:
        return image_name(f"oci:{path}")
    return image_name(text) if ":" in text else image_name(f"{text}:latest").removesuffix("-latest")


@contextmanager
def _opened(path: Path, store: Store) -> Iterator[Layout | DockerArchive]:
    if path.is_dir():
        yield Layout(Directory(path), "")
        return
    with store.staging("import") as work:
        file = path
        if path == STANDARD:
            file = work / "input"
            with file.open("xb") as out:
                shutil.copyfileobj(sys.stdin.buffer, out)
        archive = open_archive(file, work)
        # of docker's archives with both, only manifest.json has whole names
        yield DockerArchive(archive, "") if archive.has("manifest.json") else Layout(archive, "")
