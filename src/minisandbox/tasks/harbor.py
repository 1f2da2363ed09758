"""Read Harbor's task directories: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/``, ``solution/``.

The rules are those of Harbor 0.26; https://harborframework.com/docs describes the format. Unsupported features are
rejected before anything runs.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.spec import DockerfileBase, OciBase
from minisandbox.tasks.builds import Build, ContainerBuild
from minisandbox.tasks.context import LoadContext, problem_of
from minisandbox.tasks.fields import Fields
from minisandbox.tasks.graders import ScriptGrader
from minisandbox.tasks.needs import Needs, Solution, network_of
from minisandbox.tasks.task import Task
from minisandbox.types import Network
from minisandbox.values import MiB

CONFIG = "task.toml"
"""The file that marks a directory as a task."""
_SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_SOLUTION_TIMEOUT = 1800.0
_PUBLISHED = "/logs/artifacts"
_DIRECTORIES = ("/logs/agent", "/logs/verifier", _PUBLISHED)
# Harbor makes the script executable, and its shebang line selects the interpreter.
_RUN = "chmod +x {0} 2>/dev/null; [ -x {0} ] || exec bash {0}; exec {0}"
_UNSUPPORTED = {
    "steps": "a task of several steps; each would need an agent of its own in the same sandbox",
    "environment.tpu": "sandboxes have no TPU",
    "environment.mcp_servers": "agents here call no MCP servers",
    "environment.healthcheck": "a command that waits for a service",
    "verifier.environment": "the verifier has an image of its own; a task has one image here",
    "verifier.collect": "commands between the agent and the verifier",
    "agent.user": "agents run as the image's user",
}
_UNSUPPORTED_FILES = {
    **dict.fromkeys(
        (f"environment/{one}" for one in _COMPOSE),
        ("services are", "a sandbox is one machine without others next to it"),
    ),
    "trajectory.json": ("prior context is", "agents here begin with the instruction alone"),
}
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])B?", re.IGNORECASE)
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_HEADER = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]+")


def task_directories(path: Path) -> list[Path]:
    """Return the task directories of ``harbor:PATH``: the path itself, or its subdirectories by name.

    Raises:
        TaskFileError: the path contains no task.
    """
    if (path / CONFIG).is_file():
        return [path.resolve()]
    directories = sorted(entry for entry in path.glob("*") if (entry / CONFIG).is_file()) if path.is_dir() else []
    if not directories:
        raise TaskFileError(
            f"{path} has no Harbor task",
            path=path,
            reason=f"neither it nor a directory in it has a {CONFIG}" if path.exists() else "it does not exist",
            hint="give a task directory, or the directory that holds them: harbor:PATH",
        )
    return [path.resolve() / entry.name for entry in directories]


def convert(row: Fields, context: LoadContext) -> Task:
    """Convert the task directory in a row's ``harbor`` column; see :func:`read_task` for errors."""
    return read_task(row.path("harbor"), context)


def read_task(path: Path, context: LoadContext) -> Task:
    """Read a task directory.

    Args:
        path: the task directory.
        context: the settings; if ``environment`` is "pins", the Dockerfile is built even if the task names an image.

    Raises:
        TaskFileError: a file is missing or malformed, or the task needs an unsupported feature; ``path``, ``line`` and
            ``field`` have the position.
    """
    config = _read_config(path, trusted=context.places is None)
    _check_supported(config)
    seconds = config.number("agent.timeout_sec", 0.0) or None
    return Task(
        instance_id=path.resolve().name,
        repo=config.text("task.name") or path.resolve().name,
        base_commit="",
        problem_statement=_instruction(config),
        patch="",
        test_patch="",
        FAIL_TO_PASS=(),
        PASS_TO_PASS=(),
        build=_build(config, prebuilt=context.environment != "pins"),
        grader=_grader(config),
        solution=_solution(config, seconds),
        needs=_needs(config, seconds, public=context.public_network),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """A parsed ``task.toml``.

    Attributes:
        path: the task's directory.
        source: the text of the file.
        values: its tables and keys.
        trusted: whether the file may use the host's environment variables, and name paths outside its directory.
    """

    path: Path
    source: str
    values: Mapping[str, object]
    trusted: bool

    def error(self, key: str, problem: str, *, reason: str | None = None, hint: str | None = None) -> TaskFileError:
        """Create the error for a key, with its line."""
        line = _line_of(self.source, key)
        position = f"{self.path / CONFIG}{'' if line is None else f', line {line}'}"
        return TaskFileError(
            f"{position}: {key!r} {problem}", path=self.path / CONFIG, line=line, field=key, reason=reason, hint=hint
        )

    def get(self, key: str) -> object:
        """Return the value of a dotted key, or None if it is missing."""
        value: object = self.values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a string; a number (a user or a version) is converted."""
        value = self.get(key)
        if not isinstance(value, str | int | float | None) or isinstance(value, bool):
            raise self.error(key, f"is {value!r}", hint="write a string")
        return default if value is None else str(value)

    def number(self, key: str, default: float) -> float:
        """Return a number that is 0 or more."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self.error(key, f"is {value!r}", hint="write a number, 0 or more")
        return float(value)

    def items(self, key: str) -> Sequence[object]:
        """Return a list."""
        value = self.get(key)
        if not isinstance(value, list | None):
            raise self.error(key, f"is {value!r}", hint="write a list")
        return value or ()

    def variables(self, key: str) -> tuple[tuple[str, str], ...]:
        """Return environment variables, with ``${NAME}`` and ``${NAME:-default}`` expanded."""
        table = self.get(key)
        if not isinstance(table, dict | None) or not all(isinstance(text, str) for text in (table or {}).values()):
            raise self.error(key, "is no table of strings", hint='write it like NAME = "value"')
        return tuple((name, self._resolved(f"{key}.{name}", value)) for name, value in (table or {}).items())

    def _resolved(self, key: str, value: str) -> str:
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            return value
        variable = os.environ.get(match[1]) if self.trusted else None
        if variable is None and match[2] is None:
            raise self.error(
                key,
                f"needs the variable {match[1]} of this machine",
                reason="it is not set" if self.trusted else "it may hold a secret, which the task would get",
                hint=f"set {match[1]}" if self.trusted else "if you trust all of these tasks: --allow-local-sources",
            )
        return match[2] if variable is None else variable

    def file(self, name: str) -> Path:
        """Return the path of a file or directory of the task; an untrusted task cannot leave its directory."""
        path = self.path / name
        if (problem := problem_of(path, None if self.trusted else (self.path,))) is not None:
            what, reason, hint = problem
            raise TaskFileError(f"{path} {what}", path=path, reason=reason, hint=hint)
        return path


def _read_config(path: Path, *, trusted: bool) -> _Config:
    file = path / CONFIG
    try:
        source = file.read_text(encoding="utf-8")
        tables = tomllib.loads(source)
    except OSError as error:
        raise TaskFileError(f"{file} cannot be read", path=file, reason=error.strerror or str(error)) from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise TaskFileError(f"{file} is not TOML", path=file, reason=str(error), hint="fix that line") from error
    return _Config(path, source, tables, trusted)


def _line_of(source: str, key: str) -> int | None:
    """Return the line number of a key or table, found without a TOML parser (best effort)."""
    section, _, leaf = key.rpartition(".")
    current = ""
    for line_number, line in enumerate(source.splitlines(), start=1):
        if header := _HEADER.match(line):
            current = header[1]
            if current == key:
                return line_number
        elif current == section and re.match(rf"\s*{re.escape(leaf)}\s*=", line):
            return line_number
    return None


def _check_supported(config: _Config) -> None:
    version = config.text("schema_version", _SCHEMAS[-1])  # ignore the older key "version"
    if version not in _SCHEMAS:
        raise config.error(
            "schema_version",
            f"is {version!r}, which is unknown",
            reason="the task is for another version of Harbor",
            hint=f"known are {', '.join(_SCHEMAS)}",
        )
    for key, reason in _UNSUPPORTED.items():
        if config.get(key):
            raise config.error(key, "is not supported", reason=reason, hint="run the task with Harbor itself")
    if config.text("environment.os", "linux").lower() != "linux":
        raise config.error("environment.os", f"is {config.text('environment.os')!r}", reason="sandboxes run Linux")
    if config.number("environment.gpus", 0):
        raise config.error("environment.gpus", "is not supported", reason="sandboxes see no GPU")
    for name, description in _UNSUPPORTED_FILES.items():
        if (path := config.path / name).exists():
            hint = "run the task with Harbor itself"
            raise TaskFileError(f"{path}: {description[0]} not supported", path=path, reason=description[1], hint=hint)


def _instruction(config: _Config) -> str:
    """Return the agent's instruction, without the leading canary lines that keep benchmarks out of training data."""
    path = config.file("instruction.md")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise TaskFileError(f"{path} cannot be read", path=path, reason=str(error)) from error
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    instruction = "\n".join(lines).lstrip("\n")
    if not instruction.strip():
        raise TaskFileError(f"{path} is empty", path=path, hint="say what the agent has to do")
    return instruction


def _build(config: _Config, *, prebuilt: bool) -> Build:
    folder = config.file("environment")
    dockerfile, image = folder / "Dockerfile", config.text("environment.docker_image")
    workdir, variables = config.text("environment.workdir"), config.variables("environment.env")
    if dockerfile.is_file() and not (image and prebuilt):
        return ContainerBuild(DockerfileBase(dockerfile, folder), workdir, variables, cut=False, reset=False)
    if not image:
        raise TaskFileError(
            f"{config.path} has no environment/Dockerfile and names no image",
            path=dockerfile,
            reason="the directory is incomplete, or the task is for another provider",
            hint="add the Dockerfile, or environment.docker_image to task.toml",
        )
    if not dockerfile.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise config.error(
            "environment.docker_image",
            "stands next to files in environment/ without a Dockerfile",
            reason="Harbor copies them into the running container",
            hint="add a Dockerfile that begins with the image and copies them",
        )
    return ContainerBuild(OciBase(image), workdir, variables, cut=False, reset=False)


def _grader(config: _Config) -> ScriptGrader:
    tests = config.file("tests")
    if not (tests / "test.sh").is_file():
        raise TaskFileError(
            f"{config.path} has no tests/test.sh", path=tests / "test.sh", reason="nothing else writes the reward"
        )
    mode = config.text("verifier.environment_mode", "shared")
    if mode not in ("shared", "separate"):
        raise config.error("verifier.environment_mode", f"is {mode!r}", hint="write 'shared' or 'separate'")
    if mode == "separate" and (builds := [name for name in ("Dockerfile", *_COMPOSE) if (tests / name).exists()]):
        raise config.error(
            "verifier.environment_mode",
            f"is 'separate', and tests/ has a {builds[0]}",
            reason=_UNSUPPORTED["verifier.environment"],
        )
    published = dict.fromkeys((_PUBLISHED, *_artifacts(config)))
    return ScriptGrader(
        _RUN.format("/tests/test.sh"),
        tests,
        mode="live" if mode == "shared" else "fresh",
        timeout=config.number("verifier.timeout_sec", 600.0),
        environment=config.variables("verifier.env"),
        user=config.text("verifier.user"),
        carry=(".", *published) if mode == "shared" else tuple(published),
    )


def _artifacts(config: _Config) -> Iterator[str]:
    for entry in config.items("artifacts"):
        table = entry if isinstance(entry, dict) else {"source": entry}
        source, service = table.get("source"), table.get("service")
        if not isinstance(source, str) or ".." in Path(source).parts:
            raise config.error("artifacts", f"has {entry!r}", hint="name a path of the container, without '..'")
        if service not in (None, "main"):
            raise config.error("artifacts", f"has one of the service {service!r}", reason="sandboxes have no services")
        yield source


def _solution(config: _Config, seconds: float | None) -> Solution | None:
    files = config.file("solution")
    if not (files / "solve.sh").is_file():
        return None
    variables = dict((("DEBIAN_FRONTEND", "noninteractive"), *config.variables("solution.env")))
    command = _RUN.format("/solution/solve.sh")
    return Solution(files, command, timeout=seconds or _SOLUTION_TIMEOUT, environment=tuple(variables.items()))


def _needs(config: _Config, seconds: float | None, *, public: bool) -> Needs:
    network = _network(config, "environment", "public", public=public)
    agent = _network(config, "agent", None, public=public) or network
    grader = _network(config, "verifier", None, public=public) or network
    assert agent is not None
    assert grader is not None
    is_shared = config.text("verifier.environment_mode", "shared") == "shared"
    if is_shared and agent != grader:
        raise config.error(
            "verifier.network_mode" if config.get("verifier.network_mode") else "agent.network_mode",
            "gives the agent and the verifier different networks in one sandbox",
            reason="the network of a sandbox cannot change",
            hint='set verifier.environment_mode = "separate"',
        )
    memory, disk = (_megabytes(config, f"environment.{name}") for name in ("memory", "storage"))
    return Needs(memory, disk, agent, grader, seconds, entrypoint=True, directories=_DIRECTORIES)


def _megabytes(config: _Config, key: str) -> int | None:
    """Return ``KEY_mb`` in bytes, or the older ``KEY = "2G"``."""
    older_value = config.get(key)
    if older_value is None or config.get(f"{key}_mb") is not None:
        return round(config.number(f"{key}_mb", 0.0) * MiB) or None
    match = _SIZE.fullmatch(str(older_value).strip())
    if match is None:
        raise config.error(key, f"is {older_value!r}", hint=f"write {key.rpartition('.')[2]}_mb = 2048")
    return round(float(match[1]) * _MEGABYTES[match[2].upper()] * MiB)


def _network(config: _Config, section: str, default: str | None, *, public: bool) -> Network | None:
    """Return the network of a section, or None if neither the section nor the default sets one."""
    key, mode = f"{section}.network_mode", config.get(f"{section}.network_mode")
    if mode is None:
        mode = "no-network" if config.get(f"{section}.allow_internet") is False else default
    if mode is None:
        return None
    hosts = [str(host) for host in config.items(f"{section}.allowed_hosts")]
    try:
        if mode == "allowlist":
            return network_of(hosts, public=public)
        if mode in ("public", "no-network"):
            return network_of("public" if mode == "public" else "off", public=public)
    except InvalidValue as error:
        raise config.error(f"{section}.allowed_hosts", f"is wrong: {error.what}", hint=error.hint) from error
    raise config.error(key, f"is {mode!r}", hint="write 'public', 'no-network' or 'allowlist'")
