"""Sources of a repository: a source archive, a git commit, a local directory or the base image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue

_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_USER_OR_LOGIN = re.compile(r"^([^/?#]*://)?[^/?#]*@")


@dataclass(frozen=True, slots=True)
class SdistSource:
    """A source archive on the package index.

    Attributes:
        name: the name of the project.
        version: the version of the project.
        sha256: the archive's hash, 64 hexadecimal digits.
    """

    name: str
    version: str
    sha256: str

    def check(self) -> None:
        """Check the fields.

        Raises:
            InvalidValue: a field is invalid.
        """
        if _PROJECT.fullmatch(self.name) is None:
            raise InvalidValue(
                f"{self.name!r} is not a project's name", hint="write it as the package index has it, like 'attrs'"
            )
        if not self.version or any(c.isspace() or c == "/" for c in self.version):
            raise InvalidValue(f"{self.version!r} is not a version of {self.name}", hint="write it like '23.1.0'")
        if _SHA256.fullmatch(self.sha256) is None:
            raise InvalidValue(
                f"{self.sha256!r} is not the sha256 of {self.name} {self.version}",
                hint="give 64 lower-case hexadecimal digits",
            )


@dataclass(frozen=True, slots=True)
class GitSource:
    """A commit of a git repository.

    Attributes:
        url: the URL or local path of the repository, without control characters and without surrounding blanks.
        commit: the full object name of the commit.
    """

    url: str
    commit: str

    def check(self) -> None:
        """Check the fields.

        Raises:
            InvalidValue: a field is invalid.
        """
        # urllib removes leading blanks, and all tabs and newlines; git does not, so both would read different addresses
        has_odd_characters = self.url != self.url.strip() or any(not sign.isprintable() for sign in self.url)
        if not self.url or has_odd_characters or self.url.startswith("-") or "::" in self.url:
            raise InvalidValue(
                f"{shown(self.url)!r} is not a repository's URL or path",
                hint="write https://HOST/OWNER/NAME, ssh://HOST/PATH or a path, without blanks around it",
            )
        if _COMMIT.fullmatch(self.commit) is None:
            raise InvalidValue(
                f"{self.commit!r} is not a full commit", hint="give all 40 hexadecimal digits: git rev-parse NAME"
            )


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A local directory; the cache key of its layer is a hash of the files' contents.

    From a git checkout, the tracked files and the untracked files that git does not ignore are copied. From any other
    directory, all files are copied.

    Attributes:
        path: the directory.
        within: resolved paths of the directories that may contain the source; checked when the source is read. None
            allows any directory.
    """

    path: Path
    within: tuple[Path, ...] | None = None


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The repository or the files that the base image already contains in the recipe's workdir.

    Attributes:
        commit: the commit to which the files are reset, unless it is checked out; "" to keep the files unchanged.
        remove: absolute paths in the image that are removed.
    """

    commit: str = ""
    remove: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.commit and not is_commit(self.commit):
            raise InvalidValue(f"{self.commit!r} is not a full commit", hint="give all 40 hexadecimal digits")
        for path in self.remove:
            components = PurePosixPath(path).parts
            if not path.startswith("/") or len(components) < 2 or ".." in components or "\0" in path:
                raise InvalidValue(f"{path!r} cannot be removed", hint="write an absolute path such as '/solution'")


Source = SdistSource | GitSource | LocalSource | ImageSource


def is_commit(text: str) -> bool:
    """Return whether a string is the full object name of a commit."""
    return _COMMIT.fullmatch(text) is not None


def shown(address: str) -> str:
    """Return an address for messages and records, without credentials and the query, which may contain a signature."""
    plain = _USER_OR_LOGIN.sub(r"\1", address)
    return re.split("[?#]", plain, maxsplit=1)[0] if "://" in plain else plain  # a local path may contain "?" and "#"
