"""The pages of the API reference: each public name is on one of them. `make docs` fills them from the docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import minisandbox

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PUBLIC = {name for name in minisandbox.__all__ if not name.startswith("_")} - {"MiniSandboxError"}


def test_every_public_name_is_on_one_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((REFERENCE / "api").glob("*.md"))]
    names = re.findall(r"^::: minisandbox\.(\w+)$", "\n".join(pages), flags=re.MULTILINE)
    assert sorted(names) == sorted(PUBLIC | {"errors", "testing"})


def test_the_overview_names_what_each_page_has() -> None:
    overview = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for path, row in re.findall(r"^\| \[.*\]\((api/\w+\.md)\) \| (.*) \|$", overview, flags=re.MULTILINE):
        page = (REFERENCE / path).read_text(encoding="utf-8")
        listed = {name for name in re.findall(r"`(\w+)`", row) if name in PUBLIC}
        assert listed == set(re.findall(r"^::: minisandbox\.(\w+)$", page, flags=re.MULTILINE)) & PUBLIC, path
