"""Find Python interpreters in their usual directories, and run each to read its version."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from packaging.version import Version

from minisandbox.errors import InterpreterNotFound
from minisandbox.spec import PythonRequest
from minisandbox.store.disk.paths import home_directory

PROBE_TIMEOUT = 10.0

# A program for Python 2.7 to 3.14 that prints its version as one line of JSON.
_QUESTION = """
import sys
try:
    import sysconfig
    config = sysconfig.get_config_var
except ImportError:
    config = lambda name: None
import json, platform
sys.stdout.write(json.dumps({
    "version": platform.python_version(),
    "implementation": platform.python_implementation(),
    "prefix": getattr(sys, "base_prefix", getattr(sys, "real_prefix", sys.prefix)),
    "abi": config("SOABI") or config("EXT_SUFFIX") or "",
    "build": sys.version,
    "debug": hasattr(sys, "gettotalrefcount"),
}))
"""
_EXACT = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_MINOR = re.compile(r"\d+\.\d+")
_LONGEST = 1000
_NAME = re.compile(r"python(?:[23]|([23]\.\d{1,2}))?")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter on this machine.

    Attributes:
        executable: the path of the interpreter with links resolved.
        version: the version, for example ``"3.11.7"``.
        prefix: the directory of the installation; for a virtual environment, of its base installation.
        abi: the ABI tag, for example ``"cpython-311-x86_64-linux-gnu"``.
        build: the interpreter's ``sys.version``.
        stamp: size and mtime of the executable, which change when the interpreter is installed again.
    """

    executable: Path
    version: str
    prefix: Path
    abi: str
    build: str
    stamp: str

    @property
    def minor(self) -> str:
        """The minor version, for example ``"3.11"``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def release(self) -> Version:
        """The version for comparisons, without the trailing "+" of development builds, which PEP 440 does not allow."""
        return Version(self.version.rstrip("+"))

    @property
    def own_prefix(self) -> bool:
        """Return whether only this interpreter uses the prefix, as with pyenv, uv and conda, but not with /usr."""
        return Path("/usr") not in (self.prefix, *self.prefix.parents) and self.prefix != Path("/")


def probe(executable: Path) -> Interpreter | None:
    """Run an interpreter to read its version and build.

    Args:
        executable: the path of the interpreter with links resolved.

    Returns:
        The interpreter; None if it does not run, does not exit within ten seconds, or is not a release build of
        CPython. An executable that has not changed is run once per process.
    """
    try:
        status = executable.stat()
        return _ask(executable, f"{status.st_size}:{status.st_mtime_ns}")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=256)
def _ask(executable: Path, stamp: str) -> Interpreter | None:
    """Run an interpreter once per stamp and process; failures are not cached, because a busy machine causes some."""
    output = subprocess.run(
        [executable, "-E", "-s", "-S", "-c", _QUESTION],  # not -I, which Python 2 lacks
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        timeout=PROBE_TIMEOUT,
        check=True,
    ).stdout
    properties = json.loads(output)
    if properties["implementation"] != "CPython" or properties["debug"]:
        return None
    prefix = Path(properties["prefix"]).resolve()
    return Interpreter(executable, properties["version"], prefix, properties["abi"], properties["build"], stamp)


def find_interpreter(text: str) -> Interpreter:
    """Return the best interpreter of this machine for a request.

    For a version or minor version, choose the newest patch release; prefer interpreters with their own prefix to the
    system's interpreters. For a range, choose the interpreter that runs MiniSandbox if its version is in the range, or
    else the oldest minor version in the range.

    Args:
        text: ``"3.11"``, ``"3.11.7"`` or a range like ``">=3.11"``.

    Raises:
        InterpreterNotFound: no interpreter satisfies the request; the error lists the installed interpreters.
        InvalidValue: the request is neither a version nor a range.
    """
    request = PythonRequest.parse(text)
    minor = None if request.ranged else ".".join(request.text.split(".")[:2])
    candidates = [interpreter for interpreter in _probed(minor) if request.accepts(str(interpreter.release))]
    if not candidates:
        raise _not_found(request, installed_interpreters())
    return choose(request, candidates)


def choose(request: PythonRequest, candidates: Iterable[Interpreter]) -> Interpreter:
    """Choose the best of several interpreters that satisfy a request; see :func:`find_interpreter`."""
    ordered = sorted(candidates, key=_newest_first, reverse=True)
    if not request.ranged:
        return ordered[0]
    running = Path(sys.base_prefix).resolve(), platform.python_version()
    for interpreter in ordered:
        if (interpreter.prefix, interpreter.version) == running:
            return interpreter
    return min(ordered, key=lambda interpreter: Version(interpreter.minor))


def installed_interpreters() -> list[Interpreter]:
    """Return all CPython interpreters of this machine; those with their own prefix come first, newer before older."""
    return sorted(_probed(), key=_newest_first, reverse=True)


def _probed(minor: str | None = None) -> Iterator[Interpreter]:
    """Yield the interpreters of this machine; skip executables whose names state another minor version."""
    for executable in candidates(os.environ):
        match = _NAME.fullmatch(executable.name)
        name_version = match[1] if match else None
        if (minor is None or name_version in (None, minor)) and (interpreter := probe(executable)) is not None:
            yield interpreter


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the executables that may be interpreters, with links resolved, each once.

    Args:
        environment: the variables that name directories, for example PATH and PYENV_ROOT.
    """
    known_paths: set[Path] = set()
    for directory in search_places(environment):
        for path in _executables(directory):
            if path not in known_paths:  # virtual environments link to the same interpreter
                known_paths.add(path)
                yield path


def search_places(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories to search for interpreters: the running one's, PATH, pyenv, uv, conda and the system."""
    yield Path(sys.base_prefix) / "bin"
    shims = os.sep + "shims"
    yield from (
        Path(folder) for folder in environment.get("PATH", "").split(":") if folder and not folder.endswith(shims)
    )
    home = home_directory(environment) or Path("/nonexistent")  # Debian's convention for users without a home directory
    for pattern in _patterns(environment, home):
        yield from sorted(Path("/").glob(str(pattern).lstrip("/")))
    yield from (Path("/usr/bin"), Path("/usr/local/bin"))


def _patterns(environment: Mapping[str, str], home: Path) -> Iterator[Path]:
    data_folder = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    yield Path(environment.get("PYENV_ROOT") or home / ".pyenv") / "versions/*/bin"
    yield Path(environment.get("UV_PYTHON_INSTALL_DIR") or data_folder / "uv/python") / "*/bin"
    roots = [home / name for name in ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda")]
    roots += [Path("/opt") / name for name in ("conda", "miniconda3", "anaconda3", "miniforge3")]
    roots += [Path(environment[name]) for name in ("CONDA_ROOT", "MAMBA_ROOT_PREFIX") if environment.get(name)]
    if conda := environment.get("CONDA_EXE"):
        roots.append(Path(conda).parent.parent)
    for root in roots:
        yield root / "bin"
        yield root / "envs/*/bin"
    yield Path("/opt/*/bin")
    yield Path("/opt/python/*/bin")


def _executables(directory: Path) -> list[Path]:
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:  # the directory is missing or unreadable
        return []
    paths = []
    for name in sorted(names):
        with suppress(OSError):
            path = (directory / name).resolve(strict=True)
            if path.is_file() and os.access(path, os.X_OK):
                paths.append(path)
    return paths


def _newest_first(interpreter: Interpreter) -> tuple[bool, Version, str]:
    return interpreter.own_prefix, interpreter.release, str(interpreter.executable)


def _not_found(request: PythonRequest, interpreters: list[Interpreter]) -> InterpreterNotFound:
    installed = (
        ", ".join(sorted({f"{interpreter.version} ({interpreter.prefix})" for interpreter in interpreters})) or "none"
    )
    locations = "this Python's own prefix, PATH, pyenv, uv, conda, /usr/bin, /usr/local/bin and /opt"
    version = request.text if not request.ranged else "VERSION"
    return InterpreterNotFound(
        f"no Python {request.text} on this machine",
        reason=f"found: {installed}; looked in {locations}",
        hint=f"install one: `uv python install {version}` (3.8 and later), `pyenv install {version}` or conda",
    )
