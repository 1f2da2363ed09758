"""List the files of a project on the configured package indexes by the simple API (PEP 503 HTML, PEP 691 JSON)."""

from __future__ import annotations

import hashlib
import html
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import Version

from minisandbox.errors import InvalidValue, SourceError
from minisandbox.images.python.web import Page, Web
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import parse_moment, shown
from minisandbox.store import Store
from minisandbox.store.disk.durable import write_atomic

FRESH = 600.0
"""Seconds to cache a listing, the same as in the Cache-Control header of the public index."""

_FORMAT = 2
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_ARCHIVE = re.compile(r"(?P<stem>.+)\.(?:tar\.gz|tgz|zip|tar\.bz2|tar\.xz)")
_SCHEMES = frozenset({"http", "https", "file"})


@dataclass(frozen=True, slots=True)
class IndexLink:
    """A file on an index page.

    Attributes:
        url: the absolute URL without a fragment.
        sha256: the hash that the page states, or "".
        requires_python: the specifier of supported Python versions, or "".
        yanked: the reason why the file was yanked; None if the file was not yanked.
        uploaded: the upload time (PEP 700) in ISO 8601, or "".
        metadata: the hash of the file's metadata file (PEP 714), or "".
    """

    url: str
    sha256: str = ""
    requires_python: str = ""
    yanked: str | None = None
    uploaded: str = ""
    metadata: str = ""

    @property
    def filename(self) -> str:
        """The name of the file: the last part of the URL."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def uploaded_before(self, moment: datetime) -> bool:
        """Return whether the file was uploaded before a time; False if its upload time is unknown, as in uv."""
        try:
            return bool(self.uploaded) and parse_moment(self.uploaded) < moment
        except InvalidValue:
            return False


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a project.

    Attributes:
        files: the files by name; if several indexes have a file, the first index wins.
        fetched: the time when the indexes were requested, in seconds since the epoch.
        failure: the error of an index that could not be read, or "".
    """

    files: Mapping[str, IndexLink]
    fetched: float
    failure: str = ""


@dataclass(slots=True)
class Listings:
    """A cache of the indexes' listings of projects. Threads may share it.

    Attributes:
        store: the store that caches responses.
        web: the reader of pages.
    """

    store: Store
    web: Web
    _listings: dict[str, Listing] = field(default_factory=dict)

    def get(self, project: str, *, before: datetime | None = None) -> Listing:
        """Return the files of a project; if no index can be read, return the files of an earlier response.

        Args:
            project: the normalised name of the project.
            before: time after which uploads are invisible, so that a response received later never expires.

        Raises:
            SourceError: no index can be read, and no earlier response is cached.
        """
        listing = self._listings.get(project) or self._cached(project)
        oldest = time.time() - FRESH if before is None else min(time.time() - FRESH, before.timestamp())
        if listing is None or listing.fetched < oldest:
            listing = self._request(project, listing)
        self._listings[project] = listing
        return listing

    def _request(self, project: str, old: Listing | None) -> Listing:
        try:
            links, failures = listed_files(project, self.web)
        except SourceError as error:
            if old is None:
                raise
            return Listing(old.files, time.time(), f"{error}; an earlier answer is used")
        files: dict[str, IndexLink] = {}
        for link in links:
            if version_in(project, link.filename) is not None:
                files.setdefault(link.filename, link)
        if failures:  # also use files of an earlier response; do not cache the result on disk
            files = {**files, **(old.files if old else {})}
            return Listing(files, time.time(), "; ".join(map(str, failures)))
        listing = Listing(files, time.time())
        self._save(project, listing)
        return listing

    def _save(self, project: str, listing: Listing) -> None:
        rows = [asdict(link) for link in listing.files.values()]
        path = self._path(project)
        with suppress(OSError):  # the cache is optional
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(path, json.dumps({"format": _FORMAT, "fetched": listing.fetched, "files": rows}).encode())

    def _cached(self, project: str) -> Listing | None:
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # ignore a broken cache entry
            cached = json.loads(self._path(project).read_bytes())
            if cached["format"] == _FORMAT:
                links = [IndexLink(**row) for row in cached["files"]]
                return Listing({link.filename: link for link in links}, float(cached["fetched"]))
        return None

    def _path(self, project: str) -> Path:
        """Return the path of a project's cache file, named by a hash, because the URLs may contain secrets."""
        identity = json.dumps([self.web.settings.indexes, self.web.settings.find_links, project])
        return self.store.root / "index" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


def listed_files(name: str, web: Web) -> tuple[list[IndexLink], list[SourceError]]:
    """Return a project's files on all configured indexes, and all files of ``find_links`` pages, of any project.

    Returns:
        The files in the order of the indexes, and the errors of indexes that could not be read.

    Raises:
        SourceError: an index cannot be read, and no other index has files.
    """
    links: list[IndexLink] = []
    failures: list[SourceError] = []
    for url in _pages(name, web.settings):
        try:
            if page := web.read(url, _ACCEPT):
                links += [link for link in _links(page) if _may_link(url, link.url)]
        except SourceError as error:  # continue: another index may have the project
            failures.append(error)
    if failures and not links:
        raise failures[0]
    return links, failures


def _may_link(page: str, target: str) -> bool:
    """Return whether to follow a link; a page from the network must not link to files of this machine."""
    scheme = urlsplit(target).scheme
    return scheme in _SCHEMES and (scheme != "file" or urlsplit(page).scheme == "file")


def _pages(name: str, settings: IndexSettings) -> Iterator[str]:
    for index in settings.indexes:
        yield f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    for link in settings.find_links:
        yield link if urlsplit(link).scheme in _SCHEMES else Path(link).expanduser().absolute().as_uri()


def _links(page: Page) -> Iterator[IndexLink]:
    if page.content_type.endswith("json"):
        try:
            yield from [_json_link(file, page.url) for file in json.loads(page.content)["files"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SourceError(f"{shown(page.url)} is not an index page", reason=reason) from error
        return
    parser = _Anchors()
    parser.feed(page.content.decode("utf-8", "replace"))
    base = urljoin(page.url, parser.base)
    for anchor in parser.anchors:
        url, fragment = urldefrag(urljoin(base, anchor["href"]))
        metadata = anchor.get("data-core-metadata", "") or anchor.get("data-dist-info-metadata", "")
        requires = anchor.get("data-requires-python", "")
        yield IndexLink(url, _hash_in(fragment), requires, anchor.get("data-yanked"), metadata=_hash_in(metadata))


def _hash_in(text: str) -> str:
    return text.partition("sha256=")[2].partition("&")[0].lower()


def _json_link(file: Mapping[str, Any], base: str) -> IndexLink:
    yanked, metadata = file.get("yanked") or False, file.get("core-metadata") or file.get("dist-info-metadata")
    return IndexLink(
        urljoin(base, str(file["url"])),
        str(file.get("hashes", {}).get("sha256", "")).lower(),
        str(file.get("requires-python") or ""),
        None if yanked is False else "" if yanked is True else str(yanked),
        str(file.get("upload-time") or ""),
        str(metadata.get("sha256", "")).lower() if isinstance(metadata, dict) else "",
    )


def json_page(project: str, files: Iterable[IndexLink]) -> bytes:
    """Return a project's page in JSON (PEP 691); unlike HTML, the JSON format has upload times."""
    rows = [
        {
            "filename": link.filename,
            "url": quote(link.filename),
            "hashes": {"sha256": link.sha256} if link.sha256 else {},
            "requires-python": link.requires_python or None,
            "yanked": False if link.yanked is None else link.yanked or True,
            "core-metadata": {"sha256": link.metadata} if link.metadata else False,
            **({"upload-time": link.uploaded} if link.uploaded else {}),
        }
        for link in files
    ]
    return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": rows}).encode()


def html_page(files: Iterable[IndexLink]) -> bytes:
    """Return a project's page in HTML (PEP 503), which old versions of pip need."""
    lines = ["<!DOCTYPE html>", "<html><body>"]
    for link in files:
        fragment = f"#sha256={link.sha256}" if link.sha256 else ""
        attributes = f' data-requires-python="{html.escape(link.requires_python)}"' if link.requires_python else ""
        if link.yanked is not None:
            attributes += f' data-yanked="{html.escape(link.yanked)}"'
        if link.metadata:
            attributes += f' data-dist-info-metadata="sha256={link.metadata}"'
        lines.append(f'<a href="{quote(link.filename)}{fragment}"{attributes}>{html.escape(link.filename)}</a><br>')
    return "\n".join([*lines, "</body></html>"]).encode()


def version_in(name: str, filename: str) -> str | None:
    """Return the version in the name of a wheel or source archive; None if the file belongs to another project."""
    if filename.endswith(".whl"):
        parts = filename.split("-")
        return parts[1] if len(parts) >= 5 and canonicalize_name(parts[0]) == canonicalize_name(name) else None
    stem = match["stem"] if (match := _ARCHIVE.fullmatch(filename)) else ""
    dash_indexes = [
        match.start() for match in re.finditer("-", stem)
    ]  # in old archives, the project's name may contain "-"
    return next(
        (stem[index + 1 :] for index in dash_indexes if canonicalize_name(stem[:index]) == canonicalize_name(name)),
        None,
    )


def same_version(version: str, other: str) -> bool:
    """Return whether two strings name the same version (in PEP 440, ``1.0`` equals ``1.0.0``)."""
    try:
        return Version(version) == Version(other)
    except ValueError:  # InvalidVersion, or thousands of digits
        return version == other


class _Anchors(HTMLParser):
    """An HTML parser that collects the anchors and the base URL of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: list[dict[str, str]] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an anchor or the base URL."""
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and values.get("href"):
            self.anchors.append(values)
        elif tag == "base" and values.get("href"):
            self.base = values["href"]
