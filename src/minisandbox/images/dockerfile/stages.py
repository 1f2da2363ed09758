"""What a Dockerfile comes to: stages whose steps have everything resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minisandbox.images.dockerfile.mounts import RunMount
from minisandbox.store.keys import JSONValue

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ImageBase:
    """An image that a stage starts from or copies from.

    Attributes:
        reference: its name.
        platform: such as ``linux/arm64``; "" for this machine's.
    """

    reference: str
    platform: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """The files that the Dockerfile's build is given."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Nothing."""


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
        unkeyed: variables that do not decide what it makes: addresses of proxies.
        workdir: where it starts.
        user: as whom it runs; "" for root.
        network: ``default``, ``none`` or ``host``.
        mounts: what it sees of other places.
        script: a document that begins with ``#!``, which ``argv`` starts at ``/dev/pipes``.
    """

    line: int
    text: str
    argv: tuple[str, ...]
    variables: Variables
    unkeyed: Variables
    workdir: str
    user: str
    network: str = "default"
    mounts: tuple[Mount, ...] = ()
    script: Document | None = None


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
    origin: Context | ImageBase | Stage
    sources: tuple[str, ...]
    documents: tuple[Document, ...]
    destination: str
    owner: str = ""
    mode: str = ""
    excludes: tuple[str, ...] = ()
    keep_parents: bool = False
    extract: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount of a RUN with its origin.

    Attributes:
        wanted: what the RUN says.
        origin: where a bind's source lies.
    """

    wanted: RunMount
    origin: Context | ImageBase | Stage


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: its name, or its number.
        line: the line of its FROM.
        base: what it starts from.
        steps: what is done, in order.
        config: the image's configuration, as docker names its parts: ``Env``, ``WorkingDir``, ``Entrypoint`` ...
    """

    name: str
    line: int
    base: ImageBase | Scratch | Stage
    steps: tuple[RunCommand | CopyFiles, ...]
    config: Mapping[str, JSONValue] = field(hash=False)
