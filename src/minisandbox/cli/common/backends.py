"""``--backend``: what makes the sandboxes of a command."""

from __future__ import annotations

import argparse

from minisandbox.errors import InvalidValue

ENGINES = ("podman", "docker")
_DEFAULT = "sandbox"


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--backend``."""
    parser.add_argument(
        "--backend",
        choices=(_DEFAULT, *ENGINES),
        default=_DEFAULT,
        help="what makes the sandboxes: namespaces (sandbox, the default), or an engine to compare with, of this "
        "machine or of DOCKER_HOST",
    )


def backend_of(args: argparse.Namespace) -> str:
    """Return the chosen backend as :attr:`.ImageSpec.backend` names it; "" for a command without the option.

    Raises:
        InvalidValue: it is an engine, and the command runs on a cluster.
    """
    if getattr(args, "backend", _DEFAULT) == _DEFAULT:
        return ""
    if args.cluster is not None:
        raise InvalidValue("--backend and --cluster cannot be combined", hint="run it on one machine")
    return str(args.backend)


def backend_config(args: argparse.Namespace) -> dict[str, str]:
    """Return the backend's part of a run's identity; empty for the default."""
    engine = backend_of(args)
    return {"backend": engine} if engine else {}
