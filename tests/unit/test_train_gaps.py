"""How a trainer's log-probabilities are compared with the sampler's; without torch."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from minisandbox.errors import InvalidValue, TokenMismatch
from minisandbox.train.config import Agreement, RlConfig
from minisandbox.train.options import load
from minisandbox.train.rows import BFLOAT16, FLOAT32, Gaps, Rounding, Tolerance, TrainingRow

CONFIG = RlConfig(model="m", tasks=("t",), out="o")


def row(sampled: list[float], name: str = "t__0") -> TrainingRow:
    """A row of one token of context and the sampled ones."""
    count = len(sampled)
    return TrainingRow(name, array("i", range(count + 1)), b"\0" + b"\1" * count, array("d", [0.0, *sampled]))


def bfloat16_noise(count: int, seed: int) -> list[float]:
    """Differences as measured: a standard deviation of 0.055, 5 % beyond 0.117, one of 4,000 at 0.656 (trl#6789)."""
    draw = random.Random(seed)
    found = [draw.gauss(0.0, 0.15 if draw.random() < 0.1 else 0.03) for _ in range(count)]
    found[count // 2] = 0.656
    return found


def compared(tolerance: Tolerance, changes: list[float], *, rows: int = 1) -> Gaps:
    gaps = Gaps(tolerance)
    for number in range(rows):
        part = changes[number::rows]
        gaps.add(row([-2.0] * len(part), f"t__{number}"), [0.0, *(-2.0 + one for one in part)])
    gaps.check()
    return gaps


@pytest.mark.parametrize("rows", [1, 8, 500])
def test_what_bfloat16_rounds_passes(rows: int) -> None:
    changes = bfloat16_noise(4000, rows)
    gaps = compared(BFLOAT16, changes, rows=rows)
    assert 0.02 < gaps.mean < 0.06
    assert max(gaps.sizes) == pytest.approx(0.656)
    with pytest.raises(TokenMismatch):
        compared(FLOAT32, changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([0.15] * 400, "mean 0.15"),  # another temperature: every token a little
        ([0.0] * 380 + [0.7] * 20, "p99 0.7"),  # some tokens are sampled from another distribution
        ([-6.0, *[0.0] * 20], "row KL 0.16"),  # a token that was never sampled, in a short row
        ([-6.0] * 4 + [0.0] * 296, "row KL"),  # one of each turn, in a long one
        ([float("nan")], "max inf"),
    ],
)
def test_what_is_no_rounding_shows(changes: list[float], said: str) -> None:
    with pytest.raises(TokenMismatch, match=said) as caught:
        compared(BFLOAT16, changes)
    assert "the limits are mean 0.1, p99 0.5, row KL 0.05" in str(caught.value)
    assert not caught.value.excess <= 1


def test_the_error_has_all_statistics() -> None:
    with pytest.raises(TokenMismatch) as caught:
        compared(FLOAT32, [0.0, 0.002, 0.0])
    said = str(caught.value)
    assert said.startswith("t__0, token 2 (id 2): ")
    assert "-2.000000 and -1.998000" in said
    assert all(word in said for word in ("3 tokens", "mean", "p99", "max 0.002", "row KL", "agreement.by=statistics"))
    assert caught.value.excess == pytest.approx(20)


def test_short_rows_are_not_judged_by_one_token() -> None:
    compared(BFLOAT16, [0.656])
    compared(BFLOAT16, [0.3, -0.656, 0.0])


def test_the_mean_of_a_step_is_no_row_to_leave_out() -> None:
    with pytest.raises(TokenMismatch) as caught:
        compared(BFLOAT16, [0.15] * 400)
    with pytest.raises(TokenMismatch):
        Rounding(100).take(caught.value)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (CONFIG, FLOAT32),
        (replace(CONFIG, tolerance=0.01), Tolerance(token=0.01)),
        (replace(CONFIG, precision="bfloat16"), BFLOAT16),
        (replace(CONFIG, agreement=Agreement(by="statistics", mean=0.2)), replace(BFLOAT16, mean=0.2)),
        (replace(CONFIG, precision="bfloat16", agreement=Agreement(by="token")), FLOAT32),
        (replace(CONFIG, check_tokens=False), Tolerance()),
    ],
)
def test_what_a_configuration_allows(config: RlConfig, allowed: Tolerance) -> None:
    assert config.allowed_gaps == allowed


def test_the_packaged_configuration_in_bfloat16_compares_statistics() -> None:
    assert load(RlConfig, "rl-qwen2.5-coder-3b").allowed_gaps == BFLOAT16
    with pytest.raises(InvalidValue, match="p99"):
        Agreement(p99=0.0)
