"""Joining a cluster: which one, and how its nodes set up what they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.models import Budget, ModelOptions, open_model
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.cluster.fleet import SILENCE, Fleet, NodeReport
from minisandbox.rollouts.cluster.worker import Terms
from minisandbox.rollouts.setup import Setup

NODE = "{node}"
"""What stands for a node's address in the address of a model's server."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A Ray cluster that does a batch's rollouts: for :func:`.run_batch`. Used for one batch.

    Attributes:
        address: of its head, ``HOST:PORT``; ``auto`` is the one that this machine is a node of. Where this process
            uses Ray already, it is that cluster.
        model: which model each node asks, and how; ``{node}`` in its ``api_base`` is the node's own address. None where
            the setup has no model, or one that can be sent to other processes (pickle).
        budget: what the batch may spend on it, with what it has spent before.
        mirrors: a directory of git repositories, there on each node, that builds look in.
        silence: seconds without an answer after which a node's unfinished rollouts are done elsewhere too.
        notice: called with what people should know: nodes that come, go and say nothing.
    """

    address: str = "auto"
    model: ModelOptions | None = None
    budget: Budget | None = None
    mirrors: Path | None = None
    silence: float = SILENCE
    notice: Callable[[str], None] | None = None
    _fleet: Fleet | None = field(default=None, init=False)

    def crew(self, setup: Setup, budgets: Budgets, *, tries: int, pause: float) -> Fleet:
        """Join the cluster; returns what does a batch's rollouts.

        Args:
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
            setup_of=_SetupOf(setup, self.model, self.budget),
            starts=None if budgets.starts == usual.starts else budgets.starts,
            gradings=None if budgets.gradings == usual.gradings else budgets.gradings,
            warm=budgets.warm,
            tries=tries,
            pause=pause,
            mirrors=self.mirrors,
        )
        finder = RayNodes(self.address, terms)
        self._fleet = Fleet(finder, setup, tries=tries, silence=self.silence, budget=self.budget, notice=self.notice)
        return self._fleet

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """What each node has done, those that are gone included."""
        return () if self._fleet is None else self._fleet.reports


class _SetupOf:
    """Makes the setup on a node. Clients of models are not sent, but what opens them; keys are the node's own."""

    def __init__(self, setup: Setup, model: ModelOptions | None, budget: Budget | None) -> None:
        self._values = {one.name: getattr(setup, one.name) for one in dataclasses.fields(setup)}
        self._options = model
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
        return Setup(**{**self._values, "model": open_model(options, budget)})


def _host(node: str) -> str:
    return f"[{node}]" if ":" in node else node
