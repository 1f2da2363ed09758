"""Read the log of a training run: its curves, and the rollouts of each step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
