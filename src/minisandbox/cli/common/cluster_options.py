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
    """Return the checks that ``--cluster`` runs on its nodes; None for this machine."""
    if args.cluster is None:
        return None
    return ClusterChecks(Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note), args.workers)


def print_nodes(nodes: Iterable[NodeReport], *, as_json: bool = False) -> None:
    """Print the work of each node, and the transfers between nodes."""
    if as_json:
        put(json.dumps({"nodes": [plain(one) for one in nodes]}), flush=True)
        return
    for one in nodes:
        twice = sum(count > 1 for count in one.layers.values())
        came = f"{len(one.layers)} layers ({twice} more than once), {human_size(one.bytes)}"
        put(
            f"node {one.name}: {one.rollouts} done; {one.built} images built or present; {one.fetched} received "
            f"from other nodes: {came}, {human_size(one.wire)} transferred"
        )
