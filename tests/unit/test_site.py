"""The documentation site builds without a warning: pages, links, anchors, references."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.once
def test_the_site_builds(tmp_path: Path) -> None:
    """As `make docs` does; needs the extra `docs`."""
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "::: " not in (tmp_path / "reference" / "api" / "sandbox.html").read_text(encoding="utf-8")
    assert "minisandbox image gc" in (tmp_path / "reference" / "commands.html").read_text(encoding="utf-8")
