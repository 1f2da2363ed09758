"""``minisandbox cluster``: start, join, list and stop the Ray nodes that run rollouts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, print_table, put
from minisandbox.errors import InvalidValue
from minisandbox.rollouts.cluster.joining import (
    BUILDS,
    SANDBOXES,
    Row,
    connect,
    import_ray,
    offered,
    ray_error,
    statuses,
)
from minisandbox.rollouts.cluster.node import Status

PORT = 6379
_OBJECT_STORE = 256 << 20  # bytes of Ray's object store, which holds the records of recently finished rollouts


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    nouns = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    head = nouns.add_parser("head", help="start a cluster on this machine, as `ray start --head`")
    head.add_argument("--port", type=int, default=PORT, help=f"the port that nodes connect to (default: {PORT})")
    _add_node_options(head)
    head.set_defaults(run=run_head)
    worker = nouns.add_parser("worker", help="join a cluster with this machine, as `ray start --address`")
    worker.add_argument("--address", required=True, metavar="HOST:PORT", help="the cluster's head")
    _add_node_options(worker)
    worker.set_defaults(run=run_worker)
    status = nouns.add_parser("status", help="list the nodes and their work")
    status.add_argument("--address", default="auto", metavar="HOST:PORT", help="the head (default: this machine's)")
    add_json_option(status)
    status.set_defaults(run=run_status)
    stop = nouns.add_parser("stop", help="stop Ray on this machine, as `ray stop`")
    stop.set_defaults(run=run_stop)


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node-ip", metavar="ADDRESS", help="this machine's address for the other nodes")
    parser.add_argument(
        "--sandboxes", type=int, metavar="N", default=4 * (os.cpu_count() or 1),
        help="rollouts at once (default: four per CPU); 0 for a node that runs only the driver",
    )  # fmt: skip
    parser.add_argument("--build-slots", type=int, metavar="N", default=1, help="image builds at once (default: 1)")
    parser.add_argument("--block", action="store_true", help="stay in the foreground; the node ends with this command")
    parser.epilog = "Arguments after -- are passed to `ray start` unchanged."


def start_command(args: argparse.Namespace, *cluster_options: str) -> list[str]:
    """Return the arguments of `ray` that start a node.

    Args:
        args: the options that :func:`configure` declares.
        cluster_options: the options of `ray start` that choose the cluster.

    Raises:
        InvalidValue: a number is out of range.
    """
    if args.sandboxes < 0 or args.build_slots < 1:
        raise InvalidValue("--sandboxes or --build-slots is out of range", hint="give a positive number")
    resources: dict[str, float] = {BUILDS: args.build_slots}
    if args.sandboxes:
        resources[SANDBOXES] = args.sandboxes
    return [
        "start", *cluster_options, "--resources", json.dumps(resources),
        *(("--node-ip-address", args.node_ip) if args.node_ip else ()),
        *(("--block",) if args.block else ()),
        *(() if any(word.startswith("--object-store-memory") for word in args.rest)
          else ("--object-store-memory", str(_OBJECT_STORE))),
        "--disable-usage-stats", *args.rest,
    ]  # fmt: skip


def run_head(args: argparse.Namespace) -> int:
    """Start a cluster."""
    return _start(
        start_command(args, "--head", "--port", str(args.port)), f"cannot start a cluster at port {args.port}"
    )


def run_worker(args: argparse.Namespace) -> int:
    """Join a cluster."""
    return _start(start_command(args, "--address", args.address), f"cannot join a cluster at {args.address}")


def run_stop(_: argparse.Namespace) -> int:
    """Stop Ray on this machine."""
    import_ray()
    return subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop"], check=False).returncode


def _start(arguments: list[str], failure: str) -> int:
    """Run Ray's command in this process, so that its exceptions can be reported without a traceback."""
    ray = import_ray()
    from ray.scripts.scripts import cli  # noqa: PLC0415 - Ray is an optional package

    try:
        cli.main(arguments, prog_name="ray")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else exits.OK
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ray_error(failure, error, "check the address, and whether a cluster runs there already") from error
    return exits.OK


def run_status(args: argparse.Namespace) -> int:
    """Print the nodes that offer sandboxes."""
    connect(args.address)
    nodes = [node for node in import_ray().nodes() if offered(node) is not None]
    reports = asyncio.run(statuses(nodes))
    rows = [_row(node, reports[node["NodeID"]]) for node in nodes]
    if args.json:
        print_json(rows)
        return exits.OK
    titles = ("node", "sandboxes", "build slots", "batches", "queued", "live", "grading", "images", "left")
    print_table(
        titles,
        [["none" if value is None else str(value) for value in row.values()] for row in rows],
        numbers={*titles} - {"node"},
        unwrapped=["node"],
    )
    if not rows:
        put("no node offers sandboxes; run `minisandbox cluster worker --address HOST:PORT` on each")
    return exits.OK


def _row(node: Row, reports: list[Status]) -> dict[str, object]:
    offer = offered(node)
    assert offer is not None

    def total(*stages: str) -> int:
        return sum(report.stages.get(stage, 0) for report in reports for stage in stages)

    return {
        "node": node["NodeManagerAddress"],
        "sandboxes": offer.sandboxes,
        "build_slots": offer.builds,
        "batches": len(reports),
        "queued": total("queued"),
        "live": total("sandbox", "agent"),
        "grading": total("grade"),
        "images": max((report.images for report in reports), default=None),
        "left": sum(report.remaining for report in reports),
    }
