"""Parse a Dockerfile into instructions with line numbers, check their flags and arguments, and parse mounts.

``e2b-dockerfile-utils``, a port of BuildKit's parser, parses the syntax: directives, comments, continuation lines,
flags, heredocs and JSON. This module checks the flags and the number of arguments, like BuildKit's package
``instructions``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
)

from minisandbox.errors import DockerfileError
from minisandbox.spec import CopyFiles, RunCommand, RunMount

FLAGS: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount", "network", "security"}),
    "COPY": frozenset({"from", "chown", "chmod", "link", "parents", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "keep-git-dir", "checksum", "unpack"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}
_REPEATED = frozenset({"mount", "exclude"})
_ALONE = frozenset({"MAINTAINER", "WORKDIR", "USER", "STOPSIGNAL"})
_LEAST = dict.fromkeys(("ENV", "LABEL", "EXPOSE", "VOLUME", "ARG", "RUN", "HEALTHCHECK", "SHELL", "ONBUILD"), 1) | {
    "COPY": 2,
    "ADD": 2,
}
_TOO_FEW = {1: "{} has at least one argument", 2: "{} has at least one source and a destination"}
_NOT_TRIGGERS = frozenset({"ONBUILD", "FROM", "MAINTAINER"})
_SYNTAX = re.compile(r"\s*#\s*syntax\s*=\s*(\S+)", re.IGNORECASE)
_FRONTEND = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@].*)?")
_MOUNT_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "readwrite": "rw"}
_MOUNT_FIELDS = {
    "bind": {"target", "source", "from", "rw", "readonly"},
    "cache": {"id", "target", "readonly", "rw", "sharing", "from", "source", "mode", "uid", "gid"},
    "tmpfs": {"target", "size"},
    "secret": {"id", "target", "required", "mode", "uid", "gid", "env"},
    "ssh": {"id", "target", "required", "mode", "uid", "gid"},
}


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document in the Dockerfile.

    Attributes:
        name: the terminator; in a COPY, it is also the name of the file.
        raw: the unprocessed text.
        expand: whether variables in the text are expanded, because the terminator has no quotes.
        chomp: whether leading tabs are removed from each line (``<<-``).
    """

    name: str
    raw: str
    expand: bool
    chomp: bool

    @property
    def text(self) -> str:
        """The text, without leading tabs if ``chomp`` is set."""
        return chomp_heredoc_content(self.raw) if self.chomp else self.raw


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a Dockerfile.

    Attributes:
        name: the name in upper case, for example ``RUN``.
        flags: (name, value) of the flags, in order; a flag without a value has the value "true".
        args: the arguments; for ENV and LABEL, names and values alternate.
        is_json: whether the arguments were a JSON list (the "exec form").
        heredocs: the here-documents.
        line: the number of the first line, starting at 1.
        text: the whole instruction, with joined continuation lines.
    """

    name: str
    flags: tuple[tuple[str, str], ...]
    args: tuple[str, ...]
    is_json: bool
    heredocs: tuple[Heredoc, ...]
    line: int
    text: str

    def flag(self, name: str, default: str = "") -> str:
        """Return the value of a flag that may occur only once."""
        return dict(self.flags).get(name, default)

    def all_of(self, name: str) -> tuple[str, ...]:
        """Return the values of a flag that may be repeated."""
        return tuple(value for key, value in self.flags if key == name)

    def is_set(self, name: str) -> bool:
        """Return whether a boolean flag is set.

        Raises:
            DockerfileError: the flag's value is not a boolean.
        """
        value = self.flag(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            self.refuse(f"--{name}={value}: give true or false")
        return value in ("true", "1")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The names and values of an ENV or LABEL."""
        return tuple(zip(self.args[::2], self.args[1::2], strict=True))

    def refuse(self, reason: str, hint: str | None = None) -> NoReturn:
        """Raise the error for this instruction.

        Raises:
            DockerfileError: always.
        """
        refuse(self, reason, hint)


def refuse(instruction: Instruction | RunCommand | CopyFiles, reason: str, hint: str | None = None) -> NoReturn:
    """Raise the error for an instruction of a Dockerfile.

    Raises:
        DockerfileError: always.
    """
    raise DockerfileError(instruction.text.splitlines()[0][:200], line=instruction.line, reason=reason, hint=hint)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed Dockerfile.

    Attributes:
        instructions: the instructions, in order.
        escape: the escape character.
    """

    instructions: tuple[Instruction, ...]
    escape: str


def parse_dockerfile(text: str) -> Dockerfile:
    """Parse a Dockerfile.

    Raises:
        DockerfileError: the Dockerfile is malformed, or requests another frontend; the error names the line.
    """
    parsed = _parse_syntax(text)
    return replace(parsed, instructions=tuple(map(_checked, parsed.instructions)))


def _parse_syntax(text: str) -> Dockerfile:
    """Parse a Dockerfile, without checking flags and arguments."""
    _check_frontend(text)
    try:
        document = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        reason = re.sub(r"^Dockerfile parse error(?: on line \d+)?: ", "", str(error))
        raise DockerfileError("the Dockerfile cannot be parsed", line=error.line, reason=reason) from None
    except RecursionError:
        raise DockerfileError("the Dockerfile cannot be parsed", reason="it has JSON with too many levels") from None
    if not document.instructions:
        raise DockerfileError("the Dockerfile has no instruction", hint="begin with FROM")
    return Dockerfile(tuple(map(_typed, document.instructions)), document.escape_token)


def parse_trigger(text: str, origin: Instruction, escape: str) -> Instruction:
    """Parse the instruction of an ONBUILD.

    Args:
        text: the instruction.
        origin: the ONBUILD instruction, or the FROM whose base image has the trigger; its line appears in errors.
        escape: the escape character.

    Raises:
        DockerfileError: the instruction is malformed, or not allowed in ONBUILD.
    """
    try:
        trigger = _parse_syntax(text if escape == "\\" else f"# escape={escape}\n{text}").instructions[0]
        trigger = trigger if trigger.name in _NOT_TRIGGERS else _checked(trigger)
    except DockerfileError as error:
        origin.refuse(f"ONBUILD {text[:200]}: {error.reason or error.what}")
    if trigger.name in _NOT_TRIGGERS:
        origin.refuse(f"ONBUILD cannot have {trigger.name}")
    return replace(trigger, line=origin.line)


def _check_frontend(text: str) -> None:
    """Reject frontends other than Docker's own (``# syntax=docker/dockerfile:1``)."""
    first_line = text.lstrip("\ufeff").split("\n", 1)[0]
    match = _SYNTAX.match(first_line)
    if match is not None and _FRONTEND.fullmatch(match[1]) is None:
        raise DockerfileError(
            first_line.strip()[:200],
            line=1,
            reason="this frontend is a program of its own",
            hint="remove the line, or use docker/dockerfile:1",
        )


def _typed(node: DockerfileInstruction) -> Instruction:
    args = tuple(node.args)
    if node.name in ("ENV", "LABEL"):  # the parser returns triples of name, value and separator
        args = tuple(arg for index, arg in enumerate(args) if index % 3 < 2)
    elif node.name == "ONBUILD":  # the parser omits the trigger
        args = tuple(filter(None, (node.original.strip()[len("ONBUILD") :].strip(),)))
    heredocs = tuple(Heredoc(heredoc.name, heredoc.content, heredoc.expand, heredoc.chomp) for heredoc in node.heredocs)
    flags = tuple(_flag(text) for text in node.flags)
    return Instruction(node.name, flags, args, node.json, heredocs, node.start_line, node.original.strip())


def _flag(flag: str) -> tuple[str, str]:
    name, equals, value = flag.removeprefix("--").partition("=")
    return name, value if equals else "true"


def _checked(instruction: Instruction) -> Instruction:
    """Check an instruction's flags and arguments, as far as possible without expanding variables."""
    if any("\0" in text for text in (instruction.text, *instruction.args)):
        instruction.refuse("it has a NUL character, which no command, path or variable can have")
    names = [name for name, _ in instruction.flags]
    for name in names:
        if name not in FLAGS.get(instruction.name, frozenset()):
            instruction.refuse(f"{instruction.name} has no flag --{name}")
        if name not in _REPEATED and names.count(name) > 1:
            instruction.refuse(f"--{name} is given more than once")
    if instruction.name in _ALONE and len(instruction.args) != 1:
        instruction.refuse(f"{instruction.name} has exactly one argument")
    if len(instruction.args) < _LEAST.get(instruction.name, 0):
        instruction.refuse(_TOO_FEW[_LEAST[instruction.name]].format(instruction.name))
    if instruction.name in _CHECKS:
        _CHECKS[instruction.name](instruction)
    return instruction


def _check_names(instruction: Instruction) -> None:
    if any(not name for name, _ in instruction.pairs):
        instruction.refuse(f"{instruction.name}: a name is empty")


def _check_shell(instruction: Instruction) -> None:
    if not instruction.is_json:
        instruction.refuse('SHELL needs the JSON form, such as SHELL ["/bin/bash", "-c"]')


def _check_volume(instruction: Instruction) -> None:
    if "" in instruction.args:
        instruction.refuse("VOLUME: a path is empty")


def _check_trigger(instruction: Instruction) -> None:
    parse_trigger(instruction.args[0], instruction, "\\")


def _check_from(instruction: Instruction) -> None:
    if len(instruction.args) == 3 and instruction.args[1].lower() == "as":
        if re.fullmatch(r"[a-z][a-z0-9_.-]*", instruction.args[2].lower()) is None:
            instruction.refuse(
                f"{instruction.args[2]!r} cannot name a stage: it begins with a letter, and has letters, digits, _ . -"
            )
    elif len(instruction.args) != 1:
        instruction.refuse("FROM has an image, and perhaps AS with a name")


def _check_health(instruction: Instruction) -> None:
    kind = instruction.args[0].upper()
    if kind == "NONE" and len(instruction.args) > 1:
        instruction.refuse("HEALTHCHECK NONE has no arguments")
    if kind not in ("NONE", "CMD"):
        instruction.refuse(f"HEALTHCHECK {instruction.args[0]} is unknown: it is NONE or CMD")
    if kind == "CMD" and len(instruction.args) < 2:
        instruction.refuse("HEALTHCHECK CMD has a command")


_CHECKS: Mapping[str, Callable[[Instruction], None]] = {
    "ENV": _check_names,
    "FROM": _check_from,
    "HEALTHCHECK": _check_health,
    "LABEL": _check_names,
    "ONBUILD": _check_trigger,
    "SHELL": _check_shell,
    "VOLUME": _check_volume,
}


# --- the mounts of RUN --------------------------------------------------------------------------------------------


def parse_mount(flag: str, instruction: Instruction, workdir: str) -> RunMount:
    """Parse the value of a ``--mount`` flag.

    Args:
        flag: the flag's value with expanded variables.
        instruction: the RUN instruction, for errors.
        workdir: the directory that relative targets are based on.

    Raises:
        DockerfileError: the mount is malformed or unsupported.
    """
    fields = _mount_fields(flag, instruction)
    kind = fields.pop("type", "bind")
    if kind not in _MOUNT_FIELDS:
        instruction.refuse(f"--mount=type={kind} is not supported", "bind, cache, tmpfs, secret and ssh are")
    if unknown := sorted(fields.keys() - _MOUNT_FIELDS[kind]):
        instruction.refuse(f"--mount=type={kind} has no {', '.join(unknown)}")
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
        required, _mount_number(fields, "mode", instruction, 8),
        (_mount_number(fields, "uid", instruction) or 0, _mount_number(fields, "gid", instruction) or 0),
        _mount_size(fields.get("size", "0"), instruction),
    )  # fmt: skip


def _mount_fields(flag: str, instruction: Instruction) -> dict[str, str]:
    fields: dict[str, str] = {}
    for option in flag.split(","):
        name, equals, value = option.partition("=")
        name = _MOUNT_NAMES.get(name.strip().lower(), name.strip().lower())
        if not name or (not equals and name not in ("readonly", "rw", "required")):
            instruction.refuse(f"--mount={flag}: {option!r} is not NAME=VALUE")
        fields[name] = value if equals else "true"
    return fields


def _mount_number(fields: dict[str, str], name: str, instruction: Instruction, base: int = 10) -> int | None:
    if name not in fields:
        return None
    try:
        return int(fields[name], base)
    except ValueError:
        instruction.refuse(f"--mount: {name}={fields[name]} is not a number")


def _mount_size(size_text: str, instruction: Instruction) -> int:
    """Parse a size like ``64m`` into bytes, as BuildKit does (RAMInBytes in docker/go-units)."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:([kmgtp])(?:i?b)?|b)?", size_text, re.ASCII | re.IGNORECASE)
    size = float(match[1]) * 1024 ** (" kmgtp".index((match[2] or " ").lower())) if match else 1 << 63
    if size >= 1 << 63:
        instruction.refuse(f"--mount: size={size_text} is not a size", "write it like 64m, 1.5g or 4096")
    return int(size)
