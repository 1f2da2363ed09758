"""``minisandbox image shell TASK``: the last good step of a failed build, by hand."""

from __future__ import annotations

import argparse
import os

from minisandbox.cli.output import say
from minisandbox.cli.streams import follow, has_terminal, window
from minisandbox.errors import InvalidValue
from minisandbox.images import repair
from minisandbox.store import Store


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    shell = verbs.add_parser(
        "shell",
        help="open the last good step of a failed build, and keep what is done there",
        description="An interactive bash over the layers that a failed build did make, with the network of the failed "
        "step. With --keep what was done there becomes a layer of its own below that step, and the next build of the "
        "image goes on from it. Where stdin is no terminal, commands are read from it.",
    )
    shell.add_argument("image", metavar="TASK", help="the task's id, or the image's name")
    shell.add_argument("--keep", action="store_true", help="keep what was done, if the shell's exit status is 0")
    shell.add_argument("--forget", action="store_true", help="forget what was kept for this image before; no shell")
    shell.set_defaults(run=run_shell, kept="nothing of what was done in the shell is kept")


def run_shell(args: argparse.Namespace) -> int:
    """Give a person a bash in a failed build; its exit status is ours."""
    store = Store.open()
    if args.forget:
        if args.keep:
            raise InvalidValue("--keep and --forget", hint="give one of them")
        repair.forget(store, args.image)
        return 0
    terminal = has_terminal()
    with repair.open_failed(store, args.image) as work:
        if terminal:
            say(
                f"minisandbox: before step {work.failure.step!r} of {args.image}; what failed: "
                f"{work.failure.reason.splitlines()[0]}",
                f"the log of that step: {store.log_path(work.failure.key)}",
                "exit 0 keeps what was done, any other status drops it"
                if args.keep
                else "nothing is kept (see --keep)",
            )
        env = {**work.environment, "TERM": os.environ.get("TERM", "xterm")}
        pty = window() if terminal else None
        with work.box.start(["bash"], cwd="/testbed", env=env, pty=pty) as process:
            status = follow(process, stdin=True, terminal=terminal)
        if args.keep and status == 0:
            layer = work.keep()
            say(f"minisandbox: kept as layer {layer.key[:16]}; `minisandbox image build` goes on from it")
        elif args.keep:
            say(f"minisandbox: the shell ended with status {status}: nothing was kept")
    return status
