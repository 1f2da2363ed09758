"""``minisandbox image pythons [install VERSION]``: the interpreters for recipes."""

from __future__ import annotations

import argparse

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Column, add_json_option, print_json, print_table, put
from minisandbox.errors import InvalidValue
from minisandbox.images.pythons import Python, install_python, list_pythons
from minisandbox.store import Store


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    pythons = verbs.add_parser(
        "pythons",
        help="list the interpreters that recipes can name; install one",
        usage="minisandbox image pythons [--check] [--json]\n       minisandbox image pythons install VERSION",
        description="List the interpreters of this machine, or install one of uv's builds.",
    )
    pythons.add_argument("verb", nargs="?", choices=["install"], metavar="install", help="install one")
    pythons.add_argument("version", nargs="?", metavar="VERSION", help="the version: 3.12 or 3.12.4")
    pythons.add_argument("--check", action="store_true", help="try each new interpreter in a sandbox, as a layer")
    add_json_option(pythons)
    pythons.set_defaults(run=run_pythons, kept="finished layers are kept")


def run_pythons(args: argparse.Namespace) -> int:
    """List interpreters, or install one."""
    store = Store.open()
    if args.verb == "install":
        if args.version is None:
            raise InvalidValue("no version to install", hint="for instance: minisandbox image pythons install 3.12")
        found = install_python(args.version, store)
        if args.json:
            print_json(found)
        else:
            put(f"Python {found.version} is at {found.executable}")
        return exits.OK
    rows = list_pythons(store, check=args.check)
    if args.json:
        print_json(rows)
        return exits.OK
    columns = ("version", "kind", "readable by", "in a sandbox", "path")
    print_table([Column(title, whole=title == "version") for title in columns], map(_row, rows))
    put("\n* the default for its minor version")
    return exits.OK


def _row(one: Python) -> tuple[str, ...]:
    star = " *" if one.chosen else ""
    return (one.interpreter.version + star, one.kind, one.readers, one.works, str(one.interpreter.executable))
