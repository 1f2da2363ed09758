"""``minisandbox image pull``: take a container image from a registry, a layout or an archive."""

from __future__ import annotations

import argparse
import time

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Progress,
    add_json_option,
    clean_line,
    human_seconds,
    human_size,
    print_json,
    put,
)
from minisandbox.cli.image.transfer import add_private_option
from minisandbox.images import pull, total_size
from minisandbox.store import Store


def add_pull_options(take: argparse.ArgumentParser) -> None:
    """Declare the options of ``pull``."""
    take.description = (
        "Take a container image into the store, without a container engine. Layers already present are not fetched. "
        "Credentials are those of `podman login` and `docker login`; mirrors and prefixes are those of registries.conf."
    )
    take.add_argument(
        "reference",
        metavar="REF",
        help="[HOST/]NAME[:TAG][@DIGEST], oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:TAG]",
    )
    take.add_argument("--name", help="its name in the store (default: after REF, `python:3.12` is `python-3.12`)")
    take.add_argument("--platform", metavar="OS/ARCH", help="such as linux/arm64 (default: this machine's)")
    add_private_option(take)
    add_json_option(take)
    take.set_defaults(run=run_pull, kept="finished layers and downloads are kept; the same command resumes")


def run_pull(args: argparse.Namespace) -> int:
    """Pull one image."""
    began = time.monotonic()
    with Progress() as progress:
        image = pull(
            args.reference,
            store=Store.open(),
            name=args.name,
            platform=args.platform,
            private=args.private,
            progress=progress.status,
        )
    if args.json:
        facts = {"name": image.name, "key": image.key, "notes": image.notes, "layers": image.layers}
        print_json({**facts, "config": image.config, "bytes": total_size([image])})
        return exits.OK
    took = human_seconds(time.monotonic() - began)
    put(clean_line(f"{image.name}   {len(image.layers)} layers, {human_size(total_size([image]))}, in {took}"))
    for name in ("not as in the image", "user"):
        if name in image.notes:
            put(clean_line(f"{name}: {image.notes[name]}"))
    put()
    put(clean_line(f"run a command in it: minisandbox sandbox run --image {image.name} -- CMD"))
    return exits.OK
