"""The whole way, by the command a newcomer types: images, validation, rollouts, a second run that rebuilds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisandbox.tasks import Form, TaskSet

pytestmark = [pytest.mark.kernel, pytest.mark.index, pytest.mark.slow]

# Tasks of both forms, and of one project and of several: root has these, an ordinary user all fourteen.
SIX = ("pytoolz__toolz-1.0.0.update_in", "r1chardj0n3s__parse-*", "pytoolz__toolz-1.0.0.outer_join",
       "pallets__click-8.1.7.range_bounds", "pallets__click-8.1.7.empty_default", "jpvanhal__inflection-*")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A store and a directory of their own, as a fresh account has them."""

    root: Path
    only: tuple[str, ...]  # options that choose tasks
    tasks: int

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "MINISANDBOX_STORE": str(self.root / "store")}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "minisandbox", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=self.root, env=self.environment,
        )  # fmt: skip

    def run(self, *words: str, status: int = 0) -> str:
        with self.start(*words) as process:
            out, err = process.communicate(timeout=900)
        assert process.returncode == status, err + out
        return out

    def json(self, *words: str, status: int = 0) -> object:
        return json.loads(self.run(*words, "--json", status=status))

    def rollouts(self, *words: str) -> list[dict[str, object]]:
        """What ``rollout --json`` says of each rollout; the last line is its summary."""
        *lines, last = map(json.loads, self.run(*words, "--json").splitlines())
        assert last["summary"]["rollouts"] == len(lines)
        return [line["rollout"] for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the first run has been made."""
    names = SIX if os.geteuid() == 0 else ()
    only = tuple(word for name in names for word in ("--only", name))
    made = Place(tmp_path_factory.mktemp("quickstart"), only, len(names) or 14)
    (made.root / "first.json").write_text(made.run("quickstart", *only, "--json"), encoding="utf-8")
    return made


def layers(place: Place) -> dict[str, float]:
    """Every layer with the time of its making."""
    return {path.name: path.stat().st_mtime for path in (place.root / "store" / "layers").iterdir()}


def test_first_run(place: Place) -> None:
    report = json.loads((place.root / "first.json").read_text(encoding="utf-8"))
    assert len(report["tasks"]) == report["as_expected"] == place.tasks
    bundled = TaskSet.load("quickstart")
    assert {bundled[task["instance_id"]].form for task in report["tasks"]} == {Form.SWEBENCH, Form.SWESMITH}
    assert report["resumed"] == 0
    for task in report["tasks"]:
        assert task["status"] == "valid"
        assert task["verdicts"] == {"oracle": "resolved", "empty": "failed", "replay": "resolved"}
        assert task["problems"] == []
        assert task["shared_bytes"] > task["unique_bytes"] > 0
        assert 0 < task["sandbox_ready"] < 60
    assert sum(task["built_in"] for task in report["tasks"]) > 0
    assert report["disk_bytes"] < sum(task["shared_bytes"] for task in report["tasks"])


@pytest.mark.once
def test_second_run_rebuilds_nothing(place: Place) -> None:
    before = layers(place)
    report = place.json("quickstart", *place.only)
    assert isinstance(report, dict)
    assert layers(place) == before
    assert report["as_expected"] == place.tasks
    assert report["resumed"] == 3 * place.tasks
    assert all(task["built_in"] == 0 for task in report["tasks"])


@pytest.mark.once
def test_the_table(place: Place) -> None:
    lines = place.run("quickstart", "--only", "*toolz*").splitlines()
    assert lines[0].split()[:2] == ["task", "built"]
    assert sum(line.startswith("pytoolz__toolz") and line.endswith("as expected") for line in lines) == 2
    assert any(line.startswith("2 of 2 tasks as expected") for line in lines)


@pytest.mark.once
def test_check_finds_no_fault(place: Place) -> None:
    report = place.json("tasks", "check", "quickstart", *place.only, "-k", "1")
    assert isinstance(report, dict)
    assert (report["tasks"], report["findings"]) == (place.tasks, [])
    assert {(one["ran"], one["reference"], one["empty"]) for one in report["results"]} == {(True, 1, 0)}


@pytest.mark.once
def test_images_are_listed_and_shown(place: Place) -> None:
    images = place.json("image", "ls")
    assert isinstance(images, list)
    names = [image["name"] for image in images if image["name"] != "host"]
    assert len(names) == place.tasks
    shown = place.json("image", "show", names[0])
    assert isinstance(shown, dict)
    assert shown["layers"][0]["step"]["kind"] == "base"
    assert names[0] in place.run("image", "show", names[0])
    assert place.run("image", "ls").count("\n") >= place.tasks


@pytest.mark.once
def test_a_rollout_goes_on_where_it_was(place: Place) -> None:
    words = ("rollout", "quickstart", "--agent", "oracle", "--only", "*toolz*", "--out", "run")
    first, second = place.rollouts(*words), place.rollouts(*words)
    assert [one["resumed"] for one in first] == [False, False]
    assert [one["resumed"] for one in second] == [True, True]
    again = ("rollout", "quickstart", "--agent", "replay", "--recording", "run", "--only", "*toolz*", "--out", "again")
    assert {one["verdict"] for one in place.rollouts(*again)} == {"resolved"}


def test_a_task_that_cannot_be_built_costs_the_others_nothing(place: Place) -> None:
    names = ("pytoolz__toolz-1.0.0.update_in", "pytoolz__toolz-1.0.0.outer_join")
    rows = [place.json("tasks", "show", "quickstart", one) for one in names]
    assert isinstance(rows[0], dict)
    rows[0]["build"]["install"] = ["echo the-reason >&2; exit 3"]
    (place.root / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with place.start("image", "build", "mixed.jsonl") as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 24
    assert names[1] in out
    assert "the-reason" in err
    assert ".log" in err
    found = place.json("validate", "mixed.jsonl", status=30)
    assert isinstance(found, dict)
    assert [one["verdict"] for one in found["results"]] == ["error", "valid"]


@pytest.mark.once
def test_an_invalid_task_is_a_finding(place: Place) -> None:
    row = place.json("tasks", "show", "quickstart", "pytoolz__toolz-1.0.0.update_in")
    assert isinstance(row, dict)
    row["FAIL_TO_PASS"] = [*row["FAIL_TO_PASS"], row["PASS_TO_PASS"].pop()]
    (place.root / "wrong.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    found = place.json("validate", "wrong.jsonl", status=1)
    assert isinstance(found, dict)
    assert [(one["verdict"], one["cause"]) for one in found["results"]] == [("invalid", "f2p_not_failing")]


@pytest.mark.once
def test_ctrl_c_keeps_what_is_finished(place: Place) -> None:
    words = ("rollout", "quickstart", *place.only, "--agent", "empty", "--out", "cut")
    with place.start(*words) as process:
        assert process.stderr is not None
        while ": failed" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert err.splitlines()[-1] == "minisandbox: interrupted; finished rollouts are kept; the same command resumes"
    report = place.rollouts(*words)
    assert any(one["resumed"] for one in report)
    assert {one["verdict"] for one in report} == {"failed"}
