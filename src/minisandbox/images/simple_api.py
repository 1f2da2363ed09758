"""The package index's simple API (PEP 503 HTML and PEP 691 JSON): which files there are of a project."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from minisandbox.errors import SourceError
from minisandbox.images.echoes import Secrets
from minisandbox.images.index import IndexSettings, default_index_url, shown, without_credentials
from minisandbox.images.web import Web, authorization

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_LONGEST_NAME = 255
_ARCHIVE = re.compile(r"(?P<stem>.+)\.(?:tar\.gz|tgz|zip|tar\.bz2|tar\.xz)")
_ECHO_HINT = "an index must not send back what it is asked with: tell whoever runs it"
_SCHEMES = frozenset({"http", "https", "file"})


@dataclass(frozen=True, slots=True)
class Archive:
    """A source archive on an index.

    Attributes:
        url: where it is.
        filename: its name.
        version: the version in its name.
        sha256: the hash that the index gives, or "".
    """

    url: str
    filename: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Link:
    """A file on an index page.

    Attributes:
        url: where it is, absolute, without a fragment.
        sha256: the hash that the page gives, or "".
        requires_python: the interpreters it is for, as the page says it, or "".
        yanked: why it was yanked; None where it was not.
        uploaded: when it was uploaded (PEP 700), as ISO 8601, or "".
        metadata: the hash of its metadata file (PEP 714), or "" where there is none.
    """

    url: str
    sha256: str = ""
    requires_python: str = ""
    yanked: str | None = None
    uploaded: str = ""
    metadata: str = ""

    @property
    def filename(self) -> str:
        """The last part of the URL."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def texts(self) -> tuple[str, ...]:
        """Return all that the index says in it, but for the name of a server."""
        url = urlsplit(self.url)
        where = (url.netloc.rpartition("@")[0], url.path, url.query, url.fragment)
        return (*where, self.sha256, self.requires_python, self.yanked or "", self.uploaded, self.metadata)


class Listed(NamedTuple):
    """What the indexes have of a project.

    Attributes:
        files: in the order of the indexes.
        left_out: how many more there are, which repeat credentials of this host.
    """

    files: list[Link]
    left_out: int = 0

    @property
    def complaint(self) -> str:
        """Why files are missing, or ""."""
        return f"{self.left_out} files are left out: the index repeats a password in them" if self.left_out else ""


def find_archives(name: str, settings: IndexSettings) -> list[Archive]:
    """Return the source archives of a project on every configured index.

    Args:
        name: the project.
        settings: the host's.

    Returns:
        Archives in the order of the indexes; empty if none has the project.

    Raises:
        SourceError: an index cannot be read and no other has the project, or all that there is repeats credentials.
    """
    listed = listed_files(name, settings)
    archives = [archive for link in listed.files if (archive := _archive(name, link))]
    if listed.left_out and not archives:
        raise SourceError(f"no source archive of {name!r} can be used", reason=listed.complaint, hint=_ECHO_HINT)
    return archives


def listed_files(name: str, settings: IndexSettings) -> Listed:
    """Return what every configured index links to for a project; ``find_links`` pages are not filtered by name.

    Raises:
        SourceError: an index cannot be read and no other has anything.
    """
    web, found, failures = Web(settings), [], []
    for url in _pages(name, settings):
        try:
            page = web.read(url, _ACCEPT)
        except SourceError as error:  # another index may have it; the failure is told if none has
            failures.append(error)
            continue
        if page is not None:
            found += [link for link in _links(*page) if _may_link(url, link.url)]
    if not found and failures:
        raise failures[0]
    return without_echoes(found, settings)


def without_echoes(links: Iterable[Link], settings: IndexSettings) -> Listed:
    """Leave out links that repeat credentials of the settings: build steps and messages are told what links say."""
    secrets, several = Secrets.of(settings), [_plain(link, settings) for link in links]
    kept = [link for link in several if not secrets.are_in(link.texts())]
    return Listed(kept, len(several) - len(kept))


def _plain(link: Link, settings: IndexSettings) -> Link:
    """Return a link without the credentials that its server is told anyway, as the settings say."""
    url = without_credentials(link.url)
    same = authorization(url, settings) == authorization(link.url, settings)
    return replace(link, url=url) if same and url != link.url else link


def _may_link(page: str, target: str) -> bool:
    """Whether a link is followed: a page from the network must not lead to files of this machine."""
    scheme = urlsplit(target).scheme
    return scheme in _SCHEMES and (scheme != "file" or urlsplit(page).scheme == "file")


def _pages(name: str, settings: IndexSettings) -> Iterator[str]:
    if not settings.no_index:
        for index in (settings.index_url or default_index_url(), *settings.extra_index_urls):
            yield f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    for link in settings.find_links:
        yield link if urlsplit(link).scheme in _SCHEMES else Path(link).expanduser().absolute().as_uri()


def _links(page: bytes, content_type: str, base: str) -> Iterator[Link]:
    if content_type.endswith("json"):
        yield from (_json_link(file, base) for file in _json_files(page, base))
        return
    parser = _Anchors()
    parser.feed(page.decode("utf-8", "replace"))
    base = urljoin(base, parser.base)
    for anchor in parser.anchors:
        url, fragment = urldefrag(urljoin(base, anchor["href"]))
        yanked = anchor.get("data-yanked")
        yield Link(
            url,
            _hash_in(fragment),
            anchor.get("data-requires-python", ""),
            yanked,
            metadata=_hash_in(anchor.get("data-core-metadata", "") or anchor.get("data-dist-info-metadata", "")),
        )


def _hash_in(text: str) -> str:
    return text.partition("sha256=")[2].partition("&")[0].lower()


def _json_link(file: Mapping[str, object], base: str) -> Link:
    yanked = file.get("yanked", False)
    return Link(
        urljoin(base, str(file.get("url"))),
        _sha256(file.get("hashes")),
        str(file.get("requires-python") or ""),
        None if yanked is False else "" if yanked is True else str(yanked),
        str(file.get("upload-time") or ""),
        _sha256(file.get("core-metadata") or file.get("dist-info-metadata")),
    )


def _sha256(hashes: object) -> str:
    digest = hashes.get("sha256", "") if isinstance(hashes, dict) else ""
    return str(digest).lower()


def _json_files(page: bytes, base: str) -> list[dict[str, object]]:
    try:
        files = json.loads(page)["files"]
        return [file for file in files if isinstance(file, dict)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{shown(base)} is not an index page", reason=f"{type(error).__name__}: {error}") from error


def version_in(name: str, filename: str) -> str | None:
    """Return the version in the name of a project's file, wheel or source archive; None if it is not the project's."""
    if filename.endswith(".whl"):
        parts = filename.split("-")
        return parts[1] if len(parts) >= 5 and canonicalize_name(parts[0]) == canonicalize_name(name) else None
    return _version_of(name, filename)


def _archive(name: str, link: Link) -> Archive | None:
    version = _version_of(name, link.filename)
    return None if version is None else Archive(link.url, link.filename, version, link.sha256)


def _version_of(name: str, filename: str) -> str | None:
    """The version in an archive's name; None if it is no source archive of the project."""
    if len(filename) > _LONGEST_NAME:  # no file can have it, and a version of thousands of digits cannot be read
        return None
    try:
        project, parsed = parse_sdist_filename(filename)
        if project == canonicalize_name(name):
            return str(parsed)
    except InvalidSdistFilename:
        pass
    match = _ARCHIVE.fullmatch(filename)
    if match is None:
        return None
    for at in [found.start() for found in re.finditer("-", match["stem"])]:  # old names may have "-" in the project
        if canonicalize_name(match["stem"][:at]) == canonicalize_name(name):
            return match["stem"][at + 1 :]
    return None


def same_version(one: str, other: str) -> bool:
    """Whether two texts name the same version (PEP 440: ``1.0`` is ``1.0.0``)."""
    try:
        return Version(one) == Version(other)
    except ValueError:  # InvalidVersion, or thousands of digits
        return one == other


class _Anchors(HTMLParser):
    """Collects a page's anchors, and its base."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: list[dict[str, str]] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take one start tag."""
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and values.get("href"):
            self.anchors.append(values)
        elif tag == "base" and values.get("href"):
            self.base = values["href"]
