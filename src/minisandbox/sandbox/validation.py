"""Check the types of arguments early, because not all callers use a type checker.

Sync and async handles and the fakes use it. Messages name the type of an argument and not its value, which may be a
secret or huge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from minisandbox.errors import InvalidValue
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import ImageSpec, Limits, Mount, Network, is_number

_LONGEST_TIMEOUT = 1e8


def wrong_type(name: str, value: object, expected: str) -> InvalidValue:
    """Return the error for an argument of the wrong type.

    Args:
        name: name of the argument.
        value: the given value.
        expected: description of a valid value.
    """
    kind = "None" if value is None else f"of type {type(value).__name__}"
    return InvalidValue(f"{name} is {kind}", hint=f"give {expected}")


def check_type(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Check that a value has one of these types.

    Raises:
        InvalidValue: the value has another type.
    """
    if not isinstance(value, types):
        raise wrong_type(name, value, expected)


def check_timeout(timeout: float | None) -> None:
    """Check that the timeout of a command is a positive number of seconds or None.

    Raises:
        InvalidValue: the timeout is invalid.
    """
    _check_seconds(timeout)
    if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:  # NaN fails too
        hint = f"give at most {_LONGEST_TIMEOUT:.0f}, or None for no limit"
        raise InvalidValue(f"timeout {timeout!r} is not a positive number of seconds", hint=hint)


def check_wait(timeout: float | None) -> None:
    """Check that a time to wait is a number of seconds or None; 0 and negative numbers mean not to wait.

    Raises:
        InvalidValue: the value is not a number.
    """
    _check_seconds(timeout)
    if timeout is not None and math.isnan(timeout):
        raise InvalidValue(f"timeout {timeout!r} is not a number of seconds", hint="give seconds, or None for no limit")


def _check_seconds(timeout: object) -> None:
    if timeout is not None and not is_number(timeout):
        raise wrong_type("timeout", timeout, "seconds as an int or a float, or None for no limit")


def check_command(command: object) -> None:
    """Check that a command is a string or a sequence of strings.

    Raises:
        InvalidValue: the command is of another type.
    """
    if isinstance(command, str):
        return
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise wrong_type("command", command, "a str for bash -c, or a list of them for a program and its arguments")
    for index, argument in enumerate(command):
        check_type(f"command[{index}]", argument, str, "a str")


def check_texts(name: str, mapping: object) -> None:
    """Check that a value is a mapping of strings to strings, such as environment variables, or None.

    Args:
        name: name of the argument.
        mapping: the given value, or None.

    Raises:
        InvalidValue: the value has another type.
    """
    if mapping is None:
        return
    check_type(name, mapping, Mapping, "a dict of str by str")
    assert isinstance(mapping, Mapping)
    for key, text in mapping.items():
        check_type(f"a name in {name}", key, str, "each name as a str")
        check_type(f"{name}[{key!r}]", text, str, "each value as a str")


def check_path(name: str, path: object) -> None:
    """Check that a path inside a sandbox is a string or a PurePosixPath.

    Raises:
        InvalidValue: the path has another type.
    """
    check_type(name, path, (str, PurePosixPath), "a str or a PurePosixPath")


def check_creation(
    image: object,
    limits: Limits | None,
    network: Network | None,
    mounts: Sequence[Mount],
    environment: Mapping[str, str] | None,
    upper: Path | None,
    labels: Mapping[str, str] | None,
) -> None:
    """Check the types of the arguments of :meth:`minisandbox.Sandbox.create`.

    Raises:
        InvalidValue: an argument has the wrong type, or a label has an empty name.
    """
    check_type("image", image, (ImageSpec, Snapshot), "an ImageSpec (Image.spec() gives one) or a Snapshot")
    for name, value, kind, expected in (
        ("limits", limits, Limits, "a Limits, or None for its defaults"),
        ("network", network, Network, "Network.off(), Network.allow(...) or Network.host()"),
        ("upper", upper, Path, "a Path, or None to write to memory"),
    ):
        if value is not None:
            check_type(name, value, kind, expected)
    check_texts("environment", environment)
    check_texts("labels", labels)
    if "" in (labels or {}):
        raise InvalidValue("a label has an empty name", hint="labels are texts by non-empty names")
    check_type("mounts", mounts, (list, tuple), "a list of Mount")
    for index, mount in enumerate(mounts):
        check_type(f"mounts[{index}]", mount, Mount, "a Mount(source, target)")
