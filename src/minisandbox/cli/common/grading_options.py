"""Options of commands that grade: the fields of GradingOptions."""

from __future__ import annotations

import argparse
from dataclasses import fields

from minisandbox.errors import InvalidValue
from minisandbox.grade import GradingOptions


def add_grading_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare ``--timeout`` and ``--confirm``."""
    for one in fields(GradingOptions):
        parser.add_argument(
            f"--{one.name}",
            type=float if one.name == "timeout" else str,
            default=one.default,
            metavar=one.metadata["metavar"],
            help=str(one.metadata["help"]) + ("" if one.default is None else f" (default: {one.default})"),
        )


def grading_options(args: argparse.Namespace) -> GradingOptions:
    """Read the options that :func:`add_grading_arguments` declares.

    Raises:
        InvalidValue: a value cannot be used.
    """
    try:
        return GradingOptions(**{one.name: getattr(args, one.name) for one in fields(GradingOptions)})
    except InvalidValue as error:
        raise InvalidValue(f"--{error.what}", hint=error.hint) from error
