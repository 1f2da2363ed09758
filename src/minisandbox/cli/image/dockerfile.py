"""``minisandbox image build --file DOCKERFILE CONTEXT``: build a Dockerfile without a container engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from minisandbox.cli.image.pull import add_platform_option
from minisandbox.errors import InvalidValue
from minisandbox.spec import Buildable
from minisandbox.store import Store
from minisandbox.types import Network

_MAX_SECRET = 500 << 10
"""Maximum bytes of a secret, the same as in BuildKit."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for Dockerfiles."""
    group = parser.add_argument_group("Dockerfiles", "With --file, TASKS is the build context, a directory.")
    group.add_argument("-f", "--file", type=Path, metavar="DOCKERFILE", help="build this Dockerfile")
    group.add_argument(
        "--build-arg", metavar="NAME=VALUE", action="append", default=[], help="the value of an ARG; NAME alone takes "
        "it from the environment; may be repeated",
    )  # fmt: skip
    group.add_argument("--target", metavar="STAGE", help="the stage to build (default: the last)")
    add_platform_option(group)
    group.add_argument(
        "--secret", metavar="id=ID,src=FILE", action="append", default=[], help="a secret for RUN --mount=type=secret; "
        "or id=ID,env=NAME; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--network", metavar="host|off|HOST,...", default="host", help="what a RUN reaches: the host's network (the "
        "default), nothing, or the named hosts alone",
    )  # fmt: skip


def recipes(args: argparse.Namespace, store: Store) -> dict[str, Callable[[], Buildable]]:
    """Return the image's name, and a function that reads the Dockerfile's recipe."""
    from minisandbox.images import read_dockerfile  # noqa: PLC0415 - only Dockerfiles need it
    from minisandbox.images.dockerfile.evaluation import BuildOptions  # noqa: PLC0415 - only Dockerfiles need it

    context = Path(args.tasks)
    options = BuildOptions(
        target=args.target,
        arguments=dict(filter(None, map(_argument, args.build_arg))),
        platform=args.platform,
        network=_network(args.network),
        secrets=dict(_secret(text) for text in args.secret),
    )
    name = args.name or context.resolve().name.lower()
    return {name: lambda: read_dockerfile(args.file, context, store=store, options=options)}


def _argument(text: str) -> tuple[str, str] | None:
    """Parse ``NAME=VALUE``, or ``NAME`` for a variable of the environment; return None for an unset variable."""
    name, equals, value = text.partition("=")
    if not name:
        raise InvalidValue(f"--build-arg {text!r} has no name", hint="write NAME=VALUE")
    if not equals and name not in os.environ:
        return None
    return name, value if equals else os.environ[name]


def _network(text: str) -> Network:
    return Network(text) if text in ("host", "off") else Network.allow(*text.split(","))


def _secret(text: str) -> tuple[str, bytes]:
    fields = dict(field.partition("=")[::2] for field in text.split(","))
    identity = fields.get("id", "")
    if not identity or fields.keys() - {"id", "src", "source", "env", "type"}:
        raise InvalidValue(f"--secret {text!r} is malformed", hint="write id=ID,src=FILE or id=ID,env=NAME")
    if "env" in fields:
        if fields["env"] not in os.environ:
            raise InvalidValue(f"--secret {identity}: there is no variable {fields['env']}")
        return identity, os.environb[os.fsencode(fields["env"])]
    path = Path(fields.get("src") or fields.get("source") or identity)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET + 1)
    except OSError as error:
        raise InvalidValue(f"--secret {identity}: {path} cannot be read", reason=error.strerror) from None
    if len(content) > _MAX_SECRET:
        raise InvalidValue(f"--secret {identity}: {path} has more than {_MAX_SECRET} bytes")
    return identity, content
