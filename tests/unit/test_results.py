"""Results: rows that are there once they were put, in a file that others can read meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.errors import RunError
from minisandbox.grade.sets.resumable import Job, Progress, Work, carry_out, opened
from minisandbox.store.results import Result, Results
from minisandbox.store.rundir import RunDirectory

ONE = Result("a__b-1", "f" * 64, True, {"status": "valid", "tests": ["t\udcff"], "seconds": 1.5})


@pytest.mark.parametrize("wal", [True, False])
def test_what_is_put_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: bool) -> None:
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "0" if wal else "1")
    with Results(tmp_path / "r.sqlite") as results:
        assert results.journal == ("wal" if wal else "delete")
        assert results.get("a__b-1") is None
        results.put(replace(ONE, final=False))
        results.put(ONE)
        results.put(replace(ONE, id="a__a-1"))
    with Results(tmp_path / "r.sqlite") as results:
        assert results.get("a__b-1") == ONE
        assert [one.id for one in results] == ["a__a-1", "a__b-1"]


def test_a_database_in_memory() -> None:
    with Results(None) as results:
        results.put(ONE)
        assert list(results) == [ONE]


def test_a_run_says_where_it_cannot_do_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "1")
    with pytest.warns(RuntimeWarning, match="rollback journal"), opened(RunDirectory, tmp_path / "run", {}) as results:
        results.put(ONE)
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "0")
    with opened(RunDirectory, tmp_path / "run", {}) as results:
        assert list(results) == [ONE]


def test_others_read_while_it_is_written(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite") as results:
        results.put(ONE)
        reader = sqlite3.connect(tmp_path / "r.sqlite")
        results.put(replace(ONE, id="a__b-2"))
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (2,)
        reader.close()


def test_a_killed_writer_leaves_what_it_put(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from minisandbox.store.results import Result, Results\n"
        "results = Results(Path(sys.argv[1]))\n"
        "for n in range(5): results.put(Result(str(n), '', True, {}))\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "r.sqlite")], check=False)
    assert ended.returncode == -signal.SIGKILL
    with Results(tmp_path / "r.sqlite") as results:
        assert len(list(results)) == 5


def test_what_is_no_database_of_ours(tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_text("no database at all, but long enough to be taken for a header" * 20)
    with pytest.raises(RunError, match=r"r\.sqlite cannot be used"):
        Results(tmp_path / "r.sqlite")
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(RunError, match="version 99"):
        Results(tmp_path / "newer.sqlite")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite") as results:
        results.put(ONE)
        results._database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(OSError, match="disk is full"):
            results.put(replace(ONE, id="big", body={"log": "x" * 1_000_000}))
        assert results.get("a__b-1") == ONE


def run(results: Results, marks: dict[str, str], *, again: bool = False) -> tuple[list[str], list[Progress[Result]]]:
    """Carry out a job for each id; what was done, and what was told."""
    done: list[str] = []
    news: list[Progress[Result]] = []

    def job(name: str, mark: str) -> Job:
        def do() -> tuple[dict[str, object], bool]:
            done.append(name)
            return {"by": mark}, mark != "broken"

        return Job(name, lambda _: Work(mark, do))

    jobs = [job(name, mark) for name, mark in marks.items()]
    carry_out(
        jobs,
        results,
        image_of=lambda task: pytest.fail(task.instance_id),
        workers=2,
        again=lambda _: again,
        tell=news.append,
    )
    return sorted(done), news


def test_only_what_changed_or_failed_is_done_again() -> None:
    with Results(None) as results:
        assert run(results, {"a": "1", "b": "1", "c": "broken"})[0] == ["a", "b", "c"]
        done, news = run(results, {"a": "1", "b": "2", "c": "broken", "d": "1"})
        assert done == ["b", "c", "d"]
        assert sorted(one.latest.id for one in news if one.resumed) == ["a"]
        assert [one.done for one in news] == [1, 2, 3, 4]
        assert {one.total for one in news} == {4}
        assert news[-1].seconds_left == 0.0
        assert run(results, {"a": "1"}, again=True)[0] == ["a"]
