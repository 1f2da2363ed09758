"""Many processes, the same layers: each is made once, killed makers leave nothing. `make stress-store` has more."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stress_store import Outcome, stress


def test_a_few_processes_make_each_layer_once(tmp_path: Path) -> None:
    outcome = stress(tmp_path / "store", processes=12, layers=4, kill=False)
    assert outcome == Outcome(makers=12, failed=0, killed=0, made=4, damaged=0, leftovers=())


@pytest.mark.slow
def test_killed_makers_cost_the_others_nothing(tmp_path: Path) -> None:
    outcome = stress(tmp_path / "store", processes=12, layers=4, kill=True)
    assert outcome.makers == 12
    assert outcome.killed > 0
    assert (outcome.failed, outcome.damaged, outcome.leftovers) == (0, 0, ())
    assert outcome.made == 4, "published once each, whoever was killed on the way"
