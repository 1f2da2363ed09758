"""The launcher starts every time: its processes race for a moment while namespaces change under them."""

from __future__ import annotations

import pytest

from minisandbox.sandbox.controller import current_controller, shut_down

pytestmark = pytest.mark.kernel

STARTS = 60  # a start that lost a race failed 2 times in 100


def test_it_starts_every_time() -> None:
    for _ in range(STARTS):
        shut_down()
        assert current_controller().launcher.alive
    shut_down()
