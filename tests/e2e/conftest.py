"""What the commands as typed share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minisandbox.store import remove_tree


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store in which each test finds what those before it have built: as a reader of the documents does."""
    root = tmp_path_factory.mktemp("shared") / "store"
    yield root
    remove_tree(root)
