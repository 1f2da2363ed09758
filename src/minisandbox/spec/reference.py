"""Parse references to container images in a registry or in local files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue

DOCKER_HUB = "docker.io"
_LOCAL = ("oci", "oci-archive", "docker-archive")
_HOST = re.compile(r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
# The grammar of repository names: github.com/distribution/reference, regexp.go.
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")  # OCI image-spec, descriptor.md
_LONGEST = 255
_FORMS = "write [HOST/]NAME[:TAG][@DIGEST], oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:TAG]"


@dataclass(frozen=True, slots=True)
class Remote:
    """An image in a registry.

    Attributes:
        host: the registry, with its port.
        repository: the repository.
        tag: the tag of the image; "" if the reference has only a digest.
        digest: the digest of the image, or "".
        insecure: whether requests to the registry may use HTTP without TLS.
    """

    host: str
    repository: str
    tag: str
    digest: str = ""
    insecure: bool = False

    def __str__(self) -> str:
        """Return the reference as a string that :func:`parse_reference` reads."""
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")

    @property
    def version(self) -> str:
        """The digest, or the tag if there is none; the manifest is requested by it."""
        return self.digest or self.tag


@dataclass(frozen=True, slots=True)
class Local:
    """An image in files of this machine.

    Attributes:
        kind: ``oci``, ``oci-archive`` or ``docker-archive``.
        path: the directory or file.
        tag: the image's tag; "" if there is only one image.
    """

    kind: str
    path: Path
    tag: str

    def __str__(self) -> str:
        """Return the reference as a string that :func:`parse_reference` reads."""
        return f"{self.kind}:{self.path}" + (f":{self.tag}" if self.tag else "")


def parse_reference(reference: str) -> Remote | Local:
    """Parse a reference to a container image.

    Raises:
        InvalidValue: the reference is malformed.
    """
    local = split_local(reference)
    return parse_remote(reference.removeprefix("docker://")) if local is None else _parse_local(*local)


def split_local(reference: str) -> tuple[str, str] | None:
    """Split a reference to files of this machine into its kind and its location, ``PATH[:TAG]``; else return None."""
    kind, colon, location = reference.partition(":")
    return (kind, location) if colon and kind in _LOCAL else None


def _parse_local(kind: str, location: str) -> Local:
    path, _, tag = location.partition(":")
    if not path or "\0" in location:
        raise InvalidValue(f"{kind}:{location} names no path", hint=_FORMS)
    return Local(kind, Path(path).expanduser().absolute(), tag)


def has_host(reference: str) -> bool:
    """Return whether a reference names its registry."""
    host, slash, _ = reference.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


def is_repository(host: str, repository: str) -> bool:
    """Return whether a host and a name of a repository on it are well-formed."""
    return bool(_HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository)) and len(repository) <= _LONGEST


def parse_remote(reference: str) -> Remote:
    """Parse a reference to an image in a registry.

    Raises:
        InvalidValue: the reference is malformed.
    """
    name, _, digest = reference.partition("@")
    host, _, path = (name if has_host(name) else f"{DOCKER_HUB}/{name}").partition("/")
    repository, colon, tag = path.partition(":")
    if host in (DOCKER_HUB, "index.docker.io"):
        host, repository = DOCKER_HUB, repository if "/" in repository else f"library/{repository}"
    if not is_repository(host, repository) or (colon and not _TAG.fullmatch(tag)) or ("@" in reference and not digest):
        lower = "; names of repositories are in lower case" if repository != repository.lower() else ""
        raise InvalidValue(f"{reference!r} is not a reference to a container image", hint=_FORMS + lower)
    if digest and not _DIGEST.fullmatch(digest):
        reason = "a digest is sha256: and 64 or sha512: and 128 lower-case hexadecimal digits"
        raise InvalidValue(f"{digest!r} is not a digest", reason=reason, hint="give all of it")
    return Remote(host, repository, tag or ("" if digest else "latest"), digest)
