"""What is installed before a benchmark's repository: the environment of its official image, or as it is specified.

Exact pins decide whether a row validates; specifications alone do not pin enough (a heavy user of the original system
measured 35 % of the rows without and 63 to 67 % with pins).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from minisandbox.errors import InvalidValue, TaskFileError
from minisandbox.tasks.dialects.corrections import BEFORE, FIRST

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Pinned:
    """What is installed before a repository.

    Attributes:
        python: the interpreter's minor version.
        requirements: what is installed.
        complete: whether that is everything.
        overrides: what is installed after it.
    """

    python: str
    requirements: tuple[str, ...]
    complete: bool = False
    overrides: tuple[str, ...] = ()


def exported(folder: Path | None, *names: str) -> Pinned | None:
    """Return the exported environment of an official image, or None where the folder has none.

    Args:
        folder: a directory with exports (``conda env export``), or with directories of such directories.
        names: directories, each below the one before it: ``("django__django", "11066")``.

    Raises:
        InvalidValue: an export cannot be read.
    """
    for path in _exports(folder, names):
        from minisandbox.images.python.pins import read_pins  # noqa: PLC0415 - reading task files must not load the sandbox

        pins = read_pins(path)
        if not pins.python:
            raise InvalidValue(f"{path} names no python", reason="it is no `conda env export`", hint="export it again")
        python = Version(pins.python)
        late = {name for name, first in BEFORE.items() if python >= Version(first)}
        found = [line for line in pins.requirements if name_of(line) not in late]
        return Pinned(f"{python.major}.{python.minor}", tuple(found), complete=True)
    return None


def _exports(folder: Path | None, names: Sequence[str]) -> Iterator[Path]:
    if folder is None or {"", ".", ".."} & set("/".join(names).split("/")):  # rows name what is below it alone
        return
    for top in (folder, *(entry for entry in sorted(folder.glob("*")) if entry.is_dir())):
        yield from sorted(top.joinpath(*names).glob("*.yml"))


def specified(python: str, packages: Sequence[str], overrides: Sequence[str]) -> Pinned:
    """Return what a specification asks for.

    Args:
        python: the interpreter.
        packages: requirements, those of the repository's files among them.
        overrides: what the specification installs after them.
    """
    named = {name_of(line) for line in (*packages, *overrides)}
    first = [line for line in FIRST if name_of(line) not in named]
    taken = {name_of(line) for line in overrides}
    return Pinned(
        python, (*first, *(line for line in packages if name_of(line) not in taken)), overrides=tuple(overrides)
    )


def listed(packages: str) -> list[str]:
    """Return what a line of conda's has, as requirements: ``numpy=1.19 pytest`` or ``'numpy==1.19.2' pytest``."""
    return [_requirement(word) for word in shlex.split(packages)]


def _requirement(word: str) -> str:
    name, sign, version = word.partition("=")
    return (
        f"{name}=={version}.*"
        if sign and not version.startswith("=") and not name.endswith(("<", ">", "!", "~"))
        else word
    )


def requirements_text(text: str, include: dict[str, str]) -> list[str]:
    """Return the requirements of a ``requirements.txt`` of a repository.

    Args:
        text: its text.
        include: the texts of the files that it names by ``-r``, by what it calls them.
    """
    found: list[str] = []
    for raw in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(?:^|\s)#.*$", "", raw).strip()
        if nested := re.fullmatch(r"(?:-r|--requirement)[ =]?\s*(\S+)", line):
            found += requirements_text(include.get(nested[1], ""), include)
        elif line and not line.startswith(("-", ".")):
            # taken off the index; its files are in another one (swebench 4.1.0 does the same)
            found.append("types-setuptools" if name_of(line) == "types-pkg-resources" else line)
    return found


def name_of(requirement: str) -> str:
    """Return the normalised name of what a requirement asks for (PEP 503)."""
    match = _NAME.match(requirement)
    if match is None:
        raise TaskFileError(f"{requirement!r} is not a requirement", hint="write it like 'attrs==23.1.0'")
    return re.sub(r"[-_.]+", "-", match[0]).lower()
