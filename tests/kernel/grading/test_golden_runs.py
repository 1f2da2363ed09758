"""The files of runs, compared with golden data: their names, the keys in them, the tables of their databases."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.golden import check_golden

from minisandbox.cli.main import main
from minisandbox.images import Image
from minisandbox.rollouts import RunReader
from minisandbox.store import Store
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

COMMANDS = ("validate tasks.jsonl", "evaluate tasks.jsonl --predictions gold", "rollout tasks.jsonl --agent oracle")


def test_files_of_runs(
    smith: Task, smith_image: Image, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISANDBOX_STORE", str(store.root))
    Path("tasks.jsonl").write_text(json.dumps(smith.to_row()) + "\n")
    lines = []
    for command in COMMANDS:
        out = tmp_path / command.split()[0]
        assert main([*command.split(), "--allow-local-sources", "-o", str(out)]) == 0
        lines += [f"## {command}", *(line for path in sorted(out.rglob("*")) for line in described(path, out))]
    with RunReader(tmp_path / "rollout") as run:
        lines += ["## the trajectory", *keys(json.loads(next(run.trajectories()).to_text()))]
    check_golden("run_files.txt", "\n".join(lines) + "\n")


def described(path: Path, root: Path) -> Iterator[str]:
    """Describe a file of a run: its path, and the structure of a file that programs read."""
    if path.is_dir():
        return
    yield str(path.relative_to(root))
    if path.suffix in (".json", ".traj"):
        yield from keys(json.loads(path.read_text()))
    elif path.suffix == ".jsonl":
        yield from keys(json.loads(path.read_text().splitlines()[0]))
    elif path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as database:
            for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name"):
                yield from (f"  {line.strip()}" for line in re.sub("--.*", "", sql).splitlines() if line.strip())


def keys(value: object, depth: int = 1) -> Iterator[str]:
    """Yield the keys of an object, and those of objects and of lists' first objects in it."""
    if isinstance(value, list):
        value = next(iter(value), None)
    if isinstance(value, dict):
        for name in sorted(value):
            yield f"{'  ' * depth}{name}"
            yield from keys(value[name], depth + 1)
