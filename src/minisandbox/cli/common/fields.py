"""Options of the command line that are fields of a dataclass, which has their types, defaults and descriptions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from minisandbox.cli.common.sandbox_options import parse_pairs

_READ: Mapping[str, Callable[[str], object]] = {"int": int, "float": float, "Path": Path}


@dataclass(frozen=True, slots=True)
class FieldOption:
    """An option of the command line.

    Attributes:
        flag: its name.
        kind: the dataclass.
        field: the dataclass's field.
        metavar: the placeholder in the help.
        help: its description, without the default.
        none: whether the value may be ``none``.
        choices: the allowed values, or None for any.
    """

    flag: str
    kind: type
    field: str
    metavar: str | None
    help: str
    none: bool = False
    choices: tuple[str, ...] | None = None

    @property
    def _field(self) -> Field[Any]:
        return next(field for field in fields(self.kind) if field.name == self.field)

    @property
    def default(self) -> object:
        """The field's default; None if it has none."""
        return None if self._field.default is MISSING else self._field.default

    def add(self, group: argparse._ActionsContainer) -> None:
        """Declare the option."""
        if self._field.type == "Mapping[str, str]":
            group.add_argument(self.flag, action="append", default=[], metavar=self.metavar, help=self.help)
            return
        shown = "none" if self.none and self.default is None else self.default
        group.add_argument(
            self.flag,
            type=self._convert,
            default=self.default,
            choices=self.choices,
            metavar=self.metavar,
            help=self.help if shown is None else f"{self.help} (default: {shown})",
        )

    def _convert(self, text: str) -> object:
        read = _READ.get(str(self._field.type).removesuffix(" | None"), str)
        return None if self.none and text == "none" else read(text)

    def value(self, args: argparse.Namespace) -> Any:
        """Return the value on the command line, or the default.

        Raises:
            InvalidValue: a pair of a mapping is malformed.
        """
        value = getattr(args, self.flag.removeprefix("--").replace("-", "_"))
        return parse_pairs(value, self.flag) if self._field.type == "Mapping[str, str]" else value


def options_of(kind: type, flags: Mapping[str, str] | None = None, *, none: bool = False) -> tuple[FieldOption, ...]:
    """Return an option for each field of a dataclass whose metadata describe it.

    Args:
        kind: the dataclass.
        flags: names of options that are not the field's, by field.
        none: whether the options accept ``none``.
    """
    return tuple(
        FieldOption(
            (flags or {}).get(field.name, f"--{field.name.replace('_', '-')}"),
            kind,
            field.name,
            field.metadata.get("metavar"),
            field.metadata["help"],
            none,
            field.metadata.get("choices"),
        )
        for field in fields(kind)
    )


def values_of(args: argparse.Namespace, options: Iterable[FieldOption]) -> dict[str, Any]:
    """Return the values of options by field."""
    return {option.field: option.value(args) for option in options}
