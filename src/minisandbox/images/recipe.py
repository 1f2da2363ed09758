"""Recipes: pure data that says how to make an image: a base, and steps over it.

:class:`PythonRecipe` is what rows of Python data sets say; its :meth:`PythonRecipe.recipe` turns it into steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement

from minisandbox.errors import InvalidValue
from minisandbox.images.dockerfile.stages import CopyFiles, RunCommand
from minisandbox.images.python.index import shown
from minisandbox.images.python.interpreters import PythonRequest
from minisandbox.images.python.lock import EVERYTHING, IndexView, Lock
from minisandbox.patches import parse_patch
from minisandbox.store.keys import JSONValue
from minisandbox.types import WORKDIR

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


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The repository that the base has at the recipe's workdir, or the files there.

    Attributes:
        commit: the commit that its files are reset to unless that is checked out; "" to take them unchanged.
        remove: absolute paths of the image that are removed.
    """

    commit: str = ""
    remove: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.commit and not is_commit(self.commit):
            raise InvalidValue(f"{self.commit!r} is not a full commit", hint="give all 40 hexadecimal digits")
        for path in self.remove:
            parts = PurePosixPath(path).parts
            if not path.startswith("/") or len(parts) < 2 or ".." in parts or "\0" in path:
                raise InvalidValue(f"{path!r} cannot be removed", hint="write an absolute path such as '/solution'")


Source = SdistSource | GitSource | LocalSource | ImageSource


@dataclass(frozen=True, slots=True)
class HostBase:
    """The host's ``/usr`` and a small ``/etc``."""


@dataclass(frozen=True, slots=True)
class OciBase:
    """A container image. Its environment, workdir, user and configuration are inherited.

    Attributes:
        reference: as :func:`minisandbox.images.pull` takes it; an image of the store is not pulled again.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    reference: str
    platform: str = ""


@dataclass(frozen=True, slots=True)
class ScratchBase:
    """Nothing but mount points."""


@dataclass(frozen=True, slots=True)
class StageBase:
    """The image of another recipe, with its environment.

    Attributes:
        recipe: that recipe.
    """

    recipe: Recipe


@dataclass(frozen=True, slots=True)
class DockerfileBase:
    """What a Dockerfile builds.

    Attributes:
        dockerfile: its path.
        context: the directory that COPY and ADD take files from.
        arguments: values of its arguments (``--build-arg``).
        target: the stage; "" for the last one.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    dockerfile: Path
    context: Path
    arguments: tuple[tuple[str, str], ...] = ()
    target: str = ""
    platform: str = ""


Base = HostBase | OciBase | ScratchBase | StageBase | DockerfileBase


@dataclass(frozen=True, slots=True)
class Run:
    """Run a command.

    Attributes:
        argv: the command; no shell is involved.
        environment: variables for this command only.
        workdir: where it starts; None for the recipe's.
        user: as whom it runs; "" for root.
        network: what it reaches: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        unkeyed: further variables, which do not decide its result, such as addresses of proxies.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: PurePosixPath | None = None
    user: str = ""
    network: str = "off"
    unkeyed: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.argv:
            raise InvalidValue("a step runs no command", hint="give a program and its arguments")
        _check_network(self.network)
        check_environment(dict(self.environment))


@dataclass(frozen=True, slots=True)
class InstallSystem:
    """Install packages of the host's distribution over the host's ``/usr``.

    Attributes:
        packages: their names, with versions or without.
    """

    packages: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the fields."""
        for package in self.packages:
            if _SYSTEM.fullmatch(package) is None:
                raise InvalidValue(
                    f"{package!r} is not a system package", hint="write it like 'gcc' or 'gcc=4:12.2.0-3'"
                )


@dataclass(frozen=True, slots=True)
class InstallPython:
    """Make the environment of an interpreter of this machine.

    Attributes:
        python: as :class:`.PythonRequest` reads it.
        index: what its installer sees.
    """

    python: str
    index: IndexView = EVERYTHING

    def __post_init__(self) -> None:
        """Check the fields."""
        PythonRequest.parse(self.python)


@dataclass(frozen=True, slots=True)
class InstallRequirements:
    """Install pinned packages into the environment.

    Attributes:
        requirements: them.
        complete: whether they name everything.
        overrides: packages installed after them.
        index: what the installer sees.
    """

    requirements: tuple[str, ...]
    complete: bool = False
    overrides: tuple[str, ...] = ()
    index: IndexView = EVERYTHING

    def __post_init__(self) -> None:
        """Check the fields."""
        for line in self.requirements + self.overrides:
            check_requirement(line)


@dataclass(frozen=True, slots=True)
class CheckOut:
    """Put a repository's files at the recipe's workdir. Its layer is the same in every image.

    Attributes:
        source: where they come from.
    """

    source: Source


@dataclass(frozen=True, slots=True)
class Install:
    """Install the checked out project.

    Attributes:
        commands: shell commands, run at the workdir.
        environment: variables for them.
        network: what they reach, as :attr:`Run.network`.
        version: the version for build tools where the source's own tags do not say; "" for none.
        index: what they see of the package index.
    """

    commands: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    network: str = "index"
    version: str = ""
    index: IndexView = EVERYTHING

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_network(self.network)
        check_environment(dict(self.environment))
        if _VERSION.fullmatch(self.version) is None:
            raise InvalidValue(f"{self.version!r} is not a version", hint="write it like '5.4'")


@dataclass(frozen=True, slots=True)
class CutHistory:
    """Make the checked out files a repository of one commit, without the hidden ones and copies of these.

    Attributes:
        patch: applied before.
        hidden: paths that are removed.
    """

    patch: str = ""
    hidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_files(self.hidden, self.patch, "patch")


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """Keep files that only graders see, in a layer of their own; nothing of it is in the image.

    Attributes:
        hidden: paths of the checked out files.
        test_patch: a patch of files to keep with them.
    """

    hidden: tuple[str, ...] = ()
    test_patch: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_files(self.hidden, self.test_patch, "test_patch")


Step = (
    Run | RunCommand | CopyFiles | InstallSystem | InstallPython | InstallRequirements | CheckOut | Install | CutHistory
    | HiddenTests
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an image: a base, and steps over it. See :func:`minisandbox.images.build`.

    Attributes:
        base: what it starts from.
        steps: what is done, in order.
        environment: further variables for everything that runs in the image; no step sees them.
        workdir: where commands start and repositories lie; None for the base's.
        user: as whom the image's commands run; None for the base's.
        config: how a container wants to be run (``Entrypoint``, ``Cmd``, ``Shell`` ...), over the base's.
        step_timeout: seconds one step may take.
        lock: what has to be installed in the end; None to let the index decide.
    """

    base: Base = HostBase()
    steps: tuple[Step, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    workdir: PurePosixPath | None = None
    user: str | None = None
    config: Mapping[str, JSONValue] = field(default_factory=dict, hash=False)
    step_timeout: float = 1800.0
    lock: Lock | None = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without looking at this machine."""
        for name, value in self.environment:  # images have names that no shell could set
            if not name or "=" in name or "\0" in name + value:
                raise InvalidValue(f"{name!r} cannot be an environment variable")
        kinds = [type(step) for step in self.steps]
        if CheckOut not in kinds and {Install, CutHistory, HiddenTests} & set(kinds):
            raise InvalidValue("install commands, patches and hidden files need a source", hint="set the source")
        if InstallRequirements in kinds and InstallPython not in kinds:
            raise InvalidValue("requirements without an interpreter", hint="set the interpreter, for instance '3.11'")
        if not isinstance(self.base, HostBase) and {InstallSystem, InstallPython} & set(kinds):
            raise InvalidValue(
                "system packages and interpreters of this machine need its /usr",
                hint="leave out the base; or install them by commands of the image's own",
            )
        if self.workdir is not None and not self.workdir.is_absolute():
            raise InvalidValue(f"workdir {self.workdir} is not absolute", hint="write it like '/testbed'")
        if not self.step_timeout > 0:
            raise InvalidValue(f"step_timeout is {self.step_timeout!r}", hint="give seconds, more than 0")


@dataclass(frozen=True, slots=True)
class PythonRecipe:
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
        step_timeout: seconds one build step may take; listing and hashing its files may take as long, a minute at
            least.
        network: what the install commands reach: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        exclude_newer: a date such as ``"2024-03-01"``: packages uploaded later are not there; "" for all.
        system: packages of the host's distribution, installed below everything else; takes root.
        lock: the exact files of an image that is to be made again; None to let the index decide.
        version: the project's version, for build tools that ask git for one where the source's own tags do not say; ""
            for none.
        torch_backend: ``"cpu"``: PyTorch's builds without CUDA and none of CUDA's libraries, whatever the requirements
            say; "" for those that the requirements name.
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
        if self.source is None and (self.install or self.patch or self.hidden or self.test_patch):
            raise InvalidValue(
                "install commands, patches and hidden files need a source", hint="set PythonRecipe.source"
            )
        _check_network(self.network)
        check_environment(dict(self.environment))
        self._index("")
        self.recipe()

    def recipe(self) -> Recipe:
        """Return the base and the steps."""
        return Recipe(
            HostBase(), tuple(self._steps()), self.environment, WORKDIR, step_timeout=self.step_timeout, lock=self.lock
        )

    def _steps(self) -> Iterator[Step]:
        if self.system:
            yield InstallSystem(self.system)
        if self.python is not None:
            yield InstallPython(self.python, replace(self._index("python"), torch_backend=""))
        if self.requirements or self.overrides:
            yield InstallRequirements(self.requirements, self.complete, self.overrides, self._index("requirements"))
        if self.source is None:
            return
        yield CheckOut(self.source)
        if self.install:
            yield Install(self.install, self.environment, self.network, self.version, self._index("install"))
        if self.hidden or self.test_patch.strip():
            yield HiddenTests(self.hidden, self.test_patch)
        yield CutHistory(self.patch, self.hidden)

    def _index(self, step: str) -> IndexView:
        locked = None if self.lock is None else tuple(self.lock.steps.get(step, ()))
        return IndexView("" if self.lock else self.exclude_newer, self.torch_backend, locked)


Buildable = Recipe | PythonRecipe


def is_commit(text: str) -> bool:
    """Whether a text is a commit's full name."""
    return _COMMIT.fullmatch(text) is not None


def _check_network(network: str) -> None:
    if network not in NETWORKS:
        raise InvalidValue(f"network is {network!r}", hint=f"write one of {', '.join(NETWORKS)}")


def _check_files(hidden: tuple[str, ...], patch: str, name: str) -> None:
    for path in hidden:
        check_repository_path(path)
    parse_patch(patch, name=name)


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


def check_environment(variables: Mapping[str, str]) -> None:
    """Refuse names and values that no environment can hold.

    Raises:
        InvalidValue: there is one.
    """
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise InvalidValue(f"{name!r} cannot be an environment variable")
