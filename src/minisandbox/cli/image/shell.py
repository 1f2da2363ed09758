"""``minisandbox image shell TASK``: continue a failed build by hand."""

from __future__ import annotations

import argparse
import os

from minisandbox.cli.common.output import say
from minisandbox.cli.common.streams import follow, has_terminal, window
from minisandbox.errors import InvalidValue
from minisandbox.images import repair
from minisandbox.store import Store


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    shell = verbs.add_parser(
        "shell",
        help="open a shell at the last successful step of a failed build",
        description="Open an interactive bash over the layers of a failed build, with the network of the failed step. "
        "With --keep the changes become a layer below that step, and the next build of the image continues from it. "
        "Without a terminal, commands are read from stdin.",
    )
    shell.add_argument("image", metavar="TASK", help="the task's id, or the image's name")
    shell.add_argument("--keep", action="store_true", help="keep the changes if the shell's exit status is 0")
    shell.add_argument("--forget", action="store_true", help="drop the changes kept earlier for this image; no shell")
    shell.set_defaults(run=run_shell, kept="the changes made in the shell are dropped")


def run_shell(args: argparse.Namespace) -> int:
    """Open a bash in a failed build; return its exit status."""
    store = Store.open()
    if args.forget:
        if args.keep:
            raise InvalidValue("--keep and --forget cannot be combined", hint="give one of them")
        repair.forget(store, args.image)
        return 0
    terminal = has_terminal()
    with repair.open_failed(store, args.image) as work:
        if terminal:
            say(
                f"minisandbox: at step {work.failure.step!r} of {args.image}, which failed: "
                f"{work.failure.reason.splitlines()[0]}",
                f"the step's log: {store.log_path(work.failure.key)}",
                "exit 0 keeps the changes, any other status drops them"
                if args.keep
                else "the changes will be dropped (see --keep)",
            )
        env = {**work.environment, "TERM": os.environ.get("TERM", "xterm")}
        pty = window() if terminal else None
        shell = ["/bin/sh" if work.failure.own_root else "bash"]
        with work.box.start(shell, cwd=work.failure.workdir, env=env, pty=pty) as process:
            status = follow(process, stdin=True, terminal=terminal)
        if args.keep and status == 0:
            layer = work.keep()
            say(f"minisandbox: kept as layer {layer.key[:16]}; `minisandbox image build` continues from it")
        elif args.keep:
            say(f"minisandbox: the shell ended with status {status}: the changes were dropped")
    return status
