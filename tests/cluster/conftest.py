"""Which tests of clusters run where: one in `make test`, all in `make test-cluster`."""

from __future__ import annotations

import importlib.util
import os

import pytest
from tests.cluster.hosts import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = "the extra ray is not installed" if importlib.util.find_spec("ray") is None else missing()
    for item in items:
        if item.path.parent.name != "cluster":
            continue
        for mark in (pytest.mark.kernel, pytest.mark.once, pytest.mark.alone):
            item.add_marker(mark)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        elif item.path.name != "test_small.py" and not os.environ.get("MINISANDBOX_TEST_CLUSTER_ROLLOUTS"):
            item.add_marker(pytest.mark.skip(reason="it takes minutes: make test-cluster"))
