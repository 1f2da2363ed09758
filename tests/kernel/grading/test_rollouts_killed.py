"""The controller of a batch is killed, again and again: each rollout is finished once, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests import waiting

from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.slow]

# 300 and 30 in `make test-rollouts`
ROLLOUTS = int(os.environ.get("MINISANDBOX_TEST_ROLLOUTS", "12"))
KILLS = int(os.environ.get("MINISANDBOX_TEST_KILLS", "3"))
DEADLINE = 120.0 + 30.0 * ROLLOUTS  # seconds; for a machine that is slow and busy
LABEL = "calc__killed"


def start(place: Path, store: Store) -> subprocess.Popen[bytes]:
    """Begin a batch, or go on with it; what it prints is in files, since nobody reads it before it is killed."""
    with (place / "out.jsonl").open("wb") as out, (place / "err").open("wb") as err:
        return subprocess.Popen(
            [
                sys.executable, "-m", "minisandbox", "rollout", "tasks.jsonl", "--allow-local-sources",
                "--agent", "replay", "--recording", "commands.json",
                "--n", "3", "--workers", "8", "-o", "run", "--json",
            ],
            stdout=out, stderr=err, cwd=place, env={**os.environ, "MINISANDBOX_STORE": str(store.root)},
        )  # fmt: skip


def rows(run: Path) -> dict[tuple[str, int], str]:
    """What the database of a run has, read by another process than the one that writes it."""
    file = run / "rollouts.sqlite"
    if not file.exists():
        return {}
    with closing(sqlite3.connect(file, timeout=60)) as database:
        try:
            found = database.execute(
                "SELECT instance_id, attempt, ended || hex(trajectory) FROM rollouts WHERE reward NOT NULL"
            ).fetchall()
        except sqlite3.OperationalError:  # it has no table yet
            return {}
    return {(name, attempt): row for name, attempt, row in found}


def test_killed_again_and_again_each_rollout_is_finished_once(
    smith: Task, smith_image: Image, store: Store, tmp_path: Path
) -> None:
    chance = random.Random(7)
    tasks = [replace(smith, instance_id=f"{LABEL}-{number}") for number in range(-(-ROLLOUTS // 3))]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))
    (tmp_path / "commands.json").write_text(json.dumps(["sleep 0.2", "sed -i 's/a - b/a + b/' calc/core.py"]))
    before: dict[tuple[str, int], str] = {}
    total = 3 * len(tasks)
    for kill in range(KILLS):
        with start(tmp_path, store) as killed:
            enough = min(len(before) + chance.randint(0, 2 * total // (KILLS + 1)), total - KILLS + kill)
            waiting.until(lambda n=enough: len(rows(tmp_path / "run")) >= n, DEADLINE)  # type: ignore[misc] # this round's
            killed.send_signal(signal.SIGKILL)
            killed.wait(60)
        now = rows(tmp_path / "run")
        assert before.items() <= now.items(), "what was finished was done again, or lost"
        before = now
    with start(tmp_path, store) as last:
        last.wait(DEADLINE)
    assert last.returncode == 0, (tmp_path / "err").read_text()
    after = rows(tmp_path / "run")
    assert before.items() <= after.items()
    assert after.keys() == {(task.instance_id, attempt) for task in tasks for attempt in range(3)}

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ended = [line["rollout"] for line in lines[:-1]]
    assert sum(one["resumed"] for one in ended) == len(before)
    assert {one["reward"] for one in ended} == {1.0}
    assert len({(one["instance_id"], one["attempt"]) for one in ended}) == len(ended) == total
    assert lines[-1]["summary"]["finished"] == total
    predictions = json.loads((tmp_path / "run" / "preds.json").read_text())
    assert predictions.keys() == {task.instance_id for task in tasks}

    waiting.until(lambda: not [box for box in Sandbox.list() if box.image.startswith(LABEL)])
