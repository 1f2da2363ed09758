"""What the package index has of a pin, and what is in it: every wheel's list of files, read without the wheel."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit

from benchmarks.scale.pins import Pin
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from minisandbox.errors import SourceError
from minisandbox.images.python.index import without_credentials
from minisandbox.images.python.simple_api import IndexLink, listed_files, same_version, version_in
from minisandbox.images.python.web import Web
from minisandbox.index_settings import IndexSettings
from minisandbox.store.disk.durable import write_atomic

_TAIL = 1 << 16
_LARGEST_SDIST = 64 << 20
_GLIBC = 36
_ARCHIVES = (".tar.gz", ".tgz", ".zip", ".tar.bz2")
_NOT_MODULES = frozenset({"setup.py", "conftest.py"})
_NOT_INSTALLED = frozenset({"test", "tests", "doc", "docs", "examples", "benchmarks", "scripts", "tools"})

WHEEL, NEAR, SDIST, MISSING = "wheel", "near", "sdist", "missing"

Member = tuple[str, int, int, bool]
"""A file in an archive: its path, the CRC-32 of its content, its bytes, whether it can be executed."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What an installation of one pin brings.

    Attributes:
        kind: :data:`WHEEL` (exact), :data:`NEAR` (a wheel of another interpreter stands for a source archive that is
            built), :data:`SDIST` (what of it looks installed), or :data:`MISSING`.
        file: the file's name on the index.
        size: bytes of the file.
        members: what is in it.
    """

    kind: str
    file: str = ""
    size: int = 0
    members: tuple[Member, ...] = ()


class Index:
    """The configured package index, with a cache on disk: a second run asks for nothing, an interrupted one goes on.

    Args:
        folder: the cache.
        settings: the host's.
    """

    def __init__(self, folder: Path, settings: IndexSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._web = _Ranges(settings)
        folder.mkdir(parents=True, exist_ok=True)

    def contents(self, pin: Pin, python: str) -> Contents:
        """Return what is in the file that an interpreter would install for a pin.

        Raises:
            SourceError: the index cannot be asked.
        """
        links = self._links(pin)
        link = choose(python, links)
        near = nearest(python, links) if link is not None and not link.filename.endswith(".whl") else None
        if near is not None:
            return replace(self._contents_of(near), kind=NEAR)
        return Contents(MISSING) if link is None else self._contents_of(link)

    def _contents_of(self, link: IndexLink) -> Contents:
        kept = self._folder / f"{link.filename}.json.gz"
        with suppress(FileNotFoundError):
            return _decoded(kept.read_bytes())
        found = self._look_into(link)
        write_atomic(kept, gzip.compress(json.dumps(asdict(found)).encode(), 6, mtime=0))
        return found

    def _links(self, pin: Pin) -> list[IndexLink]:
        """The files of one version."""
        kept = self._folder / f"{pin.name}=={pin.version}.links.json"
        with suppress(FileNotFoundError):
            return [IndexLink(**row) for row in json.loads(kept.read_bytes())]
        try:
            files = _project_files(pin.name, self._settings)
        except SourceError as error:
            if "404" not in str(error.reason):
                raise
            files = []
        versions = ((link, version_in(pin.name, link.filename)) for link in files)
        found = [link for link, version in versions if version and same_version(version, pin.version)]
        write_atomic(kept, json.dumps([asdict(link) for link in found]).encode())
        return found

    def _look_into(self, link: IndexLink) -> Contents:
        if link.filename.endswith(".whl"):
            size, members = self._web.members(link.url)
            return Contents(WHEEL, link.filename, size, tuple(members))
        data = self._web.part(link.url, None)[1]
        if len(data) > _LARGEST_SDIST:
            return Contents(SDIST, link.filename, len(data))
        return Contents(SDIST, link.filename, len(data), tuple(installed_of(sdist_members(link.filename, data))))


@cache
def _project_files(name: str, settings: IndexSettings) -> list[IndexLink]:
    return listed_files(name, Web(settings))[0]


def _decoded(data: bytes) -> Contents:
    value = json.loads(gzip.decompress(data))
    members = tuple((path, crc, size, program) for path, crc, size, program in value["members"])
    return Contents(value["kind"], value["file"], value["size"], members)


def choose(python: str, links: list[IndexLink]) -> IndexLink | None:
    """Return what an installer on Linux (x86_64) would take: the best wheel, else the source archive; or None."""
    if (wheel := _best_wheel(python, links)) is not None:
        return wheel
    archives = [link for link in links if link.filename.endswith(_ARCHIVES)]
    return min(archives, key=lambda link: _ARCHIVES.index(_ending(link.filename)), default=None)


def nearest(python: str, links: list[IndexLink]) -> IndexLink | None:
    """Return the wheel of the interpreter that is nearest to one for which there is none."""
    number = int(python.partition(".")[2])
    others = sorted(range(5, 15), key=lambda minor: abs(minor - number))
    return next((found for minor in others if (found := _best_wheel(f"3.{minor}", links)) is not None), None)


def _best_wheel(python: str, links: list[IndexLink]) -> IndexLink | None:
    ranks = _ranks(python)
    wheels = [(rank, link.filename, link) for link in links if (rank := _rank(link.filename, ranks)) is not None]
    return min(wheels, key=lambda found: found[:2])[2] if wheels else None


def _ending(filename: str) -> str:
    return next(end for end in _ARCHIVES if filename.endswith(end))


def _rank(filename: str, ranks: dict[Tag, int]) -> int | None:
    try:
        tags = parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:
        return None
    return min((ranks[tag] for tag in tags if tag in ranks), default=None)


@cache
def _ranks(python: str) -> dict[Tag, int]:
    """The tags of an interpreter by preference, for a glibc as new as any wheel asks for."""
    version = [int(part) for part in python.split(".")]
    old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(_GLIBC, 4, -1):
        platforms += [f"manylinux_2_{minor}_x86_64", *([f"{old[minor]}_x86_64"] if minor in old else [])]
    platforms.append("linux_x86_64")
    interpreter = f"cp{''.join(map(str, version))}"
    tags = [*cpython_tags(version, platforms=platforms), *compatible_tags(version, interpreter, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


class _Ranges(Web):
    """Reads parts of files."""

    def part(self, url: str, tail: int | None) -> tuple[int, bytes]:
        """Return a file's size and its last bytes, or all of them."""
        if urlsplit(url).scheme == "file":
            data = Path(urllib.request.url2pathname(urlsplit(url).path)).read_bytes()
            return len(data), data if tail is None else data[-tail:]
        headers = {"User-Agent": "minisandbox"} | ({} if tail is None else {"Range": f"bytes=-{tail}"})
        request = urllib.request.Request(without_credentials(url), headers=headers)
        try:
            with self.client(url).open(request, timeout=self.settings.timeout, attempts=1) as answer:
                data = answer.read()
                span = answer.headers.get("Content-Range", "")
        except HTTPError as error:
            error.close()
            if error.code == 416:  # the file is shorter than what was asked for
                return self.part(url, None)
            raise SourceError(f"cannot read {without_credentials(url)}", reason=str(error)) from None
        except OSError as error:
            raise SourceError(f"cannot read {without_credentials(url)}", reason=str(error)) from None
        return int(span.rpartition("/")[2]) if span else len(data), data

    def members(self, url: str) -> tuple[int, list[Member]]:
        """Return a wheel's size and its central directory, from its last bytes."""
        size, data = self.part(url, _TAIL)
        while True:
            try:
                return size, list(zip_members(cast("IO[bytes]", Tail(size, data))))
            except _BeforeTail as need:
                size, data = self.part(url, size - need.offset + _TAIL)


class _BeforeTail(Exception):
    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class Tail(io.RawIOBase):
    """A file of which only the end is there."""

    def __init__(self, size: int, data: bytes) -> None:
        self._size, self._data, self._at = size, data, 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the place in the whole file."""
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place in the whole file."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read from the end that is there; what lies before it raises an exception that says where."""
        begin = self._at - (self._size - len(self._data))
        if begin < 0:
            raise _BeforeTail(self._at)
        end = len(self._data) if size is None or size < 0 else begin + size
        self._at += len(self._data[begin:end])
        return self._data[begin:end]


def zip_members(file: IO[bytes]) -> Iterator[Member]:
    """Yield what a zip's central directory lists; nothing else of it is read."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield info.filename, info.CRC, info.file_size, bool(info.external_attr >> 16 & 0o111)


def sdist_members(filename: str, data: bytes) -> list[Member]:
    """Return what is in a source archive."""
    if filename.endswith(".zip"):
        return list(zip_members(io.BytesIO(data)))
    found = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            file = archive.extractfile(info) if info.isfile() else None
            if file is not None:
                found.append((info.name, zlib.crc32(file.read()), info.size, bool(info.mode & 0o111)))
    return found


def installed_of(members: list[Member]) -> Iterator[Member]:
    """Yield what an installation of a source archive would leave: its packages and modules, under their own paths.

    A guess: compiled modules are not counted, their sources are, as data of the packages.
    """
    plain = [(path.partition("/")[2], crc, size, program) for path, crc, size, program in members]
    for root in ("src/", "lib/", ""):
        below = [(path.removeprefix(root), crc, size, mode) for path, crc, size, mode in plain if path.startswith(root)]
        paths = [path for path, *_ in below]
        packages = {path.partition("/")[0] for path in paths if path.count("/") == 1 and path.endswith("/__init__.py")}
        modules = {path for path in paths if "/" not in path and path.endswith(".py")} - _NOT_MODULES
        tops = (packages - _NOT_INSTALLED) | modules
        if tops:
            yield from (
                (path, crc, size, program) for path, crc, size, program in below if path.partition("/")[0] in tops
            )
            return


def look_up(index: Index, wanted: list[tuple[Pin, str]], progress: Callable[[int], None]) -> Iterator[Contents]:
    """Yield what the index has for each pin and interpreter, in their order, several asked at once."""
    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(lambda pair: index.contents(*pair), wanted), 1):
            progress(number)
            yield found
