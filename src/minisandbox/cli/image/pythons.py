"""``minisandbox image pythons``: the interpreters for recipes."""

from __future__ import annotations

import argparse

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Column, add_json_option, print_json, print_table, put
from minisandbox.images import installed_interpreters


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    pythons = verbs.add_parser(
        "pythons",
        help="list the interpreters that recipes can name",
        description="List the interpreters of this machine. `uv python install` and `pyenv install` add others.",
    )
    add_json_option(pythons)
    pythons.set_defaults(run=run_pythons)


def run_pythons(args: argparse.Namespace) -> int:
    """List interpreters."""
    found = installed_interpreters()
    if args.json:
        print_json(found)
        return exits.OK
    first = {one.minor: one for one in reversed(found)}
    rows = [(f"{one.version}{' *' * (first[one.minor] is one)}", str(one.executable)) for one in found]
    print_table([Column("version", whole=True), Column("path")], rows)
    put("\n* the default for its minor version")
    return exits.OK
