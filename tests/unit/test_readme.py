"""The README as a package index shows it: without the repository around it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = "https://example.org/owner/minisandbox"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_every_link_becomes_absolute(hook: ModuleType) -> None:
    found = targets(hook.absolute(README, HOME))
    assert len(found) == len(targets(README))
    assert [one for one in found if "://" not in one] == []
    assert f"{HOME}/raw/HEAD/docs/assets/overview.svg" in found
    assert f"{HOME}/blob/HEAD/ARCHITECTURE.md" in found


def test_without_a_repository_no_relative_link_is_left(hook: ModuleType) -> None:
    text = hook.absolute(README, "")
    assert [one for one in targets(text) if "://" not in one] == []
    assert "![" not in text
    assert "Architecture" in text


def test_the_distribution_has_that_readme(hook: ModuleType) -> None:
    metadata: dict[str, object] = {"urls": {"Repository": f"{HOME}/"}}
    hook.CustomMetadataHook(str(ROOT), {}).update(metadata)
    readme = metadata["readme"]
    assert isinstance(readme, dict)
    assert readme["text"] == hook.absolute(README, HOME)


def test_its_size() -> None:
    assert len(README.encode()) <= 7 << 10
