"""Write and read lock files, which list the exact package files from which an image can be built again."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.spec import LOCK_FORMAT, TORCH_BACKEND, Lock, Package
from minisandbox.store import LayerRecord

PACKAGES = "packages"
"""Name of the layer fact that lists the package files that the step fetched."""
INSTALLED = "lock"
"""Name of the layer fact that lists the installed distributions at the end of the step."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;#]+)")


def lock_of(image: str, records: Iterable[LayerRecord]) -> Lock:
    """Return the lock of an image, from the records of its layers.

    Args:
        image: the name of the image.
        records: the records of its layers, bottom first.

    Raises:
        StoreError: an imported record has a malformed list of packages.
    """
    python: dict[str, str] = {}
    system: dict[str, str] = {}
    installed: dict[str, str] = {}
    steps: dict[str, tuple[Package, ...]] = {}
    base = backend = ""
    for record in records:
        kind = str(record.step.get("kind", ""))
        base = base or record.key
        if kind.startswith("python_"):
            python = {name: str(record.step.get(name, "")) for name in ("version", "build", "abi")} | {"kind": kind[7:]}
        if kind == "system":
            lines = record.facts.get("versions", "").splitlines()
            system = dict(line.split("=", 1) for line in lines if "=" in line)
        if INSTALLED in record.facts:
            installed = read_freeze(record.facts[INSTALLED])
        backend = str(record.step.get(TORCH_BACKEND, backend))
        if packages := record.facts.get(PACKAGES):
            steps["python" if kind.startswith("python_") else kind] = _packages(packages, record.key)
    return Lock(image, base, python, system, installed, steps, backend)


def _packages(text: str, key: str) -> tuple[Package, ...]:
    try:
        return tuple(Package(*map(str, row)) for row in json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            f"layer {key[:16]} does not say what was installed",
            reason=f"its record has a list of packages that cannot be read: {error}",
            hint="build the image again",
        ) from error


def packages_fact(packages: Iterable[Package]) -> str:
    """Return the :data:`PACKAGES` fact for the files that a step fetched."""
    return json.dumps([[package.name, package.version, package.file, package.sha256] for package in sorted(packages)])


def read_freeze(text: str) -> dict[str, str]:
    """Return the versions in a ``pip freeze`` listing, by distribution; skip editable installations."""
    return {canonicalize_name(match[1]): match[2] for match in map(_PIN.match, text.splitlines()) if match}


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        NotFound: the file is missing.
        InvalidValue: the file is not a lock file, or has another format version.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFound(f"there is no lock {path}", hint="`minisandbox image pins IMAGE --lock` prints one") from None
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{path} is not a lock file", reason=str(error)) from error
    if table.get("format") != LOCK_FORMAT:
        raise InvalidValue(
            f"{path} has format {table.get('format')!r}", hint="use the MiniSandbox that wrote it, or a later one"
        )
    try:
        return _read(table)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(f"{path} is not a lock file", reason=f"{type(error).__name__}: {error}") from error


def _read(table: Mapping[str, object]) -> Lock:
    steps: dict[str, list[Package]] = {}
    rows = table.get("package", [])
    for row in rows if isinstance(rows, list) else [rows]:
        package = Package(*(_text(row, name) for name in ("name", "version", "file", "sha256")))
        if _SHA256.fullmatch(package.sha256) is None or "/" in package.file:
            raise TypeError(f"{package.file!r} with the hash {package.sha256!r}")
        steps.setdefault(_text(row, "step"), []).append(package)
    python, system, installed = (_texts(table[section]) for section in ("python", "system", "installed"))
    step_packages = {step: tuple(packages) for step, packages in steps.items()}
    backend = _text(table, TORCH_BACKEND) if TORCH_BACKEND in table else ""
    return Lock(_text(table, "image"), _text(table, "base"), python, system, installed, step_packages, backend)


def _texts(table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        raise TypeError(f"{table!r} is not a table")
    return {str(name): _text(table, name) for name in table}


def _text(table: object, name: str) -> str:
    text = table[name] if isinstance(table, dict) else None
    if not isinstance(text, str):
        raise TypeError(f"{name} is not a string")
    return text
