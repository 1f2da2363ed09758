"""Read the log of a training run: its curves, the rollouts of each step, and what its reward consists of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from minisandbox.view.index import Mix

_RISE = 0.05
"""Smaller changes of a share are taken as noise."""
_FIRST = ("reward", "loss", "grad_norm", "entropy", "staleness", "groups_silent", "rollouts_failed", "rollouts_seconds")
"""The curves that are drawn first."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rollout in a training step.

    Attributes:
        instance_id: the task's id.
        attempt: the rollout's number.
        advantage: the factor of its tokens in the loss.
        tokens: the number of its tokens with loss.
    """

    instance_id: str
    attempt: int
    advantage: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training run's configuration says about its steps.

    Attributes:
        steps: the number of steps.
        width: the number of attempts of a task that belong to a step, repetitions included.
        unconfirmed: the reward of a pass that could not be confirmed; None for no reward.
    """

    steps: int
    width: int
    unconfirmed: float | None


def plan_of(path: Path) -> Plan | None:
    """Return the plan of a training run, or None if its configuration cannot be read."""
    import yaml  # noqa: PLC0415 - only configurations need yaml

    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        groups = config["groups"]
        width = int(groups["size"]) * (1 + int(groups.get("redo", 0)))
        reward = groups.get("unconfirmed_reward")
        return (
            Plan(int(config.get("steps", 0)), width, None if reward is None else float(reward)) if width > 0 else None
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return None


@dataclass(frozen=True, slots=True)
class Rise:
    """How the reward changed from the first to the last quarter of the steps, and how passes without a doubt did.

    Attributes:
        reward: the mean reward in the first and in the last quarter.
        believed: the share of rollouts that passed without a doubt, in both.
        doubts: the share of rollouts in doubt, in both.
        start: the first step from which on clearly more rollouts are in doubt than in the first quarter.
    """

    reward: tuple[float, float]
    believed: tuple[float, float]
    doubts: tuple[float, float]
    start: int

    @property
    def is_wrong(self) -> bool:
        """Whether the reward rises, and passes without a doubt do not explain it."""
        rise = self.reward[1] - self.reward[0]
        return rise > _RISE and rise - (self.believed[1] - self.believed[0]) > rise / 2


def rise_of(rewards: Sequence[tuple[float, float]], mixes: Sequence[Mix]) -> Rise | None:
    """Compare the first and the last quarter of a training run; None for fewer than four steps.

    Args:
        rewards: the steps and their mean rewards.
        mixes: the rollouts of each step.
    """
    if len(mixes) < 4 or len(rewards) < 4:
        return None

    def quarters(values: Sequence[float]) -> tuple[float, float]:
        size = max(1, len(values) // 4)
        return fmean(values[:size]), fmean(values[-size:])

    shares = [mix.doubts / mix.rollouts for mix in mixes]
    doubts = quarters(shares)
    below = [mix.step for mix, share in zip(mixes, shares, strict=True) if share <= doubts[0] + _RISE]
    return Rise(
        quarters([reward for _, reward in rewards]), quarters([mix.believed / mix.rollouts for mix in mixes]), doubts,
        below[-1] + 1 if below else mixes[0].step,
    )  # fmt: skip


def curves(path: Path) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the steps and values of each number in a training run's log, the most telling first.

    Args:
        path: the training run's directory.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for line in _lines(path / "log.jsonl"):
        step = line.get("step")
        for name, value in line.items():
            if name != "step" and _is_number(value) and _is_number(step):
                points.setdefault(name, []).append((float(step), float(value)))  # type: ignore[arg-type] # a number
    order = {name: index for index, name in enumerate(_FIRST)}
    return sorted(points.items(), key=lambda curve: order.get(curve[0], len(order)))


def rollouts_of(path: Path, step: int) -> list[Part]:
    """Return the rollouts on which a step trained, highest advantage first.

    Args:
        path: the training run's directory.
        step: the step's number, from 1.
    """
    parts = []
    for line in _lines(path / "rollouts.jsonl"):
        instance_id, _, attempt = str(line.get("rollout")).rpartition("__")
        advantage, tokens = line.get("advantage"), line.get("tokens")
        if line.get("step") == step and attempt.isdecimal() and _is_number(advantage) and isinstance(tokens, int):
            parts.append(Part(instance_id, int(attempt), float(advantage), tokens))  # type: ignore[arg-type] # a number
    return sorted(parts, key=lambda part: (-part.advantage, part.instance_id, part.attempt))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects in a log; a truncated last line is left out."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value
