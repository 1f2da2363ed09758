"""Reject arguments of a wrong type early: not all callers use a type checker.

Sync and async handles and the fakes use it. Messages name the type, never the value: it may be a secret, or huge.
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
    """Return the error for an argument of a wrong type.

    Args:
        name: of the argument.
        value: what was given.
        expected: what should have been.
    """
    kind = "None" if value is None else f"of type {type(value).__name__}"
    return InvalidValue(f"{name} is {kind}", hint=f"give {expected}")


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value that has none of these types.

    Raises:
        InvalidValue: the value has another type.
    """
    if not isinstance(value, kinds):
        raise wrong_type(name, value, expected)


def check_timeout(timeout: float | None) -> None:
    """Refuse a timeout of a command that is not a positive number of seconds.

    Raises:
        InvalidValue: the timeout is invalid.
    """
    _check_seconds(timeout)
    if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:  # NaN fails too
        hint = f"give at most {_LONGEST_TIMEOUT:.0f}, or None for no limit"
        raise InvalidValue(f"timeout {timeout!r} is not a positive number of seconds", hint=hint)


def check_wait(timeout: float | None) -> None:
    """Refuse a time to wait that is not a number of seconds; 0 and less do not wait.

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
    """Refuse a command that is neither a text nor a list of texts.

    Raises:
        InvalidValue: the command is of another type, or empty.
    """
    if isinstance(command, str):
        return
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise wrong_type("command", command, "a str for bash -c, or a list of them for a program and its arguments")
    for number, part in enumerate(command):
        check_type(f"command[{number}]", part, str, "a str")


def check_texts(name: str, mapping: object) -> None:
    """Reject values other than a mapping of strings to strings, such as environment variables.

    Args:
        name: of the argument.
        mapping: what was given, or None.

    Raises:
        InvalidValue: the value is something else.
    """
    if mapping is None:
        return
    check_type(name, mapping, Mapping, "a dict of str by str")
    assert isinstance(mapping, Mapping)
    for key, text in mapping.items():
        check_type(f"a name in {name}", key, str, "each name as a str")
        check_type(f"{name}[{key!r}]", text, str, "each value as a str")


def check_path(name: str, path: object) -> None:
    """Reject values other than a path inside a sandbox.

    Raises:
        InvalidValue: the path is invalid.
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
    """Refuse arguments of :meth:`minisandbox.Sandbox.create` that are of a wrong type.

    Raises:
        InvalidValue: an argument is of a wrong type.
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
    for number, mount in enumerate(mounts):
        check_type(f"mounts[{number}]", mount, Mount, "a Mount(source, target)")
