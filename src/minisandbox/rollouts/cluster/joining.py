"""Joining a cluster: which one, and how its nodes set up what they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.models import Budget, ModelOptions, open_model
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.fleet import SILENCE, Fleet, NodeReport
from minisandbox.rollouts.cluster.trades import Done, RolloutTrade, Trade
from minisandbox.rollouts.cluster.worker import Terms
from minisandbox.rollouts.database import Packed
from minisandbox.rollouts.setup import Setup

NODE = "{node}"
"""What stands for a node's address in the address of a model's server."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A Ray cluster that does rollouts: for :func:`.run_batch`, :class:`.ClusterRollouts`, :class:`.ClusterChecks`.

    Attributes:
        address: of its head, ``HOST:PORT``; ``auto`` is the one that this machine is a node of. Where this process
            uses Ray already, it is that cluster.
        model: which model each node asks, and how; ``{node}`` in its ``api_base`` is the node's own address. None where
            the setup has no model, or one that can be sent to other processes (pickle).
        api_key: the server's key, where it is this program that made it up; it is sent to the nodes. None: each reads
            its own environment.
        budget: what the batch may spend on it, with what it has spent before.
        mirrors: a directory of git repositories, there on each node, that builds look in.
        silence: seconds without an answer after which a node's unfinished rollouts are done elsewhere too.
        notice: called with what people should know: nodes that come, go and say nothing.
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
        """See that it can be joined from here at all.

        Raises:
            MissingExtra: Ray is not installed.
        """
        from minisandbox.rollouts.cluster.on_ray import import_ray  # noqa: PLC0415 - only clusters need Ray

        import_ray()

    def crew(self, setup: Setup, budgets: Budgets, *, tries: int, pause: float) -> Fleet[Packed]:
        """Join the cluster; returns what does a batch's rollouts.

        Args:
            setup: how rollouts are done.
            budgets: as of :meth:`fleet`.
            tries: the same.
            pause: the same.

        Raises:
            MissingExtra: Ray is not installed.
            HostError: there is no such cluster.
        """
        self._fleet = self.fleet(RolloutTrade(setup, self.budget), setup, budgets, tries=tries, pause=pause)
        return self._fleet

    def fleet(
        self, trade: Trade[Done], setup: Setup, budgets: Budgets, *, tries: int = 3, pause: float = 1.0
    ) -> Fleet[Done]:
        """Join the cluster; returns its nodes, which begin to work when they are run.

        Args:
            trade: what they do.
            setup: how rollouts are done.
            budgets: of each node: ``workers`` and ``builds`` are what the node offers.
            tries: how often a rollout is tried at most, where it fails on our side.
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
        return Fleet(finder, trade, tries=tries, silence=self.silence, notice=self.notice)

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """What each node has done, those that are gone included."""
        return () if self._fleet is None else self._fleet.reports


class _SetupOf:
    """Makes the setup on a node. Clients of models are not sent, but what opens them; keys are usually the node's."""

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
