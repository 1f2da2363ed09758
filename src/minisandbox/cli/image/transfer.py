"""``minisandbox image export|import``: move images to another machine, user or store."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, human_size, print_json, put, say
from minisandbox.cli.image.listing import add_names, chosen
from minisandbox.errors import InvalidValue
from minisandbox.images.travel import STANDARD, export_file, import_directory, import_file
from minisandbox.store import Store
from minisandbox.store.importing import Imported


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``export``."""
    parser.description = "Write images to one compressed file, every content once."
    add_names(parser, "+")
    parser.add_argument("file", metavar="FILE", type=Path, help="the file; `-` for standard output")
    add_json_option(parser)
    parser.set_defaults(run=run_export, kept="no file was written")


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``import``."""
    parser.description = (
        "Import images from a file of `image export`, or from another store's directory, which is opened read-only. "
        "Every content is checked against its hash; content already present is skipped. Import only from sources "
        "whose programs you would run."
    )
    parser.add_argument("source", metavar="FILE|STORE", type=Path, help="a file (`-`: standard input), or a directory")
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="images to take from a store (default: all)")
    parser.add_argument("--replace", action="store_true", help="replace different images with the same names")
    add_json_option(parser)
    parser.set_defaults(run=run_import, kept="finished layers are kept; there are no partial images")


def run_export(args: argparse.Namespace) -> int:
    """Write images to a file."""
    if args.file == STANDARD and (args.json or sys.stdout.isatty()):
        raise InvalidValue("image export -: stdout is a terminal or used by --json", hint="redirect it, without --json")
    store = Store.open()
    with Progress() as progress:
        done = export_file(store, chosen(store, args.images), args.file, progress=_byte_progress(progress, "written"))
    if args.json:
        print_json(done)
        return exits.OK
    size = "" if args.file == STANDARD else f" in {human_size(os.stat(args.file).st_size)}"
    say(
        f"{len(done.images)} images, {done.layers} layers: {human_size(done.total)} of files, "
        f"{human_size(done.bytes)} after deduplication{size}"
    )
    return exits.OK


def run_import(args: argparse.Namespace) -> int:
    """Import images."""
    store = Store.open()
    with Progress() as progress:
        tell = _byte_progress(progress, "read")
        if args.source.is_dir():
            done = import_directory(store, args.source, args.images or None, replace=args.replace, progress=tell)
        elif args.images:
            raise InvalidValue("image import FILE takes no image names", hint="it imports all images of the file")
        else:
            done = import_file(store, args.source, replace=args.replace, progress=tell)
    if args.json:
        print_json(done)
    else:
        _print_imported(done)
    return exits.OK


def _print_imported(done: Imported) -> None:
    put(
        f"{len(done.images)} images: {len(done.layers)} layers imported, {done.present} already present; "
        f"{human_size(done.bytes)} read"
    )
    if done.owners:
        put(f"{done.owners} files of other users now belong to you: an ordinary user cannot keep other owners")
    if done.privileges:
        put(f"{done.privileges} files lost their setuid or setgid bit, which has no effect in a sandbox")


def _byte_progress(progress: Progress, verb: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        progress.status(f"{human_size(done)} of {human_size(total)} {verb}")

    return show
