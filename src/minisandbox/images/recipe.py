"""Recipes: pure data that says how to make an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement

from minisandbox.errors import InvalidValue
from minisandbox.images.index import parse_moment, shown
from minisandbox.images.lock import Lock
from minisandbox.images.request import PythonRequest
from minisandbox.images.torch_builds import BACKENDS
from minisandbox.patches import parse_patch

_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SYSTEM = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?")
NETWORKS = ("off", "index", "host")
_VERSION = re.compile(r"[A-Za-z0-9.+!_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SdistSource:
    """A source archive on the package index.

    Attributes:
        name: the project.
        version: its version.
        sha256: the archive's hash, 64 hexadecimal digits.
    """

    name: str
    version: str
    sha256: str

    def __post_init__(self) -> None:
        """Check the fields."""
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
        url: where to fetch from: a URL or a local path, without control characters, and blanks at its ends.
        commit: its full object name.
    """

    url: str
    commit: str

    def __post_init__(self) -> None:
        """Check the fields."""
        # urllib drops blanks at its beginning, and tabs and newlines anywhere: it would be another address to some
        odd = self.url != self.url.strip() or any(not sign.isprintable() for sign in self.url)
        if not self.url or odd or self.url.startswith("-") or "::" in self.url:
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
    """A directory of this machine; the content of its files decides.

    Of a git checkout, the tracked and the untracked but not ignored files are taken; of any other directory, all.

    Attributes:
        path: the directory.
        within: directories, no links on the way to them, of which one must hold it when it is read; None: it may lie
            anywhere.
    """

    path: Path
    within: tuple[Path, ...] | None = None


Source = SdistSource | GitSource | LocalSource


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an image. See :func:`minisandbox.images.build`.

    Attributes:
        python: ``"3.11"``, ``"3.11.7"`` or ``">=3.11,<3.15"``; None for no interpreter beyond the host's ``/usr``.
        requirements: pinned packages, installed before the source is there, so that images share them.
        complete: whether ``requirements`` name everything, as ``pip freeze`` does: nothing else is installed with them,
            and nobody asks whether they go together.
        overrides: packages installed after the requirements, in a run of their own: they win over them.
        source: what lies at ``/testbed``; None for an image without a repository.
        install: shell commands, run at ``/testbed``.
        environment: further variables, for the install commands and for everything that runs in the image.
        patch: applied to the source after it was installed and before anything is committed.
        hidden: paths in the repository that are removed from it, and kept in the tests layer.
        test_patch: the hidden tests' patch; only the tests layer gets it.
        step_timeout: seconds one build step may take; listing and hashing what it wrote may take as long, a minute at
            least.
        network: what the install commands reach: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        exclude_newer: a date such as ``"2024-03-01"``: packages uploaded later are not there; "" for all.
        system: packages of the host's distribution, installed below everything else; takes root.
        lock: the exact files of an image that is to be made again; None to let the index decide.
        version: the version of the project that its build tools are told where they ask git for one and the source's
            own tags do not say; "" for none.
        torch_backend: ``"cpu"``: PyTorch's builds without CUDA and none of CUDA's libraries, whatever the requirements
            say; "" for what they say.
    """

    python: str | None = None
    requirements: tuple[str, ...] = ()
    complete: bool = False
    overrides: tuple[str, ...] = ()
    source: Source | None = None
    install: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    patch: str = ""
    hidden: tuple[str, ...] = ()
    test_patch: str = ""
    step_timeout: float = 1800.0
    network: str = "index"
    exclude_newer: str = ""
    system: tuple[str, ...] = ()
    lock: Lock | None = None
    version: str = ""
    torch_backend: str = ""

    def __post_init__(self) -> None:
        """Check everything that can be checked without looking at this machine."""
        if self.python is not None:
            PythonRequest.parse(self.python)
        elif self.requirements or self.overrides:
            raise InvalidValue("requirements without an interpreter", hint="set Recipe.python, for instance to '3.11'")
        for line in self.requirements + self.overrides:
            check_requirement(line)
        if self.source is None and (self.install or self.patch or self.hidden or self.test_patch):
            raise InvalidValue("install commands, patches and hidden files need a source", hint="set Recipe.source")
        _check_environment(dict(self.environment))
        for path in self.hidden:
            check_repository_path(path)
        parse_patch(self.patch, name="patch")
        parse_patch(self.test_patch, name="test_patch")
        if not self.step_timeout > 0:
            raise InvalidValue(f"step_timeout is {self.step_timeout!r}", hint="give seconds, more than 0")
        _check_access(self.network, self.exclude_newer, self.system)
        if _VERSION.fullmatch(self.version) is None:
            raise InvalidValue(f"{self.version!r} is not a version", hint="write it like '5.4'")
        if self.torch_backend not in BACKENDS:
            raise InvalidValue(f"torch_backend is {self.torch_backend!r}", hint="write 'cpu', or leave it out")


def _check_access(network: str, exclude_newer: str, system: tuple[str, ...]) -> None:
    if network not in NETWORKS:
        raise InvalidValue(f"network is {network!r}", hint=f"write one of {', '.join(NETWORKS)}")
    if exclude_newer:
        parse_moment(exclude_newer)
    for package in system:
        if _SYSTEM.fullmatch(package) is None:
            raise InvalidValue(f"{package!r} is not a system package", hint="write it like 'gcc' or 'gcc=4:12.2.0-3'")


def check_requirement(line: str) -> None:
    """Refuse what is not one requirement: options and paths would read more than the recipe says.

    Raises:
        InvalidValue: it is not a PEP 508 requirement.
    """
    try:
        Requirement(line)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise InvalidValue(
            f"{line!r} is not a requirement", reason=reason, hint="write it like 'attrs==23.1.0'"
        ) from error


def check_repository_path(path: str) -> None:
    """Refuse paths that do not lie inside the repository.

    Raises:
        InvalidValue: it is empty, absolute, or has ``..``, ``.git`` or a NUL in it.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or "\n" in path or {"..", ".git"} & set(parts):
        raise InvalidValue(f"{path!r} is not a path in the repository")


def _check_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise InvalidValue(f"{name!r} cannot be an environment variable")
