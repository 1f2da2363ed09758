"""``minisandbox image build --file DOCKERFILE CONTEXT``: build a Dockerfile without a container engine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.builds import Builder
from minisandbox.cli.output import Progress, clean_line, human_seconds, human_size, print_json, put
from minisandbox.errors import InvalidValue
from minisandbox.images import total_size
from minisandbox.store import Store
from minisandbox.types import Network, parse_size

_MOST_SECRET = 500 << 10
"""Bytes (as BuildKit)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what is for Dockerfiles."""
    group = parser.add_argument_group("Dockerfiles", "With --file, TASKS is the build context, a directory.")
    group.add_argument("-f", "--file", type=Path, metavar="DOCKERFILE", help="build this Dockerfile")
    group.add_argument(
        "--build-arg", metavar="NAME=VALUE", action="append", default=[], help="the value of an ARG; NAME alone takes "
        "it from the environment; may be repeated",
    )  # fmt: skip
    group.add_argument("--target", metavar="STAGE", help="the stage to build (default: the last)")
    group.add_argument(
        "--platform", metavar="OS/ARCH", default="", help="such as linux/arm64 (default: this machine's)"
    )
    group.add_argument(
        "--secret", metavar="id=ID,src=FILE", action="append", default=[], help="a secret for RUN --mount=type=secret; "
        "or id=ID,env=NAME; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--network", metavar="host|off|HOST,...", default="host", help="what a RUN reaches: the host's network (the "
        "default), nothing, or the named hosts alone",
    )  # fmt: skip
    group.add_argument("--pull", action="store_true", help="pull base images even if they are there")


def run_build(args: argparse.Namespace) -> int:
    """Build one Dockerfile."""
    from minisandbox.images.dockerfile.building import Options, build_dockerfile  # noqa: PLC0415 - few builds need it

    context = Path(args.tasks)
    jobs = {} if args.jobs is None else {"jobs": args.jobs}
    options = Options(
        arguments=dict(filter(None, map(_argument, args.build_arg))),
        target=args.target,
        platform=args.platform,
        network=_network(args.network),
        secrets=dict(_secret(text) for text in args.secret),
        memory=None if args.memory is None else parse_size(args.memory),
        pull=args.pull,
        **jobs,
    )
    name = args.name or context.resolve().name.lower()
    with Progress() as progress:
        builder = Builder(Store.open(), progress)
        image = build_dockerfile(
            args.file, context, store=builder.store, name=name, options=options, progress=builder.report
        )
    seconds = builder.seconds.get(name, 0.0)
    if args.json:
        facts = {"name": image.name, "key": image.key, "notes": image.notes, "layers": image.layers}
        print_json({**facts, "config": image.config, "bytes": total_size([image]), "built_in": seconds})
        return exits.OK
    took = f"built in {human_seconds(seconds)}" if seconds else "cached"
    put(clean_line(f"{image.name}   {len(image.layers)} layers, {human_size(total_size([image]))}, {took}"))
    if (note := image.notes.get("not as in the image")) is not None:
        put(clean_line(f"not as in the Dockerfile: {note}"))
    return exits.OK


def _argument(text: str) -> tuple[str, str] | None:
    """An argument's name and value; None for one that the environment should have and has not, as docker does."""
    name, equals, value = text.partition("=")
    if not name:
        raise InvalidValue(f"--build-arg {text!r} has no name", hint="write NAME=VALUE")
    if not equals and name not in os.environ:
        return None
    return name, value if equals else os.environ[name]


def _network(text: str) -> Network:
    return Network(text) if text in ("host", "off") else Network.allow(*text.split(","))


def _secret(text: str) -> tuple[str, bytes]:
    fields = dict(part.partition("=")[::2] for part in text.split(","))
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
            content = file.read(_MOST_SECRET + 1)
    except OSError as error:
        raise InvalidValue(f"--secret {identity}: {path} cannot be read", reason=error.strerror) from None
    if len(content) > _MOST_SECRET:
        raise InvalidValue(f"--secret {identity}: {path} has more than {_MOST_SECRET} bytes")
    return identity, content
