"""``minisandbox image rm|gc``: remove images and garbage from the store."""

from __future__ import annotations

import argparse
import re

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, print_json, put
from minisandbox.cli.image.listing import add_names, chosen
from minisandbox.errors import InvalidValue
from minisandbox.store import Store
from minisandbox.store.collect import GRACE, Collected, collect, remove_images
from minisandbox.values import human_size, parse_size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_KEPT = "everything not yet removed is kept"


def add_rm_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rm``."""
    parser.description = (
        "Remove images, failed builds of these names, and the layers that only they use. Layers in use stay until "
        "`image gc`."
    )
    add_names(parser, "*")
    parser.add_argument("--failed", action="store_true", help="remove what all failed builds left: logs and layers")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, only print what would be removed")
    add_json_option(parser)
    parser.set_defaults(run=run_rm, kept=_KEPT)


def add_gc_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``gc``."""
    parser.description = (
        "Remove leftovers of dead processes, layers without an image, and with --budget or --unused-for images, the "
        "least recently used first. Images in use and kept ones stay."
    )
    parser.add_argument("--budget", metavar="SIZE", help="maximum size of all layers together, such as 20G")
    parser.add_argument("--unused-for", metavar="TIME", help="remove images unused for this time, such as 30d or 12h")
    parser.add_argument(
        "--keep", metavar="IMAGE", action="append", default=[], help="never collect this image, from now on; or a glob"
    )
    parser.add_argument(
        "--no-keep", metavar="IMAGE", action="append", default=[], help="collect this image again; or a glob"
    )
    parser.add_argument(
        "--grace", metavar="TIME", default=f"{GRACE:.0f}s", help="spare layers used within this time (default: 1h)"
    )
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="compress images until their next use; remove them only where --budget needs it",
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, only print what would be removed")
    add_json_option(parser)
    parser.set_defaults(run=run_gc, kept=_KEPT)


def parse_duration(text: str, option: str) -> float:
    """Convert a duration to seconds: ``30d``, ``12h``, ``90s`` or ``0s``.

    Args:
        text: the duration.
        option: name of the option in error messages.

    Raises:
        InvalidValue: the text is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidValue(f"{option} {text!r} is not a duration", hint="write for instance 30d, 12h, 90m or 0s")
    return float(match[1]) * _SECONDS[match[2]]


def run_gc(args: argparse.Namespace) -> int:
    """Remove unused layers, leftovers and, with ``--budget`` or ``--unused-for``, images."""
    store = Store.open()
    budget = None if args.budget is None else parse_size(args.budget)
    unused_for = None if args.unused_for is None else parse_duration(args.unused_for, "--unused-for")
    grace = parse_duration(args.grace, "--grace")
    pinned, unpinned = chosen(store, args.keep), chosen(store, args.no_keep)
    if not args.dry_run:
        for name in pinned:
            store.pin(name)
        for name in unpinned:
            store.unpin(name)
    with Progress() as progress:
        removed = collect(
            store,
            budget=budget,
            unused_for=unused_for,
            keep=pinned,
            grace=grace,
            freeze=args.freeze,
            dry_run=args.dry_run,
            progress=progress.status,
        )
    _print_collected(removed, args, budget=budget)
    return exits.OK


def run_rm(args: argparse.Namespace) -> int:
    """Remove images, failed builds, and layers that were made by hand for these images."""
    from minisandbox.images.repair import forget_manual_layers, images_by_hand  # noqa: PLC0415 - slow: imports the image builder

    if bool(args.images) == args.failed:
        raise InvalidValue("image rm needs one choice of images", hint="give names, or --failed")
    store = Store.open()
    failed, by_hand = [failure.image for failure in store.failures()], images_by_hand(store)
    image_names = store.image_names()
    names = failed if args.failed else chosen(store, args.images, sorted({*image_names, *failed, *by_hand}))
    images = [] if args.failed else [name for name in names if name in image_names]
    with Progress() as progress:
        failures = {*names} & {*failed}
        removed = remove_images(store, images, failures=failures, dry_run=args.dry_run, progress=progress.status)
    for name in [] if args.failed else sorted({*names} & {*by_hand}):
        removed.leftovers.append(f"changes made by hand for {name}")
        if not args.dry_run:
            forget_manual_layers(store, name)
    _print_collected(removed, args)
    return exits.OK


def _print_collected(removed: Collected, args: argparse.Namespace, *, budget: int | None = None) -> None:
    if args.json:
        print_json(removed)
        return
    for name in removed.images:
        put(f"image {name}")
    for name in removed.frozen:
        put(f"frozen: image {name}")
    for line in removed.leftovers:
        put(line)
    would = "would be " if args.dry_run else ""
    counts = f"{len(removed.images)} images, {len(removed.layers)} layers and {len(removed.leftovers)} leftovers"
    sizes = f"{human_size(removed.freed)} {would}freed; layers take {human_size(removed.size)}"
    put(f"{counts} {would}removed, {sizes}")
    if removed.spared:
        put(f"{len(removed.spared)} layers without an image stay: in use, or used recently (--grace)")
    if budget is not None and removed.size > budget:
        put(f"still above --budget {human_size(budget)}: the rest is in use, kept, or was used within --grace")
