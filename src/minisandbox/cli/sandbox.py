"""``minisandbox sandbox run|shell|exec|ls|kill|prune``: use and manage sandboxes."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from minisandbox.cli.common import exits
from minisandbox.cli.common import sandbox_options as options
from minisandbox.cli.common.fields import parse_pairs
from minisandbox.cli.common.output import (
    add_json_option,
    clean_line,
    human_seconds,
    plain_fields,
    print_json,
    print_table,
    put,
    say,
)
from minisandbox.cli.common.sandbox_options import Start
from minisandbox.cli.common.streams import follow, has_terminal, window
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.host import reaper, registry
from minisandbox.images import host_image, load_image
from minisandbox.sandbox import Sandbox, live_sandboxes, scratch
from minisandbox.store import Store
from minisandbox.types import ImageSpec, SandboxInfo

_OUTPUT_AND_STATUS = (
    "Its output is streamed, and its exit status becomes this command's (124 after a timeout, 128 plus the signal's "
    "number after a signal). Ctrl-C ends it."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    run = verbs.add_parser(
        "run",
        help="run one command in a new sandbox",
        usage="minisandbox sandbox run [options] -- CMD [ARGUMENT ...]",
        description=f"Run one command in a new sandbox, which ends with it. {_OUTPUT_AND_STATUS}",
    )
    options.add_creation(run)
    options.add_command(run)
    run.set_defaults(run=run_run, kept="the sandbox and everything in it has been removed")
    shell = verbs.add_parser(
        "shell",
        help="open a shell in a new or a live sandbox",
        usage="minisandbox sandbox shell [options] [ID]",
        description="Open an interactive bash in a live sandbox, or in a new one that ends with it. Without a "
        "terminal, commands are read from stdin.",
    )
    shell.add_argument("id", metavar="ID", nargs="?", help="a live sandbox: its id, or a prefix of it")
    options.add_creation(shell)
    options.add_start(shell)
    shell.set_defaults(run=run_shell, kept="a sandbox created for the shell has been removed, a live one keeps running")
    execute = verbs.add_parser(
        "exec",
        help="run one command in a live sandbox",
        usage="minisandbox sandbox exec [options] ID -- CMD [ARGUMENT ...]",
        description=f"Run one command in a live sandbox of any process of this user. {_OUTPUT_AND_STATUS}",
    )
    execute.add_argument("id", metavar="ID", help="the sandbox: its id, or a prefix of it")
    options.add_command(execute)
    execute.set_defaults(run=run_exec, kept="the sandbox keeps running")
    _configure_management(verbs)


def _configure_management(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ls = verbs.add_parser("ls", help="list the live sandboxes of this user")
    options.add_label(ls, "only sandboxes with this label")
    add_json_option(ls)
    ls.set_defaults(run=run_ls)
    kill = verbs.add_parser(
        "kill",
        help="end live sandboxes",
        usage="minisandbox sandbox kill (ID ... | --all | --label NAME=VALUE)",
        description="End live sandboxes of this user, from any process, with everything that runs in them.",
    )
    kill.add_argument("id", metavar="ID", nargs="*", help="a sandbox: its id, or a prefix of it")
    kill.add_argument("--all", action="store_true", help="all sandboxes of this user")
    options.add_label(kill, "all sandboxes with this label")
    kill.set_defaults(run=run_kill, kept="the sandboxes named above have ended")
    prune = verbs.add_parser(
        "prune",
        help="remove leftovers of killed processes",
        description="Remove the sandbox records and control groups that killed processes left behind. Creating a "
        "sandbox does the same. Processes that are alive are not affected. The exit status is 1 if something could "
        "not be removed.",
    )
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    add_json_option(prune)
    prune.set_defaults(run=run_prune, kept="the leftovers named above have been removed")


# --- commands --------------------------------------------------------------------------------------------------------


def run_run(args: argparse.Namespace) -> int:
    """Run a command in a new sandbox; return its exit status."""
    command, start = options.command_of(args, "minisandbox sandbox run"), options.parse_start(args)
    with _new(args) as box:
        return _run(box, command, start, stdin=args.stdin, terminal=args.tty)


def run_exec(args: argparse.Namespace) -> int:
    """Run a command in a live sandbox; return its exit status."""
    command, start = options.command_of(args, f"minisandbox sandbox exec {args.id}"), options.parse_start(args)
    with Sandbox.attach(options.find(args.id).id) as box:
        return _run(box, command, start, stdin=args.stdin, terminal=args.tty)


def run_shell(args: argparse.Namespace) -> int:
    """Open a bash that reads from the terminal or from a script on stdin; return its exit status."""
    if args.rest:
        raise InvalidValue("'sandbox shell' takes no command", hint="use 'sandbox run' or 'sandbox exec'")
    terminal, start = has_terminal(), options.parse_start(args)
    with _live_or_new(args) as box:
        if terminal:
            effect = "the sandbox keeps running" if args.id else "ends the sandbox"
            say(f"minisandbox: sandbox {box.id}; exit or ^D leaves the shell, and {effect}")
        return _run(box, ["bash"], start, stdin=True, terminal=terminal)


def _run(box: Sandbox, command: Sequence[str], start: Start, *, stdin: bool, terminal: bool) -> int:
    env = {"TERM": os.environ.get("TERM", "xterm"), **start.env} if terminal else start.env
    pty = window() if terminal else None
    with box.start(command, timeout=start.timeout, cwd=start.cwd, env=env, user=start.user, pty=pty) as process:
        return follow(process, stdin=stdin, terminal=terminal)


@contextlib.contextmanager
def _live_or_new(args: argparse.Namespace) -> Iterator[Sandbox]:
    if args.id is None:
        with _new(args) as box:
            yield box
        return
    conflicting = [name for name in ("image", "allow", "limit", "mount", "label") if getattr(args, name)]
    if conflicting:
        raise InvalidValue(
            f"--{conflicting[0]} needs a new sandbox, and {args.id} is a live one", hint="leave out either"
        )
    with Sandbox.attach(options.find(args.id).id) as box:
        yield box


def _new(args: argparse.Namespace) -> Sandbox:
    limits, labels = options.parse_limits(args.limit), parse_pairs(args.label, "--label")
    mounts = [options.parse_mount(text) for text in args.mount]
    network = options.parse_network(args)
    return Sandbox.create(_image(args.image), limits=limits, network=network, mounts=mounts, labels=labels)


def _image(name: str | None) -> ImageSpec:
    store = Store.open()
    return (host_image(store) if name is None else load_image(store, name)).spec()


# --- management ------------------------------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    """List live sandboxes."""
    sandboxes = live_sandboxes(labels=parse_pairs(args.label, "--label"))
    if args.json:
        print_json([{**plain_fields(info), "labels": dict(info.labels)} for info in sandboxes])
        return exits.OK
    numbers = ("owner", "pid", "age", "expires in")
    titles = ("id", "image", "network", "labels", *numbers)
    print_table(titles, [_row(info, time.time()) for info in sandboxes], numbers=numbers, unwrapped=["id"])
    return exits.OK


def _row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    labels = ", ".join(f"{name}={value}" for name, value in info.labels)
    remaining = "-" if info.expires is None else human_seconds(max(0.0, info.expires - now))
    age = human_seconds(now - info.created)
    return info.id, info.image, info.network, labels or "-", str(info.owner), str(info.pid), age, remaining


def run_kill(args: argparse.Namespace) -> int:
    """Stop live sandboxes and print their ids."""
    if bool(args.id) + args.all + bool(args.label) != 1:
        raise InvalidValue("sandbox kill needs one choice", hint="give ids, or --all, or --label NAME=VALUE")
    labels = parse_pairs(args.label, "--label")
    sandboxes = [options.find(prefix) for prefix in args.id] if args.id else live_sandboxes(labels=labels)
    for info in dict.fromkeys(sandboxes):
        with contextlib.suppress(NotFound):  # the sandbox was stopped meanwhile
            Sandbox.attach(info.id).stop()
        put(info.id, flush=True)
    return exits.OK


def run_prune(args: argparse.Namespace) -> int:
    """Remove and print what exited owner processes left behind; return 1 if a removal fails."""
    runtime = registry.runtime_directory()
    leftovers = [*reaper.leftovers(runtime), *scratch.leftovers()]
    remaining_count = 0
    rows: list[dict[str, object]] = []
    for leftover in leftovers:
        is_removed = not args.dry_run and leftover.remove()
        remaining_count += not is_removed
        rows.append({"kind": leftover.kind, "path": leftover.path, "owner": leftover.owner, "removed": is_removed})
        if not args.json:
            action = "removed" if is_removed else "would remove" if args.dry_run else "could not remove"
            put(f"{action} {leftover.kind} {clean_line(str(leftover.path))}", flush=True)
    if args.json:
        print_json(rows)
    elif not leftovers:
        put("nothing to remove")
    return exits.NEGATIVE if remaining_count and not args.dry_run else exits.OK
