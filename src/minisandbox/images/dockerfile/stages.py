"""The steps of a Dockerfile, with everything resolved: RUN with its mounts, and COPY with its kin."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from minisandbox.errors import DockerfileError
from minisandbox.types import Network

if TYPE_CHECKING:
    from minisandbox.images.dockerfile.parsing import Instruction
    from minisandbox.images.recipe import OciBase, StageBase

_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "readwrite": "rw"}
_FIELDS = {
    "bind": {"target", "source", "from", "rw", "readonly"},
    "cache": {"id", "target", "readonly", "rw", "sharing", "from", "source", "mode", "uid", "gid"},
    "tmpfs": {"target", "size"},
    "secret": {"id", "target", "required", "mode", "uid", "gid", "env"},
    "ssh": {"id", "target", "required", "mode", "uid", "gid"},
}
Variables = tuple[tuple[str, str], ...]


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


def parse_mount(text: str, one: Instruction, workdir: str) -> RunMount:
    """Parse a mount.

    Args:
        text: the flag's value, variables expanded.
        one: its RUN, for errors.
        workdir: what relative targets are relative to.

    Raises:
        DockerfileError: it is malformed or unsupported.
    """
    fields = _fields(text, one)
    kind = fields.pop("type", "bind")
    if kind not in _FIELDS:
        one.refuse(f"--mount=type={kind} is not supported", "bind, cache, tmpfs, secret and ssh are")
    if odd := sorted(fields.keys() - _FIELDS[kind]):
        one.refuse(f"--mount=type={kind} has no {', '.join(odd)}")
    if kind == "cache" and {"from", "source"} & fields.keys():
        one.refuse("a cache that begins with the files of another image is not supported", "COPY them in the RUN")
    identity = fields.get("id", "")
    target = fields.get("target", "")
    required = fields.get("required", "false").lower() in ("true", "1")
    if kind == "ssh" and required:
        one.refuse("--mount=type=ssh,required is not supported", "no build has an SSH agent; mount a key as a secret")
    if kind == "secret":
        identity = identity or posixpath.basename(target)
        if not identity:
            one.refuse("--mount=type=secret has an id or a target")
        if not target and "env" not in fields:
            target = f"/run/secrets/{identity}"
    elif not target and kind != "ssh":
        one.refuse(f"--mount=type={kind} has a target")
    target = posixpath.normpath(posixpath.join(workdir, target)) if target else ""
    if target == "/":
        one.refuse("nothing can be mounted at /")
    return RunMount(
        kind, target, fields.get("source", ""), fields.get("from", ""), identity or target, fields.get("env", ""),
        required, _number(fields, "mode", one, 8),
        (_number(fields, "uid", one) or 0, _number(fields, "gid", one) or 0), _size(fields.get("size", "0"), one),
    )  # fmt: skip


def _fields(text: str, one: Instruction) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = _NAMES.get(name.strip().lower(), name.strip().lower())
        if not name or (not equals and name not in ("readonly", "rw", "required")):
            one.refuse(f"--mount={text}: {part!r} is not NAME=VALUE")
        fields[name] = value if equals else "true"
    return fields


def _number(fields: dict[str, str], name: str, one: Instruction, base: int = 10) -> int | None:
    if name not in fields:
        return None
    try:
        return int(fields[name], base)
    except ValueError:
        one.refuse(f"--mount: {name}={fields[name]} is not a number")


def _size(text: str, one: Instruction) -> int:
    """Return bytes, as BuildKit reads them (RAMInBytes in docker/go-units)."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:([kmgtp])(?:i?b)?|b)?", text, re.ASCII | re.IGNORECASE)
    size = float(match[1]) * 1024 ** (" kmgtp".index((match[2] or " ").lower())) if match else 1 << 63
    if size >= 1 << 63:
        one.refuse(f"--mount: size={text} is not a size", "write it like 64m, 1.5g or 4096")
    return int(size)


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


def refuse(one: Instruction | RunCommand | CopyFiles, reason: str, hint: str | None = None) -> NoReturn:
    """Refuse an instruction.

    Raises:
        DockerfileError: always.
    """
    raise DockerfileError(one.text.splitlines()[0][:200], line=one.line, reason=reason, hint=hint)
