"""``minisandbox image push|export|import``: move images to registries, engines and other stores."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, clean_line, print_json, put, say
from minisandbox.cli.common.task_sets import add_tasks_option
from minisandbox.cli.image.listing import add_names, chosen, named
from minisandbox.cli.image.pull import add_platform_option, add_private_option
from minisandbox.errors import InvalidValue
from minisandbox.images import export_images, import_images, push, push_set
from minisandbox.images.oci.pull import STANDARD
from minisandbox.store import Store
from minisandbox.store.blobs.packing import COMPRESSIONS, GZIP
from minisandbox.values import human_size

_PRIVATE = (
    "for another MiniSandbox: with hidden tests, and also if the image needs the host's /usr; engines cannot read it"
)


def add_push_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Declare the options of ``push``; an image is not required if ``arguments`` have ``--tasks``."""
    parser.description = (
        "Push an image to a registry, without a container engine. Layers that the registry has are not sent. Hidden "
        "tests are left out. Several images become a set: each is tagged with its name, and REF lists them for `image "
        "pull --set`. Credentials are those of `podman login` and `docker login`."
    )
    # Two positionals first, because argparse would not accept options between IMAGE and REF with a list alone.
    if not any(word.partition("=")[0] == "--tasks" for word in arguments):
        parser.add_argument("first", metavar="IMAGE", help="an image's name, or a glob")
    parser.add_argument("second", metavar="REF", help="where to: HOST/NAME[:TAG]")
    parser.add_argument("further", metavar="IMAGE", nargs="*", help="further images come before REF, which is the last")
    add_tasks_option(parser)
    parser.add_argument(
        "--attach",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a file that travels with the set, such as validation results; may be repeated",
    )
    _add_format(parser)
    add_json_option(parser)
    parser.set_defaults(run=run_push, kept="the registry keeps the layers that it has; the same command resumes")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``export``."""
    parser.description = (
        "Write images as an OCI archive or layout, which `podman load`, `docker load`, skopeo and `image import` read. "
        "Hidden tests are left out."
    )
    add_names(parser, "+")
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="a file that ends in .tar, `-` for standard output, or a new directory"
    )
    _add_format(parser)
    add_json_option(parser)
    parser.set_defaults(run=run_export, kept="nothing was written")


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``import``."""
    parser.description = (
        "Import all images of an OCI archive or layout, or of an archive of `docker save`. Layers already present are "
        "skipped."
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="the file, `-` for standard input, or the directory")
    parser.add_argument("--name", help="the name of the only image (default: its tag)")
    add_platform_option(parser)
    parser.add_argument("--replace", action="store_true", help="replace different images with the same names")
    add_private_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run_import, kept="finished layers are kept; there are no partial images")


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compression", choices=COMPRESSIONS, default=GZIP, help="of the layers (default: gzip)")
    parser.add_argument("--private", action="store_true", help=_PRIVATE)


def run_push(args: argparse.Namespace) -> int:
    """Push one image, or a set of images."""
    store = Store.open()
    *args.images, args.reference = filter(None, [getattr(args, "first", ""), args.second, *args.further])
    is_set = args.tasks is not None or args.attach or len(args.images) != 1 or set(args.images[0]) & set("*?[")
    names = named(store, args) if is_set else []
    if is_set and not names:
        raise InvalidValue("there is no image to push", hint="give IMAGE or --tasks TASKS")
    with Progress() as progress:
        options = {"store": store, "private": args.private, "progress": progress.status}
        if is_set:
            pushed = push_set(names, args.reference, files=args.attach, compression=args.compression, **options)
        else:
            pushed = push(args.images[0], args.reference, compression=args.compression, **options)
    if args.json:
        print_json(pushed)
    else:
        put(f"{pushed.reference}@{pushed.digest}")
        put(f"{pushed.layers} layers, {pushed.sent} of them sent: {human_size(pushed.bytes)}")
        if pushed.lost:
            put(clean_line(f"not as in the image: {pushed.lost}"))
    return exits.OK


def run_export(args: argparse.Namespace) -> int:
    """Write images to a file or a directory."""
    if args.path == STANDARD and (args.json or sys.stdout.isatty()):
        raise InvalidValue("image export -: stdout is a terminal or used by --json", hint="redirect it, without --json")
    store = Store.open()
    with Progress() as progress:
        exported = export_images(
            store,
            chosen(store, args.images),
            args.path,
            compression=args.compression,
            private=args.private,
            progress=progress.status,
        )
    if args.json:
        print_json(exported)
    else:
        say(f"{len(exported.images)} images, {exported.layers} layers: {human_size(exported.bytes)}")
    return exits.OK


def run_import(args: argparse.Namespace) -> int:
    """Import images."""
    with Progress() as progress:
        images = import_images(
            args.path,
            store=Store.open(),
            name=args.name,
            platform=args.platform or None,
            private=args.private,
            replace=args.replace,
            progress=progress.status,
        )
    if args.json:
        print_json([{"name": image.name, "key": image.key, "layers": image.layers} for image in images])
        return exits.OK
    for image in images:
        losses = image.notes.get("not as in the image", "")
        remark = f"; not as in the file: {losses}" if losses else ""
        put(clean_line(f"{image.name}   {len(image.layers)} layers{remark}"))
    return exits.OK
