"""The package index's simple API (PEP 503 HTML and PEP 691 JSON): which archives there are of a project."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from minisandbox.errors import SourceError
from minisandbox.images.index import IndexSettings, default_index_url
from minisandbox.images.web import Web

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_ARCHIVE = re.compile(r"(?P<stem>.+)\.(?:tar\.gz|tgz|zip|tar\.bz2|tar\.xz)")
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


def find_archives(name: str, settings: IndexSettings) -> list[Archive]:
    """Return the source archives of a project on every configured index.

    Args:
        name: the project.
        settings: the host's.

    Returns:
        Archives in the order of the indexes; empty if none has the project.

    Raises:
        SourceError: an index cannot be read and no other has the project.
    """
    web, found, failures = Web(settings), [], []
    for url in _pages(name, settings):
        try:
            page = web.read(url, _ACCEPT)
        except SourceError as error:  # another index may have it; the failure is told if none has
            failures.append(error)
            continue
        if page is not None:
            found += [archive for link in _links(*page) if (archive := _archive(name, *link))]
    if not found and failures:
        raise failures[0]
    return found


def page_links(page: bytes, base: str) -> list[str]:
    """Return the absolute URLs that an HTML page links to."""
    return [url for url, _ in _links(page, "text/html", base)]


def _pages(name: str, settings: IndexSettings) -> Iterator[str]:
    if not settings.no_index:
        for index in (settings.index_url or default_index_url(), *settings.extra_index_urls):
            yield f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    for link in settings.find_links:
        yield link if urlsplit(link).scheme in _SCHEMES else Path(link).expanduser().absolute().as_uri()


def _links(page: bytes, content_type: str, base: str) -> Iterator[tuple[str, str]]:
    """The links of a page, absolute, with the sha256 that is given for each ("" if none)."""
    if content_type.endswith("json"):
        for file in _json_files(page, base):
            hashes = file.get("hashes")
            digest = hashes.get("sha256", "") if isinstance(hashes, dict) else ""
            yield urljoin(base, str(file.get("url"))), str(digest)
        return
    parser = _Anchors()
    parser.feed(page.decode("utf-8", "replace"))
    base = urljoin(base, parser.base)
    for target in parser.targets:
        url, fragment = urldefrag(urljoin(base, target))
        digest = fragment.partition("sha256=")[2].partition("&")[0]
        yield url, digest.lower()


def _json_files(page: bytes, base: str) -> list[dict[str, object]]:
    try:
        files = json.loads(page)["files"]
        return [file for file in files if isinstance(file, dict)]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{base} is not an index page", reason=f"{type(error).__name__}: {error}") from error


def _archive(name: str, url: str, sha256: str) -> Archive | None:
    filename = unquote(urlsplit(url).path.rpartition("/")[2])
    if urlsplit(url).scheme not in _SCHEMES:
        return None
    version = _version_of(name, filename)
    return None if version is None else Archive(url, filename, version, sha256)


def _version_of(name: str, filename: str) -> str | None:
    """The version in an archive's name; None if it is no source archive of the project."""
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
    except InvalidVersion:
        return one == other


class _Anchors(HTMLParser):
    """Collects what a page's anchors point to, and its base."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take one start tag."""
        target = dict(attrs).get("href")
        if target and tag == "a":
            self.targets.append(target)
        elif target and tag == "base":
            self.base = target
