"""Four other distributions, with a dialect, a grader, an agent and a backend: used by the commands as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from minisandbox.agents import load_recipe, open_agent
from minisandbox.errors import InvalidValue, NotFound, PackageError, TaskFileError
from minisandbox.grade.graders.script import ScriptRunner
from minisandbox.plugins import GROUPS, plugin_names
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import ScriptGrader, task_from_row
from minisandbox.types import ExecResult, ImageSpec

DISTRIBUTIONS = sorted(str(path.parent) for path in Path(__file__).parent.glob("*/pyproject.toml"))
ROWS = (
    {"exercise": "sum", "question": "What is 40 + 2?", "answer": "42"},
    {"exercise": "difference", "question": "What is 40 - 2?", "answer": "38"},
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the four distributions."""
    target = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *DISTRIBUTIONS]
    subprocess.run(command, check=True)
    return target


def minisandbox(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "minisandbox", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_each_distribution_adds_one_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    assert {group: plugin_names(group) for group in GROUPS} == {
        "dialects": ("exercises",), "graders": ("answer",), "agents": ("writer",), "backends": ("labelled",),
        "recipes": ("typist",),
    }  # fmt: skip


@pytest.mark.kernel
def test_a_rollout_uses_all_four(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises/README").write_text("Write answer.txt.\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = "rollout rows.jsonl --allow-local-sources --agent writer --agent-option text=42 --backend labelled -o run"
    done = minisandbox(installed, tmp_path, *words.split(), "--json")
    assert done.returncode == 0, done.stderr
    shown = minisandbox(installed, tmp_path, "trajectories", "ls", "run", "--json")
    rewards = {row["instance_id"]: row["reward"] for row in json.loads(shown.stdout)}
    assert rewards == {"sum": 1.0, "difference": 0.0}


@pytest.mark.kernel
def test_a_backend_creates_sandboxes(installed: Path, spec: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    with Sandbox.create(replace(spec, backend="labelled")) as box:
        assert box.exec("echo $MADE_BY").stdout == "labelled\n"


@dataclass(frozen=True, slots=True)
class FailingGrader(ScriptGrader):
    """A plug-in with a bug."""

    kind: ClassVar[str] = "failing"

    def reward(self, box: Sandbox, result: ExecResult) -> float:
        raise KeyError(result.stdout)


@pytest.mark.kernel
def test_a_grader_that_fails_gives_no_reward(box: Sandbox) -> None:
    run = ScriptRunner(FailingGrader("echo 1"), timeout=60.0).run(box)
    assert run.reward is None
    assert run.doubt is not None
    assert "the grader 'failing' failed: KeyError" in run.doubt.detail


def distribution(folder: Path, name: str, group: str, entry: str) -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[minisandbox.{group}]\n{entry}\n")


def test_an_entry_point_that_fails_names_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "broken", "agents", "mine = no_such_module:Agent")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackageError, match=r"'mine' of broken 1\.0 cannot be loaded.*ModuleNotFoundError"):
        open_agent("mine")


def test_two_entry_points_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "first", "agents", "mine = json:loads")
    distribution(tmp_path, "second", "agents", "mine = json:dumps")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackageError, match=r"'mine' of (first|second) 1\.0 is already a name of (first|second) 1\.0"):
        open_agent("mine")


def test_names_of_ours_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "mine", "agents", "bash = json:loads")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackageError, match=r"'bash' of mine 1\.0 is already a name of MiniSandbox"):
        open_agent("other")


def test_what_is_no_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group in GROUPS:
        distribution(tmp_path / group, "mine", group, "mine = json:__name__")
    row = {"instance_id": "a", "repo": "o/n", "form": "swebench", "problem_statement": "", "patch": "", "build": {}}
    calls: dict[str, Callable[[], object]] = {
        "dialects": lambda: task_from_row(row, form="mine"),
        "graders": lambda: task_from_row({**row, "test": {"grader": "mine", "command": "true"}}),
        "agents": lambda: open_agent("mine"),
        "recipes": lambda: load_recipe("mine"),
        "backends": lambda: Sandbox.create(ImageSpec("a", (tmp_path,), backend="mine")),
    }
    for group, call in calls.items():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / group))
            with pytest.raises((PackageError, InvalidValue), match="mine"):
                call()
        with pytest.raises((InvalidValue, NotFound, TaskFileError), match="mine"):
            call()
