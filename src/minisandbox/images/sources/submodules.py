"""Parse ``.gitmodules``, and resolve relative URLs of submodules."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    """An entry of ``.gitmodules``.

    Attributes:
        url: the URL of the submodule's repository; ``./`` and ``../`` are relative to the superproject's URL.
        is_checked_out: whether ``git submodule update`` checks the submodule out (``update`` is not ``none``).
    """

    url: str
    is_checked_out: bool


def read_modules(listing: bytes) -> dict[bytes, Module]:
    """Return the entries of ``.gitmodules`` that have a path and a URL, by path.

    Args:
        listing: the output of ``git config --null --list`` for ``.gitmodules``.
    """
    values: dict[bytes, dict[bytes, bytes]] = {}
    for line in listing.split(b"\0"):
        key, _, value = line.partition(b"\n")
        section, _, entry = key.partition(b".")
        name, _, variable = entry.rpartition(b".")
        if section == b"submodule" and name:
            values.setdefault(name, {})[variable] = value
    return {
        fields[b"path"].rstrip(b"/"): Module(os.fsdecode(fields[b"url"]), fields.get(b"update") != b"none")
        for fields in values.values()
        if fields.get(b"path") and fields.get(b"url")
    }


def resolve_url(base: str, url: str) -> str:
    """Return the absolute URL of a submodule, as ``git submodule init`` resolves it.

    Args:
        base: the superproject's URL.
        url: the submodule's URL in ``.gitmodules``.
    """
    if not url.startswith(("./", "../")):
        return url
    base, separator = base.rstrip("/"), "/"
    while url.startswith(("./", "../")):
        step, _, url = url.partition("/")
        if step == "..":
            base, separator, _ = base.rpartition("/" if "/" in base else ":")
    return f"{base}{separator}{url}".rstrip("/")
