"""The benchmark of engines: its table, resuming, what it leaves; without any engine."""

from __future__ import annotations

import fcntl
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engines import measuring
from benchmarks.engines.engine import Bash, Engine, Output, Project, Shelled
from benchmarks.engines.measuring import measure, temporary_place
from benchmarks.engines.registry import ENGINES, chosen, engine_class
from benchmarks.engines.report import table
from benchmarks.engines.results import Results, Sample, plan
from benchmarks.engines.worker import Measured

ABOUT = {"machine": "one"}
QUICK = plan(["calc"], quick=True)


def test_a_name_stands_for_its_variants() -> None:
    assert list(chosen(["bubblewrap"])) == ["host", "bubblewrap-command", "bubblewrap"]
    assert list(chosen(["minisandbox-user"])) == ["host", "minisandbox-user"]
    with pytest.raises(ValueError, match="no engine 'lxc'"):
        chosen(["lxc"])
    assert all(issubclass(engine_class(name), Engine) for name in ENGINES)


def test_samples_are_owed_until_the_rounds_the_budget_or_a_failure(tmp_path: Path) -> None:
    results, creation = Results(tmp_path / "new", ABOUT), QUICK[0]
    assert results.owes("docker", creation)
    results.add("docker", creation.name, {"took": 1.0})
    assert results.owes("docker", creation)
    results.add("podman", creation.name, {"took": creation.budget + 1})
    results.add("original", creation.name, {"took": 1.0, "failed": "no"})
    results.note("bubblewrap", {"failed": "not installed"})
    assert not any(results.owes(name, creation) for name in ("podman", "original", "bubblewrap"))
    again = Results(tmp_path / "new", ABOUT)
    again.add("docker", creation.name, {"took": 1.0})
    assert not again.owes("docker", creation)


def test_results_of_another_run_are_kept_apart(tmp_path: Path) -> None:
    Results(tmp_path, ABOUT).add("docker", "exec", {"took": 1.0})
    with pytest.raises(ValueError, match="another version"):
        Results(tmp_path, {"machine": "two"})
    assert Results(tmp_path, ABOUT).samples("docker", "exec")
    assert not Results(tmp_path, {"machine": "two"}, fresh=True).samples("docker", "exec")


# --- the table ---------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> Results:
    results = Results(tmp_path / "results", ABOUT)
    for name, factor in (("minisandbox", 1.0), ("bubblewrap", 2.0)):
        results.note(name, {"version": name})
        results.add(name, "creation", {"ready": [0.003 * factor], "teardown": [0.001], "cpu": 0.02 * factor})
        results.add(name, "rollout-30", {"wall": 0.36 * factor, "cpu": None})
        results.add(name, "validation-calc", {"wall": 2.0, "suite": 1.5, "tests": f"{factor:.0f} passed"})
    results.add("bubblewrap", "at-once-8", {"failed": "no room"})
    results.note("podman", {"failed": "podman is not installed"})
    return results


def test_the_table_has_numbers_ratios_and_what_is_missing(measured: Results) -> None:
    text = table(measured, QUICK, {"minisandbox": "Ours", "bubblewrap": "Bwrap", "podman": "Podman"})
    lines = text.splitlines()
    assert lines[:2] == ["| | Ours | Bwrap |", "|---|--:|--:|"]
    assert "| create to first result, p50, ms | 3.00 | 6.00 |" in lines
    assert "| the same / MiniSandbox, root; paired | 1.00 | 2.00 |" in lines
    assert "| CPU of create, `/bin/true` and stop, ms | 5.00 | 10.0 |" in lines
    assert "| a million rollouts, worker-hours | 100 | 200 |" in lines
    assert "- Podman: not run: podman is not installed." in lines
    assert "- Bwrap failed in at-once-8: no room." in lines
    assert "- validation-calc: the tests ended differently: Ours: 1 passed; Bwrap: 2 passed." in lines
    assert not any("CPU of a rollout" in line for line in lines)  # not counted: no control group


# --- engines' processes ----------------------------------------------------------------------------------------------


class Host(Shelled):
    """A shell of the host."""

    stopped = 0
    refuses = False

    def create(self, project: Project) -> Any:
        place = Path(tempfile.mkdtemp(dir=self.place))
        return Bash(["env", f"HOME={place}"]), place

    def exec(self, box: Any, command: Sequence[str]) -> Output:
        return Output(1, "refused") if self.refuses else super().exec(box, command)

    def shell(self, box: Any, command: str) -> Output:
        return super().shell(box, command.replace("/tmp/", "~/"))

    def stop(self, box: Any) -> None:
        self.stopped += 1
        super().stop(box)


def test_quantities_are_measured_and_nothing_stays(tmp_path: Path) -> None:
    measured = Measured(host := Host(tmp_path, "", [Project(Path("calc"))]))
    assert [len(found) for found in measured.creation(3).values()] == [3, 3]
    assert [len(found) for found in measured.exec(2).values()] == [2, 2]
    assert measured.rollout(5)["wall"] > 0
    assert measured.hold(2)["ready"] > 0
    assert measured.release()["teardown"] > 0
    assert (host.stopped, list(tmp_path.iterdir())) == (7, [])
    host.refuses = True
    with pytest.raises(RuntimeError, match="2 of 2 failed, one with a command ended with 1"):
        measured.hold(2)
    assert (host.stopped, list(tmp_path.iterdir())) == (9, [])


def test_a_shell_reports_statuses_and_its_end() -> None:
    bash = Bash([])
    assert bash.run("printf a; cd /; (exit 3)") == Output(3, "a")
    assert bash.run(["echo", "$HOME 'x'"]) == Output(0, "$HOME 'x'\n")
    assert bash.run("pwd").text == "/\n"
    with pytest.raises(RuntimeError, match="the shell ended: bye"):
        bash.run("echo bye; exit")
    bash.stop()


# --- interrupted runs ------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    interrupted = itertools.chain([False] * 5, [True], itertools.repeat(False))

    class Worker:
        def __init__(self, name: str, *_: object) -> None:
            self.name, self.status = name, {"version": "1"} if name != "docker" else {"failed": "no daemon"}

        def sample(self, quantity: Any) -> Sample:
            if next(interrupted):
                raise KeyboardInterrupt
            asked.append((quantity.name, self.name))
            return {"took": 1.0, "load": 0.5}

        def close(self) -> None:
            asked.append(("close", self.name))

    monkeypatch.setattr(measuring, "Worker", Worker)
    monkeypatch.setattr(measuring, "build_projects", lambda *_: [])
    names = ("host", "minisandbox", "docker")
    with pytest.raises(KeyboardInterrupt):
        measure(names, ["calc"], QUICK, Results(tmp_path / "results", ABOUT), tmp_path)
    first = [("creation", "minisandbox"), ("creation", "minisandbox"), ("exec", "host"), ("exec", "minisandbox")]
    assert asked[:5] == [*first, ("rollout-30", "minisandbox")]
    assert asked[5:] == [("close", name) for name in reversed(names)]
    asked.clear()
    measure(names, ["calc"], QUICK, Results(tmp_path / "results", ABOUT), tmp_path)
    rest = [("at-once-8", "minisandbox"), ("validation-calc", "host"), ("validation-calc", "minisandbox")]
    assert asked == [*rest, ("close", "minisandbox"), ("close", "host")]
    monkeypatch.setattr(measuring, "build_projects", lambda *_: pytest.fail("nothing is missing"))
    measure(names, ["calc"], QUICK, Results(tmp_path / "results", ABOUT), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["results"]


def test_directories_of_killed_runs_are_removed(tmp_path: Path) -> None:
    for name in ("killed", "running"):
        (tmp_path / f"bench-engines-{name}").mkdir()
        (tmp_path / f"bench-engines-{name}" / "lock").touch()
    with open(tmp_path / "bench-engines-running" / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with temporary_place(tmp_path) as place:
            assert {one.name for one in tmp_path.iterdir()} == {"bench-engines-running", place.name}
    assert [one.name for one in tmp_path.iterdir()] == ["bench-engines-running"]
