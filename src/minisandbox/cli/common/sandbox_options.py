"""Declare and read the options of ``minisandbox sandbox``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.sandbox import live_sandboxes
from minisandbox.types import Limits, Mount, Network, SandboxInfo, parse_size

# The conversion of each limit's value; the names are those of Limits.
_LIMITS: dict[str, Callable[[str], int | float]] = {
    "memory": parse_size,
    "cpu": float,
    "disk": parse_size,
    "processes": int,
    "open_files": int,
    "file_size": parse_size,
    "output": parse_size,
    "inotify": int,
    "lifetime": float,
}
LIMIT_NAMES = ", ".join(_LIMITS)


def add_creation(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a new sandbox."""
    parser.add_argument("--image", metavar="NAME", help="an image of the store (default: only the host's /usr)")
    parser.add_argument("--network", choices=("off", "host"), default="off", help="default: off, with its own loopback")
    parser.add_argument(
        "--allow",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        help="allow HTTP(S) to a host or '*.SUFFIX'",
    )
    parser.add_argument("--allow-private", action="store_true", help="allow private addresses of these hosts")
    parser.add_argument("--limit", metavar="NAME=VALUE", action="append", default=[], help=f"one of {LIMIT_NAMES}")
    parser.add_argument(
        "--mount", metavar="HOST:INSIDE", action="append", default=[], help="mount a host path, read-only"
    )
    add_label(parser, "a label, shown by 'sandbox ls'")


def parse_network(args: argparse.Namespace) -> Network:
    """Read ``--network``, ``--allow`` and ``--allow-private``.

    Raises:
        InvalidValue: the options contradict each other, or a host pattern is malformed.
    """
    if not args.allow:
        if args.allow_private:
            raise InvalidValue("--allow-private needs --allow", hint="name the hosts: --allow HOST[:PORT]")
        return Network(args.network)
    if args.network == "host":
        raise InvalidValue("--allow and --network host cannot be combined", hint="leave out one of them")
    return Network.allow(*args.allow, private=args.allow_private)


def add_label(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare ``--label``."""
    parser.add_argument("--label", metavar="NAME=VALUE", action="append", default=[], help=text)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Declare the options that set up a command: user, directory and environment."""
    parser.add_argument("--user", metavar="NAME|UID", help="user to run as; only root, the default, has capabilities")
    parser.add_argument("--cwd", metavar="DIR", help="the directory to start in (default: the image's workdir)")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="an environment variable")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare a command and its options."""
    add_start(parser)
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="time limit of the command")
    parser.add_argument("-i", "--stdin", action="store_true", help="forward stdin to the command")
    parser.add_argument("-t", "--tty", action="store_true", help="run the command on a new terminal")
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="after --: the command, its arguments")


@dataclass(frozen=True, slots=True)
class Start:
    """The start options of a command.

    Attributes:
        env: environment variables.
        user: the user to run as, or None for root.
        cwd: the directory to start in, or None for the image's workdir.
        timeout: wall seconds, or None.
    """

    env: dict[str, str]
    user: str | int | None
    cwd: str | None
    timeout: float | None


def parse_start(args: argparse.Namespace) -> Start:
    """Read the options of :func:`add_start` and :func:`add_command`.

    Raises:
        InvalidValue: a variable is not NAME=VALUE.
    """
    user = args.user
    if user is not None and user.isascii() and user.isdigit():
        user = int(user)
    return Start(parse_pairs(args.env, "--env"), user, args.cwd, getattr(args, "timeout", None))


def command_of(args: argparse.Namespace, example: str) -> list[str]:
    """Return the command that follows ``--``.

    Args:
        args: the command line.
        example: the correct command line, up to the command.

    Raises:
        InvalidValue: the command or the ``--`` before it is missing.
    """
    if args.command:
        command_line = " ".join([*args.command, *args.rest])
        raise InvalidValue(
            f"unexpected argument {args.command[0]!r}", reason="there is no -- before the command",
            hint=f"{example} -- {command_line}",
        )  # fmt: skip
    if not args.rest:
        raise InvalidValue("the command is missing", hint=f"{example} -- python3 --version")
    command: list[str] = args.rest
    return command


def parse_limits(pairs: Iterable[str]) -> Limits:
    """Read the ``NAME=VALUE`` pairs of ``--limit``.

    Raises:
        InvalidValue: a name is unknown, or a value is invalid.
    """
    values: dict[str, Any] = {}  # converted by _LIMITS
    for pair in pairs:
        name, value = parse_pair(pair, "--limit")
        if name not in _LIMITS:
            raise InvalidValue(f"--limit {pair}: unknown limit {name!r}", hint=f"the limits are {LIMIT_NAMES}")
        try:
            values[name] = _LIMITS[name](value)
        except ValueError as error:
            hint = error.hint if isinstance(error, InvalidValue) else "give a number"
            raise InvalidValue(f"--limit {pair}: invalid value {value!r}", hint=hint) from error
    return Limits(**values)


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


def parse_mount(text: str) -> Mount:
    """Parse a ``HOST:INSIDE`` pair.

    Raises:
        InvalidValue: the text is malformed.
    """
    source, colon, target = text.rpartition(":")
    if not colon or not source:
        raise InvalidValue(f"--mount {text} is not HOST:INSIDE", hint="for instance --mount ./data:/data")
    return Mount(Path(source).absolute(), PurePosixPath(target))


def find(beginning: str) -> SandboxInfo:
    """Return the live sandbox with an id or unambiguous prefix; the ``box-`` may be left out.

    Raises:
        NotFound: there is no such sandbox.
        InvalidValue: the prefix fits several sandboxes.
    """
    live = live_sandboxes()
    exact = [info for info in live if info.id == beginning]
    matches = exact or [info for info in live if beginning and info.id.startswith((beginning, f"box-{beginning}"))]
    if not matches:
        raise NotFound(f"there is no live sandbox {beginning!r}", hint="'minisandbox sandbox ls' lists them")
    if len(matches) > 1:
        ids = ", ".join(info.id for info in matches[:8])
        raise InvalidValue(f"{beginning!r} is ambiguous: {len(matches)} sandboxes, {ids}", hint="give a longer prefix")
    return matches[0]
