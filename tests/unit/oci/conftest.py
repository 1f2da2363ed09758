"""A store, and a registry on this machine, for tests of container images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.oci_registry import Registry, isolate, serve

from minisandbox.store import Store


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No waiting, no files of this machine, no proxy between a test and its registry."""
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def server() -> Iterator[Registry]:
    """A registry."""
    with serve() as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(tmp_path / "store")
