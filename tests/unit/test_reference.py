"""The reference of the API says what the docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "api.md"


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_its_links_lead_to_headings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_nothing_of_another_markup_is_left() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"``[^`]|:(meth|class|attr|func|mod):|<object|0x[0-9a-f]{6}", text.replace("```", ""))
