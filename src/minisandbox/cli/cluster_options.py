"""``--cluster``, and what nodes have done, as printed: for every command that nodes of a cluster can do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from minisandbox.cli.output import human_size, plain, put
from minisandbox.rollouts.cluster import NodeReport


def add_cluster_argument(group: argparse._ActionsContainer) -> None:
    """Declare ``--cluster``."""
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="let the nodes of a Ray cluster do it: HOST:PORT of its head, or auto for the one that this machine is "
        "in. Rollouts at once and images built at once are what each node offers; other numbers are for each node",
    )


def print_nodes(nodes: Iterable[NodeReport], *, as_json: bool = False) -> None:
    """Print what each node has done, and what went from one to the other."""
    if as_json:
        put(json.dumps({"nodes": [plain(one) for one in nodes]}), flush=True)
        return
    for one in nodes:
        twice = sum(count > 1 for count in one.layers.values())
        came = f"{len(one.layers)} layers ({twice} of them twice), {human_size(one.bytes)}"
        put(
            f"node {one.name}: {one.rollouts} done; {one.built} images made or found there; {one.fetched} came "
            f"from others, with {came}, {human_size(one.wire)} on the wire"
        )
