"""A store of these tests' own, a task that needs no package index, and whatever is made to work with sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisandbox.store import Store, remove_tree

TASK = "example__calc-1"
FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "tests/test_calc.py": "from calc import add\n"}
FIX = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


def row(source: Path, instance_id: str = TASK) -> dict[str, object]:
    """A task over a directory, with no interpreter but the host's."""
    return {
        "instance_id": instance_id, "repo": "example/calc", "base_commit": "c0ffee" * 6 + "cafe", "form": "swebench",
        "problem_statement": "add() subtracts", "patch": FIX, "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
        "PASS_TO_PASS": [], "build": {"source": {"local": {"path": str(source)}}}, "test": {"command": "true"},
    }  # fmt: skip


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task file: one task that can be built, one that cannot."""
    root = tmp_path_factory.mktemp("tasks")
    for name, text in FILES.items():
        (root / "calc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "calc" / name).write_text(text)
    rows = [row(root / "calc"), row(root / "nowhere", "example__broken-1")]
    (root / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(root / "tasks.jsonl")


@pytest.fixture(scope="session", autouse=True)
def without_a_default_loop() -> None:
    """Make ``asyncio.get_event_loop()`` fail, as after any ``asyncio.run()``: litellm leaves a new loop unclosed."""
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Where images and other programs' settings go."""
    root = tmp_path_factory.mktemp("integrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISANDBOX_STORE", str(root / "store"))
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(root / "mini"))  # it makes one when it is imported
        patch.setenv("MSWEA_SILENT_STARTUP", "1")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for a price list on the network
        patch.delenv("MINISANDBOX_TASKS", raising=False)
        yield Store.open()
    remove_tree(root / "store")
