"""Convert the rollouts of a training step to SkyRL's output: rows of exact tokens, in the order of the prompts.

A rollout has one row, unless its agent forks or summarises the history (:class:`.TokenGraph`). Each sampled token
carries loss in exactly one row. SkyRL calls these rows steps, and computes a group's baseline from the last row of each
rollout. A rollout with an infrastructure error carries no loss. It gets the mean reward of the other rollouts in its
group, so that it does not change the baseline.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from minisandbox.models import TokenRow
from minisandbox.rollouts import EXIT_CONTEXT
from minisandbox.trajectories import Trajectory


class RolloutName(Protocol):
    """The attributes of SkyRL's ``TrajectoryID`` that this module uses."""

    @property
    def instance_id(self) -> str:
        """The id of the prompt, which is equal for all rollouts of a group."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a requested rollout.

    Attributes:
        name: the rollout's name in SkyRL.
        trajectory: the rollout's record; None if the rollout did not end in time.
        unconfirmed: the reward of an unconfirmed pass; None for no reward.
    """

    name: RolloutName
    trajectory: Trajectory | None
    unconfirmed: float | None = None

    @property
    def reward(self) -> float | None:
        """The reward; None after an infrastructure error or unconfirmed pass."""
        return None if self.trajectory is None else self.trajectory.reward_or(self.unconfirmed)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether all tests passed but the pass could not be confirmed."""
        return self.trajectory is not None and self.trajectory.unconfirmed

    @property
    def rows(self) -> tuple[TokenRow, ...]:
        """The rows that carry loss; empty if the rollout has no reward."""
        if self.trajectory is None or self.reward is None:
            return ()
        return tuple(row for row in self.trajectory.rows if any(row.mask))

    @property
    def truncated(self) -> bool:
        """Whether the last response was truncated, or the context had no space for another response."""
        trajectory = self.trajectory
        return trajectory is not None and (
            EXIT_CONTEXT in trajectory.exit_status
            or bool(trajectory.turns and trajectory.turns[-1].finish_reason == "length")
        )

    @property
    def seconds(self) -> float:
        """The duration of the rollout in seconds."""
        return 0.0 if self.trajectory is None else self.trajectory.timings.total


class _Columns:
    """The lists of a ``GeneratorOutput``, with one entry per row."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.responses: list[list[int]] = []
        self.rewards: list[float] = []
        self.masks: list[list[int]] = []
        self.stops: list[str] = []
        self.logprobs: list[list[float]] = []
        self.names: list[RolloutName] = []
        self.times: list[float] = []
        self.lasts: list[bool] = []

    def add(self, rollout: Ended, reward: float, pad: int) -> None:
        """Add the rows of a rollout; a rollout without rows becomes one row without loss."""
        stop = "length" if rollout.truncated else "stop"
        rows = [_parts(row) for row in rollout.rows] or [([pad], [pad], [0], [0.0])]
        for number, (prompt, response, mask, logprobs) in enumerate(rows, 1):
            self.prompts.append(prompt)
            self.responses.append(response)
            self.masks.append(mask)
            self.logprobs.append(logprobs)
            # every row has the reward: SkyRL's baseline reads the last row, and its filters of groups read all rows
            self.rewards.append(reward)
            self.stops.append(stop if rollout.rows else "error")
            self.names.append(rollout.name)
            self.times.append(rollout.seconds)
            self.lasts.append(number == len(rows))


def output_of(ended: Sequence[Ended], *, pad: int, drop_truncated: bool = False) -> dict[str, object]:
    """Return a ``GeneratorOutput`` without metrics, which :func:`metrics_of` computes.

    Args:
        ended: the rollouts, grouped by prompt.
        pad: a token for rollouts without rows.
        drop_truncated: whether truncated rollouts carry no loss (``generator.apply_overlong_filtering``).
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in ended:
        if rollout.reward is not None:
            groups[rollout.name.instance_id].append(rollout.reward)
    columns = _Columns()
    for rollout in ended:
        others = groups[rollout.name.instance_id]
        stand_in = statistics.fmean(others) if others else 0.0
        columns.add(rollout, stand_in if rollout.reward is None else rollout.reward, pad)
    if drop_truncated:
        pairs = zip(columns.masks, columns.stops, strict=True)
        columns.masks = [mask if stop == "stop" else [0] * len(mask) for mask, stop in pairs]
    return {
        "prompt_token_ids": columns.prompts,
        "response_ids": columns.responses,
        "rewards": columns.rewards,
        "loss_masks": columns.masks,
        "stop_reasons": columns.stops,
        "rollout_metrics": None,
        "rollout_logprobs": columns.logprobs,
        "trajectory_ids": columns.names,
        "trajectory_generation_times": columns.times,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "is_last_step": columns.lasts,
        "env_metrics": None,
    }


def metrics_of(ended: Sequence[Ended]) -> Mapping[str, float]:
    """Return the metrics of a step. Across batches, SkyRL sums metrics whose name does not contain ``mean``.

    Args:
        ended: the rollouts.
    """
    rewards = [rollout.reward for rollout in ended if rollout.reward is not None]
    groups: dict[str, set[float]] = defaultdict(set)
    for rollout in ended:
        groups[rollout.name.instance_id] |= set() if rollout.reward is None else {rollout.reward}
    counts: dict[str, float] = {
        "sandbox/rollouts": len(ended),
        "sandbox/rollouts_failed": sum(rollout.reward is None and not rollout.is_unconfirmed for rollout in ended),
        "sandbox/rollouts_unconfirmed": sum(rollout.is_unconfirmed for rollout in ended),
        "sandbox/rollouts_truncated": sum(rollout.truncated for rollout in ended),
        "sandbox/rollouts_without_tokens": sum(rollout.reward is not None and not rollout.rows for rollout in ended),
        "sandbox/rollouts_forked": sum(len(rollout.rows) > 1 for rollout in ended),
        "sandbox/groups_silent": sum(len(found) < 2 for found in groups.values()),
    }
    means: dict[str, Sequence[float]] = {
        "reward": rewards,
        "turns": [len({turn for row in rollout.rows for turn in row.turns}) for rollout in ended if rollout.rows],
        "seconds": [rollout.seconds for rollout in ended if rollout.trajectory is not None],
    }
    return counts | {f"sandbox/{name}_mean": statistics.fmean(values) for name, values in means.items() if values}


def _parts(row: TokenRow) -> tuple[list[int], list[int], list[int], list[float]]:
    """Split a row for SkyRL, into the prompt and the tokens from the first token with loss on."""
    start = max(1, row.prompt_length)  # SkyRL needs a prompt of at least one token, from which to predict
    return row.ids[:start].tolist(), row.ids[start:].tolist(), list(row.mask[start:]), row.logprobs[start:].tolist()
