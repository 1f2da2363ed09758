"""Ray's part: an actor on each node holds a worker, and the driver calls it.

An actor is Ray's process on a node. It ends with the driver's job, or by itself when it has not heard of the driver for
long; the kernel then ends its sandboxes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeAlias

from minisandbox import __version__
from minisandbox.errors import HostError, MiniSandboxError, MissingExtra, NodeLost, StoreError
from minisandbox.grade.resumable import Job as Check
from minisandbox.rollouts.cluster.node import Checked, Moved, Node, Resources, Status
from minisandbox.rollouts.cluster.worker import Terms, Worker
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.store import ImageRecord, Store
from minisandbox.tasks import Task

Row: TypeAlias = Mapping[str, Any]
"""A node as Ray lists it."""
NAMESPACE = "minisandbox"
SANDBOXES, BUILDS, IO = "sandboxes", "build_slots", "io_budget"
"""What nodes offer, as Ray knows it."""
LEASE = 120
"""Seconds without a word of the driver after which a node's actor ends, counted while it runs itself."""
_HIRING = 240.0
_ANSWER = 5.0
_ID = 12  # characters of a node's id that tell it from others
_VERSIONS = f"MiniSandbox {__version__} on Python {platform.python_version()}"


def import_ray() -> ModuleType:
    """Return Ray.

    Raises:
        MissingExtra: it is not installed.
    """
    # Ray tells of its use by default; whoever wants that says so.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # noqa: PLC0415 - only clusters need it
    except ImportError as error:
        raise MissingExtra(
            "clusters need Ray, which is not installed", hint="pip install 'swe-minisandbox[ray]', on each node"
        ) from error
    found: ModuleType = ray
    return found


def connect(address: str) -> bool:
    """Join a cluster; returns whether this process was in none before.

    Args:
        address: of its head, ``HOST:PORT``; ``auto`` is the one that this machine is a node of.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster, or this machine is no node of it.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False,
            logging_level="error", include_dashboard=None,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise HostError(
            f"no cluster at {address}",
            reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="minisandbox cluster head here, or minisandbox cluster worker --address HOST:PORT: the driver's "
            "machine is a node too; it may offer no sandboxes",
        ) from error
    return True


def own_address() -> str:
    """Return what other nodes of the cluster that was joined reach this machine by."""
    return str(import_ray().util.get_node_ip_address())


def offered(node: Row) -> Resources | None:
    """Return what a node offers, as Ray lists it; None for one that is gone, or offers no sandboxes."""
    found = node["Resources"]
    if not node["Alive"] or found.get(SANDBOXES, 0) < 1:
        return None
    return Resources(int(found[SANDBOXES]), max(1, int(found.get(BUILDS, 1))), found.get(IO) or None)


class NodeActor:
    """What Ray runs on a node. Its one method carries the worker's: errors of ours are values, not Ray's.

    Args:
        name: the node's address.
        resources: what it offers.
        terms: how rollouts are done.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms) -> None:
        self._made = (name, resources, terms)
        self._worker: Worker | None = None
        self._silent = 0

    async def hello(self) -> tuple[str, dict[str, str] | MiniSandboxError]:
        """Begin to work; returns versions, and what images are there or why nothing works."""
        name, resources, terms = self._made
        try:
            worker = self._worker = Worker(name, resources, terms, Store.open())
            self._watching = asyncio.ensure_future(self._watch())
            return _VERSIONS, worker.known()
        except MiniSandboxError as error:
            return _VERSIONS, _portable(error)

    async def call(self, method: str, *values: object) -> tuple[bool, object]:
        """Call a method of the worker; returns whether it went well, and its result or error."""
        assert self._worker is not None
        if method == "beat":
            self._silent = 0
        if method == "fetch":
            name, where, handle = values
            values = (name, where, _RaySource(str(where), handle))
        try:
            found = getattr(self._worker, method)(*values)
            return True, await found if asyncio.iscoroutine(found) else found
        except MiniSandboxError as error:
            return False, _portable(error)

    async def _watch(self) -> None:
        """End this process where the driver has gone without Ray's noticing."""
        from ray.util.metrics import Gauge  # noqa: PLC0415 - only clusters need it

        assert self._worker is not None
        where = {"node": self._made[0]}
        rollouts = Gauge("minisandbox_rollouts", "Rollouts of a node, by where they are.", ("node", "stage"))
        others = {
            name: Gauge(f"minisandbox_{name}", text, ("node",))
            for name, text in (
                ("images", "Images in a node's store."),
                ("sending", "Parts of images on their way out of a node."),
                ("came", "Bytes of contents that came to a node from others."),
                ("left", "Rollouts that the driver of a node's batch has not kept yet."),
            )
        }
        while self._silent < LEASE:
            status = self._worker.status()
            for stage, count in status.stages.items():
                rollouts.set(count, {**where, "stage": stage})
            for name, gauge in others.items():
                gauge.set(getattr(status, name), where)
            await asyncio.sleep(1)
            self._silent += 1
        os._exit(1)


def _portable(error: MiniSandboxError) -> MiniSandboxError:
    """An error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever it is that cannot be sent
        return MiniSandboxError(error.what, reason=error.reason, hint=error.hint)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


async def _asked(actor: Any, method: str, *values: object) -> Any:
    """Call a worker's method through its actor.

    Raises:
        NodeLost: the actor or its node has gone.
        MiniSandboxError: what the method raised.
    """
    errors = import_ray().exceptions
    try:
        fine, value = await actor.call.remote(method, *values)
    except errors.RayTaskError:  # a mistake in our own code there
        raise
    except errors.RayError as error:
        raise NodeLost("a node is lost", reason=str(error).splitlines()[0]) from error
    if not fine:
        raise value
    return value


class _RaySource:
    """Another node's worker, for one that takes an image over."""

    def __init__(self, where: str, actor: object) -> None:
        self._where, self._actor = where, actor

    async def record(self, name: str) -> ImageRecord:
        found: ImageRecord = await self._call("record", name)
        return found

    async def send(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> int:
        return int(await self._call("send", name, keys, contents))

    async def read(self, number: int) -> bytes:
        return bytes(await self._call("read", number))

    async def _call(self, method: str, *values: object) -> Any:
        try:
            return await _asked(self._actor, method, *values)
        except NodeLost as error:
            raise StoreError(f"{self._where} has gone", reason=error.reason, hint="it is tried again") from error


class RayNode:
    """A node, by its actor."""

    def __init__(self, name: str, resources: Resources, images: Mapping[str, str], actor: Any) -> None:
        self.name, self.resources, self.images, self.actor = name, resources, images, actor

    async def build(self, task: Task) -> str:
        """As :meth:`.Worker.build`."""
        return str(await _asked(self.actor, "build", task))

    async def fetch(self, task: Task, source: Node) -> Moved:
        """As :meth:`.Worker.fetch`."""
        assert isinstance(source, RayNode)
        where = f"node {source.name}"
        found: Moved = await _asked(self.actor, "fetch", task.instance_id, where, source.actor)
        return found

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None) -> Packed | None:
        """As :meth:`.Worker.rollout`."""
        found: Packed | None = await _asked(self.actor, "rollout", task, attempt, waited, draw)
        return found

    async def check(self, task: Task, check: Check, known: str | None) -> Checked | None:
        """As :meth:`.Worker.check`."""
        found: Checked | None = await _asked(self.actor, "check", task, check, known)
        return found

    async def give_back(self, most: int) -> None:
        """As :meth:`.Worker.give_back`."""
        await _asked(self.actor, "give_back", most)

    async def beat(self, left: int) -> Status:
        """As :meth:`.Worker.beat`."""
        found: Status = await _asked(self.actor, "beat", left)
        return found

    async def close(self) -> None:
        """End the actor, and with it what works there."""
        ray = import_ray()
        with suppress(ray.exceptions.RayError, ValueError):  # it has gone already
            await asyncio.to_thread(ray.kill, self.actor)


async def statuses(nodes: list[Row]) -> dict[str, list[Status]]:
    """Ask all actors of all batches how their nodes are; returns what they say, by the beginning of the node's id."""
    ray = import_ray()
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    found: dict[str, list[Status]] = {node["NodeID"]: [] for node in nodes}
    for name in names:
        try:
            status = await asyncio.wait_for(_asked(ray.get_actor(name, NAMESPACE), "status"), _ANSWER)
        except (ValueError, TimeoutError, MiniSandboxError):  # it has just ended, or does not answer
            continue
        for node, known in found.items():
            if node[:_ID] in name:
                known.append(status)
    return found


class RayNodes:
    """The nodes of a Ray cluster.

    Args:
        address: of its head, or ``auto``.
        terms: how rollouts are done on each.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster.
    """

    def __init__(self, address: str, terms: Terms) -> None:
        self._ray = import_ray()
        self._joined = connect(address)
        self._terms = terms
        self._there: dict[str, tuple[str, Resources]] = {}

    async def ids(self) -> set[str]:
        """Return the ids of the nodes that offer sandboxes."""
        try:
            nodes = await asyncio.to_thread(self._ray.nodes)
        except self._ray.exceptions.RayError as error:
            raise NodeLost("the cluster's head does not answer", reason=str(error)) from error
        found = {node["NodeID"]: (node["NodeManagerAddress"], offered(node)) for node in nodes}
        self._there = {one: (name, offer) for one, (name, offer) in found.items() if offer is not None}
        return set(self._there)

    async def hire(self, one: str) -> RayNode:
        """Have a node work for us.

        Raises:
            MiniSandboxError: it does not.
        """
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 - only clusters need it
            NodeAffinitySchedulingStrategy,
        )

        name, resources = self._there[one]
        job = self._ray.get_runtime_context().get_job_id()
        kind = self._ray.remote(NodeActor).options(
            num_cpus=0,
            resources={SANDBOXES: resources.sandboxes},
            max_concurrency=4 * resources.sandboxes + 256,
            max_restarts=0,
            name=f"{NAMESPACE}-{job}-{one[:_ID]}-{os.urandom(3).hex()}",
            namespace=NAMESPACE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(one, soft=False),
        )
        actor = kind.remote(name, resources, self._terms)
        try:
            versions, images = await asyncio.wait_for(actor.hello.remote(), _HIRING)
        except TimeoutError:
            self._ray.kill(actor)
            raise HostError(
                f"node {name} does not begin to work", reason="its sandboxes are in use by another run"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise NodeLost(f"node {name} does not begin to work", reason=str(error).strip()[-500:]) from error
        if isinstance(images, MiniSandboxError) or versions != _VERSIONS:
            self._ray.kill(actor)
            raise (
                images.about(f"node {name}")
                if isinstance(images, MiniSandboxError)
                else HostError(f"node {name} has {versions}, not {_VERSIONS}", hint="install the same on each node")
            )
        return RayNode(name, resources, images, actor)

    async def close(self) -> None:
        """Leave the cluster, if we joined it."""
        if self._joined:
            await asyncio.to_thread(self._ray.shutdown)
