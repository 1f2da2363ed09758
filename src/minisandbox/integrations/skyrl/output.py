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
from typing import NamedTuple, Protocol

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


class _Row(NamedTuple):
    """The tokens of a row: the prompt, and the tokens from the first token with loss on."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]


def output_of(ended: Sequence[Ended], *, pad_token: int, drop_truncated: bool = False) -> dict[str, object]:
    """Return a ``GeneratorOutput`` without metrics, which :func:`metrics_of` computes.

    Args:
        ended: the rollouts, grouped by prompt.
        pad_token: a token for rollouts without rows, each of which becomes one row without loss.
        drop_truncated: whether truncated rollouts carry no loss (``generator.apply_overlong_filtering``).
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in ended:
        if rollout.reward is not None:
            groups[rollout.name.instance_id].append(rollout.reward)
    rows: list[_Row] = []
    rollouts: list[tuple[Ended, float, str]] = []  # rollout, reward and stop reason of each row
    last_rows: list[bool] = []
    for rollout in ended:
        group = groups[rollout.name.instance_id]
        mean = statistics.fmean(group) if group else 0.0
        reward = mean if rollout.reward is None else rollout.reward
        own_rows = [_row(row) for row in rollout.rows] or [_Row([pad_token], [pad_token], [0], [0.0])]
        stop = "error" if not rollout.rows else "length" if rollout.truncated else "stop"
        if drop_truncated and stop != "stop":
            own_rows = [row._replace(mask=[0] * len(row.mask)) for row in own_rows]
        rows += own_rows
        # Give every row the reward: SkyRL's baseline reads the last row, and its group filters read all rows.
        rollouts += [(rollout, reward, stop)] * len(own_rows)
        last_rows += [False] * (len(own_rows) - 1) + [True]
    return {
        "prompt_token_ids": [row.prompt for row in rows],
        "response_ids": [row.response for row in rows],
        "rewards": [reward for _, reward, _ in rollouts],
        "loss_masks": [row.mask for row in rows],
        "stop_reasons": [stop for _, _, stop in rollouts],
        "rollout_metrics": None,
        "rollout_logprobs": [row.logprobs for row in rows],
        "trajectory_ids": [rollout.name for rollout, _, _ in rollouts],
        "trajectory_generation_times": [rollout.seconds for rollout, _, _ in rollouts],
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "is_last_step": last_rows,
        "env_metrics": None,
    }


def metrics_of(ended: Sequence[Ended]) -> Mapping[str, float]:
    """Return the metrics of a step. Across batches, SkyRL sums metrics whose name does not contain ``mean``.

    Args:
        ended: the rollouts.
    """
    all_rewards = [rollout.reward for rollout in ended if rollout.reward is not None]
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
        "sandbox/groups_silent": sum(len(rewards) < 2 for rewards in groups.values()),
    }
    means: dict[str, Sequence[float]] = {
        "reward": all_rewards,
        "turns": [len({turn for row in rollout.rows for turn in row.turns}) for rollout in ended if rollout.rows],
        "seconds": [rollout.seconds for rollout in ended if rollout.trajectory is not None],
    }
    return counts | {f"sandbox/{name}_mean": statistics.fmean(values) for name, values in means.items() if values}


def _row(row: TokenRow) -> _Row:
    start = max(1, row.prompt_length)  # SkyRL needs a prompt of at least one token
    return _Row(
        row.ids[:start].tolist(), row.ids[start:].tolist(), list(row.mask[start:]), row.logprobs[start:].tolist()
    )
