"""Run directories: one writer, whole files, the same configuration."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from minisandbox.errors import DiskFull, NotFound, RunError, TrajectoryError
from minisandbox.models import TokenUsage
from minisandbox.rollouts import RunDirectory, RunReader, Summary, export_sweagent
from minisandbox.rollouts.database import RolloutDatabase, pack
from minisandbox.trajectories import Failure, Timings, Trajectory, TurnRecord

WITHOUT_WAL = pytest.mark.filterwarnings("ignore:.*rollback journal:RuntimeWarning")
CONFIG: dict[str, str | int | float | bool | None] = {"agent": "oracle", "workers": 2, "timeout": None}
TRAJECTORY = Trajectory(
    "a__b-1", 0, "oracle", "i", "k", "2025-01-01T00:00:00+00:00", "0", "submitted", "", (), b"", None, None, Timings()
)


@pytest.mark.parametrize("wal", [True, pytest.param(False, marks=WITHOUT_WAL)])
def test_what_is_written_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: bool) -> None:
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "0" if wal else "1")
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        assert run.trajectory("a__b-1", 0) is None
        assert run.write(TRAJECTORY) == Summary.of(TRAJECTORY)
        assert run.trajectory("a__b-1", 0) == TRAJECTORY
        run.write(replace(TRAJECTORY, detail="again"))
        with RunReader(tmp_path / "run") as reader:
            assert [one.detail for one in reader.summaries()] == ["again"]
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        again = run.trajectory("a__b-1", 0)
        assert again is not None
        assert again.detail == "again"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == CONFIG


def test_summaries_come_back_as_they_were(tmp_path: Path) -> None:
    turn = TurnRecord(1, 0.5, 2.0, 2, TokenUsage(100, 20, 60), "stop", 0.25)
    odd = replace(
        TRAJECTORY, attempt=1, detail="\udcff", turns=(turn, turn), model="m", tries=(Failure("model", "X", "y"),),
        failure=Failure("grade", "infrastructure", "no"), timings=Timings(1, 2, 3, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.write(odd)
        run.write(TRAJECTORY)
        assert run.trajectory("a__b-1", 1) == odd
        plain, found = run.summaries()
    assert plain == Summary.of(TRAJECTORY)
    assert found == replace(Summary.of(odd), detail=found.detail)
    assert (found.usage, found.cost, found.tries, found.failed_in) == (TokenUsage(200, 40, 120), 0.5, 2, "grade")


def test_other_directories_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no rollouts\.sqlite"):
        RunReader(tmp_path)


def test_long_and_odd_names(tmp_path: Path) -> None:
    """Tasks have no such ids, but a database may come from anybody."""
    names = [
        "é" * 200,
        "e" * 199 + "a",
        "e" * 199 + "b",
        "a b",
        "-rf",
        "100%",
        "../../x",
        "..",
        "/etc/x",
        "a\nb",
    ]
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        for name in names:
            run.write(replace(TRAJECTORY, instance_id=name))
        assert all(run.trajectory(name, 0) is not None for name in names)
    out = tmp_path / "a" / "b" / "out"
    written = list(export_sweagent(tmp_path / "run", out))
    assert len(set(written)) == len(names)
    assert "100%" in written
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "run"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG), pytest.raises(RunError, match="in use"):
        RunDirectory.open(tmp_path, CONFIG)
    RunDirectory.open(tmp_path, CONFIG).close()


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, CONFIG).close()
    RunDirectory.open(tmp_path, {**CONFIG, "workers": 7}).close()
    with pytest.raises(RunError, match="agent = 'oracle', not 'empty'"):
        RunDirectory.open(tmp_path, {**CONFIG, "agent": "empty"})
    with pytest.raises(RunError, match="script"):
        RunDirectory.open(tmp_path, {**CONFIG, "script": "x"})
    RunDirectory.open(tmp_path, CONFIG).close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "minisandbox-run", "version": 99, "config": {}}'])
def test_a_directory_that_is_no_run_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError):
        RunDirectory.open(tmp_path, CONFIG)
    assert (tmp_path / "run.json").read_text() == text


def test_a_damaged_trajectory_is_named(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.write(TRAJECTORY)
    for blob in (b"x", zstandard.compress(b"{}"), None):
        with closing(sqlite3.connect(tmp_path / "rollouts.sqlite")) as database, database:
            database.execute("UPDATE rollouts SET trajectory = ?", (blob if blob is not None else "text",))
        with RunReader(tmp_path) as reader, pytest.raises(TrajectoryError, match="a__b-1, attempt 0"):
            reader.trajectory("a__b-1", 0)


def test_a_write_that_the_kernel_cuts_off_leaves_what_was_there(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.write(TRAJECTORY)
        old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises((RunError, DiskFull)):
                run.write(replace(TRAJECTORY, submission=random.Random(1).randbytes(500_000)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old_handler)
        assert run.trajectory("a__b-1", 0) == TRAJECTORY
        run.write(replace(TRAJECTORY, attempt=1))
        assert len(list(run.summaries())) == 2


def test_threads_write_at_once(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run:
        threads = [
            threading.Thread(target=run.write, args=(replace(TRAJECTORY, attempt=number % 4),)) for number in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.attempt for one in run.summaries()] == [0, 1, 2, 3]


def test_a_database_that_another_process_has_locked_is_waited_for(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, CONFIG) as run, closing(sqlite3.connect(tmp_path / "rollouts.sqlite")) as other:
        run.write(TRAJECTORY)
        other.execute("BEGIN IMMEDIATE")
        writing = threading.Thread(target=run.write, args=(replace(TRAJECTORY, attempt=1),))
        writing.start()
        writing.join(0.3)
        assert writing.is_alive(), "it waits"
        other.rollback()
        writing.join(60)
        assert not writing.is_alive()
        assert len(list(run.summaries())) == 2


def test_one_that_stays_locked_is_an_error_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.sqlite"
    with closing(sqlite3.connect(file)) as other, RolloutDatabase(file, wait=0.1) as mine:
        mine.put(pack(TRAJECTORY))
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RunError, match="end the program that has it open"):
            mine.put(pack(TRAJECTORY))


def test_a_run_under_way_is_read_where_its_directory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not yet in the main file counts: readers take part in the locking where a writer's files are there."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.write(TRAJECTORY)
        with RunReader(tmp_path) as reader:
            assert [one.attempt for one in reader.summaries()] == [0]
            run.write(replace(TRAJECTORY, attempt=1))
            assert [one.attempt for one in reader.summaries()] == [0, 1]
