"""Configure rollouts: the agent, the model, and limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from minisandbox.agents import Agent, AgentLimits, CommandAgent
from minisandbox.errors import InvalidValue
from minisandbox.grade import ONCE, confirmed_share
from minisandbox.models import Model, Sampling
from minisandbox.models.protocol import SeededModel
from minisandbox.rollouts.grades import KnownGrades
from minisandbox.tasks import Task
from minisandbox.trajectories.codec import to_json
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Building, Image

ImageOf: TypeAlias = "Callable[[Task], Image]"
"""A function that returns a task's image; called concurrently in several threads."""

ImagesOf: TypeAlias = "Callable[[Sequence[Task], int], Building]"
"""A function that starts to build the images of tasks with the given number of parallel steps, and returns at once."""

DEADLINE = 7200.0
"""The default time in seconds after which an agent is stopped."""
_GRACE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The configuration of rollouts.

    Attributes:
        agent: the agent; one object serves all rollouts.
        model: the agent's model; None for agents without a model.
        sampling: the sampling options of the model.
        agent_limits: the limits of each rollout's agent. Reaching a limit is no error: the submission is graded.
        limits: resource limits of each sandbox, the agent's and the grader's.
        timeout: time limit of the tests in seconds; None for each task's own limit.
        confirm: how passes are confirmed: ``once``, ``always`` or ``share(P)`` (:class:`.GradingOptions`).
        deadline: seconds after which the agent is stopped in any case; its submission is still graded.
        configuration: the agent's configuration, stored with each trajectory.
        turn_patches: whether to record the workspace's changes after each turn of an agent with a model.
        grades: the cache that shares grades among equal submissions, for deterministic tests; None grades each
            submission.
    """

    agent: Agent
    model: Model | None = None
    sampling: Sampling = field(default_factory=Sampling)
    agent_limits: AgentLimits = field(default_factory=AgentLimits)
    limits: Limits | None = None
    timeout: float | None = None
    confirm: str = ONCE
    deadline: float = DEADLINE
    configuration: Mapping[str, object] = field(default_factory=dict)
    turn_patches: bool = True
    grades: KnownGrades | None = None

    def __post_init__(self) -> None:
        """Check the values, and that an agent that needs a model has a model."""
        if self.agent.needs_model and self.model is None:
            raise InvalidValue(
                f"the agent {self.agent.name!r} needs a model", hint="give one: --model NAME --api-base URL"
            )
        confirmed_share(self.confirm)
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"{name} is {value!r}", hint="give a number of seconds above 0")
        for name, table in (("sampling", self.sampling_table()), ("configuration", dict(self.configuration))):
            try:
                json.dumps(to_json(table), allow_nan=False)
            except (TypeError, ValueError) as error:  # fail now, not at the end of the first rollout
                raise InvalidValue(
                    f"the {name} cannot be stored with a trajectory: {error}", hint="use values that JSON supports"
                ) from None

    @property
    def model_name(self) -> str:
        """The model's name; empty without a model."""
        return "" if self.model is None else self.model.name

    @property
    def seconds(self) -> float:
        """Seconds after which the agent is stopped. The session enforces the agent's time limit a little earlier."""
        return min(self.deadline, (self.agent_limits.seconds or self.deadline) + _GRACE)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the model to a command-line agent while the block runs; other agents need no server."""
        if isinstance(self.agent, CommandAgent) and self.model is not None:
            async with self.agent.serving(self.model):
                yield
        else:
            yield

    def sampling_table(self) -> dict[str, object]:
        """Return the sampling options as a trajectory stores them; empty without a model."""
        return {} if self.model is None else dataclasses.asdict(self.sampling) | {"stop": list(self.sampling.stop)}


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling options of a single rollout.

    Attributes:
        sampling: replaces the sampling options of the setup.
        seed: the seed from which the seeds of the rollout's responses are derived; None uses the seed of ``sampling``.
    """

    sampling: Sampling
    seed: int | None = None

    def of(self, setup: Setup) -> Setup:
        """Return a copy of a setup with these sampling options."""
        model = setup.model if setup.model is None or self.seed is None else SeededModel(setup.model, self.seed)
        return dataclasses.replace(setup, model=model, sampling=self.sampling)
