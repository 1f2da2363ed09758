"""``minisandbox image``: declare the verbs, and import the module of a verb only when it is called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

VERBS = {
    "build": ("build", "build the images of tasks, of a recipe or of a Dockerfile"),
    "pull": ("pull", "take container images from registries, OCI layouts or archives"),
    "ls": ("listing", "list images with their sizes, ages and uses"),
    "show": ("listing", "print an image's layers and environment variables"),
    "pins": ("pins", "print what is installed in an image, for --pins and requirements_file"),
    "verify": ("verifying", "find damaged layers, and quarantine them"),
    "rm": ("removal", "remove images, and the layers that only they use"),
    "gc": ("removal", "remove unused layers and leftovers; by age or size, images too"),
    "push": ("transfer", "push an image to a registry"),
    "export": ("transfer", "write images as an OCI archive or layout"),
    "import": ("transfer", "import images from an OCI archive or layout, or from `docker save`"),
}
"""Module and help line of each verb; the module has a function ``add_VERB_options``."""


def configure(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add the verbs to the parser, and the options of the verb in ``arguments``; import no module of other verbs.

    Args:
        parser: the noun's parser.
        arguments: the command line.
    """
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb, (name, summary) in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=summary)
        if verb in arguments:
            module = importlib.import_module(f"minisandbox.cli.image.{name}")
            add_options = getattr(module, f"add_{verb}_options")
            takes_arguments = verb in ("build", "pull", "push")
            add_options(verb_parser, arguments) if takes_arguments else add_options(verb_parser)
