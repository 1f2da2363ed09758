"""``minisandbox view``: show runs as web pages."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import say
from minisandbox.errors import MissingExtra, NotFound
from minisandbox.trajectories.tokenised import open_tokenizer
from minisandbox.view import Site

_PORT = 8642


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.description = (
        "Serve pages about runs to the browser of this user: runs, tasks, and rollouts turn by turn. The printed "
        "address contains a token; without it, the server answers nothing."
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="*", default=[Path()],
        help="a run's directory, or one that contains runs (default: the current directory)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=_PORT, help=f"the port (default: {_PORT}); 0 for any free one")
    parser.add_argument("--tokenizer", metavar="DIR", help="show the tokens of rollouts as text of this tokenizer")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write one HTML file instead of serving pages")
    parser.add_argument("--rollouts", metavar="N", type=int, default=100, help="rollouts of each run in the file (100)")
    parser.set_defaults(run=run, kept="nothing was changed")


def run(args: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C."""
    try:
        from minisandbox.view.export import write_export  # noqa: PLC0415 - an extra
        from minisandbox.view.server import serve  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra(
            f"the package {error.name} is not installed", reason=str(error), hint="pip install 'swe-minisandbox[view]'"
        ) from error
    for path in args.runs:
        if not path.is_dir():
            raise NotFound(f"{path} is not a directory", hint="give the directory of a run, or one that contains runs")
    site = Site(args.runs, None if args.tokenizer is None else open_tokenizer(args.tokenizer))
    count = len(site.runs())
    if args.export is not None:
        write_export(site, args.export, args.rollouts)
        say(f"{args.export}: {count} runs")
        return exits.OK
    serve(site, args.host, args.port, lambda url: say(f"{count} runs; Ctrl-C ends the server", url))
    return exits.OK
