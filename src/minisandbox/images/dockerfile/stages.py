"""The steps of a Dockerfile, with everything resolved: RUN, and COPY with its kin."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.images.dockerfile.mounts import RunMount
from minisandbox.types import Network

if TYPE_CHECKING:
    from minisandbox.images.recipe import OciBase, StageBase

Variables = tuple[tuple[str, str], ...]


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
    mounts: tuple[Mount, ...] = ()
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
class Mount:
    """A mount of a RUN with its origin.

    Attributes:
        wanted: what the RUN says.
        origin: where a bind's source lies.
    """

    wanted: RunMount
    origin: Context | OciBase | StageBase
