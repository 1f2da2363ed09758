"""``minisandbox image lock show|diff``: the exact inputs of an image."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Column, add_json_option, print_json, print_table, put
from minisandbox.images import Lock, compare_locks, load_image, lock_of, read_lock
from minisandbox.store import Store


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    lock = verbs.add_parser("lock", help="print the exact inputs of an image; compare two")
    actions = lock.add_subparsers(metavar="VERB", required=True)
    show = actions.add_parser("show", help="print an image's lock file, for `image build --locked`")
    show.add_argument("image", metavar="IMAGE", help="the image")
    add_json_option(show)
    show.set_defaults(run=run_show)
    diff = actions.add_parser(
        "diff",
        help="compare two locks",
        description="Compare two locks; the exit status is 1 where more than the images' names differs.",
    )
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help="an image, or a lock file (.toml)")
    add_json_option(diff)
    diff.set_defaults(run=run_diff)


def run_show(args: argparse.Namespace) -> int:
    """Print a lock."""
    lock = _of_image(args.image)
    if args.json:
        print_json(lock)
    else:
        put(lock.to_toml(), end="")
    return exits.OK


def run_diff(args: argparse.Namespace) -> int:
    """Print the differences between two locks."""
    found = compare_locks(_of(args.a), _of(args.b))
    if args.json:
        print_json(found)
    elif found:
        columns = [Column("part"), Column("name", whole=True), Column(args.a), Column(args.b)]
        print_table(columns, [(one.part, one.name, one.old or "-", one.new or "-") for one in found])
    else:
        put("the locks are the same")
    return exits.NEGATIVE if found else exits.OK


def _of(text: str) -> Lock:
    return read_lock(Path(text)) if text.endswith(".toml") else _of_image(text)


def _of_image(name: str) -> Lock:
    image = load_image(Store.open(), name)
    return lock_of(image.name, image.records())
