"""Recipes: how to make an image, as a base and steps over it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement

from minisandbox.errors import InvalidValue
from minisandbox.patches import parse_patch
from minisandbox.spec.index import EVERYTHING, IndexView, Lock, PythonRequest
from minisandbox.spec.sources import GitSource, SdistSource, Source
from minisandbox.types import JSONValue, Network

NETWORKS = ("off", "index", "host")
_SYSTEM = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?")
_VERSION = re.compile(r"[A-Za-z0-9.+!_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Variables = tuple[tuple[str, str], ...]


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
        args: values of its arguments (``--build-arg``).
        target: the stage; "" for the last one.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    dockerfile: Path
    context: Path
    args: tuple[tuple[str, str], ...] = ()
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
        check_network(self.network)
        check_environment(dict(self.environment))


@dataclass(frozen=True, slots=True)
class RunMount:
    """One mount of a RUN.

    Attributes:
        kind: ``bind``, ``cache``, ``tmpfs``, ``secret``, or ``ssh``, which mounts nothing: no build has an SSH agent.
        target: where, absolute; "" of a secret that is only a variable.
        source: the path in ``origin`` that a bind shows.
        origin: the stage or image of a bind; "" for the context.
        identity: which cache or secret.
        variable: the variable that gets a secret.
        required: whether a missing secret is an error.
        mode: the permission bits of a cache or a secret; None for the usual ones.
        owner: the user and group of a cache or a secret.
        size: bytes of a tmpfs; 0: as the kernel has it.
    """

    kind: str
    target: str
    source: str = ""
    origin: str = ""
    identity: str = ""
    variable: str = ""
    required: bool = False
    mode: int | None = None
    owner: tuple[int, int] = (0, 0)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The files that a build is given.

    Attributes:
        root: the directory.
        dockerfile: the Dockerfile, which may have a ``.dockerignore`` of its own.
    """

    root: Path
    dockerfile: Path


@dataclass(frozen=True, slots=True)
class ResolvedMount:
    """A mount of a RUN with its origin.

    Attributes:
        wanted: what the RUN says.
        origin: where a bind's source lies.
    """

    wanted: RunMount
    origin: Context | OciBase | StageBase


@dataclass(frozen=True, slots=True)
class Document:
    """A file that stands in the Dockerfile itself.

    Attributes:
        name: its name.
        content: its content.
    """

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class RunCommand:
    """RUN.

    Attributes:
        line: its line.
        text: the instruction, for people.
        argv: the command.
        variables: what it sees, the image's own and arguments.
        unkeyed: variables that do not decide its result: addresses of proxies.
        workdir: where it starts.
        user: as whom it runs; "" for root.
        network: what it reaches.
        mounts: what it sees of other places.
        script: a document that begins with ``#!``, which ``argv`` starts at ``/dev/pipes``.
        secrets: contents of secrets by id; they decide nothing.
    """

    line: int
    text: str
    argv: tuple[str, ...]
    variables: Variables
    unkeyed: Variables
    workdir: str
    user: str
    network: Network = field(default_factory=Network.host)
    mounts: tuple[ResolvedMount, ...] = ()
    script: Document | None = None
    secrets: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """COPY, ADD, or the directory that WORKDIR makes.

    Attributes:
        line: its line.
        text: the instruction, for people.
        origin: what the sources are paths in.
        sources: them, with wildcards.
        documents: files of the Dockerfile itself.
        destination: an absolute path; a slash at its end makes it a directory.
        owner: whom the files belong to, ``USER[:GROUP]``; "" for root, or for the owners they have in another stage.
        mode: their permission bits; "" for those they have.
        excludes: patterns of what is left out.
        keep_parents: whether the directories of a source's path are made too.
        extract: whether archives are unpacked (ADD).
    """

    line: int
    text: str
    origin: Context | OciBase | StageBase
    sources: tuple[str, ...]
    documents: tuple[Document, ...]
    destination: str
    owner: str = ""
    mode: str = ""
    excludes: tuple[str, ...] = ()
    keep_parents: bool = False
    extract: bool = False


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

    def __post_init__(self) -> None:
        """Check the source."""
        if isinstance(self.source, SdistSource | GitSource):
            self.source.check()


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
        check_network(self.network)
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


def check_network(network: str) -> None:
    """Refuse what is no network of a build step.

    Raises:
        InvalidValue: it is not one of :data:`NETWORKS`.
    """
    if network not in NETWORKS:
        raise InvalidValue(f"network is {network!r}", hint=f"write one of {', '.join(NETWORKS)}")


def check_environment(variables: Mapping[str, str]) -> None:
    """Refuse names and values that no environment can hold.

    Raises:
        InvalidValue: there is one.
    """
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise InvalidValue(f"{name!r} cannot be an environment variable")
