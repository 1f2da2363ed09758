"""Read the pins of ``pip freeze``, requirements files and conda exports as requirements of a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue, StoreError
from minisandbox.reading import read_regular
from minisandbox.spec.recipe import check_requirement

_MOST = 16 << 20
_MOST_FILES = 100
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_HASH = re.compile(r"\s+--hash[= ]\S+")
# A conda package NAME=VERSION=BUILD with a Python build. Most of these have the same name on the package index.
_CONDA = re.compile(r"([A-Za-z0-9._-]+)=([^=\s]+)=(py\S*)")
# The names on the package index of conda packages with another name there; "" if no index has the project.
_CONDA_NAMES = {
    "antlr-python-runtime": "antlr4-python3-runtime",
    "brotli-python": "brotli",
    "cdat_info": "",
    "cdms2": "",
    "cdtime": "",
    "distarray": "",
    "esmpy": "",
    "iris": "scitools-iris",
    "libcf": "",
    "matplotlib-base": "matplotlib",
    "msgpack-python": "msgpack",
    "nbconvert-core": "nbconvert",
    "numpy-base": "",
    "pyarrow-core": "",
    "pyqt": "",
    "pytables": "tables",
    "python-eccodes": "",
    "python-fastjsonschema": "fastjsonschema",
    "python-tzdata": "tzdata",
    "python-xxhash": "xxhash",
    "seaborn-base": "seaborn",
}
_CONDA_PYTHON = re.compile(r"python=(\d+\.\d+(?:\.\d+)?)(?:=\S+)?")
_ADDRESS = re.compile(r"@ ?\w+(?:\+\w+)?://|^(?:git\+|https?:|file:|\.{0,2}/)")


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins of a listing.

    Attributes:
        requirements: the pins that a package index can satisfy.
        skipped: lines that no package index can satisfy, each with the reason.
        python: the Python version that a conda export names, or "".
    """

    requirements: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    python: str = ""


def read_pins(path: Path, check: Callable[[Path], None] = lambda _: None) -> Pins:
    """Read a listing: ``pip freeze``, a requirements file, or ``conda env export`` (``.yml``).

    Args:
        path: the file; files that it includes (``-r``) are read, too.
        check: called with the path of each file before it is opened, and with its real path before it is read; raises
            InvalidValue if the file must not be read.

    Raises:
        InvalidValue: a file cannot be read, is not a regular file, is larger than 16 MiB, or has a line that is neither
            a requirement nor an option.
    """
    return _read_pins(path, check, set())


def _read_pins(path: Path, check: Callable[[Path], None], read_paths: set[str]) -> Pins:
    """Read a listing and the listings that it includes, each of them only once."""
    check(path)
    try:
        real_path = os.path.realpath(path)
        if real_path in read_paths:
            return Pins(())
        read_paths.add(real_path)
        content = read_regular(path, _MOST, check).decode()
    except InvalidValue:
        raise
    except (OSError, ValueError, StoreError) as error:  # ValueError: not UTF-8, or an invalid path
        reason = error.reason if isinstance(error, StoreError) else str(error)
        raise InvalidValue(f"cannot read the pins in {path}", reason=reason, hint="give a text file") from error
    if len(read_paths) > _MOST_FILES:
        raise InvalidValue(f"cannot read the pins in {path}", reason=f"more than {_MOST_FILES} files name each other")
    if path.suffix in (".yml", ".yaml"):
        return _read_conda(content)
    requirements: list[str] = []
    skipped: list[tuple[str, str]] = []
    for line in requirement_lines(content):
        if name := included_file(line):
            included = _read_pins(path.parent / name, check, read_paths)
            requirements += included.requirements
            skipped += included.skipped
        elif reason := _unusable(line):
            skipped.append((line, reason))
        else:
            requirements.append(_checked(line, path))
    return Pins(tuple(dict.fromkeys(requirements)), tuple(skipped))


def requirement_lines(content: str) -> Iterator[str]:
    """Yield the lines of a requirements file without comments and hashes; join continuation lines."""
    for line in content.replace("\\\n", " ").splitlines():
        stripped = _HASH.sub("", _COMMENT.sub("", line)).strip()
        if stripped:
            yield stripped


def included_file(line: str) -> str:
    """Return the name of the file that a line of a requirements file includes (``-r``), or ""."""
    match = re.fullmatch(r"(?:-r|--requirement)[ =]?\s*(\S+)", line)
    return match[1] if match else ""


def _unusable(line: str) -> str:
    """Return the reason why a line cannot be a requirement of an image, or ""."""
    if line.startswith(("-e ", "--editable")):
        return "an editable installation: the source and the install commands of the recipe make it"
    if line.startswith("-"):
        return "an option: the package index of this machine is used"
    return ""


def _checked(line: str, path: Path) -> str:
    if _ADDRESS.search(line):
        raise InvalidValue(
            f"{path}: {line!r} names an address, not a version",
            reason="an image is made from what the package index has",
            hint="`pip list --format=freeze` lists versions alone",
        )
    try:
        check_requirement(line)
    except InvalidValue as error:
        raise error.about(str(path))  # noqa: B904 - it is the same error
    return line


def _read_conda(content: str) -> Pins:
    """Read the subset of YAML that ``conda env export`` writes: a list of packages with a nested list for pip."""
    requirements: list[str] = []
    skipped: list[tuple[str, str]] = []
    python = ""
    for line in content.splitlines():
        entry = line.strip().removeprefix("- ").strip()
        if not line.strip().startswith("- ") or entry == "pip:":
            continue
        if match := _CONDA_PYTHON.fullmatch(entry):
            python = match[1]
        elif match := _CONDA.fullmatch(entry):
            if name := _CONDA_NAMES.get(match[1], match[1]):
                requirements.append(f"{name}=={match[2]}")
            else:
                skipped.append((entry, "a conda package that no package index has"))
        elif "==" in entry:
            requirements.append(entry)
        elif "=" in entry:
            skipped.append((entry, "a conda package that is no Python distribution"))
    return Pins(tuple(dict.fromkeys(requirements)), tuple(skipped), python)
