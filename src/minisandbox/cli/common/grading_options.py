"""Options of commands that grade: the fields of GradingOptions."""

from __future__ import annotations

import argparse

from minisandbox.cli.common.fields import options_of, read_options
from minisandbox.errors import InvalidValue
from minisandbox.grade import GradingOptions

_OPTIONS = options_of(GradingOptions)


def add_grading_arguments(group: argparse._ActionsContainer) -> None:
    """Declare ``--timeout`` and ``--confirm``."""
    for option in _OPTIONS:
        option.add(group)


def grading_options(args: argparse.Namespace) -> GradingOptions:
    """Read the options that :func:`add_grading_arguments` declares.

    Raises:
        InvalidValue: a value is invalid.
    """
    try:
        return read_options(GradingOptions, args, _OPTIONS)
    except InvalidValue as error:
        raise InvalidValue(f"--{error.what}", hint=error.hint) from error
