"""The official Dockerfiles as benchmarks/parity/dockerfiles.py renders them: only what cannot be had is replaced."""

from __future__ import annotations

import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.parity import dockerfiles

from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.spec import PythonRecipe
from minisandbox.tasks import Task
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.graders import LogGrader
from minisandbox.tasks.rows import task_from_own_row

pytest.importorskip("swebench")
pytest.importorskip("swesmith")
EXPORT = "name: testbed\ndependencies:\n  - python=3.10.15=h1\n  - pip:\n      - six==1.16.0\n"
PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"


def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str, repo: str, version: str) -> Path:
    monkeypatch.setattr(dockerfiles, "_add_parts", lambda *_: None)
    monkeypatch.setattr(dockerfiles, "_mirror", lambda *_: None)
    build = PythonRecipe("3.10", ("six==1.16.0",), complete=True)
    task = Task(
        identity, repo, "0" * 40, "a problem", PATCH, PATCH, ("t.py::a",), (), version, build=build,
        grader=LogGrader("pytest", "swebench:pallets/flask"),
    )  # fmt: skip
    row = {**task.to_row(), "repo": repo}
    for folder in ("swebench/pallets__flask/5014", "swesmith/pallets__click.fde47b4b"):
        (tmp_path / "pins" / folder).mkdir(parents=True)
    (tmp_path / "pins/swebench/pallets__flask/5014/environment.yml").write_text(EXPORT)
    name = "sweenv_pallets__click.fde47b4b.yml"
    (tmp_path / "pins/swesmith/pallets__click.fde47b4b" / name).write_text(EXPORT)
    options = Namespace(out=tmp_path, pins=tmp_path / "pins", repo_mirrors=tmp_path)
    found = task_from_own_row(dockerfiles._render(task, row, options), LoadContext(base=tmp_path))
    assert found.repo == repo
    return tmp_path / identity


@pytest.mark.parametrize(
    ("identity", "repo"),
    [("pallets__flask-5014", "pallets/flask"), ("pallets__click.fde47b4b.x__1", "swesmith/pallets__click.fde47b4b")],
)
def test_the_difference_is_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str, repo: str) -> None:
    folder = rendered(tmp_path, monkeypatch, identity, repo, "2.3")
    official, ours = (place / "Dockerfile" for place in (folder / "official", folder))
    assert "ubuntu:22.04" in official.read_text()
    assert "conda init" in ours.read_text()
    parse_dockerfile(ours.read_text())
    names = [line.split()[1] for line in (folder / "difference.diff").read_text().splitlines() if line[:3] == "+++"]
    assert names[0] == "Dockerfile"
    copy = tmp_path / "copy"
    shutil.copytree(folder / "official", copy / "official")
    for name in names:
        shutil.copy(folder / "official" / name, copy)
    subprocess.run(["patch", "-p0", "-s", "-i", folder / "difference.diff"], cwd=copy, check=True, timeout=60)
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert EXPORT.strip() in (folder / "setup_env.sh").read_text()


def test_an_official_file_that_changed_is_noticed() -> None:
    official = dockerfiles.Official({}, {}, {"base": "b", "environment": "e"}, "o/r")
    with pytest.raises(SystemExit, match="does not have"):
        dockerfiles._replaced("base", "FROM debian\n", official)
