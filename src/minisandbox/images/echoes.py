"""Credentials that an index sends back: its entries are passed on to build steps, whose code must not read them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from minisandbox.images.index import IndexSettings, shown

_SHORTEST_PASSWORD = 6  # shorter ones are in many an innocent name
_SHORTEST_TOKEN = 16  # of a user without a password: the name is the secret then, or just a name
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
        forms = {form.casefold() for address in addresses for form in _forms(urlsplit(address))}
        told = [shown(address).casefold() for address in addresses]
        return cls(frozenset(form for form in forms if not any(form in one for one in told)))

    def are_in(self, texts: Iterable[str]) -> bool:
        """Whether a text has one of them, percent-encoded or not."""
        return bool(self.forms) and any(form in text for one in texts for text in _readings(one) for form in self.forms)


def _forms(address: SplitResult) -> Iterator[str]:
    name, password = address.username or "", address.password or ""
    secret, shortest = (password, _SHORTEST_PASSWORD) if password else (name, _SHORTEST_TOKEN)
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
