"""Evaluate a parsed Dockerfile into a recipe: expand arguments and variables, and resolve stages.

The evaluation follows the Dockerfile reference (docs.docker.com/reference/dockerfile). Details that the reference
leaves open follow BuildKit.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NoReturn, TypeVar

from e2b_dockerfile_utils import ShellLex, parse_heredoc

from minisandbox.errors import DockerfileError, MiniSandboxError
from minisandbox.images.dockerfile.parsing import Dockerfile, Instruction, parse_mount, parse_trigger
from minisandbox.images.image import DEFAULT_PATH
from minisandbox.images.oci.manifest import Platform, own_platform, platform_or_own, text_of, texts_of
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
)
from minisandbox.types import Network
from minisandbox.values import JSONValue

_T = TypeVar("_T", str, list[str])
PIPES = "/dev/pipes"
"""The directory to which a RUN's here-document is written as a script, as in BuildKit."""
PROXIES = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
"""Build arguments that a RUN sees without an ARG instruction, and that are left out of the cache key."""
TIMEOUT = 7200.0
"""The default timeout of one RUN in seconds."""
_SHELL = ("/bin/sh", "-c")
_REMOTE = re.compile(r"(?:https?|ftp|git|ssh)://|git@[\w.-]+:", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}
_PATTERN = re.compile(r"\$\{(\w+)[#%/]")
"""Matches an expansion that removes or replaces a pattern in a variable's value, for example ``${NAME#PATTERN}``."""
_MOST_DIGITS = 18  # fit in 64 bits
_MOST_NESTED = 100
"""Maximum length of a chain of stages that depend on each other, because planning a stage is recursive."""
_MOST_EXPANDED = 1 << 23
"""Maximum number of characters in all expanded words of a Dockerfile."""
_MOST_STEPS = 1 << 26
"""Maximum number of steps to match one pattern."""

Config = Mapping[str, JSONValue]
Bases = Callable[[OciBase], Config]
"""A function that returns the configuration of an image, and pulls the image if it is missing."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build from a Dockerfile.

    Attributes:
        target: the stage to build; None for the last stage.
        arguments: values of the build arguments (``--build-arg``).
        platform: the target platform; "" for that of this machine.
        network: the network of a RUN without ``--network``.
        secrets: contents of secrets by id.
        timeout: the timeout of one RUN in seconds.
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


def evaluate(dockerfile: Dockerfile, options: BuildOptions, bases: Bases, context: Context) -> Recipe:
    """Evaluate a Dockerfile into a recipe.

    Args:
        dockerfile: the parsed Dockerfile.
        options: the options of the build.
        bases: returns the configuration of a base image.
        context: the build context.

    Returns:
        The recipe of the target stage, which contains the recipes of the stages that it needs.

    Raises:
        DockerfileError: an instruction is invalid or unsupported; the error names the line. No instruction has run.
    """
    global_args, blocks = _split(dockerfile)
    blocks = _up_to(blocks, options.target)
    evaluation = _Evaluation(dockerfile.escape, options, bases, blocks, context)
    evaluation.set_globals(global_args)
    return evaluation.stage(len(blocks) - 1).recipe


def _split(dockerfile: Dockerfile) -> tuple[tuple[Instruction, ...], tuple[_Block, ...]]:
    starts = [index for index, instruction in enumerate(dockerfile.instructions) if instruction.name == "FROM"]
    global_args = dockerfile.instructions[: starts[0] if starts else None]
    for instruction in global_args:
        if instruction.name != "ARG":
            instruction.refuse("only ARG can come before the first FROM")
    if not starts:
        raise DockerfileError("the Dockerfile has no FROM", hint="begin with FROM IMAGE")
    ends = (*starts[1:], len(dockerfile.instructions))
    return global_args, tuple(
        _Block(index, dockerfile.instructions[start], dockerfile.instructions[start + 1 : end])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def _up_to(blocks: tuple[_Block, ...], target: str | None) -> tuple[_Block, ...]:
    """Return the stages up to the target stage; later stages are not built."""
    if target is None:
        return blocks
    for block in reversed(blocks):
        if target.lower() == block.name or target == str(block.number):
            return blocks[: block.number + 1]
    names = ", ".join(block.name for block in blocks if block.name) or "none has a name"
    raise DockerfileError(f"there is no stage {target!r}", reason=f"stages: {names}")


class _Evaluation:
    """The state of one evaluation: the arguments before the first FROM, and the stages evaluated so far."""

    def __init__(
        self, escape: str, options: BuildOptions, bases: Bases, blocks: tuple[_Block, ...], context: Context
    ) -> None:
        self.escape = escape
        self.options = options
        self.context = context
        self.arguments = options.arguments
        self.bases = bases
        self.platform = platform_or_own(options.platform)
        self.explicit = options.platform
        self.globals = _platform_arguments(self.platform)
        self._blocks = blocks
        self._stages: dict[int, StageBase] = {}
        self._depth = self._expanded = 0

    def set_globals(self, global_args: Iterable[Instruction]) -> None:
        for instruction in global_args:
            for argument in instruction.args:
                name, equals, value = argument.partition("=")
                if name in self.arguments:
                    self.globals[name] = self.arguments[name]
                elif equals:
                    self.globals[name] = self.word(value, self.globals, instruction)

    def stage(self, index: int) -> StageBase:
        """Return a stage; evaluate each stage only once."""
        if index not in self._stages:
            self._depth += 1
            if self._depth > _MOST_NESTED:
                self._blocks[index].start.refuse(f"more than {_MOST_NESTED} stages are based on one another")
            self._stages[index] = self._evaluate(self._blocks[index])
            self._depth -= 1
        return self._stages[index]

    def origin(self, name: str, instruction: Instruction, stage_index: int) -> OciBase | StageBase:
        """Return the earlier stage, or else the image, that ``--from`` names."""
        if _is_number(name):
            if int(name) >= stage_index:
                instruction.refuse(f"--from={name}: there is no such stage before this one")
            return self.stage(int(name))
        if (stage := self._earlier_stage(name, stage_index)) is not None:
            return stage
        if name.lower() in {block.name for block in self._blocks[stage_index:]} - {""}:
            instruction.refuse(f"--from={name}: that stage comes later, or is this one")
        return OciBase(name, self.explicit)

    def word(self, text: str, variables: Mapping[str, str], instruction: Instruction) -> str:
        """Expand variables in a string that stays one word, and remove its quotes."""
        return self._expand(ShellLex.process_word, text, variables, instruction)

    def words(self, text: str, variables: Mapping[str, str], instruction: Instruction) -> list[str]:
        """Expand variables in a string, then split the string into words; a variable's value may have several words."""
        return self._expand(ShellLex.process_words, text, variables, instruction)

    def document(self, text: str, variables: Mapping[str, str], instruction: Instruction) -> str:
        """Expand variables in a here-document; keep its quotes."""
        return self._expand(ShellLex.process_word, text, variables, instruction, keep_quotes=True)

    def _expand(
        self, process: Callable[[ShellLex, str], _T], text: str, variables: Mapping[str, str], instruction: Instruction,
        *, keep_quotes: bool = False,
    ) -> _T:  # fmt: skip
        if "$" in text:
            self._check_expansion(text, variables, instruction)
        lexer = ShellLex(self.escape, skip_process_quotes=keep_quotes, env=variables, skip_unset_env=False)
        try:
            expanded = process(lexer, text)
        except ValueError as error:
            instruction.refuse(str(error).replace("failed to process ", "")[:1000])
        self._expanded += len("".join(expanded))
        return expanded

    def _check_expansion(self, text: str, variables: Mapping[str, str], instruction: Instruction) -> None:
        """Reject an expansion that could take too much memory or time, because pattern matching may backtrack."""
        longest = max(map(len, variables.values()), default=0)
        size = self._expanded + len(text) + text.count("$") * longest
        steps = 0
        if names := _PATTERN.findall(text):
            matched = max(len(variables.get(name, "")) for name in names)
            is_nested = text.count("$") > len(names)
            stars = text.count("*") + is_nested * max(value.count("*") for value in ("", *variables.values()))
            size += matched * (len(text) + is_nested * longest)
            steps = matched ** (min(stars, 20) + 1)
        if size > _MOST_EXPANDED:
            instruction.refuse(f"the Dockerfile's variables expand to more than {_MOST_EXPANDED} characters")
        if steps > _MOST_STEPS:
            instruction.refuse("a pattern in it would take too long to match")

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
        elif (stage := self._earlier_stage(reference, block.number)) is not None:
            base, config = stage, stage.recipe.config
        else:
            base = OciBase(reference, platform)
            try:
                config = self.bases(base)
            except MiniSandboxError as error:
                raise error.about(f"line {start.line}")  # noqa: B904 - it is the same error
        state = _State(self, block, config)
        for trigger in texts_of(config, "OnBuild"):
            state.apply(parse_trigger(trigger, start, "\\"))
        for instruction in block.body:
            state.apply(instruction)
        return StageBase(state.finished(base))

    def _earlier_stage(self, name: str, stage_index: int) -> StageBase | None:
        for block in reversed(self._blocks[:stage_index]):
            if block.name == name.lower():
                return self.stage(block.number)
        return None


class _State:
    """The state of a stage after the instructions applied so far."""

    def __init__(self, evaluation: _Evaluation, block: _Block, config: Config) -> None:
        self.steps: list[RunCommand | CopyFiles] = []
        self._evaluation = evaluation
        self._number = block.number
        self._inherited = config
        self._config = {name: value for name, value in config.items() if name != "OnBuild"}
        self._variables = dict(variable.split("=", 1) for variable in texts_of(config, "Env") if "=" in variable)
        self._variables.setdefault("PATH", DEFAULT_PATH)
        self._arguments: dict[str, str] = {}
        self._has_command = False

    def apply(self, instruction: Instruction) -> None:
        """Apply an instruction."""
        _INSTRUCTIONS[instruction.name](self, instruction)

    def finished(self, base: OciBase | ScratchBase | StageBase) -> Recipe:
        """Return the stage as a recipe."""
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        dropped: dict[str, JSONValue] = dict.fromkeys(self._inherited.keys() - self._config.keys())
        is_root = not keeps_owners() or set(self._user.split(":")) <= {"", "0", "root"}
        return Recipe(
            base, tuple(self.steps), tuple(self._variables.items()), PurePosixPath(self._workdir),
            "" if is_root else self._user, {**dropped, **self._config, "Env": variables},
            self._evaluation.options.timeout,
        )  # fmt: skip

    @property
    def _visible(self) -> dict[str, str]:
        """The variables that instructions can use; an ENV overrides an ARG of the same name."""
        return {**self._arguments, **self._variables}

    @property
    def _workdir(self) -> str:
        return text_of(self._config, "WorkingDir") or "/"

    @property
    def _user(self) -> str:
        return text_of(self._config, "User")

    def _word(self, text: str, instruction: Instruction) -> str:
        return self._evaluation.word(text, self._visible, instruction)

    def _absolute(self, path: str) -> str:
        return posixpath.normpath("/" + posixpath.join(self._workdir, path).lstrip("/"))

    # --- variables and metadata ---

    def _arg(self, instruction: Instruction) -> None:
        for argument in instruction.args:
            name, equals, value = argument.partition("=")
            if name in self._evaluation.arguments:
                self._arguments[name] = self._evaluation.arguments[name]
            elif equals:
                self._arguments[name] = self._word(value, instruction)
            elif name in self._evaluation.globals:
                self._arguments[name] = self._evaluation.globals[name]

    def _env(self, instruction: Instruction) -> None:
        variables = self._visible  # earlier assignments of an ENV do not affect later ones
        for name, value in instruction.pairs:
            variable = self._evaluation.word(name, variables, instruction)
            if not variable or "=" in variable:
                instruction.refuse(f"{variable!r} cannot be an environment variable")
            self._variables[variable] = self._evaluation.word(value, variables, instruction)

    def _label(self, instruction: Instruction) -> None:
        labels = {self._word(name, instruction): self._word(value, instruction) for name, value in instruction.pairs}
        self._config["Labels"] = {**_mapping(self._config, "Labels"), **labels}

    def _maintainer(self, instruction: Instruction) -> None:
        self._config["Author"] = instruction.args[0]

    def _expose(self, instruction: Instruction) -> None:
        ports = dict(_mapping(self._config, "ExposedPorts"))
        for argument in instruction.args:
            for port in self._evaluation.words(argument, self._visible, instruction):
                ports |= {name: {} for name in _ports(port, instruction)}
        self._config["ExposedPorts"] = ports

    def _volume(self, instruction: Instruction) -> None:
        volumes: dict[str, JSONValue] = {self._word(path, instruction): {} for path in instruction.args}
        self._config["Volumes"] = {**_mapping(self._config, "Volumes"), **volumes}

    def _stop_signal(self, instruction: Instruction) -> None:
        self._config["StopSignal"] = self._word(instruction.args[0], instruction)

    def _on_build(self, instruction: Instruction) -> None:
        self._config["OnBuild"] = [*texts_of(self._config, "OnBuild"), instruction.args[0]]

    def _health(self, instruction: Instruction) -> None:
        if instruction.args[0].upper() == "NONE":
            self._config["Healthcheck"] = {"Test": ["NONE"]}
            return
        command_kind = "CMD" if instruction.is_json else "CMD-SHELL"
        health_check: dict[str, JSONValue] = {"Test": [command_kind, *instruction.args[1:]]}
        for flag, name in _INTERVALS:
            if flag_value := instruction.flag(flag):
                health_check[name] = _nanoseconds(flag_value, flag, instruction)
        if flag_value := instruction.flag("retries"):
            if not _is_number(flag_value):
                instruction.refuse(f"--retries={flag_value}: give a number")
            health_check["Retries"] = int(flag_value)
        self._config["Healthcheck"] = health_check

    # --- how commands run ---

    def _set_user(self, instruction: Instruction) -> None:
        user = self._word(instruction.args[0], instruction)
        if not user:
            instruction.refuse("the user is empty")
        self._config["User"] = user

    def _set_shell(self, instruction: Instruction) -> None:
        self._config["Shell"] = list(instruction.args)

    def _command(self, instruction: Instruction) -> None:
        self._config["Cmd"] = self._line(instruction)
        self._has_command = True

    def _entrypoint(self, instruction: Instruction) -> None:
        self._config["Entrypoint"] = self._line(instruction)
        if not self._has_command:  # a new entrypoint drops the base's default command
            self._config.pop("Cmd", None)

    def _line(self, instruction: Instruction) -> list[str]:
        return list(instruction.args) if instruction.is_json else [*self._shell, *instruction.args]

    @property
    def _shell(self) -> tuple[str, ...]:
        return texts_of(self._config, "Shell") or _SHELL

    # --- steps ---

    def _set_workdir(self, instruction: Instruction) -> None:
        path = self._word(instruction.args[0], instruction)
        if not path:
            instruction.refuse("the path is empty")
        self._config["WorkingDir"] = workdir = self._absolute(path)
        if workdir != "/":
            context = self._evaluation.context
            self.steps.append(CopyFiles(instruction.line, instruction.text, context, (), (), f"{workdir}/", self._user))

    def _run_command(self, instruction: Instruction) -> None:
        if (security := instruction.flag("security")) not in ("", "sandbox"):
            instruction.refuse(f"--security={security} is not supported", "nothing that is built gets privileges")
        networks = {"default": self._evaluation.options.network, "none": Network.off(), "host": Network.host()}
        network = networks.get(instruction.flag("network", "default"))
        if network is None:
            instruction.refuse(f"--network={instruction.flag('network')}: give default, none or host")
        argv, script = self._resolved(instruction)
        arguments = self._evaluation.arguments
        self.steps.append(RunCommand(
            instruction.line, instruction.text, argv, tuple(self._visible.items()),
            tuple((name, arguments[name]) for name in PROXIES if name in arguments and name not in self._visible),
            self._workdir, self._user, network, tuple(self._mounts(instruction)), script,
            tuple(self._evaluation.options.secrets.items()),
        ))  # fmt: skip

    def _resolved(self, instruction: Instruction) -> tuple[tuple[str, ...], Document | None]:
        """Return the command and the here-document of a RUN, unexpanded, because the shell expands their variables."""
        if instruction.is_json or not instruction.heredocs:
            return tuple(self._line(instruction)), None
        if parse_heredoc(instruction.args[0]) is None:  # a normal command with here-documents, which the shell reads
            command = "".join([instruction.args[0], *(f"\n{doc.raw}{doc.name}" for doc in instruction.heredocs)])
            return (*self._shell, command), None
        document = instruction.heredocs[0]
        if document.text.startswith("#!"):
            return (f"{PIPES}/{document.name}",), Document(document.name, document.text.encode())
        return (*self._shell, document.text), None

    def _mounts(self, instruction: Instruction) -> Iterator[ResolvedMount]:
        for flag in instruction.all_of("mount"):
            mount = parse_mount(self._word(flag, instruction), instruction, self._workdir)
            if mount.kind != "ssh":
                yield ResolvedMount(mount, self._origin(mount.origin, instruction))

    def _origin(self, name: str, instruction: Instruction) -> Context | OciBase | StageBase:
        """Return the image or stage that ``from`` names, or the build context without ``from``."""
        return self._evaluation.origin(name, instruction, self._number) if name else self._evaluation.context

    def _copy(self, instruction: Instruction) -> None:
        is_add = instruction.name == "ADD"
        *sources, destination = (self._word(text, instruction) for text in instruction.args)
        documents = tuple(self._document(doc.name, doc.text, doc.expand, instruction) for doc in instruction.heredocs)
        if not instruction.is_json and instruction.heredocs:
            sources = [self._word(text, instruction) for text in instruction.args[:-1] if parse_heredoc(text) is None]
        if not destination or not all(sources):
            instruction.refuse("a source or the destination is empty", "an argument or a variable in it has no value")
        if is_add:
            self._check_add(instruction, sources)
        origin = self._origin(self._word(instruction.flag("from"), instruction), instruction)
        self.steps.append(CopyFiles(
            instruction.line, instruction.text, origin, tuple(sources), documents, self._destination(destination),
            self._word(instruction.flag("chown"), instruction), self._word(instruction.flag("chmod"), instruction),
            tuple(self._word(text, instruction) for text in instruction.all_of("exclude")),
            instruction.is_set("parents"),
            is_add and instruction.flag("unpack", "true").lower() not in ("false", "0"),
        ))  # fmt: skip

    def _document(self, name: str, text: str, expand: bool, instruction: Instruction) -> Document:
        content = self._evaluation.document(text, self._visible, instruction) if expand else text
        return Document(name, content.encode())

    def _destination(self, text: str) -> str:
        path = self._absolute(text)
        is_folder = text.endswith(("/", "/.")) or text in (".", "..")
        return f"{path.rstrip('/')}/" if is_folder else path

    def _check_add(self, instruction: Instruction, sources: list[str]) -> None:
        for source in sources:
            if _REMOTE.match(source):
                instruction.refuse(
                    f"ADD of {source[:200]} is not supported", "fetch it in a RUN, or put it into the context"
                )
        for flag in ("checksum", "keep-git-dir"):
            if instruction.flag(flag):
                instruction.refuse(f"--{flag} is for sources of other machines, which ADD does not support")

    def _never(self, instruction: Instruction) -> NoReturn:
        instruction.refuse(f"{instruction.name} cannot stand here")


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
    """Return the predefined arguments (reference, "Automatic platform ARGs")."""
    arguments: dict[str, str] = {}
    for prefix, platform in (("TARGET", target), ("BUILD", own_platform())):
        arguments |= {
            f"{prefix}PLATFORM": str(platform), f"{prefix}OS": platform.os, f"{prefix}ARCH": platform.architecture,
            f"{prefix}VARIANT": platform.variant,
        }  # fmt: skip
    return arguments


def _ports(ports: str, instruction: Instruction) -> list[str]:
    """Expand a port, or a range like ``8000-8002/udp``, into single ports with their protocol."""
    port_range, _, protocol = ports.partition("/")
    lowest, _, highest = port_range.partition("-")
    highest = highest or lowest
    if not _is_number(lowest) or not _is_number(highest) or protocol.lower() not in ("", "tcp", "udp", "sctp"):
        instruction.refuse(f"{ports!r} is no port", "write it like 8080, 53/udp or 8000-8010")
    start, end = int(lowest), int(highest)
    if not 0 < start <= end < 65536:
        instruction.refuse(f"{ports!r}: ports are 1 to 65535")
    return [f"{port}/{protocol.lower() or 'tcp'}" for port in range(start, end + 1)]


def _nanoseconds(duration: str, flag: str, instruction: Instruction) -> int:
    """Parse a Go duration like ``1m30s`` into nanoseconds (time.ParseDuration)."""
    terms = _DURATION.findall(duration)
    if "".join(number + unit for number, unit in terms) != duration or not terms:
        instruction.refuse(f"--{flag}={duration}: write it like 30s or 1m30s")
    total = sum(float(number) * _UNITS[unit] for number, unit in terms)
    if total >= 1 << 63:
        instruction.refuse(f"--{flag}={duration[:40]} is too long: at most 292 years")
    return round(total)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _mapping(config: Config, name: str) -> Mapping[str, JSONValue]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
