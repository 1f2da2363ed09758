"""The interpreters of this machine for people: what kind each is, who may read it, whether it works in a sandbox."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InterpreterNotFound, InvalidValue, MiniSandboxError
from minisandbox.images.bound import run_bound
from minisandbox.images.builder import build
from minisandbox.images.index import host_settings
from minisandbox.images.interpreters import installed_interpreters
from minisandbox.images.plan import Planner
from minisandbox.images.probe import Interpreter
from minisandbox.images.recipe import InstallPython, PythonRecipe
from minisandbox.images.request import PythonRequest
from minisandbox.images.steps import python_step
from minisandbox.images.uvtool import find_uv
from minisandbox.store import Store, step_key

_INSTALL_TIMEOUT = 1800.0
_HIDDEN_FOR_OTHERS = "this user"


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter, as a recipe's ``python`` may mean it.

    Attributes:
        interpreter: what it is.
        kind: ``pyenv``, ``uv``, ``conda``, ``system`` or ``other``.
        readers: ``everybody``, or ``this user`` where a directory on the way is closed to others.
        chosen: whether its minor version, asked for alone, means it.
        works: ``yes`` (an image's layer was made of it), ``no: REASON``, or ``untried``.
    """

    interpreter: Interpreter
    kind: str
    readers: str
    chosen: bool
    works: str


def list_pythons(store: Store, *, check: bool = False) -> list[Python]:
    """Return the interpreters of this machine, newest first.

    Args:
        store: where layers and answers of earlier probes are.
        check: make an image of each that is untried: its layer is kept, for images to come.
    """
    planner = Planner(store)
    found = installed_interpreters(store)
    first: dict[str, Interpreter] = {}
    for one in found:
        first.setdefault(one.minor, one)
    return [
        Python(one, kind_of(one), readers_of(one), first[one.minor] is one, _works(one, store, planner, check=check))
        for one in found
    ]


def kind_of(interpreter: Interpreter, environment: Mapping[str, str] | None = None) -> str:
    """Return where an interpreter comes from."""
    env = os.environ if environment is None else environment
    parts = interpreter.prefix.parts
    if not interpreter.own_prefix:
        return "system"
    if (interpreter.prefix / "conda-meta").is_dir():
        return "conda"
    if "versions" in parts and (".pyenv" in parts or _below(interpreter.prefix, env.get("PYENV_ROOT"))):
        return "pyenv"
    if "uv" in parts or _below(interpreter.prefix, env.get("UV_PYTHON_INSTALL_DIR")):
        return "uv"
    return "other"


def _below(path: Path, folder: str | None) -> bool:
    return bool(folder) and Path(folder or "/").resolve() in path.parents


def readers_of(interpreter: Interpreter) -> str:
    """Return who may use an interpreter: whoever may pass every directory that leads to it."""
    for path in (interpreter.executable, *interpreter.executable.parents):
        try:
            if not path.stat().st_mode & 0o001:
                return _HIDDEN_FOR_OTHERS
        except OSError:
            return _HIDDEN_FOR_OTHERS
    return "everybody"


def _works(interpreter: Interpreter, store: Store, planner: Planner, *, check: bool) -> str:
    key = step_key(planner.platform(), python_step(InstallPython(interpreter.version), interpreter).definition)
    if store.has_layer(key):
        return "yes"
    if not check:
        return "untried"
    name = f"python-{interpreter.version}"
    try:
        build(PythonRecipe(python=str(interpreter.release)), store=store, name=name)
    except MiniSandboxError as error:
        return f"no: {error.what}"
    return "yes" if store.has_layer(key) else "untried"  # another one of the same version comes before it


def install_python(version: str, store: Store) -> Interpreter:
    """Install an interpreter that uv has builds of, where uv keeps them.

    Args:
        version: ``"3.12"`` or ``"3.12.4"``.
        store: where answers of probes are kept.

    Returns:
        The interpreter; one that was there already counts.

    Raises:
        InvalidValue: that is no version.
        InterpreterNotFound: uv has no such build, or it cannot be had.
    """
    request = PythonRequest.parse(version)
    if request.ranged:
        raise InvalidValue(f"{version!r} is a range of versions", hint="name one, such as 3.12 or 3.12.4")
    if not (there := _installed(request, store)):
        _install(request.text)
        there = _installed(request, store)
    if not there:
        raise _unreachable(request.text, "uv installed it where it is not looked for (UV_PYTHON_INSTALL_DIR?)")
    return there[0]


def _installed(request: PythonRequest, store: Store) -> Sequence[Interpreter]:
    return [one for one in installed_interpreters(store) if request.accepts(str(one.release)) and one.own_prefix]


def _install(version: str) -> None:
    settings = host_settings()
    env = {**os.environ, **dict(settings.proxies), "UV_PYTHON_DOWNLOADS": "manual"}
    if settings.cert is not None:
        env.setdefault("SSL_CERT_FILE", str(settings.cert))
    command = [str(find_uv()), "python", "install", "--no-progress", "--no-bin", version]
    try:
        done = run_bound(command, timeout=_INSTALL_TIMEOUT, env=env)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(version, f"uv took longer than {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise _unreachable(
            version, " / ".join(line.strip() for line in os.fsdecode(done.stderr).splitlines() if line.strip())[-600:]
        )


def _unreachable(version: str, reason: str) -> InterpreterNotFound:
    old = version.startswith(("2.", "3.5", "3.6", "3.7"))
    uv = (
        "uv has builds of 3.8 and later; "
        if old
        else "where its server cannot be reached, set UV_PYTHON_INSTALL_MIRROR; "
    )
    return InterpreterNotFound(
        f"Python {version} cannot be installed",
        reason=reason,
        hint=f"{uv}`pyenv install {version}` compiles any version, `conda create -n py{version} python={version}` gets "
        "one from a conda channel, a package of the distribution does too: whatever lies in pyenv's, uv's or conda's "
        "directories, /usr, /usr/local or /opt is found by `minisandbox image pythons`",
    )
