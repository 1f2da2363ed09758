"""Which tasks of a set, from Python and from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builds import python_build
from tests.unit.test_tasks_jsonl import row

from minisandbox.errors import InvalidValue, NotFound, TaskFileError
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet, read_statuses, task_from_row, write_statuses
from minisandbox.tasks.choosing import Changed, merged, parts_of, shuffled, unique_images, with_status

IDS = [f"o__n-{number}" for number in range(10)]


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    path = tmp_path / "ten.json"
    path.write_text(json.dumps([row(instance_id=name, repo=f"o/{name[-1]}", hints_text=name) for name in IDS]))
    return path


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minisandbox", "tasks", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == status, done.stderr
    return done


# --- from Python -----------------------------------------------------------------------------------------------------


def test_tasks_share_an_environment_if_patches_alone_differ() -> None:
    first = task_from_row(row())
    other_patch = replace(first, instance_id="b", patch=first.patch.replace("+c", "+d"))
    other_build = replace(first, instance_id="c", build=replace(python_build(first), python="3.12"))
    assert unique_images(TaskSet([first, other_patch, other_build])) == {"o__n-1": ("o__n-1", "b"), "c": ("c",)}


def test_statuses_and_globs_of_them() -> None:
    statuses = {"a": "passed", "b": "submitted (exit_cost)", "c": "submitted"}
    assert with_status("abcd", statuses, ["submitted*"]) == ["b", "c"]
    assert with_status("abcd", statuses, ["submitted (exit_cost)", "missing"]) == ["b", "d"]


def test_the_same_seed_mixes_the_same_way() -> None:
    assert shuffled(IDS, 7) == shuffled(IDS, 7)
    assert sorted(shuffled(IDS, 7)) == IDS != shuffled(IDS, 7)


def test_parts_share_nothing_and_keep_the_order() -> None:
    parts = parts_of(IDS, {"train": 0.7, "dev": 0.1, "test": 0.2}, seed=1)
    assert {name: len(ids) for name, ids in parts.items()} == {"train": 7, "dev": 1, "test": 2}
    assert sorted(name for ids in parts.values() for name in ids) == IDS
    assert all(ids == sorted(ids) for ids in parts.values())
    assert parts != parts_of(IDS, {"train": 0.7, "dev": 0.1, "test": 0.2}, seed=2)
    assert len(parts_of(IDS, {"some": 0.3}, seed=1)["some"]) == 3
    for shares in ({"a": 0.9, "b": 0.2}, {"a": 0.0}, {"a": -1.0}, {"a": float("nan")}):
        with pytest.raises(InvalidValue, match="no parts of a whole"):
            parts_of(IDS, shares, seed=1)


def test_a_later_run_wins() -> None:
    whole, changes = merged(
        [{"a": "failed", "b": "passed"}, {"a": "passed", "b": "passed", "c": "error"}, {"c": "failed"}]
    )
    assert whole == {"a": "passed", "b": "passed", "c": "failed"}
    assert changes == [Changed("a", "failed", "passed", 1), Changed("c", "error", "failed", 2)]


def test_a_set_is_taken_apart_by_ids(ten: Path) -> None:
    tasks = TaskSet.load(ten)
    assert tasks.take(["o__n-3", "o__n-1"]).ids == ("o__n-3", "o__n-1")
    with pytest.raises(NotFound):
        tasks.take(["nothing"])
    with pytest.raises(InvalidValue, match="two tasks have the id"):
        tasks.take(["o__n-3", "o__n-3"])
    made = TaskSet([replace(tasks["o__n-3"], instance_id="made")])
    assert made.row("made") == made["made"].to_row()


# --- from the command line -------------------------------------------------------------------------------------------


def test_filter_by_the_statuses_of_runs(ten: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second"
    second.mkdir()
    write_statuses(first, {name: "passed" if name < "o__n-5" else "failed" for name in IDS[1:]})
    write_statuses(second / "run_batch_exit_statuses.yaml", {"o__n-4": "error", "o__n-9": "passed"})
    done = run("filter", ten, "--statuses", first, "--statuses", second, "-o", tmp_path / "usable")
    assert f"{tmp_path / 'usable'}: 4 of 10 tasks" in done.stderr
    rows = json.loads((tmp_path / "usable").read_text())
    assert [one["instance_id"] for one in rows] == ["o__n-1", "o__n-2", "o__n-3", "o__n-9"]
    assert rows == [
        one for one in json.loads(ten.read_text()) if one["instance_id"] in {x["instance_id"] for x in rows}
    ]
    assert run("filter", ten, "--statuses", first, "--status", "missing").stdout == "o__n-0\n"
    both = run("filter", ten, "--statuses", first, "--status", "missing", "--status", "f*", "--json")
    assert json.loads(both.stdout) == ["o__n-0", *IDS[5:]]


def test_filter_by_names_range_and_seed(ten: Path) -> None:
    assert run("filter", ten, "--repo", "^o/[2-4]$", "--id", "[^3]$").stdout.split() == ["o__n-2", "o__n-4"]
    assert run("filter", ten, "--range", "8:").stdout.split() == IDS[8:]
    mixed = run("filter", ten, "--shuffle", "7", "--range", ":3").stdout.split()
    assert mixed == shuffled(IDS, 7)[:3]
    assert run("filter", ten, "--only", "o__n-[12]").stdout.split() == IDS[1:3]


def test_filter_divides(ten: Path, tmp_path: Path) -> None:
    run("filter", ten, "--split", "train=0.8", "--split", "test=0.2", "-o", tmp_path / "mine.jsonl.gz")
    parts = [TaskSet.load(tmp_path / f"mine-{name}.jsonl.gz").ids for name in ("train", "test")]
    assert [len(ids) for ids in parts] == [8, 2]
    assert sorted(parts[0] + parts[1]) == IDS


def test_filter_by_what_the_store_has(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "store"))
    Store.open()
    assert run("filter", ten, "--image", "missing").stdout.split() == IDS
    assert run("filter", ten, "--image", "built", "--image", "failed").stdout == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--status", "passed"], "--status needs --statuses"),
        (["--split", "train=0.9"], "--split needs --out"),
        (["--split", "train", "-o", "x"], "is not NAME=SHARE"),
        (["--split", "a=0.9", "--split", "b=0.9", "-o", "x"], "no parts of a whole"),
        (["--range", "1-3"], "not a range"),
        (["--id", "("], "not a regular expression"),
        (["--dataset", "swe-smith"], "did you mean 'swesmith'"),
        (["--pins", "nowhere"], "--pins nowhere is not a directory"),
    ],
)
def test_filters_that_are_wrong(ten: Path, words: list[str], told: str) -> None:
    assert told in run("filter", ten, *words, status=InvalidValue.exit_code).stderr
    assert not (ten.parent / "x").exists()


def test_unique_images(ten: Path, tmp_path: Path) -> None:
    assert run("unique-images", ten).stdout.split()[-3:] == ["o__n-0", "o/0", "10"]
    run("unique-images", ten, "-o", tmp_path / "unique.parquet")
    assert TaskSet.load(tmp_path / "unique.parquet").ids == ("o__n-0",)


def test_merge(tmp_path: Path) -> None:
    write_statuses(tmp_path / "a.yaml", {"x": "failed", "y": "passed"})
    write_statuses(tmp_path / "b.yaml", {"x": "passed"})
    done = run("merge", tmp_path / "a.yaml", tmp_path / "b.yaml", "-o", tmp_path / "a.yaml")
    assert done.stdout.splitlines()[1].split() == ["x", "failed", "passed", str(tmp_path / "b.yaml")]
    assert "2 tasks; 1 changes" in done.stderr
    assert read_statuses(tmp_path / "a.yaml") == {"y": "passed", "x": "passed"}
    run("merge", tmp_path / "none.yaml", "-o", tmp_path / "c.yaml", status=TaskFileError.exit_code)
    assert not (tmp_path / "c.yaml").exists()


def test_show_prints_how_a_task_is_built_and_tested(tmp_path: Path) -> None:
    task: Task = task_from_row(row())
    path = tmp_path / "t.jsonl"
    build = replace(python_build(task), install=("make",), overrides=("attrs",), system=("gcc",), network="off")
    path.write_text(TaskSet([replace(task, build=build)]).to_jsonl())
    shown = run("show", path, "o__n-1").stdout
    for line in (
        "build.python: 3.11", 'build.requirements: ["pytest==8.3.4"]', 'build.overrides: ["attrs"]',
        'build.system: ["gcc"]', 'build.install: ["make"]', "build.network: off", 'build.environment: {"A": "b"}',
        "test.command: python -m pytest", "test.timeout: 300.0",
    ):  # fmt: skip
        assert line in shown.splitlines()


def test_rows_that_are_no_tasks_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row(), row(instance_id="b", FAIL_TO_PASS=[]))))
    done = run("filter", path, "--skip-unusable")
    assert done.stdout == "o__n-1\n"
    assert "skipped: " in done.stderr
    assert "line 2 (b): field 'FAIL_TO_PASS' is empty" in done.stderr
