"""Credentials that a server sends back: build steps, messages and records have what it says."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from minisandbox.images.index import IndexSettings, shown

_SHORTEST_PASSWORD = 6  # shorter ones are in many an innocent name
_SHORTEST_TOKEN = 16  # as a user's name, with or without a word for a password: or it is just a name
_SHORTEST_PAIR = 8  # of a name and a password together, in base64
_ENCODINGS = 3


@dataclass(frozen=True, slots=True)
class Secrets:
    """What nothing that a build step is told may have in it.

    Attributes:
        forms: passwords as they are and as addresses have them, names and passwords as headers have them; in lower
            case, since hashes are read so.
    """

    forms: frozenset[str]

    @classmethod
    def of(cls, settings: IndexSettings) -> Self:
        """Collect the credentials of indexes, pages and proxies; one that its own address shows is no secret."""
        proxies = (value for name, value in settings.proxies if name != "no_proxy")
        addresses = [*settings.urls, *(one if "://" in one else f"http://{one}" for one in proxies)]
        return cls._without_told((form for one in addresses for form in _forms(urlsplit(one))), addresses)

    @classmethod
    def of_repository(cls, address: str) -> Self:
        """Collect those of a git repository's address: what signs it too, and pieces of a password with a "@" in it."""
        with contextlib.suppress(ValueError):  # it is none, and no server was asked
            parts = urlsplit(address)
            fields = [parts.query, parts.fragment, *(value for _, value in parse_qsl(parts.query))]
            fields += [piece for piece in re.split("[:@]", parts.netloc.rpartition("@")[0])[1:] if piece]
            signs = (form for one in fields if len(one) >= _SHORTEST_PASSWORD for form in (one, unquote(one)))
            return cls._without_told([*_forms(parts), *signs], [address])
        return cls(frozenset())

    @classmethod
    def _without_told(cls, forms: Iterable[str], addresses: Iterable[str]) -> Self:
        told = [shown(address).casefold() for address in addresses]
        folded = {form.casefold() for form in forms}
        return cls(frozenset(form for form in folded if not any(form in one for one in told)))

    def are_in(self, texts: Iterable[str]) -> bool:
        """Whether a text has one of them, percent-encoded or not."""
        return bool(self.forms) and any(form in text for one in texts for text in _readings(one) for form in self.forms)


def _forms(address: SplitResult) -> Iterator[str]:
    name, password = address.username or "", address.password or ""
    for secret, shortest in ((password, _SHORTEST_PASSWORD), (name, _SHORTEST_TOKEN)):
        if len(unquote(secret)) >= shortest:
            yield from (secret, unquote(secret))
    pair = f"{unquote(name)}:{unquote(password)}".encode()
    if password and len(pair) >= _SHORTEST_PAIR:
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(pair).decode().rstrip("=")


def _readings(text: str) -> Iterator[str]:
    for _ in range(_ENCODINGS):
        yield text.casefold()
        text = unquote(text)
    yield text.casefold()
