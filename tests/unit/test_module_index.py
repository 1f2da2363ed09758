"""The index of modules names every module, and is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "modules.md"
TOOL = [sys.executable, str(ROOT / "tools" / "make_module_index.py")]


def test_the_index_is_current() -> None:
    done = subprocess.run([*TOOL, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_it_names_every_module() -> None:
    text = PAGE.read_text(encoding="utf-8")
    modules = [path for path in (ROOT / "src" / "minisandbox").rglob("*.py") if path.name != "__init__.py"]
    assert text.count("\n- `") == len(modules)
    assert [path.name for path in modules if f"- `{path.name}`: " not in text] == []
