"""``minisandbox image freeze|thaw``: keep unused images compressed."""

from __future__ import annotations

import argparse
import time

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, human_size, print_json, put
from minisandbox.cli.image.listing import add_names, chosen
from minisandbox.cli.image.removal import parse_duration
from minisandbox.errors import InvalidValue
from minisandbox.store import Store
from minisandbox.store.collect import idle_images
from minisandbox.store.freezing import Frozen, freeze, thaw_images


def add_freeze_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``freeze``."""
    parser.description = (
        "Compress the layers that only these images use. The next use unpacks them, in seconds. Layers in use are "
        "left alone."
    )
    add_names(parser, "*")
    parser.add_argument("--unused-for", metavar="TIME", help="images unused for this time, such as 30d or 12h")
    parser.add_argument("--all", action="store_true", help="all images that are not in use")
    parser.add_argument("--dry-run", action="store_true", help="freeze nothing, only print what would be frozen")
    add_json_option(parser)
    parser.set_defaults(run=run_freeze, kept="all images remain usable; the next freeze compresses the rest")


def add_thaw_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``thaw``."""
    add_names(parser, "+")
    add_json_option(parser)
    parser.set_defaults(run=run_thaw, kept="all images remain usable; thawed layers stay thawed")


def run_freeze(args: argparse.Namespace) -> int:
    """Freeze images."""
    if bool(args.images) + bool(args.unused_for) + args.all != 1:
        raise InvalidValue("image freeze needs one choice of images", hint="give names, --unused-for or --all")
    store = Store.open()
    with Progress() as progress:
        done = freeze(store, _names(store, args), dry_run=args.dry_run, progress=progress.status)
    if args.json:
        print_json(done)
    else:
        _print(done, args.dry_run)
    return exits.OK


def _names(store: Store, args: argparse.Namespace) -> list[str]:
    if args.images:
        return chosen(store, args.images)
    age = 0.0 if args.all else parse_duration(args.unused_for, "--unused-for")
    # pinned images stay ready, unless they are named
    return [
        name
        for used, name in idle_images(store, store.images(), keep=store.pins())
        if args.all or time.time() - used > age
    ]


def _print(done: Frozen, dry_run: bool) -> None:
    for name in done.images:
        put(f"image {name}")
    would, about = ("would be ", "about ") if dry_run else ("", "")
    put(
        f"{len(done.layers)} layers of {len(done.images)} images {would}frozen, {about}{human_size(done.freed)} "
        f"{would}freed"
    )
    if done.packed:
        put(f"{human_size(done.packed)} of files compressed to {human_size(done.packs)}")
    if done.spared:
        put(f"{len(done.spared)} layers left alone: in use, damaged or of an earlier MiniSandbox")


def run_thaw(args: argparse.Namespace) -> int:
    """Thaw images."""
    store = Store.open()
    begun = time.monotonic()
    with Progress() as progress:
        progress.status("thawing")
        keys = thaw_images(store, chosen(store, args.images))
    if args.json:
        print_json({"layers": keys})
    else:
        put(f"{len(keys)} layers thawed in {time.monotonic() - begun:.1f} s")
    return exits.OK
