"""Declare command-line options from the fields of a dataclass: types, defaults and descriptions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from minisandbox.errors import InvalidValue

T = TypeVar("T")
_CONVERTERS: Mapping[str, Callable[[str], object]] = {"int": int, "float": float, "Path": Path}


@dataclass(frozen=True, slots=True)
class FieldOption:
    """Command-line option for a field of a dataclass.

    Attributes:
        flag: name of the option.
        kind: the dataclass.
        field: name of the field.
        metavar: placeholder of the value in the help.
        help: description, without the default.
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
        """The field's default, or None if the field has no default."""
        return None if self._field.default is MISSING else self._field.default

    def add(self, group: argparse._ActionsContainer) -> None:
        """Declare the option."""
        if self._field.type == "Mapping[str, str]":
            group.add_argument(self.flag, action="append", default=[], metavar=self.metavar, help=self.help)
            return
        convert = _CONVERTERS.get(str(self._field.type).removesuffix(" | None"), str)

        def number(text: str) -> object:  # argparse prints the name of this function in errors
            return None if text == "none" else convert(text)

        default = "none" if self.none and self.default is None else self.default
        group.add_argument(
            self.flag,
            type=number if self.none else convert,
            default=self.default,
            choices=self.choices,
            metavar=self.metavar,
            help=self.help if default is None else f"{self.help} (default: {default})",
        )

    def value(self, args: argparse.Namespace) -> object:
        """Return the value on the command line, or the default.

        Raises:
            InvalidValue: a ``NAME=VALUE`` pair is malformed.
        """
        value = getattr(args, self.flag.removeprefix("--").replace("-", "_"))
        return parse_pairs(value, self.flag) if self._field.type == "Mapping[str, str]" else value


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` pairs of an option; a later value of a name overrides an earlier one."""
    return dict(parse_pair(pair, option) for pair in pairs)


def parse_pair(text: str, option: str) -> tuple[str, str]:
    """Parse a ``NAME=VALUE`` pair.

    Raises:
        InvalidValue: the text is malformed.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidValue(f"{option} {text} is not NAME=VALUE", hint=f"for instance {option} NAME=VALUE")
    return name, value


def options_of(kind: type, flags: Mapping[str, str] | None = None, *, none: bool = False) -> tuple[FieldOption, ...]:
    """Return an option for each field of a dataclass, described by the field's metadata.

    Args:
        kind: the dataclass.
        flags: option names that differ from the field's name, by field.
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


def read_options(kind: type[T], args: argparse.Namespace, options: Iterable[FieldOption], **others: object) -> T:
    """Return an instance of a dataclass with the values of its options.

    Args:
        kind: the dataclass.
        args: the command line.
        options: options of the dataclass; options of other dataclasses are ignored.
        others: values of fields without an option.

    Raises:
        InvalidValue: a value is invalid.
    """
    return kind(**others, **{option.field: option.value(args) for option in options if option.kind is kind})
