"""What the configured indexes have of a project, kept on disk: the pages that build steps choose from."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from minisandbox.errors import InvalidValue, SourceError
from minisandbox.images.index import IndexSettings
from minisandbox.images.simple_api import Link, Listed, listed_files, version_in, without_echoes
from minisandbox.store import Store
from minisandbox.store.durable import write_atomic

FRESH = 600.0
"""Seconds for which a page is believed; what the public index tells caches too."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a project.

    Attributes:
        files: by name; the first index that has a name decides.
        fetched: when the indexes were asked, seconds since the epoch.
        complaint: why an older answer is used, or files are missing; "" if all is well.
    """

    files: Mapping[str, Link]
    fetched: float
    complaint: str = ""


@dataclass(slots=True)
class Listings:
    """Asks the indexes, each project once in a while; threads may share it.

    Attributes:
        store: where answers are kept between processes.
        settings: the host's.
    """

    store: Store
    settings: IndexSettings
    _known: dict[str, Listing] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, project: str, *, before: datetime | None = None) -> Listing:
        """Return the files of a project.

        Args:
            project: its normalised name.
            before: what was asked after this moment is as good as new: later uploads do not count.

        Raises:
            SourceError: no index can be asked, and no earlier answer is kept.
        """
        with self._lock:
            lock = self._locks.setdefault(project, threading.Lock())
        with lock:
            known = self._known.get(project) or self._read(project)
            wanted = time.time() - FRESH if before is None else min(time.time() - FRESH, before.timestamp())
            if known is None or known.fetched < wanted:
                known = self._ask(project, known)
            self._known[project] = known
            return known

    def _ask(self, project: str, old: Listing | None) -> Listing:
        now = time.time()
        try:
            listed = listed_files(project, self.settings)
        except SourceError as error:
            if old is None:
                raise
            return Listing(old.files, now, f"{error}; an earlier answer is used")
        files: dict[str, Link] = {}
        for link in listed.files:
            if version_in(project, link.filename) is not None:
                files.setdefault(link.filename, link)
        fresh = Listing(files, now, _complaint(project, listed))
        self._write(project, fresh, listed.left_out)
        return fresh

    def _read(self, project: str) -> Listing | None:
        try:
            kept = json.loads(self._path(project).read_bytes())
            if kept["format"] == _FORMAT:
                # earlier versions kept what repeats credentials too
                listed = without_echoes((Link(**row) for row in kept["files"]), self.settings)
                listed = listed._replace(left_out=listed.left_out + int(kept.get("left_out", 0)))
                files = {link.filename: link for link in listed.files}
                return Listing(files, float(kept["fetched"]), _complaint(project, listed))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # only a cache: asking again repairs it
            pass
        return None

    def _write(self, project: str, listing: Listing, left_out: int) -> None:
        rows = [asdict(link) for link in listing.files.values()]
        path = self._path(project)
        with suppress(OSError):  # only a cache
            path.parent.mkdir(mode=0o700, exist_ok=True)
            kept = {"format": _FORMAT, "fetched": listing.fetched, "files": rows, "left_out": left_out}
            write_atomic(path, json.dumps(kept).encode())

    def _path(self, project: str) -> Path:
        """One file for a project and the indexes that were asked, whose addresses may hold secrets."""
        places = json.dumps([self.settings.index_url, *self.settings.urls, self.settings.no_index, project])
        return self.store.root / "index" / f"{hashlib.sha256(places.encode()).hexdigest()}.json"


def _complaint(project: str, listed: Listed) -> str:
    return f"{project}: {listed.complaint}" if listed.left_out else ""


def parse_moment(text: str) -> datetime:
    """Read a moment: ``2024-03-01`` (its beginning, UTC) or ISO 8601 with a time.

    Raises:
        InvalidValue: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue(f"{text!r} is not a date", hint="write it like 2024-03-01 or 2024-03-01T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def uploaded_before(link: Link, moment: datetime) -> bool:
    """Whether a file was there at a moment; one without a known time was not, as uv has it."""
    try:
        return bool(link.uploaded) and parse_moment(link.uploaded) < moment
    except InvalidValue:
        return False
