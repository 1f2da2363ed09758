"""What is skipped where an extra is not installed, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

needs_mini = pytest.mark.skipif(
    importlib.util.find_spec("minisweagent") is None,
    reason="mini-swe-agent is not installed: pip install 'swe-minisandbox[mini]'",
)
needs_swerex = pytest.mark.skipif(
    importlib.util.find_spec("swerex") is None,
    reason="SWE-ReX is not installed: pip install 'swe-minisandbox[swerex]'",
)
needs_inspect = pytest.mark.skipif(
    importlib.util.find_spec("inspect_ai") is None,
    reason="inspect-ai is not installed: pip install 'swe-minisandbox[inspect]'",
)
needs_harbor = pytest.mark.skipif(
    importlib.util.find_spec("harbor") is None,
    reason="Harbor is not installed: make test-harbor, with Python 3.12",
)
