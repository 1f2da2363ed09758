"""Arguments of a wrong type, refused before anything is done: callers are not all checked by mypy.

One place for both colours of the sandbox, and for fakes. No value is told, for it may be a secret or have no end; its
type says enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from minisandbox.errors import InvalidValue
from minisandbox.types import is_number

_LONGEST_TIMEOUT = 1e8


def wrong_type(name: str, value: object, wanted: str) -> InvalidValue:
    """The error for an argument of a wrong type.

    Args:
        name: of the argument.
        value: what was given.
        wanted: what should have been.
    """
    kind = "None" if value is None else f"of type {type(value).__name__}"
    return InvalidValue(f"{name} is {kind}", hint=f"give {wanted}")


def check_type(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse what is of none of these types.

    Raises:
        InvalidValue: it is not.
    """
    if not isinstance(value, kinds):
        raise wrong_type(name, value, wanted)


def check_timeout(timeout: float | None) -> None:
    """Refuse what is no number of seconds that a command may take.

    Raises:
        InvalidValue: it is none.
    """
    _check_seconds(timeout)
    if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:  # NaN fails too
        hint = f"give at most {_LONGEST_TIMEOUT:.0f}, or None for no limit"
        raise InvalidValue(f"timeout {timeout!r} is not a positive number of seconds", hint=hint)


def check_wait(timeout: float | None) -> None:
    """Refuse what is no number of seconds to wait for something; 0 and less is not to wait.

    Raises:
        InvalidValue: it is none.
    """
    _check_seconds(timeout)
    if timeout is not None and math.isnan(timeout):
        raise InvalidValue(f"timeout {timeout!r} is not a number of seconds", hint="give seconds, or None for no limit")


def _check_seconds(timeout: object) -> None:
    if timeout is not None and not is_number(timeout):
        raise wrong_type("timeout", timeout, "seconds as an int or a float, or None for no limit")


def check_command(command: object) -> None:
    """Refuse what is neither a text nor a list of texts.

    Raises:
        InvalidValue: it is not.
    """
    if isinstance(command, str):
        return
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise wrong_type("command", command, "a str for bash -c, or a list of them for a program and its arguments")
    for number, part in enumerate(command):
        check_type(f"command[{number}]", part, str, "a str")


def check_texts(name: str, texts: object) -> None:
    """Refuse what are no texts by names, such as variables of an environment.

    Args:
        name: of the argument.
        texts: what was given; None for none.

    Raises:
        InvalidValue: they are not.
    """
    if texts is None:
        return
    check_type(name, texts, Mapping, "a dict of str by str")
    assert isinstance(texts, Mapping)
    for key, text in texts.items():
        check_type(f"a name in {name}", key, str, "each name as a str")
        check_type(f"{name}[{key!r}]", text, str, "each value as a str")


def check_path(name: str, path: object) -> None:
    """Refuse what is no path inside a sandbox.

    Raises:
        InvalidValue: it is not.
    """
    check_type(name, path, (str, PurePosixPath), "a str or a PurePosixPath")
