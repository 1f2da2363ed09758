"""``--backend``: what makes the sandboxes of a command."""

from __future__ import annotations

import argparse

from minisandbox.errors import InvalidValue
from minisandbox.plugins import plugin_names
from minisandbox.types import ENGINES

_DEFAULT = "sandbox"


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--backend``."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default=_DEFAULT,
        help="what makes the sandboxes: namespaces (sandbox, the default); podman or docker, to compare with, of this "
        "machine or of DOCKER_HOST; or the backend of another package",
    )


def backend_of(args: argparse.Namespace) -> str:
    """Return the chosen backend as :attr:`.ImageSpec.backend` names it; "" for a command without the option.

    Raises:
        InvalidValue: there is no such backend; or the command runs on a cluster.
    """
    name = getattr(args, "backend", _DEFAULT)
    if name == _DEFAULT:
        return ""
    if name not in ENGINES and name not in (added := plugin_names("backends", (_DEFAULT, *ENGINES))):
        raise InvalidValue(f"there is no backend {name!r}", hint=f"use {', '.join((_DEFAULT, *ENGINES, *added))}")
    if args.cluster is not None:
        raise InvalidValue("--backend and --cluster cannot be combined", hint="run it on one machine")
    return str(name)


def backend_config(args: argparse.Namespace) -> dict[str, str]:
    """Return the backend's part of a run's identity; empty for the default."""
    engine = backend_of(args)
    return {"backend": engine} if engine else {}
