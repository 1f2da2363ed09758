"""Connect the driver to the nodes of a Ray cluster, by an actor on each node that runs the worker.

An actor is a process that Ray starts. It exits with the driver's Ray job, or when the driver has been silent for too
long. The kernel then kills the actor's sandboxes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from minisandbox import __version__
from minisandbox.errors import HostError, MiniSandboxError, MissingExtra, NodeLost
from minisandbox.models import Budget, ModelOptions, open_model
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.driver import SILENCE, Driver, NodeReport
from minisandbox.rollouts.cluster.node import Order, Report, Resources, Status, Terms, Worker
from minisandbox.rollouts.setup import Setup
from minisandbox.store import Store

Row: TypeAlias = Mapping[str, Any]
"""A node, as listed by Ray."""
NODE = "{node}"
"""Placeholder for a node's address in the URL of the model's server."""
NAMESPACE = "minisandbox"
SANDBOXES, BUILDS = "sandboxes", "build_slots"
"""Names of the custom Ray resources that nodes offer."""
LEASE = 120
"""Seconds without a call from the driver after which an actor exits, counted only while the actor runs."""
_STARTING = 240.0
_ANSWER = 5.0
_ID = 12  # the length of a prefix that identifies a node's id
_VERSIONS = f"MiniSandbox {__version__} on Python {platform.python_version()}"


def import_ray() -> ModuleType:
    """Import Ray and return it.

    Raises:
        MissingExtra: Ray is not installed.
    """
    # by default, Ray reports usage statistics over the network; users opt in by setting this variable
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # if there is a token, a head requires tokens, but nodes and drivers send theirs only in this mode (Ray 2.60)
    if _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray  # noqa: PLC0415 - only clusters need it
    except ImportError as error:
        raise MissingExtra(
            "a cluster needs Ray, which is not installed", hint="pip install 'swe-minisandbox[ray]', on each node"
        ) from error
    module: ModuleType = ray
    return module


def _has_token() -> bool:
    """Return whether an authentication token exists in a place that Ray searches."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
    except (OSError, RuntimeError):  # the home directory is missing or not accessible
        return False


def ray_error(failure: str, error: BaseException, hint: str) -> HostError:
    """Convert Ray's exception from starting or joining a cluster to a MiniSandbox error.

    Args:
        failure: what failed.
        error: Ray's exception.
        hint: what to do, unless the cluster rejects this machine's token.
    """
    chain: list[BaseException] = [error]
    while origin := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(origin)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if any("uthentication token" in str(cause) for cause in chain):
        reason = "the head asks for its own token, and this user's is missing or differs"
        hint = (
            "copy the head's ~/.ray/auth_token to this user's home, or name a copy by RAY_AUTH_TOKEN_PATH; "
            "RAY_AUTH_MODE=disabled starts a head that asks for none"
        )
    return HostError(failure, reason=reason, hint=hint)


def connect(address: str) -> bool:
    """Join a cluster. Return False if this process has already joined a cluster.

    Args:
        address: ``HOST:PORT`` of the cluster's head; ``auto`` uses the cluster of this machine.

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
    """Return the resources of a node in Ray's list, or None if the node is lost or offers no sandboxes."""
    resources = node["Resources"]
    if not node["Alive"] or resources.get(SANDBOXES, 0) < 1:
        return None
    return Resources(int(resources[SANDBOXES]), max(1, int(resources.get(BUILDS, 1))))


class NodeActor:
    """The actor that Ray runs on a node. It forwards calls to the worker, and returns MiniSandbox errors as values.

    Args:
        name: the node's address.
        resources: the node's resources.
        terms: options of the worker.
    """

    def __init__(self, name: str, resources: Resources, terms: Terms) -> None:
        self._arguments = (name, resources, terms)
        self._silent = 0

    async def hello(self) -> tuple[str, int, frozenset[str], MiniSandboxError | None]:
        """Start the worker; return versions, the maximum of concurrent jobs, the store's images, and any error."""
        name, resources, terms = self._arguments
        try:
            worker = self._worker = Worker(name, resources, terms, Store.open())
        except MiniSandboxError as error:
            return _VERSIONS, 0, frozenset(), _portable(error)
        self._watching = asyncio.ensure_future(self._watch())
        return _VERSIONS, worker.capacity, frozenset(worker.images()), None

    async def exchange(self, order: Order) -> Report:
        """Pass an order to the worker, and return the worker's report (:meth:`.Worker.exchange`)."""
        self._silent = 0
        report = await self._worker.exchange(order)
        errors = {name: error if error is None else _portable(error) for name, error in report.built.items()}
        return dataclasses.replace(report, built=errors, fault=report.fault and _portable(report.fault))

    async def wake(self) -> None:
        """Make a pending :meth:`exchange` return at once (:meth:`.Worker.wake`)."""
        await self._worker.wake()

    async def status(self) -> Status:
        """Return the worker's status."""
        return self._worker.status()

    async def _watch(self) -> None:
        """Publish metrics, and exit if the driver is gone and Ray has not noticed."""
        from ray.util.metrics import Gauge  # noqa: PLC0415 - only clusters need it

        tags = {"node": self._arguments[0]}
        rollouts = Gauge("minisandbox_rollouts", "Rollouts of a node, by stage.", ("node", "stage"))
        images = Gauge("minisandbox_images", "Images in a node's store.", ("node",))
        remaining = Gauge("minisandbox_left", "Rollouts that a batch has not finished yet, on all nodes.", ("node",))
        while self._silent < LEASE:
            status = self._worker.status()
            for stage, count in status.stages.items():
                rollouts.set(count, {**tags, "stage": stage})
            images.set(status.images, tags)
            remaining.set(status.remaining, tags)
            await asyncio.sleep(1)
            self._silent += 1
        os._exit(1)


def _portable(error: MiniSandboxError) -> MiniSandboxError:
    """Return an error that another process can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - these bytes are trusted.
    except Exception:  # noqa: BLE001 - pickling may raise any exception
        return MiniSandboxError(error.what, reason=error.reason, hint=error.hint)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


async def _call(method: Any, *values: object) -> Any:
    """Call a method of an actor.

    Raises:
        NodeLost: the actor or its node is lost.
    """
    from ray import exceptions  # noqa: PLC0415 - only clusters need it

    try:
        return await method.remote(*values)
    except exceptions.RayTaskError:  # a bug in MiniSandbox on the node
        raise
    except exceptions.RayError as error:
        raise NodeLost("a node is lost", reason=str(error).splitlines()[0]) from error


@dataclass(eq=False, slots=True)
class RayNode:
    """A connection to a node through its actor."""

    name: str
    resources: Resources
    capacity: int
    images: frozenset[str]
    actor: Any

    async def exchange(self, order: Order) -> Report:
        """Send an order to the node, and return the node's report (:meth:`.Worker.exchange`)."""
        report: Report = await _call(self.actor.exchange, order)
        return report

    async def wake(self) -> None:
        """Make a pending :meth:`exchange` return at once (:meth:`.Worker.wake`)."""
        await _call(self.actor.wake)

    async def close(self) -> None:
        """Kill the actor; the kernel then kills its sandboxes."""
        ray = import_ray()
        with suppress(ray.exceptions.RayError, ValueError):  # the actor has exited already
            await asyncio.to_thread(ray.kill, self.actor)


async def statuses(nodes: list[Row]) -> dict[str, list[Status]]:
    """Request the status of the actors of all batches, and return the responses by node id."""
    ray = import_ray()
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    reports: dict[str, list[Status]] = {node["NodeID"]: [] for node in nodes}
    for name in names:
        try:
            status = await asyncio.wait_for(_call(ray.get_actor(name, NAMESPACE).status), _ANSWER)
        except (ValueError, TimeoutError, MiniSandboxError):  # the actor has exited, or does not respond
            continue
        for node_id, statuses_of_node in reports.items():
            if node_id[:_ID] in name:
                statuses_of_node.append(status)
    return reports


class RayNodes:
    """The nodes of a Ray cluster.

    Args:
        address: the address of the cluster's head, or ``auto``.
        terms: options of the workers.

    Raises:
        MissingExtra: Ray is not installed.
        HostError: there is no such cluster.
    """

    def __init__(self, address: str, terms: Terms) -> None:
        self._ray = import_ray()
        self._joined = connect(address)
        self._terms = terms
        self._actor = self._ray.remote(NodeActor)  # once, because Ray pickles a class for each of its wrappers
        self._present: dict[str, tuple[str, Resources]] = {}

    async def ids(self) -> set[str]:
        """Return the ids of the nodes that offer sandboxes."""
        try:
            nodes = await asyncio.to_thread(self._ray.nodes)
        except self._ray.exceptions.RayError as error:
            raise NodeLost("the cluster's head does not answer", reason=str(error)) from error
        offers = {node["NodeID"]: (node["NodeManagerAddress"], offered(node)) for node in nodes}
        self._present = {key: (name, resources) for key, (name, resources) in offers.items() if resources is not None}
        return set(self._present)

    async def start_worker(self, node_id: str) -> RayNode:
        """Start a worker on a node.

        Raises:
            MiniSandboxError: the worker does not start.
        """
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 - only clusters need it
            NodeAffinitySchedulingStrategy,
        )

        name, resources = self._present[node_id]
        job = self._ray.get_runtime_context().get_job_id()
        remote = self._actor.options(
            num_cpus=0,
            resources={SANDBOXES: resources.sandboxes},
            max_concurrency=16,
            max_restarts=0,
            name=f"{NAMESPACE}-{job}-{node_id[:_ID]}-{os.urandom(3).hex()}",
            namespace=NAMESPACE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        actor = remote.remote(name, resources, self._terms)
        try:
            versions, capacity, images, fault = await asyncio.wait_for(actor.hello.remote(), _STARTING)
        except TimeoutError:
            self._ray.kill(actor)
            raise HostError(f"node {name} does not start its worker", reason="another run uses its sandboxes") from None
        except self._ray.exceptions.RayError as error:
            raise NodeLost(f"node {name} does not start its worker", reason=str(error).strip()[-500:]) from error
        if fault is not None or versions != _VERSIONS:
            self._ray.kill(actor)
            raise (
                fault.about(f"node {name}")
                if fault is not None
                else HostError(f"node {name} has {versions}, not {_VERSIONS}", hint="install the same on each node")
            )
        return RayNode(name, resources, capacity, images, actor)

    async def close(self) -> None:
        """Leave the cluster if this object joined it."""
        if self._joined:
            await asyncio.to_thread(self._ray.shutdown)


# --- the cluster -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A Ray cluster for :func:`.run_batch`, :class:`.RolloutThread`, and :class:`.ClusterChecks`.

    Attributes:
        address: ``HOST:PORT`` of the cluster's head; ``auto`` uses the cluster of this machine. If this process has
            already joined a Ray cluster, that cluster is used.
        model: options from which each node opens its model; ``{node}`` in ``api_base`` stands for the node's address.
            None if the setup has no model, or a model that can be pickled.
        api_key: the API key of the model's server, to send to the nodes if this program generated the key. If
            None, each node reads the key from its environment.
        budget: the batch's budget for the model, including the amount that is already spent.
        mirrors: a directory of git repositories, present on each node, that builds use.
        silence: seconds without a response after which other nodes repeat a node's unfinished jobs.
        notice: called with messages for the user: nodes that join, leave, or fall silent.
    """

    address: str = "auto"
    model: ModelOptions | None = None
    api_key: str | None = field(default=None, repr=False)
    budget: Budget | None = None
    mirrors: Path | None = None
    silence: float = SILENCE
    notice: Callable[[str], None] | None = None
    _driver: Driver | None = field(default=None, init=False)

    def check(self) -> None:
        """Check that Ray is installed, so that this process can join clusters.

        Raises:
            MissingExtra: Ray is not installed.
        """
        import_ray()

    def crew(
        self, setup: Setup, budgets: Budgets, *, tries: int = 3, pause: float = 1.0, checks: bool = False
    ) -> Driver:
        """Join the cluster, and return a driver, which starts workers on the nodes when it runs.

        Args:
            setup: the agent, its model, and limits.
            budgets: concurrency limits per node, except ``workers`` and ``builds``, which the node sets.
            tries: maximum tries of a rollout on a node; infrastructure errors are retried.
            pause: seconds before the second try.
            checks: whether the nodes run checks instead of rollouts.

        Raises:
            MissingExtra: Ray is not installed.
            HostError: there is no such cluster.
        """
        # a model given by its options is opened on each node
        values = {option.name: getattr(setup, option.name) for option in dataclasses.fields(setup)}
        values["model"] = setup.model if self.model is None else None
        spent = (0, 0.0) if self.budget is None else (self.budget.spent_tokens, self.budget.spent_dollars)
        default = Budgets()
        chosen = {name: getattr(budgets, name) for name in ("starts", "gradings")}
        terms = Terms(
            setup_of=partial(_open_setup, values, self.model, spent, self.api_key),
            checks=checks,
            limits={name: limit for name, limit in chosen.items() if limit != getattr(default, name)},
            tries=tries,
            pause=pause,
            mirrors=self.mirrors,
        )
        finder = RayNodes(self.address, terms)
        self._driver = Driver(finder, setup, budget=self.budget, silence=self.silence, notice=self.notice)
        return self._driver

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost nodes."""
        return () if self._driver is None else self._driver.reports


def _open_setup(
    values: Mapping[str, Any], options: ModelOptions | None, spent: tuple[int, float], api_key: str | None, node: str
) -> Setup:
    """Create the setup on a node. The API key usually comes from the node's environment."""
    if options is None:
        return Setup(**values)
    host = f"[{node}]" if ":" in node else node
    options = dataclasses.replace(options, api_base=options.api_base and options.api_base.replace(NODE, host))
    budget = options.budget()
    budget.charge(*spent)
    return Setup(**{**values, "model": open_model(options, budget, api_key)})
