"""Match references to the images of the store, and resolve them to registries and mirrors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.spec import DOCKER_HUB, Local, Remote, has_host, is_repository, parse_reference, parse_remote
from minisandbox.store.catalogue import NAMES
from minisandbox.values import JSONValue

_NAME_MOST = 200
_MANUAL = "see containers-registries.conf(5)"


def default_name(reference: str) -> str:
    """Return an image's default name in the store: its reference without the characters that file names disallow.

    ``python:3.12`` is ``python-3.12``, ``ghcr.io/a/b:c`` is ``ghcr.io_a_b-c``.

    Raises:
        InvalidValue: the reference is malformed.
    """
    parsed = parse_reference(reference)
    if isinstance(parsed, Local):
        path = re.sub(r"\.(gz|xz|bz2|zst)$", "", parsed.path.name).removesuffix(".tar")
        name = f"{path}-{parsed.tag}" if parsed.tag else path
    else:
        host = "" if parsed.host == DOCKER_HUB else f"{parsed.host}/"
        tag = f"-{parsed.tag}" if parsed.tag else f"@{parsed.digest.partition(':')[2][:12]}"
        repository = parsed.repository if host else parsed.repository.removeprefix("library/")
        name = f"{host}{repository}{tag}"
    return re.sub(r"[^A-Za-z0-9._@+=-]", "_", name).lstrip(".@+=-")[:_NAME_MOST] or "image"


def is_of(reference: Remote | Local, notes: Mapping[str, str]) -> bool:
    """Return whether an image of the store was pulled by a reference.

    Args:
        reference: the reference; its digest may be that of an index or of a manifest.
        notes: the notes of the image's record.
    """
    recorded = notes.get("reference", "")
    if isinstance(reference, Local):
        return str(reference) == recorded
    recorded_name, _, digest = recorded.partition("@")
    return str(replace(reference, digest="")) == recorded_name and reference.digest in ("", digest, notes.get("digest"))


def archive_names(names: Iterable[str]) -> str:
    """Select the references among the names of an archived image, and join them by spaces for the image's record.

    A bare tag, which may be the only name in an OCI layout, is not a reference.
    """
    references = []
    for name in names:
        with suppress(InvalidValue):
            if ":" in name or "/" in name:
                references.append(str(parse_remote(name)))
    return " ".join(dict.fromkeys(references))


def is_named(reference: str, notes: Mapping[str, str]) -> bool:
    """Return whether an image was imported from an archive that names it by this reference.

    A name without a host also matches ``localhost/NAME``, the name that podman and buildah give to a built image.
    """
    names = (reference,) if has_host(reference) else (reference, f"localhost/{reference}")
    return any(str(parse_remote(name)) in notes.get(NAMES, "").split() for name in names)


def origin(notes: Mapping[str, str]) -> str:
    """Return a sentence about the origin of an image of the store, for messages."""
    return f"it was taken from {notes['reference']}" if "reference" in notes else "it was built here"


# --- mirrors and prefixes (containers-registries.conf(5)) ------------------------------------------------------------


def configuration_files() -> list[Path]:
    """Return the paths of podman's registry configuration files; later files override earlier files."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "containers")
    if config_file := os.environ.get("CONTAINERS_REGISTRIES_CONF"):
        return [Path(config_file)]
    user_file = home / "registries.conf"
    files = [user_file if user_file.is_file() else Path("/etc/containers/registries.conf")]
    folders = (folder / "registries.conf.d" for folder in (Path("/etc/containers"), home))
    files += [file for folder in folders for file in sorted(folder.glob("*.conf"))]
    return [path for path in files if path.is_file()]


def locations_of(reference: Remote, files: Sequence[Path] | None = None) -> list[Remote]:
    """Return the references to try in order: the image in each mirror, then in its (possibly replaced) registry.

    Args:
        reference: the image.
        files: configuration files; None for the default files of this machine.

    Raises:
        InvalidValue: a file is malformed, or blocks the reference.
    """
    name = f"{reference.host}/{reference.repository}"
    longest_match: tuple[int, Mapping[str, JSONValue], Path] | None = None
    for file in configuration_files() if files is None else files:
        for table in _tables(file):
            prefix = str(table.get("prefix") or table.get("location") or "")
            if (length := _match_length(prefix, name)) and (longest_match is None or length >= longest_match[0]):
                longest_match = length, table, file
    if longest_match is None:
        return [reference]
    length, table, file = longest_match
    if table.get("blocked") is True:
        raise InvalidValue(
            f"{reference} is blocked", reason=f"{file} says so", hint="change that file, or the reference"
        )
    suffix = name[length:]
    mirrors = table.get("mirror") or []
    if not isinstance(mirrors, list) or not all(isinstance(row, dict) for row in mirrors):
        raise InvalidValue(f"{file}: 'mirror' is no list of tables", hint=_MANUAL)
    digests_only = table.get("mirror-by-digest-only") is True
    rows = [row for row in mirrors if _serves(row, reference, digests_only)]
    location = {"location": table.get("location") or name[:length], "insecure": table.get("insecure")}
    return [_relocated(reference, row, suffix, file) for row in (*rows, location)]


def _match_length(prefix: str, name: str) -> int:
    """Return the length of the part of an image's name that a configured prefix matches; 0 if it does not match."""
    if prefix.startswith("*."):
        host, _, _ = name.partition("/")
        return len(host) if host.endswith(prefix[1:]) else 0
    is_prefix = name == prefix or name.startswith(prefix.rstrip("/") + "/")
    return len(prefix.rstrip("/")) if prefix and is_prefix else 0


def _serves(mirror: Mapping[str, JSONValue], reference: Remote, digests_only: bool) -> bool:
    """Return whether a mirror may be used for a reference; a mirror may be restricted to digests or to tags."""
    kind = "digest-only" if digests_only else mirror.get("pull-from-mirror", "all")
    return kind in ("all", "digest-only" if reference.digest else "tag-only")


def _relocated(reference: Remote, row: Mapping[str, JSONValue], suffix: str, file: Path) -> Remote:
    host, _, repository = f"{row.get('location') or ''}{suffix}".partition("/")
    if not is_repository(host, repository):
        raise InvalidValue(f"{file}: {row.get('location')!r} is not the place of a registry", hint=_MANUAL)
    return Remote(host, repository, reference.tag, reference.digest, row.get("insecure") is True)


def _tables(file: Path) -> list[Mapping[str, JSONValue]]:
    import tomllib  # noqa: PLC0415 - slow to import, and few machines have such a file

    try:
        configuration = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{file} cannot be read", reason=str(error), hint=_MANUAL) from error
    rows = configuration.get("registry", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidValue(f"{file}: 'registry' is no list of tables", hint=_MANUAL)
    return rows
