"""The Python in the documents, and the examples, work as they stand there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from minisandbox.store import Store

pytestmark = [pytest.mark.kernel, pytest.mark.index]

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
ASKING = re.compile(r"```py\n(.*?)```", flags=re.DOTALL)
"""What needs a server or other people's packages: it is read, not run."""
IMAGE = re.compile(r"load_image\(.*\"([^\"]+)\"\)")
SLOW = re.compile(IMAGE.pattern + r"|quickstart|\bbuild\(")
"""What builds images."""


def param(block: str, name: str) -> ParameterSet:
    return pytest.param(block, id=name, marks=[pytest.mark.slow] * bool(SLOW.search(block)))


BLOCKS = [
    param(block, f"{path.relative_to(ROOT)}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")), 1)
    if "import" in block and "minisandbox" in block  # others are fragments
] + [
    param(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.once
@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path, shared_store: Store) -> None:
    environment = {**os.environ, "MINISANDBOX_STORE": str(shared_store.root)}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment, check=False,
        )  # fmt: skip

    for image in IMAGE.findall(block):  # quickstart has made it where a reader comes to this line
        built = python("-m", "minisandbox", "image", "build", "quickstart", "--only", image)
        assert built.returncode == 0, built.stderr
    done = python("-W", "error", "-c", block)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.once
def test_python_blocks_that_are_not_run_can_be_read() -> None:
    found = 0
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for block in ASKING.findall(path.read_text(encoding="utf-8")):
            compile(block, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found += 1
    assert found
