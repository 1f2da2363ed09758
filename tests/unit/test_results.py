"""Results: rows that are there once they were put, in a file that others can read meanwhile."""

from __future__ import annotations

import enum
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from minisandbox.errors import InvalidValue, MiniSandboxError, RunError
from minisandbox.images import Image
from minisandbox.runs import DATABASE, Job, Progress, Result, Results, RunDirectory, RunOptions, read_fields, run_jobs

ONE = Result("a__b-1", "f" * 64, True, {"status": "valid", "tests": ["t\udcff"], "seconds": 1.5})


@pytest.mark.parametrize(
    "wal", [True, pytest.param(False, marks=pytest.mark.filterwarnings("ignore:.*rollback journal:RuntimeWarning"))]
)
def test_what_is_put_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: bool) -> None:
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "0" if wal else "1")
    with Results(tmp_path / "r.sqlite") as results:
        assert results.journal == ("wal" if wal else "delete")
        assert list(results) == []
        results.put(replace(ONE, final=False))
        results.put(ONE)
        results.put(replace(ONE, id="a__a-1"))
    with Results(tmp_path / "r.sqlite") as results:
        assert list(results) == [replace(ONE, id="a__a-1"), ONE]


def test_a_database_in_memory() -> None:
    with Results(None) as results:
        results.put(ONE)
        assert list(results) == [ONE]


def test_a_run_says_where_it_cannot_do_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "1")
    with pytest.warns(RuntimeWarning, match="rollback journal"):
        assert run(tmp_path / "run", {"a": "1"})[0] == ["a"]
    monkeypatch.setenv("MINISANDBOX_NO_WAL", "0")
    assert run(tmp_path / "run", {"a": "1"})[0] == []


def test_others_read_while_it_is_written(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite") as results:
        results.put(ONE)
        reader = sqlite3.connect(tmp_path / "r.sqlite")
        results.put(replace(ONE, id="a__b-2"))
        assert reader.execute("SELECT count(*) FROM results").fetchone() == (2,)
        reader.close()


def test_a_killed_writer_leaves_what_it_put(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from minisandbox.runs import Result, Results\n"
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
        assert list(results) == [ONE]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a record."""

    name: str
    size: int


class Mark(enum.StrEnum):
    """What a record may say."""

    GOOD = "good"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Made:
    """A record with a field of every kind."""

    by: str
    mark: Mark = Mark.GOOD
    cause: Mark | None = None
    words: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.mark is not Mark.BROKEN


def fail(error: MiniSandboxError, built: bool) -> Made:
    return Made(f"{error.what}, {built}", Mark.BROKEN)


def run(out: Path, marks: dict[str, str], *, again: bool = False) -> tuple[list[str], list[Progress[Made]]]:
    """Run a job for each id; what was done, and what was reported."""
    done: list[str] = []
    news: list[Progress[Made]] = []

    def job(name: str, mark: str) -> Job[str]:
        def do(_: object) -> Made:
            done.append(name)
            if mark == "broken":
                raise RunError("no luck")
            return Made(mark, words=("a", "\udcff"), parts=(Part("one", 1),))

        return Job(name, lambda _: mark, do, fail)

    jobs = [job(name, mark) for name, mark in marks.items()]
    options: RunOptions[str, Made] = {"out": out, "workers": 2, "progress": news.append}
    run_jobs(RunDirectory, Made, jobs, None, {}, options, again=again)
    return sorted(done), news


def test_only_what_changed_or_failed_is_done_again(tmp_path: Path) -> None:
    assert run(tmp_path, {"a": "1", "b": "1", "c": "broken"})[0] == ["a", "b", "c"]
    done, news = run(tmp_path, {"a": "1", "b": "2", "c": "broken", "d": "1"})
    assert done == ["b", "c", "d"]
    assert [one.latest.by for one in news if one.resumed] == ["1"]
    assert [one.done for one in news] == [1, 2, 3, 4]
    assert {one.total for one in news} == {4}
    assert news[-1].seconds_left == 0.0
    assert run(tmp_path, {"a": "1"}, again=True)[0] == ["a"]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    ((made,), (broken,)) = (
        [one.latest for one in run(tmp_path, {name: mark})[1]] for name, mark in (("a", "1"), ("b", "broken"))
    )
    assert made == Made("1", words=("a", "\udcff"), parts=(Part("one", 1),), seconds=made.seconds)
    assert made.seconds > 0
    assert (broken.by, broken.mark) == ("no luck, True", Mark.BROKEN)
    with Results(tmp_path / DATABASE) as results:
        assert [read_fields(Made, one.body) for one in results] == [made, broken]
    assert read_fields(Made, {"by": "1", "dropped": 1}) == Made("1")  # of another version


def test_an_image_that_cannot_be_made_is_a_result(tmp_path: Path) -> None:
    def image_of(_: str) -> Image:
        raise RunError("no image")

    jobs = [Job("a", lambda _: "f", lambda _: pytest.fail("it has no image"), fail, "task")]
    built: list[list[str]] = []
    options: RunOptions[str, Made] = {"out": tmp_path, "build": lambda tasks: built.append([*tasks])}
    assert run_jobs(RunDirectory, Made, jobs, image_of, {}, options)["a"].by == "no image, False"
    assert built == [["task"]]
    with Results(tmp_path / DATABASE) as results:
        assert [one.final for one in results] == [False]


def test_only_chosen_jobs_run_and_others_keep_their_results(tmp_path: Path) -> None:
    run(tmp_path, {"a": "1"})
    jobs: list[Job[str]] = [Job(name, lambda _: "2", lambda _: Made("2"), fail) for name in ("b", "a", "c")]
    chosen = lambda name, earlier: name == "b" and earlier is None  # noqa: E731 - short
    found = run_jobs(RunDirectory, Made, jobs, None, {}, {"out": tmp_path}, chosen=chosen)
    assert [(name, one.by) for name, one in found.items()] == [("b", "2"), ("a", "1")]


def test_images_without_a_source_are_refused() -> None:
    job = Job("a", lambda _: "f", lambda _: Made("1"), fail, "task")
    with pytest.raises(InvalidValue, match="nothing makes the images"):
        run_jobs(RunDirectory, Made, [job], None, {}, {})
