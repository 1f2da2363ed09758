"""What agents play, before any sandbox is there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from minisandbox.agents import ReplayAgent
from minisandbox.agents.baselines import apply_command
from minisandbox.errors import InvalidValue
from minisandbox.tasks import Reference

PATCH = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-one $HOME `id`\n+END_OF_PATCH\n"


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_commands_of_a_list(tmp_path: Path) -> None:
    agent = ReplayAgent.load(write(tmp_path / "c.json", ["make", ["ls", "-l"]]))
    assert agent._commands == ("make", ("ls", "-l"))


def test_commands_of_trajectories(tmp_path: Path) -> None:
    steps = [{"command": "make", "exit_code": 1}, {"command": ["ls"]}]
    file = write(tmp_path / "a__1.json", {"instance_id": "a", "steps": steps})
    assert ReplayAgent.load(file)._per_task == {"a": ("make", ("ls",))}
    write(tmp_path / "a__0.json", {"instance_id": "a", "steps": [{"command": "first"}]})
    write(tmp_path / "b__0.json", {"instance_id": "b", "steps": []})
    assert ReplayAgent.load(tmp_path)._per_task == {"a": ("first",), "b": ()}


def test_commands_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    write(tmp_path / "run.json", {})
    write(tmp_path / "trajectories" / "a__0.json", {"instance_id": "a", "steps": [{"command": "x"}]})
    assert ReplayAgent.load(tmp_path)._per_task == {"a": ("x",)}


@pytest.mark.parametrize(
    "value", [{}, {"steps": []}, 3, [3], [[]], [["a", 1]], ["a\0"], {"instance_id": "a", "steps": [1]}]
)
def test_what_cannot_be_played(tmp_path: Path, value: object) -> None:
    with pytest.raises(InvalidValue, match=r"c\.json"):
        ReplayAgent.load(write(tmp_path / "c.json", value))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="nowhere"):
        ReplayAgent.load(tmp_path / "nowhere.json")
    (tmp_path / "c.json").write_text("make\n")
    with pytest.raises(InvalidValue, match="not JSON"):
        ReplayAgent.load(tmp_path / "c.json")


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_oracle_hands_its_patch_to_git_as_it_is(tmp_path: Path, ending: str) -> None:
    (tmp_path / "x").write_text("END_OF_PATCH\n")
    command = apply_command(Reference(PATCH.rstrip("\n") + ending, reverse=True))
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "x").read_text() == "one $HOME `id`\n"
