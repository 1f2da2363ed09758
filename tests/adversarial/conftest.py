"""Sandboxes to attack: real ones, over nothing but the made base layer and the host's /usr."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import shut_down
from minisandbox.types import ImageSpec


@pytest.fixture(scope="session", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Records of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISANDBOX_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
        yield
        shut_down()


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ImageSpec:
    """The smallest image."""
    tree = tmp_path_factory.mktemp("base") / "tree"
    write_base(base_entries(), tree)
    return ImageSpec("base", (tree,))


@pytest.fixture
def box(spec: ImageSpec) -> Iterator[Sandbox]:
    """A sandbox of its own for each test."""
    with Sandbox.create(spec) as made:
        yield made
