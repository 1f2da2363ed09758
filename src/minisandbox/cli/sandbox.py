"""``minisandbox sandbox run|ls``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from minisandbox.cli import exits
from minisandbox.cli.output import Column, add_json_option, human_seconds, print_json, print_table, say
from minisandbox.errors import InvalidValue
from minisandbox.images import host_image, load_image
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.store import Store
from minisandbox.types import ExecResult, ImageSpec, Limits, Mount, Network, Outcome, parse_size

# name on the command line -> how its value is read; the names are those of Limits
_LIMITS: dict[str, Callable[[str], int]] = {
    "disk": parse_size,
    "processes": int,
    "open_files": int,
    "file_size": parse_size,
    "output": parse_size,
}
_OUTPUT = 64 << 20  # bytes kept of each stream: here the output is the point


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    run = verbs.add_parser(
        "run",
        help="run one command in a new sandbox",
        usage="minisandbox sandbox run [options] -- CMD [ARGUMENT ...]",
        description="Run one command in a new sandbox. Its output is passed on when it ends; the exit status is its "
        "own (124 after a timeout, 128 and the signal's number after a signal).",
    )
    run.add_argument("--image", metavar="NAME", help="an image of the store (default: nothing but the host's /usr)")
    run.add_argument("--network", choices=("off", "host"), default="off", help="default: off, but for its own loopback")
    run.add_argument("--timeout", metavar="SECONDS", type=float, help="end the command after so many seconds")
    run.add_argument("--limit", metavar="NAME=VALUE", action="append", default=[], help=f"one of {', '.join(_LIMITS)}")
    run.add_argument("--mount", metavar="HOST:INSIDE", action="append", default=[], help="show a host path, read-only")
    run.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable for the command")
    run.add_argument("--cwd", metavar="DIR", help="where the command starts (default: the image's workdir)")
    run.add_argument("-i", "--stdin", action="store_true", help="give the command what stdin holds, read to its end")
    run.add_argument("command", metavar="CMD", nargs="*", help="the command and its arguments, after --")
    run.set_defaults(run=run_run, kept="the sandbox and everything in it is gone")
    ls = verbs.add_parser("ls", help="list the live sandboxes of this user")
    add_json_option(ls)
    ls.set_defaults(run=run_ls)


def run_run(args: argparse.Namespace) -> int:
    """Run a command in a new sandbox; its fate is the exit status."""
    command = [*args.command, *args.rest]
    if not command:
        raise InvalidValue("no command was given", hint="minisandbox sandbox run -- python3 --version")
    limits, network = parse_limits(args.limit), Network.off() if args.network == "off" else Network.host()
    mounts = [_mount(text) for text in args.mount]
    env = dict(_pair(text, "--env") for text in args.env)
    with Sandbox.create(_image(args.image), limits=limits, network=network, mounts=mounts) as box:
        stdin = sys.stdin.buffer.read() if args.stdin else None
        result = box.exec(command, timeout=args.timeout, cwd=args.cwd, env=env, stdin=stdin)
    _pass_on(result)
    return _status(result)


def _image(name: str | None) -> ImageSpec:
    store = Store.open()
    return (host_image(store) if name is None else load_image(store, name)).spec()


def _pass_on(result: ExecResult) -> None:
    for stream, data in ((sys.stdout, result.stdout_bytes), (sys.stderr, result.stderr_bytes)):
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()
    if result.dropped_stdout or result.dropped_stderr:
        dropped = f"{result.dropped_stdout} bytes of stdout and {result.dropped_stderr} of stderr"
        say(f"minisandbox: {dropped} were not kept; raise --limit output=SIZE")
    if result.outcome is not Outcome.EXITED:
        say(
            f"minisandbox: the command was {result.fate}"
            if result.signal
            else f"minisandbox: the command {result.fate}"
        )


def _status(result: ExecResult) -> int:
    if result.outcome is Outcome.TIMEOUT:
        return exits.TIMEOUT
    if result.signal is not None:
        return 128 + result.signal
    return result.exit_code if result.exit_code is not None else exits.INTERNAL


def parse_limits(texts: Iterable[str]) -> Limits:
    """Read ``NAME=VALUE`` texts.

    Raises:
        InvalidValue: a name is not a limit's, or a value is not one for it.
    """
    values: dict[str, int] = {"output": _OUTPUT}
    for text in texts:
        name, value = _pair(text, "--limit")
        if name not in _LIMITS:
            raise InvalidValue(
                f"--limit {text}: there is no limit {name!r}", hint=f"the limits are {', '.join(_LIMITS)}"
            )
        try:
            values[name] = _LIMITS[name](value)
        except ValueError as error:
            hint = error.hint if isinstance(error, InvalidValue) else "give a whole number"
            raise InvalidValue(f"--limit {text}: {value!r} cannot be used", hint=hint) from error
    return Limits(**values)


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidValue(f"{option} {text}: no NAME=VALUE", hint=f"for instance {option} NAME=VALUE")
    return name, value


def _mount(text: str) -> Mount:
    source, colon, target = text.rpartition(":")
    if not colon or not source:
        raise InvalidValue(f"--mount {text}: no HOST:INSIDE", hint="for instance --mount ./data:/data")
    return Mount(Path(source).absolute(), PurePosixPath(target))


def run_ls(args: argparse.Namespace) -> int:
    """List live sandboxes."""
    records = live_sandboxes()
    if args.json:
        print_json([asdict(record) for record in records])
        return exits.OK
    columns = ("id", "image", "network", "owner", "pid", "age")
    print_table(
        [Column(title, number=title in ("owner", "pid", "age"), whole=title == "id") for title in columns],
        [(r.id, r.image, r.network, str(r.owner), str(r.pid), human_seconds(time.time() - r.created)) for r in records],
    )
    return exits.OK
