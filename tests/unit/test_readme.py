"""The README as a package index shows it: without the repository around it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from minisandbox.host.environment import _OLDEST

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
    metadata: dict[str, object] = {"urls": {"Source": f"{HOME}/"}}
    hook.CustomMetadataHook(str(ROOT), {}).update(metadata)
    readme = metadata["readme"]
    assert isinstance(readme, dict)
    assert readme["text"] == hook.absolute(README, HOME)


@pytest.mark.parametrize(("name", "most"), [("README", 7), ("ARCHITECTURE", 12), ("CHANGELOG", 8), ("CONTRIBUTING", 7)])
def test_documents_stay_short(name: str, most: int) -> None:
    assert (ROOT / f"{name}.md").stat().st_size <= most << 10


def test_the_table_of_places_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Where to change what")[2]
    package, names, missing = "", 0, []
    for row in text.partition("\n## ")[0].splitlines():
        if found := re.match(r"\| \*\*`(\w+)`\*\*", row):
            package = found[1]
        for name in re.findall(r"`([\w/]+\.py)`", row):
            names += 1
            place = ROOT / "src" / "minisandbox"
            if not any((root / name).is_file() for root in (place, ROOT)) and not list((place / package).rglob(name)):
                missing.append(f"{package}: {name}")
    assert names > 90
    assert missing == []


def test_the_readme_has_both_set_up_commands() -> None:
    """`.ci/run` takes the test command from here."""
    commands = [line.partition("#")[0].strip() for line in README.splitlines()]
    assert commands.index("make quickstart") < commands.index("make test")


def test_documents_name_one_kernel_floor() -> None:
    floor = ".".join(map(str, _OLDEST))
    documents = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    floors = {
        path.name: re.findall(r"(?:need|is|be) \W*Linux ([\d.]+) or newer", path.read_text("utf-8"))
        for path in documents
    }
    assert {"CONTRIBUTING.md", "first-task.md"} <= {name for name, found in floors.items() if found}
    assert {version for found in floors.values() for version in found} == {floor}
    assert f"**Linux {floor} or newer**" in README
