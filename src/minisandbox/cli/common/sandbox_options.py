"""Declare and read the options of ``minisandbox sandbox``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from minisandbox.cli.common.fields import parse_pair, parse_pairs
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.sandbox import live_sandboxes
from minisandbox.types import Limits, Mount, Network, SandboxInfo

LIMIT_NAMES = ", ".join(Limits.__slots__)


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
    limits: dict[str, Any] = {}  # Limits checks the values
    for pair in pairs:
        name, text = parse_pair(pair, "--limit")
        if name not in Limits.__slots__:
            raise InvalidValue(f"--limit {pair}: unknown limit {name!r}", hint=f"the limits are {LIMIT_NAMES}")
        limits[name] = _number_or_size(text)
        try:
            Limits(**{name: limits[name]})
        except InvalidValue as error:
            raise InvalidValue(f"--limit {pair}: {error.what}", reason=error.reason, hint=error.hint) from error
    return Limits(**limits)


def _number_or_size(text: str) -> int | float | str:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text


def parse_mount(text: str) -> Mount:
    """Parse a ``HOST:INSIDE`` pair.

    Raises:
        InvalidValue: the text is malformed.
    """
    source, colon, target = text.rpartition(":")
    if not colon or not source:
        raise InvalidValue(f"--mount {text} is not HOST:INSIDE", hint="for instance --mount ./data:/data")
    return Mount(Path(source).absolute(), PurePosixPath(target))


def find(prefix: str) -> SandboxInfo:
    """Return the live sandbox with an id or unambiguous prefix; the ``box-`` may be left out.

    Raises:
        NotFound: there is no such sandbox.
        InvalidValue: the prefix matches several sandboxes.
    """
    live = live_sandboxes()
    exact = [info for info in live if info.id == prefix]
    matches = exact or [info for info in live if prefix and info.id.startswith((prefix, f"box-{prefix}"))]
    if not matches:
        raise NotFound(f"there is no live sandbox {prefix!r}", hint="'minisandbox sandbox ls' lists them")
    if len(matches) > 1:
        ids = ", ".join(info.id for info in matches[:8])
        raise InvalidValue(f"{prefix!r} is ambiguous: {len(matches)} sandboxes, {ids}", hint="give a longer prefix")
    return matches[0]
