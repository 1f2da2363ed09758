"""``--cluster``, and reports of a cluster's nodes: for every command that can run on a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from minisandbox.cli.common.output import Progress, plain, put
from minisandbox.rollouts.cluster import Cluster, ClusterChecks, NodeReport
from minisandbox.types import human_size


def add_cluster_argument(group: argparse._ActionsContainer) -> None:
    """Declare ``--cluster``."""
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="run on the nodes of a Ray cluster: HOST:PORT of its head, or auto for this machine's cluster. Each "
        "node's own settings bound its rollouts and image builds; other numbers apply per node",
    )


def cluster_checks(args: argparse.Namespace, progress: Progress) -> ClusterChecks | None:
    """Return the checks that ``--cluster`` runs on its nodes, or None for this machine."""
    if getattr(args, "cluster", None) is None:
        return None
    return ClusterChecks(Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note), args.workers)


def print_nodes(nodes: Iterable[NodeReport], *, as_json: bool = False) -> None:
    """Print the work of each node, and the transfers between nodes."""
    if as_json:
        put(json.dumps({"nodes": [plain(node) for node in nodes]}), flush=True)
        return
    for node in nodes:
        twice = sum(count > 1 for count in node.layers.values())
        received = f"{len(node.layers)} layers ({twice} more than once), {human_size(node.bytes)}"
        put(
            f"node {node.name}: {node.rollouts} done; {node.built} images built or present; {node.fetched} received "
            f"from other nodes: {received}, {human_size(node.wire)} transferred"
        )
