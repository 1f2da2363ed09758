"""Evaluate a Dockerfile: arguments, variables and the state that each instruction leaves to the next.

Dockerfile reference (docs.docker.com/reference/dockerfile); where it is silent, what BuildKit does.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePosixPath
from typing import NoReturn, TypeVar

from e2b_dockerfile_utils import ShellLex, parse_heredoc

from minisandbox.errors import DockerfileError, MiniSandboxError
from minisandbox.images.dockerfile.parsing import Dockerfile, Instruction, parse_trigger
from minisandbox.images.dockerfile.stages import parse_mount
from minisandbox.images.image import DEFAULT_PATH
from minisandbox.images.oci.manifest import Platform, own_platform, parse_platform, text_of, texts_of
from minisandbox.images.oci.pull import keeps_owners
from minisandbox.spec import (
    Context,
    CopyFiles,
    Document,
    OciBase,
    Recipe,
    ResolvedMount,
    RunCommand,
    ScratchBase,
    StageBase,
    Variables,
)
from minisandbox.types import JSONValue, Network

_T = TypeVar("_T")
PIPES = "/dev/pipes"
"""Where a RUN finds the document that it executes (BuildKit's place)."""
PROXIES = tuple(
    name for one in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY") for name in (one, one.lower())
)
"""Arguments that a RUN sees without an ARG, and that do not decide its result."""
TIMEOUT = 7200.0
"""Seconds that one RUN may take."""
_SHELL = ("/bin/sh", "-c")
_REMOTE = re.compile(r"(?:https?|ftp|git|ssh)://|git@[\w.-]+:", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Config = Mapping[str, JSONValue]
Bases = Callable[[OciBase], Config]
"""Returns the configuration of an image, which is pulled where it is missing."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What is built of a Dockerfile, and how.

    Attributes:
        target: the stage; None for the last one.
        arguments: values of its arguments (``--build-arg``).
        platform: what it is built for; "" for this machine.
        network: what a RUN reaches that does not say otherwise.
        secrets: contents of secrets by id.
        timeout: seconds that one RUN may take.
    """

    target: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    network: Network = field(default_factory=Network.host)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    timeout: float = TIMEOUT


@dataclass(frozen=True, slots=True)
class _Block:
    """The instructions of one stage."""

    number: int
    start: Instruction
    body: tuple[Instruction, ...]

    @property
    def name(self) -> str:
        return self.start.args[2].lower() if len(self.start.args) == 3 else ""


def evaluate(parsed: Dockerfile, wanted: BuildOptions, bases: Bases, context: Context) -> Recipe:
    """Evaluate a Dockerfile.

    Args:
        parsed: it.
        wanted: what is to be built of it.
        bases: gives the configuration of base images.
        context: what COPY and ADD take files from.

    Returns:
        The stage that is wanted; those that it needs are in it.

    Raises:
        DockerfileError: something is wrong or unsupported; the error names the line. Nothing has run then.
    """
    head, blocks = _split(parsed)
    blocks = _until(blocks, wanted.target)
    run = _Evaluation(parsed.escape, wanted, bases, blocks, context)
    run.take_globals(head)
    return run.stage(len(blocks) - 1).recipe


def _split(parsed: Dockerfile) -> tuple[tuple[Instruction, ...], tuple[_Block, ...]]:
    starts = [number for number, one in enumerate(parsed.instructions) if one.name == "FROM"]
    head = parsed.instructions[: starts[0] if starts else None]
    for one in head:
        if one.name != "ARG":
            one.refuse("only ARG can come before the first FROM")
    if not starts:
        raise DockerfileError("the Dockerfile has no FROM", hint="begin with FROM IMAGE")
    ends = (*starts[1:], len(parsed.instructions))
    return head, tuple(
        _Block(number, parsed.instructions[start], parsed.instructions[start + 1 : end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def _until(blocks: tuple[_Block, ...], target: str | None) -> tuple[_Block, ...]:
    """The stages up to the target."""
    if target is None:
        return blocks
    for block in reversed(blocks):
        if target.lower() == block.name or target == str(block.number):
            return blocks[: block.number + 1]
    known = ", ".join(block.name for block in blocks if block.name) or "none has a name"
    raise DockerfileError(f"there is no stage {target!r}", reason=f"stages: {known}")


class _Evaluation:
    """One evaluation: the arguments before the first FROM, and the stages that are needed."""

    def __init__(
        self, escape: str, wanted: BuildOptions, bases: Bases, blocks: tuple[_Block, ...], context: Context
    ) -> None:
        self.escape = escape
        self.wanted = wanted
        self.context = context
        self.arguments = wanted.arguments
        self.bases = bases
        self.platform = parse_platform(wanted.platform) if wanted.platform else own_platform()
        self.explicit = wanted.platform
        self.globals = _platform_arguments(self.platform)
        self._blocks = blocks
        self._stages: dict[int, StageBase] = {}

    def take_globals(self, head: Iterable[Instruction]) -> None:
        for one in head:
            for text in one.args:
                name, equals, value = text.partition("=")
                if name in self.arguments:
                    self.globals[name] = self.arguments[name]
                elif equals:
                    self.globals[name] = self.word(value, self.globals, one)

    def stage(self, number: int) -> StageBase:
        """Return a stage, evaluated once."""
        if number not in self._stages:
            self._stages[number] = self._evaluate(self._blocks[number])
        return self._stages[number]

    def origin(self, text: str, one: Instruction, before: int) -> OciBase | StageBase:
        """Return the stage or the image that a ``--from`` means."""
        if text.isdigit():
            if int(text) >= before:
                one.refuse(f"--from={text}: there is no such stage before this one")
            return self.stage(int(text))
        for block in reversed(self._blocks[:before]):
            if block.name == text.lower():
                return self.stage(block.number)
        if text.lower() in {block.name for block in self._blocks[before:]} - {""}:
            one.refuse(f"--from={text}: that stage comes later, or is this one")
        return OciBase(text, self.explicit)

    def word(self, text: str, variables: Mapping[str, str], one: Instruction) -> str:
        """Expand variables in one word, and drop its quotes."""
        return self._lexed(lambda lexer: lexer.process_word(text), variables, one)

    def words(self, text: str, variables: Mapping[str, str], one: Instruction) -> list[str]:
        """Expand variables, whose values may be several words."""
        return self._lexed(lambda lexer: lexer.process_words(text), variables, one)

    def document(self, text: str, variables: Mapping[str, str], one: Instruction) -> str:
        """Expand variables in a document; quotes stay."""
        try:
            return ShellLex(self.escape, skip_process_quotes=True, env=variables, skip_unset_env=False).process_word(
                text
            )
        except ValueError as error:
            one.refuse(str(error))

    def _lexed(self, use: Callable[[ShellLex], _T], variables: Mapping[str, str], one: Instruction) -> _T:
        try:
            return use(ShellLex(self.escape, env=variables, skip_unset_env=False))
        except ValueError as error:
            one.refuse(str(error).replace("failed to process ", ""))

    def _evaluate(self, block: _Block) -> StageBase:
        start = block.start
        platform = self.word(start.flag("platform"), self.globals, start) or self.explicit
        reference = self.word(start.args[0], self.globals, start)
        if not reference:
            start.refuse(f"{start.args[0]!r} is empty", "give the argument a default, or pass it with --build-arg")
        base: OciBase | ScratchBase | StageBase
        config: Config = {}
        if reference == "scratch":
            base = ScratchBase()
        elif (known := self._known(reference, block.number)) is not None:
            base, config = known, known.recipe.config
        else:
            base = OciBase(reference, platform)
            try:
                config = self.bases(base)
            except MiniSandboxError as error:
                raise error.about(f"line {start.line}")  # noqa: B904 - it is the same error
        state = _State(self, block, config)
        for text in texts_of(config, "OnBuild"):
            state.apply(parse_trigger(text, start, "\\"))
        for one in block.body:
            state.apply(one)
        return StageBase(state.finished(base))

    def _known(self, reference: str, before: int) -> StageBase | None:
        for block in reversed(self._blocks[:before]):
            if block.name == reference.lower():
                return self.stage(block.number)
        return None


class _State:
    """What a stage has come to so far."""

    def __init__(self, run: _Evaluation, block: _Block, config: Config) -> None:
        self.steps: list[RunCommand | CopyFiles] = []
        self._run = run
        self._number = block.number
        self._inherited = config
        self._config = {name: value for name, value in config.items() if name != "OnBuild"}
        self._variables = dict(row.split("=", 1) for row in texts_of(config, "Env") if "=" in row)
        self._variables.setdefault("PATH", DEFAULT_PATH)
        self._arguments: dict[str, str] = {}
        self._has_command = False

    def apply(self, one: Instruction) -> None:
        """Apply an instruction."""
        _INSTRUCTIONS[one.name](self, one)

    def finished(self, base: OciBase | ScratchBase | StageBase) -> Recipe:
        """Return the stage as a recipe."""
        rows = [f"{name}={value}" for name, value in self._variables.items()]
        dropped: dict[str, JSONValue] = dict.fromkeys(self._inherited.keys() - self._config.keys())
        is_root = not keeps_owners() or set(self._user.split(":")) <= {"", "0", "root"}
        return Recipe(
            base, tuple(self.steps), tuple(self._variables.items()), PurePosixPath(self._workdir),
            "" if is_root else self._user, {**dropped, **self._config, "Env": rows}, self._run.wanted.timeout,
        )  # fmt: skip

    @property
    def _seen(self) -> dict[str, str]:
        """What instructions see: a variable of ENV wins over an argument of its name."""
        return {**self._arguments, **self._variables}

    @property
    def _workdir(self) -> str:
        return text_of(self._config, "WorkingDir") or "/"

    @property
    def _user(self) -> str:
        return text_of(self._config, "User")

    def _word(self, text: str, one: Instruction) -> str:
        return self._run.word(text, self._seen, one)

    def _absolute(self, path: str) -> str:
        return posixpath.normpath("/" + posixpath.join(self._workdir, path).lstrip("/"))

    # --- variables and metadata ---

    def _arg(self, one: Instruction) -> None:
        for text in one.args:
            name, equals, value = text.partition("=")
            if name in self._run.arguments:
                self._arguments[name] = self._run.arguments[name]
            elif equals:
                self._arguments[name] = self._word(value, one)
            elif name in self._run.globals:
                self._arguments[name] = self._run.globals[name]

    def _env(self, one: Instruction) -> None:
        seen = self._seen  # names of one ENV do not see each other
        self._variables |= {
            self._run.word(name, seen, one): self._run.word(value, seen, one) for name, value in one.pairs
        }

    def _label(self, one: Instruction) -> None:
        labels = {self._word(name, one): self._word(value, one) for name, value in one.pairs}
        self._config["Labels"] = {**_mapping(self._config, "Labels"), **labels}

    def _maintainer(self, one: Instruction) -> None:
        self._config["Author"] = one.args[0]

    def _expose(self, one: Instruction) -> None:
        ports = dict(_mapping(self._config, "ExposedPorts"))
        for word in one.args:
            for port in self._run.words(word, self._seen, one):
                ports |= {name: {} for name in _ports(port, one)}
        self._config["ExposedPorts"] = ports

    def _volume(self, one: Instruction) -> None:
        found: dict[str, JSONValue] = {self._word(path, one): {} for path in one.args}
        self._config["Volumes"] = {**_mapping(self._config, "Volumes"), **found}

    def _stop_signal(self, one: Instruction) -> None:
        self._config["StopSignal"] = self._word(one.args[0], one)

    def _on_build(self, one: Instruction) -> None:
        self._config["OnBuild"] = [*texts_of(self._config, "OnBuild"), one.args[0]]

    def _health(self, one: Instruction) -> None:
        if one.args[0].upper() == "NONE":
            self._config["Healthcheck"] = {"Test": ["NONE"]}
            return
        kind = "CMD" if one.is_json else "CMD-SHELL"
        found: dict[str, JSONValue] = {"Test": [kind, *one.args[1:]]}
        for flag, name in _INTERVALS:
            if text := one.flag(flag):
                found[name] = _nanoseconds(text, flag, one)
        if text := one.flag("retries"):
            if not text.isdigit():
                one.refuse(f"--retries={text}: give a number")
            found["Retries"] = int(text)
        self._config["Healthcheck"] = found

    # --- how commands run ---

    def _set_user(self, one: Instruction) -> None:
        user = self._word(one.args[0], one)
        if not user:
            one.refuse("the user is empty")
        self._config["User"] = user

    def _set_shell(self, one: Instruction) -> None:
        self._config["Shell"] = list(one.args)

    def _command(self, one: Instruction) -> None:
        self._config["Cmd"] = self._line(one)
        self._has_command = True

    def _entrypoint(self, one: Instruction) -> None:
        self._config["Entrypoint"] = self._line(one)
        if not self._has_command:  # one of the base was meant for the base's entrypoint
            self._config.pop("Cmd", None)

    def _line(self, one: Instruction) -> list[str]:
        return list(one.args) if one.is_json else [*self._shell, *one.args]

    @property
    def _shell(self) -> tuple[str, ...]:
        return texts_of(self._config, "Shell") or _SHELL

    # --- steps ---

    def _set_workdir(self, one: Instruction) -> None:
        path = self._word(one.args[0], one)
        if not path:
            one.refuse("the path is empty")
        self._config["WorkingDir"] = found = self._absolute(path)
        if found != "/":
            self.steps.append(CopyFiles(one.line, one.text, self._run.context, (), (), f"{found}/", owner=self._user))

    def _run_command(self, one: Instruction) -> None:
        if one.flag("security") not in ("", "sandbox"):
            one.refuse(f"--security={one.flag('security')} is not supported", "nothing that is built gets privileges")
        networks = {"default": self._run.wanted.network, "none": Network.off(), "host": Network.host()}
        network = networks.get(one.flag("network", "default"))
        if network is None:
            one.refuse(f"--network={one.flag('network')}: give default, none or host")
        argv, script = self._resolved(one)
        given = self._run.arguments
        self.steps.append(RunCommand(
            one.line, one.text, argv, _frozen(self._seen),
            tuple((name, given[name]) for name in PROXIES if name in given and name not in self._seen),
            self._workdir, self._user, network, tuple(self._mounts(one)), script,
            tuple(self._run.wanted.secrets.items()),
        ))  # fmt: skip

    def _resolved(self, one: Instruction) -> tuple[tuple[str, ...], Document | None]:
        """The command of a RUN, with its documents; the shell expands them, not the build."""
        if one.is_json or not one.heredocs:
            return tuple(self._line(one)), None
        alone = parse_heredoc(one.args[0]) is not None
        if not alone:
            full = "".join([one.args[0], *(f"\n{doc.raw}{doc.name}" for doc in one.heredocs)])
            return (*self._shell, full), None
        document = one.heredocs[0]
        if document.text.startswith("#!"):
            script = Document(document.name, document.text.encode())
            return (f"{PIPES}/{document.name}",), script
        return (*self._shell, document.text), None

    def _mounts(self, one: Instruction) -> Iterator[ResolvedMount]:
        for text in one.all_of("mount"):
            wanted = parse_mount(self._word(text, one), one, self._workdir)
            if wanted.kind != "ssh":
                origin = self._run.origin(wanted.origin, one, self._number) if wanted.origin else self._run.context
                yield ResolvedMount(wanted, origin)

    def _copy(self, one: Instruction) -> None:
        extract = one.name == "ADD"
        *sources, destination = (self._word(text, one) for text in one.args)
        documents = tuple(self._document(doc.name, doc.text, doc.expand, one) for doc in one.heredocs)
        if not one.is_json and one.heredocs:
            sources = [self._word(text, one) for text in one.args[:-1] if parse_heredoc(text) is None]
        if not destination or not all(sources):
            one.refuse("a source or the destination is empty", "an argument or a variable in it has no value")
        if extract:
            self._check_add(one, sources)
        origin: Context | OciBase | StageBase = self._run.context
        if text := self._word(one.flag("from"), one):
            origin = self._run.origin(text, one, self._number)
        self.steps.append(CopyFiles(
            one.line, one.text, origin, tuple(sources), documents, self._destination(destination),
            self._word(one.flag("chown"), one), self._word(one.flag("chmod"), one),
            tuple(self._word(text, one) for text in one.all_of("exclude")), one.is_set("parents"),
            extract and one.flag("unpack", "true").lower() not in ("false", "0"),
        ))  # fmt: skip

    def _document(self, name: str, text: str, expand: bool, one: Instruction) -> Document:
        return Document(name, (self._run.document(text, self._seen, one) if expand else text).encode())

    def _destination(self, text: str) -> str:
        path = self._absolute(text)
        is_folder = text.endswith(("/", "/.")) or text in (".", "..")
        return f"{path.rstrip('/')}/" if is_folder else path

    def _check_add(self, one: Instruction, sources: list[str]) -> None:
        for source in sources:
            if _REMOTE.match(source):
                one.refuse(f"ADD of {source[:200]} is not supported", "fetch it in a RUN, or put it into the context")
        for flag in ("checksum", "keep-git-dir"):
            if one.flag(flag):
                one.refuse(f"--{flag} is for sources of other machines, which ADD does not support")

    def _never(self, one: Instruction) -> NoReturn:
        one.refuse(f"{one.name} cannot stand here")


_INTERVALS = (
    ("interval", "Interval"), ("timeout", "Timeout"), ("start-period", "StartPeriod"),
    ("start-interval", "StartInterval"),
)  # fmt: skip
_INSTRUCTIONS: Mapping[str, Callable[[_State, Instruction], None]] = {
    "ADD": _State._copy,
    "ARG": _State._arg,
    "CMD": _State._command,
    "COPY": _State._copy,
    "ENTRYPOINT": _State._entrypoint,
    "ENV": _State._env,
    "EXPOSE": _State._expose,
    "FROM": _State._never,
    "HEALTHCHECK": _State._health,
    "LABEL": _State._label,
    "MAINTAINER": _State._maintainer,
    "ONBUILD": _State._on_build,
    "RUN": _State._run_command,
    "SHELL": _State._set_shell,
    "STOPSIGNAL": _State._stop_signal,
    "USER": _State._set_user,
    "VOLUME": _State._volume,
    "WORKDIR": _State._set_workdir,
}


def _platform_arguments(target: Platform) -> dict[str, str]:
    """The arguments that exist without an ARG in front of the first FROM (reference, "Automatic platform ARGs")."""
    found: dict[str, str] = {}
    for prefix, one in (("TARGET", target), ("BUILD", own_platform())):
        found |= {
            f"{prefix}PLATFORM": str(one), f"{prefix}OS": one.os, f"{prefix}ARCH": one.architecture,
            f"{prefix}VARIANT": one.variant,
        }  # fmt: skip
    return found


def _ports(text: str, one: Instruction) -> list[str]:
    """``8000-8002/udp`` as single ports with their protocol."""
    numbers, _, protocol = text.partition("/")
    first, _, last = numbers.partition("-")
    if not first.isdigit() or not (last or first).isdigit() or protocol.lower() not in ("", "tcp", "udp", "sctp"):
        one.refuse(f"{text!r} is no port", "write it like 8080, 53/udp or 8000-8010")
    start, end = int(first), int(last or first)
    if not 0 < start <= end < 65536:
        one.refuse(f"{text!r}: ports are 1 to 65535")
    return [f"{port}/{protocol.lower() or 'tcp'}" for port in range(start, end + 1)]


def _nanoseconds(text: str, flag: str, one: Instruction) -> int:
    """Go's durations, such as ``1m30s`` (time.ParseDuration)."""
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        one.refuse(f"--{flag}={text}: write it like 30s or 1m30s")
    return round(timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts)).total_seconds() * 1e9)


def _frozen(values: Mapping[str, str]) -> Variables:
    return tuple(values.items())


def _mapping(config: Config, name: str) -> Mapping[str, JSONValue]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
