"""``minisandbox image pins``: print the packages of an image as pins, from which other images can be built."""

from __future__ import annotations

import argparse

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, print_json, put, say
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.images import Image, load_image, lock_of, pull, python_environments
from minisandbox.images.image import is_reference
from minisandbox.images.python.installed import choose
from minisandbox.store import Store


def add_pins_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pins``."""
    parser.description = (
        "Print the interpreter and the distributions of a Python environment of an image, in the format of `conda env "
        "export`. Nothing of the image runs. A container image that is not in the store is pulled."
    )
    parser.add_argument("image", metavar="IMAGE", help="a name in the store, or a reference as for `image pull`")
    parser.add_argument(
        "--environment",
        metavar="PATH",
        default="",
        help="the environment's path in the image, or its last part (default: the one that its commands use)",
    )
    parser.add_argument("--lock", action="store_true", help="print the lock of an image built here: files with hashes")
    add_json_option(parser)
    parser.set_defaults(run=run_pins)


def run_pins(args: argparse.Namespace) -> int:
    """Print the pins or the lock of an image."""
    image = _image(args.image)
    if args.lock:
        return _print_lock(image, args)
    paths = [args.environment.rstrip("/")] if args.environment.startswith("/") else []
    environments = python_environments(image, *paths)
    environment = choose(image, environments, args.environment)
    if args.json:
        print_json(environment)
    else:
        put(environment.to_yaml(), end="")
    others = [f"{e.path} (Python {e.python}, {len(e.pins)} pins)" for e in environments if e is not environment]
    if others and not args.environment:
        say(f"{environment.path} of {image.name}; --environment chooses another: {', '.join(others)}")
    return exits.OK


def _print_lock(image: Image, args: argparse.Namespace) -> int:
    if args.environment or image.own_root:
        reason = "only an image that was built here has one" if image.own_root else "it is of the whole image"
        raise InvalidValue("--lock prints no lock of that", reason=reason, hint="leave out --lock")
    lock = lock_of(image.name, image.records())
    if args.json:
        print_json(lock)
    else:
        put(lock.to_toml(), end="")
    return exits.OK


def _image(name: str) -> Image:
    store = Store.open()
    try:
        return load_image(store, name)
    except NotFound:
        if not is_reference(name):
            raise
    with Progress() as progress:
        return pull(name, store=store, progress=progress.status)
