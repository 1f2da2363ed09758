"""Join a cluster, and set up the workers on its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.models import Budget, ModelOptions, open_model
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.fleet import SILENCE, Fleet, NodeReport
from minisandbox.rollouts.cluster.worker import Terms
from minisandbox.rollouts.cluster.workloads import Done, RolloutWorkload, Workload
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Setup

NODE = "{node}"
"""Placeholder for a node's address in the address of a model's server."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A Ray cluster for :func:`.run_batch`, :class:`.ClusterRollouts`, and :class:`.ClusterChecks`.

    Attributes:
        address: of the head, ``HOST:PORT``; ``auto`` uses the cluster of this machine. If this process uses Ray
            already, its cluster is used.
        model: options of the nodes' model; ``{node}`` in its ``api_base`` is the node's own address. None if the
            setup has no model, or one that can be pickled.
        api_key: the server's key, if this program generated it; it is sent to the nodes. If None, each node reads
            its own environment.
        budget: the batch's budget for the model, including earlier spending.
        mirrors: a directory of git repositories, present on each node, that builds use.
        silence: seconds without an answer after which other nodes repeat a node's unfinished rollouts.
        notice: called with messages for people: nodes that join, leave, or fall silent.
    """

    address: str = "auto"
    model: ModelOptions | None = None
    api_key: str | None = field(default=None, repr=False)
    budget: Budget | None = None
    mirrors: Path | None = None
    silence: float = SILENCE
    notice: Callable[[str], None] | None = None
    _fleet: Fleet[Packed] | None = field(default=None, init=False)

    def check(self) -> None:
        """Check that this process can join clusters.

        Raises:
            MissingExtra: Ray is not installed.
        """
        from minisandbox.rollouts.cluster.on_ray import import_ray  # noqa: PLC0415 - only clusters need Ray

        import_ray()

    def crew(self, setup: Setup, budgets: Budgets, *, tries: int, pause: float) -> Fleet[Packed]:
        """Join the cluster and return the scheduler that runs a batch's rollouts.

        Args:
            setup: the agent, its model, and limits.
            budgets: as for :meth:`fleet`.
            tries: as for :meth:`fleet`.
            pause: as for :meth:`fleet`.

        Raises:
            MissingExtra: Ray is not installed.
            HostError: there is no such cluster.
        """
        self._fleet = self.fleet(RolloutWorkload(setup, self.budget), setup, budgets, tries=tries, pause=pause)
        return self._fleet

    def fleet(
        self, workload: Workload[Done], setup: Setup, budgets: Budgets, *, tries: int = 3, pause: float = 1.0
    ) -> Fleet[Done]:
        """Join the cluster and return its scheduler, which starts workers once it runs.

        Args:
            workload: the kind of work.
            setup: the agent, its model, and limits.
            budgets: concurrency limits of each node, which sets ``workers`` and ``builds`` itself.
            tries: most tries of a rollout, repeated after infrastructure errors.
            pause: seconds before the second try.

        Raises:
            MissingExtra: Ray is not installed.
            HostError: there is no such cluster.
        """
        from minisandbox.rollouts.cluster.on_ray import RayNodes  # noqa: PLC0415 - only clusters need Ray

        usual = Budgets()
        terms = Terms(
            setup_of=_SetupOf(setup, self.model, self.budget, self.api_key),
            starts=None if budgets.starts == usual.starts else budgets.starts,
            gradings=None if budgets.gradings == usual.gradings else budgets.gradings,
            warm=budgets.warm,
            tries=tries,
            pause=pause,
            mirrors=self.mirrors,
        )
        finder = RayNodes(self.address, terms)
        return Fleet(finder, workload, tries=tries, silence=self.silence, notice=self.notice)

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes, including lost ones."""
        return () if self._fleet is None else self._fleet.reports


class _SetupOf:
    """Makes the setup on a node. Model options are sent instead of clients; keys usually come from the node."""

    def __init__(self, setup: Setup, model: ModelOptions | None, budget: Budget | None, key: str | None) -> None:
        self._values = {one.name: getattr(setup, one.name) for one in dataclasses.fields(setup)}
        self._options, self._key = model, key
        self._spent = (0, 0.0) if budget is None else (budget.spent_tokens, budget.spent_dollars)
        if model is not None:
            self._values["model"] = None

    def __call__(self, node: str) -> Setup:
        if self._options is None:
            return Setup(**self._values)
        base = self._options.api_base
        options = dataclasses.replace(self._options, api_base=base and base.replace(NODE, _host(node)))
        budget = options.budget()
        budget.charge(*self._spent)
        return Setup(**{**self._values, "model": open_model(options, budget, self._key)})


def _host(node: str) -> str:
    return f"[{node}]" if ":" in node else node
