"""Restrict the interpreter and the package index files that a build may use, and record those used in a lock."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

CPU = "cpu"
TORCH_BACKENDS = ("", CPU)
"""The PyTorch backends of recipes: "" for the builds that the pins name, "cpu" for builds without CUDA."""
TORCH_BACKEND = "torch_backend"
"""The key of the PyTorch backend in the definition of a step and in a lock file."""
LOCK_FORMAT = 1
_EXACT = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_MINOR = re.compile(r"\d+\.\d+")
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class PythonRequest:
    """A parsed request for an interpreter.

    Attributes:
        text: the request as the user wrote it.
        specifiers: the versions that satisfy the request.
        ranged: whether the request is a range; for a range, the interpreter that runs MiniSandbox is preferred.
    """

    text: str
    specifiers: SpecifierSet
    ranged: bool

    @classmethod
    def parse(cls, text: str) -> PythonRequest:
        """Parse ``"3.11"``, ``"3.11.7"`` or a PEP 440 range like ``">=3.11,<3.15"``.

        Raises:
            InvalidValue: the string is neither a version nor a range.
        """
        from packaging.specifiers import InvalidSpecifier, SpecifierSet  # noqa: PLC0415 - slow to import

        stripped = text.strip()
        if len(stripped) > _LONGEST:  # int() rejects strings of thousands of digits
            raise InvalidValue(
                f"a Python version of {len(stripped)} characters", hint="write '3.11', '3.11.7' or '>=3.11,<3.15'"
            )
        if _EXACT.fullmatch(stripped):
            return cls(stripped, SpecifierSet(f"=={stripped}"), ranged=False)
        if _MINOR.fullmatch(stripped):
            return cls(stripped, SpecifierSet(f"=={stripped}.*"), ranged=False)
        try:
            if stripped:
                return cls(stripped, SpecifierSet(stripped), ranged=True)
        except InvalidSpecifier:
            pass
        raise InvalidValue(f"{text!r} is not a Python version", hint="write '3.11', '3.11.7' or '>=3.11,<3.15'")

    def accepts(self, version: str) -> bool:
        """Return whether an interpreter version satisfies the request; pre-releases only if the request names one."""
        from packaging.version import Version  # noqa: PLC0415 - slow to import

        return self.specifiers.contains(Version(version))


def parse_moment(text: str) -> datetime:
    """Parse an ISO 8601 date (``2024-03-01`` means midnight UTC) or date with a time.

    Raises:
        InvalidValue: the string is not an ISO 8601 date.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue(f"{text!r} is not a date", hint="write it like 2024-03-01 or 2024-03-01T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """One file that a step fetched from the package index.

    Attributes:
        name: the normalised name of the project.
        version: the version in the file's name.
        file: the name of the file: a wheel or a source archive.
        sha256: the hash of the file.
    """

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class IndexView:
    """The files of the package index that a step sees.

    Attributes:
        exclude_newer: a date; packages uploaded later are invisible. "" for no limit.
        torch_backend: the visible builds of PyTorch; "" for all builds.
        locked: the files that are visible; None for all files.
    """

    exclude_newer: str = ""
    torch_backend: str = ""
    locked: tuple[Package, ...] | None = None

    @property
    def before(self) -> datetime | None:
        """The time of ``exclude_newer``, after which uploads are invisible; None for no limit."""
        return parse_moment(self.exclude_newer) if self.exclude_newer else None

    def __post_init__(self) -> None:
        """Check the fields."""
        _ = self.before
        if self.torch_backend not in TORCH_BACKENDS:
            raise InvalidValue(f"torch_backend is {self.torch_backend!r}", hint="write 'cpu', or leave it out")


EVERYTHING = IndexView()


@dataclass(frozen=True, slots=True)
class Lock:
    """The exact inputs of a built image, so that the same image can be built again.

    Attributes:
        image: the name of the image.
        base: the key of the base layer, a hash of the files that it takes from the host's ``/etc``.
        python: the interpreter's ``version``, ``build``, ``abi`` and ``kind``; empty without an interpreter.
        system: versions of the system packages, by name.
        installed: versions of the Python distributions in the image, by name.
        steps: the files that each step fetched (installed packages and build dependencies), by the name of the step.
        torch_backend: the PyTorch backend of the image; "" for the builds that its requirements named.
    """

    image: str
    base: str
    python: Mapping[str, str]
    system: Mapping[str, str]
    installed: Mapping[str, str]
    steps: Mapping[str, tuple[Package, ...]]
    torch_backend: str = ""

    def to_toml(self) -> str:
        """Return the lock as the text of a lock file."""
        lines = [f"format = {LOCK_FORMAT}", f"image = {_quoted(self.image)}", f"base = {_quoted(self.base)}"]
        lines += [f"{TORCH_BACKEND} = {_quoted(self.torch_backend)}"] if self.torch_backend else []
        for title in ("python", "system", "installed"):
            values: Mapping[str, str] = getattr(self, title)
            lines += ["", f"[{title}]", *(f"{_quoted(name)} = {_quoted(values[name])}" for name in sorted(values))]
        for step, packages in self.steps.items():
            for package in sorted(packages):
                lines += ["", "[[package]]", f"step = {_quoted(step)}"]
                lines += [
                    f"{name} = {_quoted(getattr(package, name))}" for name in ("name", "version", "file", "sha256")
                ]
        return "\n".join(lines) + "\n"


def _quoted(string: str) -> str:
    return json.dumps(string)  # a JSON string is a valid TOML string
