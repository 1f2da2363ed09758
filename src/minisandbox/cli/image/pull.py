"""``minisandbox image pull``: pull container images from registries, OCI layouts and archives."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Progress,
    add_json_option,
    clean_line,
    human_seconds,
    print_json,
    print_table,
    put,
    raise_failures,
    require_positive,
)
from minisandbox.errors import InvalidValue
from minisandbox.images import Image, pull, total_size
from minisandbox.images.oci.manifest import own_platform, parse_platform
from minisandbox.images.oci.pull import JOBS
from minisandbox.store import Store
from minisandbox.values import human_size

if TYPE_CHECKING:
    from minisandbox.spec import OciBase

_OF_ONE = {"--json", "--name", "--platform", "--private"}
"""Options of a pull of one image, which needs no code that reads task sets."""


def add_pull_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Declare the options of ``pull``; leave out those for task sets if ``arguments`` only pull one image."""
    parser.description = (
        "Take container images into the store, without a container engine. Layers already present are not fetched. "
        "Credentials are those of `podman login` and `docker login`; mirrors and prefixes are those of registries.conf."
    )
    parser.add_argument(
        "references",
        metavar="REF",
        nargs="*",
        help="[HOST/]NAME[:TAG][@DIGEST], oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:TAG]",
    )
    parser.add_argument("--name", help="its name in the store (default: after REF, `python:3.12` is `python-3.12`)")
    add_platform_option(parser)
    add_private_option(parser)
    many = parser.add_argument_group(
        "Many images", "Images of a list or a task set that the store has are not asked for again: the command resumes."
    )
    many.add_argument("--from", metavar="FILE", dest="list", help="references, one a line; - is stdin, # a comment")
    many.add_argument(
        "--set", metavar="REF", help="the images of a set in a registry (`image push`); --only chooses some"
    )
    many.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="with --set, the directory for the files that travel with it"
    )
    many.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"images pulled at once (default: {JOBS})")
    options = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if options - _OF_ONE or len(arguments) < len(("image", "pull", "REF")):
        from minisandbox.cli.common.task_sets import add_tasks_option  # noqa: PLC0415 - slow to import

        add_tasks_option(parser)
    add_json_option(parser)
    parser.set_defaults(
        run=run_pull, tasks=None, kept="finished layers and downloads are kept; the same command resumes"
    )


def add_platform_option(group: argparse._ActionsContainer) -> None:
    """Declare ``--platform``; "" stands for this machine's platform."""
    help_text = "such as linux/arm64 (default: this machine's)"
    group.add_argument("--platform", metavar="OS/ARCH", default="", help=help_text)


def add_private_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--private`` for verbs that read images from elsewhere."""
    parser.add_argument(
        "--private",
        action="store_true",
        help="also take copies that --private wrote: later builds use their layers, so trust their author",
    )


def run_pull(args: argparse.Namespace) -> int:
    """Pull images; a failure does not stop the other pulls, and the first failure sets the exit status."""
    require_positive(args, "jobs")
    if len(args.references) == 1 and args.list is args.tasks is args.set is None:
        return _pull_one(args)
    if args.set is not None:
        return _pull_set(args)
    arguments = list(_bases(args.references, args))
    listed = list(_listed(args))
    if not arguments and not listed:
        raise InvalidValue("there is no image to pull", hint="give REF, --from FILE, --tasks TASKS or --set REF")
    if args.name or args.private:
        raise InvalidValue("--name and --private are for one image", hint="leave them out, or pull one REF")
    from minisandbox.cli.common.builds import Builder  # noqa: PLC0415 - slow: imports all that builds images

    store = Store.open()
    with Progress() as progress:
        builder = Builder(store, progress)
        result = builder.pull([*arguments, *listed], jobs=args.jobs, again=arguments)
    _print_images([*result.images.values()], args)
    raise_failures({base.reference: error for base, error in result.failures.items()}, "images")
    return exits.OK


def _pull_set(args: argparse.Namespace) -> int:
    from minisandbox.cli.common.builds import Builder  # noqa: PLC0415 - slow: imports all that builds images
    from minisandbox.images.oci.sets import fetch_files, pull_set, read_set  # noqa: PLC0415 - slow: loads an HTTP client

    if args.references or args.list or args.tasks or args.name or args.platform:
        raise InvalidValue("--set cannot be combined with other images", hint="leave out all but --only, --private, -o")
    store, index = Store.open(), read_set(args.set)
    with Progress() as progress:
        builder = Builder(store, progress)
        result = pull_set(
            index,
            store=store,
            only=args.only,
            private=args.private,
            jobs=args.jobs,
            progress=builder.report,
            on_remaining=builder.report_remaining,
            note=progress.note,
        )
        files = [] if args.out is None else fetch_files(index, args.out)
    _print_images([*result.images.values()], args)
    if not args.json:
        put(f"{index.reference}@{index.digest}" + "".join(f"\n{path}" for path in files))
    raise_failures({base.reference: error for base, error in result.failures.items()}, "images")
    return exits.OK


def _bases(references: Iterable[str], args: argparse.Namespace) -> Iterator[OciBase]:
    from minisandbox.spec import OciBase  # noqa: PLC0415 - slow to import

    return (OciBase(reference, args.platform) for reference in references)


def _listed(args: argparse.Namespace) -> Iterator[OciBase]:
    """Yield the images that the list and the tasks name."""
    lines = [] if args.list is None else _lines(args.list)
    yield from _bases(filter(None, (line.partition("#")[0].strip() for line in lines)), args)
    if args.tasks is None:
        return
    from minisandbox.cli.common.task_sets import load  # noqa: PLC0415 - slow to import
    from minisandbox.images.dockerfile.reading import base_images  # noqa: PLC0415 - slow: imports a Dockerfile parser

    bases = [base for task in load(args) for base in base_images(task.recipe())]
    if not bases:
        raise InvalidValue(
            f"no task of {args.tasks} names a container image", hint="`minisandbox image build` builds their images"
        )
    yield from (replace(base, platform=base.platform or args.platform) for base in bases)


def _lines(name: str) -> list[str]:
    try:
        return (sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"--from {name} cannot be read", reason=str(error), hint="one reference a line") from None


def _pull_one(args: argparse.Namespace) -> int:
    began = time.monotonic()
    [reference], platform = args.references, args.platform or None
    with Progress() as progress:
        image = pull(
            reference,
            store=Store.open(),
            name=args.name,
            platform=platform,
            private=args.private,
            progress=progress.status,
        )
    if args.json:
        print_json(_facts(image))
        return exits.OK
    duration = human_seconds(time.monotonic() - began)
    put(clean_line(f"{image.name}   {len(image.layers)} layers, {human_size(total_size([image]))}, in {duration}"))
    for line in _remarks(image):
        put(clean_line(line))
    put()
    put(clean_line(f"run a command in it: minisandbox sandbox run --image {image.name} -- CMD"))
    return exits.OK


def _remarks(image: Image) -> Iterator[str]:
    """Yield warnings about an image: lost properties, its user, an untried platform."""
    yield from (f"{name}: {image.notes[name]}" for name in ("not as in the image", "user") if name in image.notes)
    platform = parse_platform(image.notes.get("platform", str(own_platform())))  # private copies may lack the note
    if not platform.is_tried:
        foreign = "" if platform.fits(own_platform()) else "; its programs do not run here without emulation"
        yield f"platform: {platform}, which is untried{foreign}"


def _facts(image: Image) -> dict[str, object]:
    facts = {"name": image.name, "key": image.key, "notes": image.notes, "layers": image.layers}
    return {**facts, "config": image.config, "bytes": total_size([image])}


def _print_images(images: Sequence[Image], args: argparse.Namespace) -> None:
    if args.json:
        print_json([_facts(image) for image in images])
        return
    rows = [
        (image.name, str(len(image.layers)), human_size(total_size([image])), image.notes.get("reference", ""))
        for image in images
    ]
    titles = ("image", "layers", "size", "reference")
    if rows:
        print_table(titles, rows, numbers=("layers", "size"), unwrapped=titles)
    put(f"\n{len(images)} images, {human_size(total_size(images))} in total")
    for line in dict.fromkeys(line for image in images for line in _remarks(image)):
        put(clean_line(line))
