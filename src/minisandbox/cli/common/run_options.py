"""Declare and read options of commands that process task sets: ``--backend``, ``--cluster``, and grading options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from minisandbox.cli.common.fields import options_of, read_options
from minisandbox.cli.common.output import Progress, plain, put
from minisandbox.errors import InvalidValue
from minisandbox.grade import GradingOptions
from minisandbox.plugins import plugin_names
from minisandbox.rollouts import ClusterChecks
from minisandbox.rollouts.cluster import Cluster, NodeReport
from minisandbox.types import ENGINES

_NAMESPACES = "sandbox"


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--backend``."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default=_NAMESPACES,
        help="what makes the sandboxes: namespaces (sandbox, the default); podman or docker, to compare with, of this "
        "machine or of DOCKER_HOST; or the backend of another package",
    )


def backend_of(args: argparse.Namespace) -> str:
    """Return the value of :attr:`.ImageSpec.backend` for the chosen backend; "" for a command without the option.

    Raises:
        InvalidValue: there is no such backend, or the command also has ``--cluster``.
    """
    name = getattr(args, "backend", _NAMESPACES)
    if name == _NAMESPACES:
        return ""
    if name not in ENGINES and name not in (plugins := plugin_names("backends", (_NAMESPACES, *ENGINES))):
        raise InvalidValue(f"there is no backend {name!r}", hint=f"use {', '.join((_NAMESPACES, *ENGINES, *plugins))}")
    if args.cluster is not None:
        raise InvalidValue("--backend and --cluster cannot be combined", hint="run it on one machine")
    return str(name)


def backend_config(args: argparse.Namespace) -> dict[str, str]:
    """Return the backend for a run's configuration; empty for the default backend."""
    engine = backend_of(args)
    return {"backend": engine} if engine else {}


def add_cluster_argument(group: argparse._ActionsContainer) -> None:
    """Declare ``--cluster``."""
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on the nodes of a Ray cluster: HOST:PORT of its head, or auto for this machine's cluster. Each "
        "node's own settings bound its rollouts and image builds; other numbers apply per node",
    )


def cluster_checks(args: argparse.Namespace, progress: Progress) -> ClusterChecks | None:
    """Return the object that runs checks on the nodes of ``--cluster``, or None without ``--cluster``."""
    if getattr(args, "cluster", None) is None:
        return None
    return ClusterChecks(Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note), args.workers)


def print_nodes(nodes: Iterable[NodeReport], *, as_json: bool = False) -> None:
    """Print how much work each node did."""
    if as_json:
        put(json.dumps({"nodes": [plain(node) for node in nodes]}), flush=True)
        return
    for node in nodes:
        put(f"node {node.name}: {node.rollouts} done; {node.built} images built")


_GRADING_OPTIONS = options_of(GradingOptions)


def add_grading_arguments(group: argparse._ActionsContainer) -> None:
    """Declare ``--timeout`` and ``--confirm``."""
    for option in _GRADING_OPTIONS:
        option.add(group)


def grading_options(args: argparse.Namespace) -> GradingOptions:
    """Read the options that :func:`add_grading_arguments` declares.

    Raises:
        InvalidValue: a value is invalid.
    """
    try:
        return read_options(GradingOptions, args, _GRADING_OPTIONS)
    except InvalidValue as error:
        raise InvalidValue(f"--{error.what}", hint=error.hint) from error
