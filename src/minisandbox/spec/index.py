"""Which interpreter and which files of the package index a build sees, and the lock of what it used."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from minisandbox.errors import InvalidValue

CPU = "cpu"
TORCH_BACKENDS = ("", CPU)
"""What a recipe may ask for: whatever its pins say, or builds of PyTorch without CUDA."""
TORCH_BACKEND = "torch_backend"
"""What the definition of a step, and a lock file, call it."""
LOCK_FORMAT = 1
_EXACT = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_MINOR = re.compile(r"\d+\.\d+")
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class PythonRequest:
    """A parsed request for an interpreter.

    Attributes:
        text: as it was written.
        specifiers: the versions that satisfy it.
        ranged: whether it is a range (then the interpreter that runs MiniSandbox is preferred).
    """

    text: str
    specifiers: SpecifierSet
    ranged: bool

    @classmethod
    def parse(cls, text: str) -> PythonRequest:
        """Read ``"3.11"``, ``"3.11.7"`` or a PEP 440 range such as ``">=3.11,<3.15"``.

        Raises:
            InvalidValue: it is none of these.
        """
        plain = text.strip()
        if len(plain) > _LONGEST:  # of thousands of digits Python makes no number
            raise InvalidValue(
                f"a Python version of {len(plain)} characters", hint="write '3.11', '3.11.7' or '>=3.11,<3.15'"
            )
        if _EXACT.fullmatch(plain):
            return cls(plain, SpecifierSet(f"=={plain}"), ranged=False)
        if _MINOR.fullmatch(plain):
            return cls(plain, SpecifierSet(f"=={plain}.*"), ranged=False)
        try:
            if plain:
                return cls(plain, SpecifierSet(plain), ranged=True)
        except InvalidSpecifier:
            pass
        raise InvalidValue(f"{text!r} is not a Python version", hint="write '3.11', '3.11.7' or '>=3.11,<3.15'")

    def accepts(self, version: str) -> bool:
        """Whether an interpreter of that version satisfies the request; pre-releases only where they are named."""
        return self.specifiers.contains(Version(version))


def parse_moment(text: str) -> datetime:
    """Read a moment: ``2024-03-01`` (its beginning, UTC) or ISO 8601 with a time.

    Raises:
        InvalidValue: it is neither.
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
        name: the project's normalised name.
        version: its version, as the file's name has it.
        file: the file's name: a wheel, or a source archive.
        sha256: its hash.
    """

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class IndexView:
    """Which files of the package index a step sees.

    Attributes:
        exclude_newer: a date: packages uploaded later are not there; "" for all.
        torch_backend: which builds of PyTorch there are; "" for all.
        locked: the only files that are there; None for all.
    """

    exclude_newer: str = ""
    torch_backend: str = ""
    locked: tuple[Package, ...] | None = None

    @property
    def before(self) -> datetime | None:
        """The moment from which on uploads are not there."""
        return parse_moment(self.exclude_newer) if self.exclude_newer else None

    def __post_init__(self) -> None:
        """Check the fields."""
        _ = self.before
        if self.torch_backend not in TORCH_BACKENDS:
            raise InvalidValue(f"torch_backend is {self.torch_backend!r}", hint="write 'cpu', or leave it out")


EVERYTHING = IndexView()


@dataclass(frozen=True, slots=True)
class Lock:
    """What an image was made of.

    Attributes:
        image: its name.
        base: the key of its base layer: the fingerprint of what it takes from the host's ``/etc``.
        python: facts of its interpreter: ``version``, ``build``, ``abi``, ``kind``; empty without one.
        system: system packages with their versions.
        installed: distributions with their versions, as they are in the image.
        steps: by step, the files that it fetched: what was installed, and what things were built with.
        torch_backend: which builds of PyTorch it was made of; "" for those that its requirements named.
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


def _quoted(text: str) -> str:
    return json.dumps(text)  # a JSON string is a basic string of TOML
