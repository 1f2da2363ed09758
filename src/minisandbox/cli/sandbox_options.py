"""What the verbs of ``minisandbox sandbox`` are told on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.sandbox import live_sandboxes
from minisandbox.types import Limits, Mount, Network, SandboxInfo, parse_size

# name on the command line -> how its value is read; the names are those of Limits
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
    """Declare what decides how a new sandbox looks."""
    parser.add_argument("--image", metavar="NAME", help="an image of the store (default: nothing but the host's /usr)")
    parser.add_argument(
        "--network", choices=("off", "host"), default="off", help="default: off, but for its own loopback"
    )
    parser.add_argument(
        "--allow",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        help="let it reach a host, or '*.SUFFIX', by HTTP(S)",
    )
    parser.add_argument("--allow-private", action="store_true", help="even where these have private addresses")
    parser.add_argument("--limit", metavar="NAME=VALUE", action="append", default=[], help=f"one of {LIMIT_NAMES}")
    parser.add_argument(
        "--mount", metavar="HOST:INSIDE", action="append", default=[], help="show a host path, read-only"
    )
    add_label(parser, "what to call the sandbox; shown by 'sandbox ls'")


def parse_network(args: argparse.Namespace) -> Network:
    """What ``--network``, ``--allow`` and ``--allow-private`` say together.

    Raises:
        InvalidValue: they contradict each other, or a host is no pattern.
    """
    if not args.allow:
        if args.allow_private:
            raise InvalidValue("--allow-private without --allow", hint="name the hosts: --allow HOST[:PORT]")
        return Network(args.network)
    if args.network == "host":
        raise InvalidValue("--allow and --network host", hint="leave out one of them")
    return Network.allow(*args.allow, private=args.allow_private)


def add_label(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare ``--label``."""
    parser.add_argument("--label", metavar="NAME=VALUE", action="append", default=[], help=text)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Declare what decides how a command starts."""
    parser.add_argument("--user", metavar="NAME|UID", help="who runs it; root (the default) alone has capabilities")
    parser.add_argument("--cwd", metavar="DIR", help="where it starts (default: the image's workdir)")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable for it")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare a command and how it is run."""
    add_start(parser)
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="end the command after so many seconds")
    parser.add_argument("-i", "--stdin", action="store_true", help="give the command what stdin holds, as it comes")
    parser.add_argument("-t", "--tty", action="store_true", help="run the command on a terminal of its own")
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="after --: the command, its arguments")


@dataclass(frozen=True, slots=True)
class Start:
    """How a command starts.

    Attributes:
        env: variables for it.
        user: who runs it, or None for root.
        cwd: where it starts, or None for the image's workdir.
        timeout: wall seconds, or None.
    """

    env: dict[str, str]
    user: str | int | None
    cwd: str | None
    timeout: float | None


def parse_start(args: argparse.Namespace) -> Start:
    """Read what :func:`add_start` and :func:`add_command` declare.

    Raises:
        InvalidValue: a variable is not NAME=VALUE.
    """
    user = args.user
    if user is not None and user.isascii() and user.isdigit():
        user = int(user)
    return Start(parse_pairs(args.env, "--env"), user, args.cwd, getattr(args, "timeout", None))


def command_of(args: argparse.Namespace, example: str) -> list[str]:
    """The command that follows ``--``.

    Args:
        args: the command line.
        example: what it should look like, up to the command.

    Raises:
        InvalidValue: there is none, or no ``--``.
    """
    if args.command:
        words = " ".join([*args.command, *args.rest])
        raise InvalidValue(
            f"{args.command[0]!r} stands where only options may", reason="there is no -- before the command",
            hint=f"{example} -- {words}",
        )  # fmt: skip
    if not args.rest:
        raise InvalidValue("no command was given", hint=f"{example} -- python3 --version")
    command: list[str] = args.rest
    return command


def parse_limits(texts: Iterable[str]) -> Limits:
    """Read ``NAME=VALUE`` texts.

    Raises:
        InvalidValue: a name is not a limit's, or a value is not one for it.
    """
    values: dict[str, Any] = {}  # each is of its limit's own type
    for text in texts:
        name, value = parse_pair(text, "--limit")
        if name not in _LIMITS:
            raise InvalidValue(f"--limit {text}: there is no limit {name!r}", hint=f"the limits are {LIMIT_NAMES}")
        try:
            values[name] = _LIMITS[name](value)
        except ValueError as error:
            hint = error.hint if isinstance(error, InvalidValue) else "give a number"
            raise InvalidValue(f"--limit {text}: {value!r} cannot be used", hint=hint) from error
    return Limits(**values)


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """Read the ``NAME=VALUE`` texts of an option; later ones win."""
    return dict(parse_pair(text, option) for text in texts)


def parse_pair(text: str, option: str) -> tuple[str, str]:
    """Read one ``NAME=VALUE``.

    Raises:
        InvalidValue: it is not one.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidValue(f"{option} {text}: no NAME=VALUE", hint=f"for instance {option} NAME=VALUE")
    return name, value


def parse_mount(text: str) -> Mount:
    """Read one ``HOST:INSIDE``.

    Raises:
        InvalidValue: it is not one.
    """
    source, colon, target = text.rpartition(":")
    if not colon or not source:
        raise InvalidValue(f"--mount {text}: no HOST:INSIDE", hint="for instance --mount ./data:/data")
    return Mount(Path(source).absolute(), PurePosixPath(target))


def find(beginning: str) -> SandboxInfo:
    """The live sandbox that an id, or the beginning of one, stands for; its ``box-`` may be left out.

    Raises:
        NotFound: there is none.
        InvalidValue: there are several.
    """
    live = live_sandboxes()
    exact = [one for one in live if one.id == beginning]
    found = exact or [one for one in live if beginning and one.id.startswith((beginning, f"box-{beginning}"))]
    if not found:
        raise NotFound(f"no live sandbox is called {beginning!r}", hint="'minisandbox sandbox ls' lists them")
    if len(found) > 1:
        ids = ", ".join(one.id for one in found[:8])
        raise InvalidValue(f"{beginning!r} begins the ids of {len(found)} sandboxes: {ids}", hint="give more of it")
    return found[0]
