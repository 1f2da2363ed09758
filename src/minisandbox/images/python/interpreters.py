"""Interpreters are found, not named: every place where one usually lies is looked at, and each one found is asked."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from packaging.version import Version

from minisandbox.errors import InterpreterNotFound
from minisandbox.images.python.probe import Interpreter, probe
from minisandbox.images.python.request import PythonRequest
from minisandbox.store.disk.paths import home_directory

_NAME = re.compile(r"python(?:[23]|([23]\.\d{1,2}))?")


def find_interpreter(text: str) -> Interpreter:
    """Return the interpreter of this machine that suits a request best.

    For a version or minor version: the newest patch release, one with a prefix of its own before the system's. For a
    range: the interpreter that runs MiniSandbox if it is in it, else the oldest minor version that is.

    Args:
        text: ``"3.11"``, ``"3.11.7"`` or a range such as ``">=3.11"``.

    Raises:
        InterpreterNotFound: none suits; the error lists what was found.
        InvalidValue: the request is not a version.
    """
    request = PythonRequest.parse(text)
    minor = None if request.ranged else ".".join(request.text.split(".")[:2])
    suitable = [one for one in _probed(minor) if request.accepts(str(one.release))]
    if not suitable:
        raise _not_found(request, installed_interpreters())
    return choose(request, suitable)


def choose(request: PythonRequest, suitable: Iterable[Interpreter]) -> Interpreter:
    """Pick one of several interpreters that satisfy a request; see :func:`find_interpreter`."""
    ordered = sorted(suitable, key=_newest_first, reverse=True)
    if not request.ranged:
        return ordered[0]
    running = Path(sys.base_prefix).resolve()
    own = [one for one in ordered if one.prefix == running and one.version == platform.python_version()]
    if own:
        return own[0]
    oldest = min(Version(one.minor) for one in ordered)
    return next(one for one in ordered if Version(one.minor) == oldest)


def installed_interpreters() -> list[Interpreter]:
    """Return every CPython interpreter found on this machine, newest first."""
    return sorted(_probed(), key=_newest_first, reverse=True)


def _probed(minor: str | None = None) -> Iterator[Interpreter]:
    """Ask the interpreters, but for those whose names say that they are of another minor version."""
    for executable in candidates(os.environ):
        match = _NAME.fullmatch(executable.name)
        said = match[1] if match else None
        if (minor is None or said in (None, minor)) and (answer := probe(executable)) is not None:
            yield answer


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the executables that may be interpreters, links resolved, each once.

    Args:
        environment: where PATH, PYENV_ROOT and the like are read from.
    """
    seen: set[Path] = set()
    for directory in search_places(environment):
        for path in _executables(directory):
            if path not in seen:  # a virtual environment's python resolves to its base's
                seen.add(path)
                yield path


def search_places(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories that are looked in: the running interpreter's, PATH, pyenv, uv, conda, the system's."""
    yield Path(sys.base_prefix) / "bin"
    shims = os.sep + "shims"
    yield from (Path(part) for part in environment.get("PATH", "").split(":") if part and not part.endswith(shims))
    home = home_directory(environment) or Path("/nonexistent")  # as passwd(5) has it for users without one
    for pattern in _patterns(environment, home):
        yield from sorted(Path("/").glob(str(pattern).lstrip("/")))
    yield from (Path("/usr/bin"), Path("/usr/local/bin"))


def _patterns(environment: Mapping[str, str], home: Path) -> Iterator[Path]:
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    yield Path(environment.get("PYENV_ROOT") or home / ".pyenv") / "versions/*/bin"
    yield Path(environment.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python") / "*/bin"
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
    except OSError:  # not there, or not ours to read
        return []
    found = []
    for name in sorted(names):
        with suppress(OSError):
            path = (directory / name).resolve(strict=True)
            if path.is_file() and os.access(path, os.X_OK):
                found.append(path)
    return found


def _newest_first(one: Interpreter) -> tuple[bool, Version, str]:
    return one.own_prefix, one.release, str(one.executable)


def _not_found(request: PythonRequest, found: list[Interpreter]) -> InterpreterNotFound:
    listed = ", ".join(sorted({f"{one.version} ({one.prefix})" for one in found})) or "none"
    places = "this Python's own prefix, PATH, pyenv, uv, conda, /usr/bin, /usr/local/bin and /opt"
    version = request.text if not request.ranged else "VERSION"
    return InterpreterNotFound(
        f"no Python {request.text} on this machine",
        reason=f"found: {listed}; looked in {places}",
        hint=f"install one: `uv python install {version}` (3.8 and later), `pyenv install {version}` or conda",
    )
