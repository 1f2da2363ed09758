"""Print the errors that prevent results, each once, with the number of tasks that it affects."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from minisandbox.cli.common.output import same_error, say
from minisandbox.errors import MiniSandboxError


def raise_failures(failures: Mapping[str, MiniSandboxError], things: str = "tasks") -> None:
    """Print each error once, with the number of tasks that it affects; raise the first one.

    Args:
        failures: the errors, by task; may be empty.
        things: what the keys name.

    Raises:
        MiniSandboxError: the first error.
    """
    groups: dict[tuple[type, str], list[str]] = {}
    for name, error in failures.items():
        key = type(error), same_error(name, f"{error.what}; {error.reason}")
        groups.setdefault(key, []).append(name)
    errors = [_summary(failures[names[0]], names, things) for names in groups.values()]
    for error in errors[1:]:
        say(f"minisandbox: {error}")
    if errors:
        raise errors[0]


def _summary(error: MiniSandboxError, names: list[str], things: str) -> MiniSandboxError:
    if len(names) == 1:
        return error.about(names[0])
    summary = copy.copy(error)
    summary.what = f"{len(names)} {things}: {error.what.removeprefix(f'{names[0]}: ')} (first: {names[0]})"
    return summary
