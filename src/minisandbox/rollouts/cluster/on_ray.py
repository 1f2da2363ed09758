"""Ray's part: an actor on each node holds a worker, and the driver calls it.

An actor is a process of Ray's. It ends with the driver's job, or when the driver has been silent for too long; the
kernel then ends its sandboxes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from minisandbox import __version__
from minisandbox.errors import HostError, MiniSandboxError, MissingExtra, NodeLost, StoreError
from minisandbox.pool import Job as Check
from minisandbox.rollouts.cluster.node import Checked, Moved, Node, Resources, Status
from minisandbox.rollouts.cluster.worker import Terms, Worker
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Draw
from minisandbox.store import Store
from minisandbox.store.blobs.kept import LayerBlob
from minisandbox.tasks import Task

Row: TypeAlias = Mapping[str, Any]
"""A node, as listed by Ray."""
NAMESPACE = "minisandbox"
SANDBOXES, BUILDS, IO = "sandboxes", "build_slots", "io_budget"
"""Ray's names of the resources that nodes offer."""
LEASE = 120
"""Seconds of the driver's silence after which an actor ends, counted only while the actor runs."""
_STARTING = 240.0
_ANSWER = 5.0
_ID = 12  # characters of a node's id that make it unique
_VERSIONS = f"MiniSandbox {__version__} on Python {platform.python_version()}"


def import_ray() -> ModuleType:
    """Import Ray and return it.

    Raises:
        MissingExtra: Ray is not installed.
    """
    # Ray reports its use over the network by default; users who want that set the variable
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if _has_token():  # a head then asks for tokens, but nodes and drivers send theirs only in this mode (Ray 2.60)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray  # noqa: PLC0415 - only clusters need it
    except ImportError as error:
        raise MissingExtra(
            "a cluster needs Ray, which is not installed", hint="pip install 'swe-minisandbox[ray]', on each node"
        ) from error
    found: ModuleType = ray
    return found


def _has_token() -> bool:
    """Return whether Ray finds a token where it looks for one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
    except (OSError, RuntimeError):  # there is no home directory, or another user's
        return False


def ray_error(what: str, error: BaseException, hint: str) -> HostError:
    """Return our error for one of Ray's that kept this machine from starting or joining a cluster.

    Args:
        what: what failed.
        error: Ray's exception.
        hint: what to do, unless the cluster rejects this machine's token.
    """
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if any("uthentication token" in str(one) for one in chain):
        reason = "the head asks for its own token, and this user's is missing or differs"
        hint = (
            "copy the head's ~/.ray/auth_token to this user's home, or name a copy by RAY_AUTH_TOKEN_PATH; "
            "RAY_AUTH_MODE=disabled starts a head that asks for none"
        )
    return HostError(what, reason=reason, hint=hint)


def connect(address: str) -> bool:
    """Join a cluster; return False if this process had joined one already.

    Args:
        address: of the head, ``HOST:PORT``; ``auto`` uses the cluster of this machine.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster, or this machine is not one of its nodes.
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
        hint = (
            "run minisandbox cluster head here, or minisandbox cluster worker --address HOST:PORT: the driver's "
            "machine must be a node, which may offer no sandboxes"
        )
        raise ray_error(f"cannot join a cluster at {address}", error, hint) from error
    return True


def own_address() -> str:
    """Return this machine's address for other nodes of the joined cluster."""
    return str(import_ray().util.get_node_ip_address())


def offered(node: Row) -> Resources | None:
    """Return the resources of a node in Ray's list; None if it is lost or offers no sandboxes."""
    found = node["Resources"]
    if not node["Alive"] or found.get(SANDBOXES, 0) < 1:
        return None
    return Resources(int(found[SANDBOXES]), max(1, int(found.get(BUILDS, 1))), found.get(IO) or None)


class NodeActor:
    """The actor that Ray runs on a node. It forwards calls to the worker, and returns our errors as values.

    Args:
        name: the node's address.
        resources: the node's resources.
        terms: options of the worker.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms) -> None:
        self._made = (name, resources, terms)
        self._worker: Worker | None = None
        self._silent = 0

    async def hello(self) -> tuple[str, dict[str, str] | MiniSandboxError]:
        """Start the worker; return versions, and the store's images or an error."""
        name, resources, terms = self._made
        try:
            worker = self._worker = Worker(name, resources, terms, Store.open())
            self._watching = asyncio.ensure_future(self._watch())
            return _VERSIONS, worker.known()
        except MiniSandboxError as error:
            return _VERSIONS, _portable(error)

    async def call(self, method: str, *values: object) -> tuple[bool, object]:
        """Call a method of the worker; return True and its result, or False and its error."""
        assert self._worker is not None
        if method == "heartbeat":
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
        """Publish metrics, and end this process if the driver has gone without Ray noticing."""
        from ray.util.metrics import Gauge  # noqa: PLC0415 - only clusters need it

        assert self._worker is not None
        where = {"node": self._made[0]}
        rollouts = Gauge("minisandbox_rollouts", "Rollouts of a node, by stage.", ("node", "stage"))
        others = {
            name: Gauge(f"minisandbox_{name}", text, ("node",))
            for name, text in (
                ("images", "Images in a node's store."),
                ("sending", "Image transfers from a node in progress."),
                ("came", "Uncompressed bytes that a node received from other nodes."),
                ("left", "Rollouts that the driver of a node's batch has not stored yet."),
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
    """Return an error that another process can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return MiniSandboxError(error.what, reason=error.reason, hint=error.hint)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


async def _asked(actor: Any, method: str, *values: object) -> Any:
    """Call a worker's method through its actor.

    Raises:
        NodeLost: the actor or its node is lost.
        MiniSandboxError: the method raised it.
    """
    errors = import_ray().exceptions
    try:
        fine, value = await actor.call.remote(method, *values)
    except errors.RayTaskError:  # a bug in our own code on the node
        raise
    except errors.RayError as error:
        raise NodeLost("a node is lost", reason=str(error).splitlines()[0]) from error
    if not fine:
        raise value
    return value


class _RaySource:
    """Another node's worker, from which an image is fetched."""

    def __init__(self, where: str, actor: object) -> None:
        self._where, self._actor = where, actor

    async def copy(self, name: str) -> bytes:
        return bytes(await self._call("copy", name))

    async def blob(self, key: str) -> LayerBlob:
        found: LayerBlob = await self._call("blob", key)
        return found

    async def read(self, digest: str, offset: int) -> bytes:
        return bytes(await self._call("read", digest, offset))

    async def _call(self, method: str, *values: object) -> Any:
        try:
            return await _asked(self._actor, method, *values)
        except NodeLost as error:
            raise StoreError(f"{self._where} is lost", reason=error.reason, hint="the fetch is retried") from error


class RayNode:
    """A node, reached through its actor."""

    def __init__(self, name: str, resources: Resources, images: Mapping[str, str], actor: Any) -> None:
        self.name, self.resources, self.images, self.actor = name, resources, images, actor

    async def build(self, task: Task) -> str:
        """Call :meth:`.Worker.build`."""
        return str(await _asked(self.actor, "build", task))

    async def fetch(self, task: Task, source: Node) -> Moved:
        """Call :meth:`.Worker.fetch`."""
        assert isinstance(source, RayNode)
        where = f"node {source.name}"
        found: Moved = await _asked(self.actor, "fetch", task.instance_id, where, source.actor)
        return found

    async def rollout(self, task: Task, attempt: int, waited: float, draw: Draw | None) -> Packed | None:
        """Call :meth:`.Worker.rollout`."""
        found: Packed | None = await _asked(self.actor, "rollout", task, attempt, waited, draw)
        return found

    async def check(self, task: Task, check: Check[Task], known: str | None) -> Checked | None:
        """Call :meth:`.Worker.check`."""
        found: Checked | None = await _asked(self.actor, "check", task, check, known)
        return found

    async def return_jobs(self, most: int) -> None:
        """Call :meth:`.Worker.return_jobs`."""
        await _asked(self.actor, "return_jobs", most)

    async def heartbeat(self, left: int) -> Status:
        """Call :meth:`.Worker.heartbeat`."""
        found: Status = await _asked(self.actor, "heartbeat", left)
        return found

    async def close(self) -> None:
        """End the actor, and with it the node's work."""
        ray = import_ray()
        with suppress(ray.exceptions.RayError, ValueError):  # it has ended already
            await asyncio.to_thread(ray.kill, self.actor)


async def statuses(nodes: list[Row]) -> dict[str, list[Status]]:
    """Ask the actors of all batches for their status; return the answers by node id."""
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
        address: of the head, or ``auto``.
        terms: options of the workers.

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

    async def start_worker(self, one: str) -> RayNode:
        """Start a worker on a node.

        Raises:
            MiniSandboxError: the worker does not start.
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
            versions, images = await asyncio.wait_for(actor.hello.remote(), _STARTING)
        except TimeoutError:
            self._ray.kill(actor)
            raise HostError(f"node {name} does not start its worker", reason="another run uses its sandboxes") from None
        except self._ray.exceptions.RayError as error:
            raise NodeLost(f"node {name} does not start its worker", reason=str(error).strip()[-500:]) from error
        if isinstance(images, MiniSandboxError) or versions != _VERSIONS:
            self._ray.kill(actor)
            raise (
                images.about(f"node {name}")
                if isinstance(images, MiniSandboxError)
                else HostError(f"node {name} has {versions}, not {_VERSIONS}", hint="install the same on each node")
            )
        return RayNode(name, resources, images, actor)

    async def close(self) -> None:
        """Leave the cluster if this object joined it."""
        if self._joined:
            await asyncio.to_thread(self._ray.shutdown)
