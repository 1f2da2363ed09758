"""Pages in Debian's Chromium, and the runs that they show."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.browser.serving import serve_runs
from tests.unit.test_view import hostile
from tests.unit.training_tools import PATCH, trajectory

from minisandbox.grade import Flag, Grade, Reason, Verdict
from minisandbox.rollouts import RunDirectory
from minisandbox.rollouts.database import NAME
from minisandbox.store import default_root
from minisandbox.trajectories import Failure, PatchRecord, StepRecord

CHROMIUM = shutil.which("chromium")
MANY = 20_000


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few rollouts, one of 20,000, and a training run."""
    path = tmp_path_factory.mktemp("site")
    step = StepRecord("ls", "exited", 1, None, b"x", b"no", 0, 0, 0.1, 1)
    grade = Grade(
        "owner__repo-1", Verdict.FAILED, Reason.TESTS_NOT_PASSED, "1 did not pass", (("t.py::a", "failed"),),
        ("t.py::a",), log="FAILED t.py::a - assert 1 == 2\n",
    )  # fmt: skip
    flag = Flag("suspicious: frame_walking", "x.py", "sys._getframe()")
    with RunDirectory.open(path / "first", {"model": "a", "rollouts": 8}) as run:
        run.write(trajectory("owner__repo-1", 0, 1.0, steps=(step,), patches=(PatchRecord(1, PATCH),)))
        run.write(trajectory("owner__repo-1", 1, 0.0, grade=grade, steps=(step,)))
        run.write(trajectory("owner__repo-1", 2, 1.0, flags=(flag,)))
        run.write(trajectory("owner__other-2", 0, failure=Failure("model", "ModelUnavailable", "gone"), grade=None))
        run.write(hostile())
    with RunDirectory.open(path / "second", {"model": "b"}) as run:
        for attempt in range(2):
            run.write(trajectory("owner__repo-1", attempt, 1.0))
    with RunDirectory.open(path / "many", {}) as run:
        run.write(trajectory("owner__repo-0", 0, 1.0))
        run.write(trajectory("other__name-0", 1, 0.0))
    _multiply(path / "many" / NAME)
    _training(path / "rl")
    return path


def _multiply(database: Path) -> None:
    """Copy the rollouts of a run until it has 20,000."""
    with closing(sqlite3.connect(database)) as connection, connection:
        columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(rollouts)")]
        values = ", ".join("instance_id || (n / 8)" if name == "instance_id" else name for name in columns)
        values = values.replace("attempt", "attempt + 2 * (n % 8)")
        numbers = (
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {MANY // 2 - 1})"
        )
        connection.execute(
            f"{numbers} INSERT INTO rollouts ({', '.join(columns)}) SELECT {values} FROM rollouts, numbers"
        )


def _training(path: Path) -> None:
    unconfirmed = Grade("owner__repo-1", Verdict.UNCONFIRMED, Reason.UNCONFIRMED, "the changed tests passed, too")
    with RunDirectory.open(path / "rollouts", {}) as run:
        for step in range(8):
            for index in range(2):
                believed = trajectory("owner__repo-1", 4 * step + index, float(index))
                run.write(believed if step < 4 else replace(believed, grade=unconfirmed))
    log = [{"step": step + 1, "reward": 0.5 if step < 4 else 1.0, "loss": 0.1} for step in range(8)]
    rollouts = [
        {"step": step + 1, "rollout": f"owner__repo-1__{4 * step + index}", "advantage": 0.5 - index, "tokens": 9}
        for step in range(8) for index in range(2)
    ]  # fmt: skip
    for name, lines in (("log.jsonl", log), ("rollouts.jsonl", rollouts)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text("steps: 12\ngroups: {tasks: 1, size: 2, redo: 1, unconfirmed_reward: 1.0}\n")


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The runs of a finished quickstart of this user, in the user's store."""
    subprocess.run([sys.executable, "-m", "minisandbox", "quickstart"], check=True, stdout=subprocess.DEVNULL)
    return max((default_root() / "runs").glob("quickstart-*"), key=lambda path: path.stat().st_mtime)


Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-view")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Return a function that serves runs and returns a page on them; scripts' errors and dialogs fail the test."""
    contexts, problems = [], []

    def open_page(path: Path, **options: object) -> Any:
        url = serve_runs(path)
        contexts.append(browser.new_context(base_url=url.partition("/?")[0], **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
