"""How rollouts are done: who works, with what model, within which bounds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from minisandbox.agents import Agent, AgentLimits
from minisandbox.errors import InvalidValue
from minisandbox.models import Model, Sampling
from minisandbox.models.seeding import SeededModel
from minisandbox.rollouts.grades import KnownGrades
from minisandbox.tasks import Task
from minisandbox.trajectories.codec import to_json
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Building, Image

ImageOf: TypeAlias = "Callable[[Task], Image]"
"""Returns a task's image; several threads may call it at once."""

ImagesOf: TypeAlias = "Callable[[Sequence[Task], int], Building]"
"""Begins to make the images of tasks together, so many steps at once; returns at once."""

DEADLINE = 7200.0
"""Seconds after which an agent is cut off, whatever it waits for."""
_GRACE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How rollouts are done.

    Attributes:
        agent: who works; one serves all rollouts.
        model: what it asks; None for agents that ask nothing.
        sampling: how the model's answers are drawn.
        agent_limits: what each rollout's agent may take. Reaching one is its own ending, and is graded.
        limits: what each of the two sandboxes of a rollout may use.
        timeout: seconds the tests may take; each task's own if None.
        deadline: seconds after which the agent is cut off, whatever it waits for; it is graded then.
        configuration: the agent's own, kept with each trajectory.
        grades: what equal submissions share, where the tasks' tests always do the same; each is graded if None.
    """

    agent: Agent
    model: Model | None = None
    sampling: Sampling = field(default_factory=Sampling)
    agent_limits: AgentLimits = field(default_factory=AgentLimits)
    limits: Limits | None = None
    timeout: float | None = None
    deadline: float = DEADLINE
    configuration: Mapping[str, object] = field(default_factory=dict)
    grades: KnownGrades | None = None

    def __post_init__(self) -> None:
        """Check that what belongs together is there."""
        if self.agent.needs_model and self.model is None:
            raise InvalidValue(
                f"the agent {self.agent.name!r} asks a model, and none is given", hint="--model NAME --api-base URL"
            )
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"{name} is {value!r}", hint="give more than 0 seconds")
        for name, table in (("sampling", self.sampling_table()), ("configuration", dict(self.configuration))):
            try:
                json.dumps(to_json(table), allow_nan=False)
            except (TypeError, ValueError) as error:  # it would be found out when the first rollout is written
                raise InvalidValue(
                    f"the {name} cannot be kept with a trajectory: {error}", hint="give what JSON can hold"
                ) from None

    @property
    def model_name(self) -> str:
        """What the model is called; empty for none."""
        return "" if self.model is None else self.model.name

    @property
    def seconds(self) -> float:
        """Seconds after which the agent is cut off; a session that keeps to its limit ends before."""
        return min(self.deadline, (self.agent_limits.seconds or self.deadline) + _GRACE)

    def sampling_table(self) -> dict[str, object]:
        """How answers are drawn, as a trajectory has it; empty without a model."""
        return {} if self.model is None else dataclasses.asdict(self.sampling) | {"stop": list(self.sampling.stop)}


@dataclass(frozen=True, slots=True)
class Draw:
    """How the answers of one rollout are drawn, where that is its own.

    Attributes:
        sampling: in place of the setup's.
        seed: of all of its answers; None: the sampling says.
    """

    sampling: Sampling
    seed: int | None = None

    def of(self, setup: Setup) -> Setup:
        """Return a setup with it."""
        model = setup.model if setup.model is None or self.seed is None else SeededModel(setup.model, self.seed)
        return dataclasses.replace(setup, model=model, sampling=self.sampling)
