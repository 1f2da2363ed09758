"""Parse the mounts of RUN instructions (``RUN --mount``)."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from minisandbox.spec import RunMount

if TYPE_CHECKING:
    from minisandbox.images.dockerfile.parsing import Instruction

_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "readwrite": "rw"}
_FIELDS = {
    "bind": {"target", "source", "from", "rw", "readonly"},
    "cache": {"id", "target", "readonly", "rw", "sharing", "from", "source", "mode", "uid", "gid"},
    "tmpfs": {"target", "size"},
    "secret": {"id", "target", "required", "mode", "uid", "gid", "env"},
    "ssh": {"id", "target", "required", "mode", "uid", "gid"},
}


def parse_mount(text: str, instruction: Instruction, workdir: str) -> RunMount:
    """Parse the value of a ``--mount`` flag.

    Args:
        text: the flag's value with expanded variables.
        instruction: the RUN instruction, for errors.
        workdir: the directory that relative targets are based on.

    Raises:
        DockerfileError: the mount is malformed or unsupported.
    """
    fields = _fields(text, instruction)
    kind = fields.pop("type", "bind")
    if kind not in _FIELDS:
        instruction.refuse(f"--mount=type={kind} is not supported", "bind, cache, tmpfs, secret and ssh are")
    if odd := sorted(fields.keys() - _FIELDS[kind]):
        instruction.refuse(f"--mount=type={kind} has no {', '.join(odd)}")
    if kind == "cache" and {"from", "source"} & fields.keys():
        instruction.refuse(
            "a cache that begins with the files of another image is not supported", "COPY them in the RUN"
        )
    identity = fields.get("id", "")
    target = fields.get("target", "")
    required = fields.get("required", "false").lower() in ("true", "1")
    if kind == "ssh" and required:
        instruction.refuse(
            "--mount=type=ssh,required is not supported", "no build has an SSH agent; mount a key as a secret"
        )
    if kind == "secret":
        identity = identity or posixpath.basename(target)
        if not identity:
            instruction.refuse("--mount=type=secret has an id or a target")
        if not target and "env" not in fields:
            target = f"/run/secrets/{identity}"
    elif not target and kind != "ssh":
        instruction.refuse(f"--mount=type={kind} has a target")
    target = posixpath.normpath(posixpath.join(workdir, target)) if target else ""
    if target == "/":
        instruction.refuse("nothing can be mounted at /")
    return RunMount(
        kind, target, fields.get("source", ""), fields.get("from", ""), identity or target, fields.get("env", ""),
        required, _number(fields, "mode", instruction, 8),
        (_number(fields, "uid", instruction) or 0, _number(fields, "gid", instruction) or 0),
        _size(fields.get("size", "0"), instruction),
    )  # fmt: skip


def _fields(text: str, instruction: Instruction) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = _NAMES.get(name.strip().lower(), name.strip().lower())
        if not name or (not equals and name not in ("readonly", "rw", "required")):
            instruction.refuse(f"--mount={text}: {part!r} is not NAME=VALUE")
        fields[name] = value if equals else "true"
    return fields


def _number(fields: dict[str, str], name: str, instruction: Instruction, base: int = 10) -> int | None:
    if name not in fields:
        return None
    try:
        return int(fields[name], base)
    except ValueError:
        instruction.refuse(f"--mount: {name}={fields[name]} is not a number")


def _size(text: str, instruction: Instruction) -> int:
    """Parse a size like ``64m`` into bytes, as BuildKit does (RAMInBytes in docker/go-units)."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:([kmgtp])(?:i?b)?|b)?", text, re.ASCII | re.IGNORECASE)
    size = float(match[1]) * 1024 ** (" kmgtp".index((match[2] or " ").lower())) if match else 1 << 63
    if size >= 1 << 63:
        instruction.refuse(f"--mount: size={text} is not a size", "write it like 64m, 1.5g or 4096")
    return int(size)
