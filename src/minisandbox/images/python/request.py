"""Which interpreter a recipe asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from minisandbox.errors import InvalidValue

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
