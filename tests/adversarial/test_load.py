"""Bombs beside neighbours, and SIGKILL among busy sandboxes: ``make adversarial-load`` and ``make soak``, but small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.adversarial import load
from tests.adversarial.soak import Soak

from minisandbox.types import ImageSpec

pytestmark = [pytest.mark.kernel, pytest.mark.alone, pytest.mark.slow]

NEIGHBOURS = 3
MOMENTS, SANDBOXES, SEED = 8, 6, 20


def test_bombs_end_in_their_own_sandboxes(spec: ImageSpec) -> None:
    outcomes = load.run(spec, neighbours=NEIGHBOURS, quiet=0.2)
    assert outcomes.complaints == ()


def test_nothing_is_left_of_what_was_killed_at_random_moments(
    spec: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path / "runtime"))
    soak = Soak(spec.layers[0], SANDBOXES, random.Random(SEED))
    soak.run(MOMENTS)
    assert soak.complaints == []
    assert soak.killed.total() >= MOMENTS // 2
