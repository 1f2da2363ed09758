"""Rows of a file name nothing of this machine but what lies in the file's directory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisandbox.cli.main import main
from minisandbox.errors import TaskFileError
from minisandbox.images.localsource import take_snapshot
from minisandbox.images.recipe import LocalSource
from minisandbox.tasks import TaskSet, read_tasks, task_from_row
from minisandbox.tasks.confining import local_repository
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects import convert

COMMIT = "1" * 40
PATCH = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"


def row(**build: object) -> dict[str, Any]:
    return {
        "instance_id": "o__n-1", "repo": "o/n", "form": "swesmith", "problem_statement": "x", "patch": PATCH,
        "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": [], "build": build, "test": {"command": "pytest"},
    }  # fmt: skip


def local(path: object) -> dict[str, Any]:
    return row(source={"local": {"path": str(path)}})


def repository(url: object) -> dict[str, Any]:
    return row(source={"git": {"url": str(url), "commit": COMMIT}})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for a stranger's files, beside one with what is nobody's business."""
    (tmp_path / "theirs/project").mkdir(parents=True)
    (tmp_path / "theirs/pins.txt").write_text("attrs==23.1.0\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret.txt").write_text("attrs==1.0\n")
    (tmp_path / "theirs/link").symlink_to(tmp_path / "home")
    (tmp_path / "theirs/loop").symlink_to("loop")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "theirs"


def written(place: Path, *rows: dict[str, Any]) -> Path:
    path = place / "tasks.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


OUTSIDE: list[tuple[str, Callable[[Path], dict[str, Any]]]] = [
    ("build.source.local.path", local),
    ("build.source.local.path", lambda home: local("../home")),
    ("build.source.local.path", lambda home: local("project/../../home")),
    ("build.source.local.path", lambda home: local("link")),
    ("build.source.local.path", lambda home: local("/")),
    ("build.source.local.path", lambda home: local("loop")),
    ("build.source.local.path", lambda home: local("a\0b")),
    ("build.source.git.url", repository),
    ("build.source.git.url", lambda home: repository(f"file://{home}")),
    ("build.source.git.url", lambda home: repository(f"file://localhost{str(home).replace('home', 'ho%6de')}")),
    ("build.source.git.url", lambda home: repository("~/repository")),
    ("build.requirements_file", lambda home: row(requirements_file=str(home / "secret.txt"))),
    ("build.requirements_file", lambda home: row(requirements_file="link/secret.txt")),
]


@pytest.mark.parametrize(("field", "make"), OUTSIDE)
def test_what_lies_elsewhere_is_refused_with_its_place(place: Path, field: str, make: Any) -> None:
    path = written(place, make(place.parent / "home"))
    for load in (TaskSet.load, read_tasks):
        with pytest.raises(TaskFileError, match=r"tasks\.jsonl, line 1 \(o__n-1\)") as caught:
            load(path)
        assert (caught.value.field, caught.value.line) == (field, 1)
        assert caught.value.hint


def test_the_error_says_why_and_what_to_do(place: Path) -> None:
    with pytest.raises(TaskFileError) as caught:
        TaskSet.load(written(place, local("../home")))
    assert str(place.parent / "home") in str(caught.value)
    assert f"outside of {place}" in str(caught.value)
    assert "--allow-local-sources" in str(caught.value)


def test_a_home_directory_is_none_in_the_current_one_either(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(place, local("~/secrets"))
    monkeypatch.chdir(place)
    with pytest.raises(TaskFileError, match="outside of"):
        TaskSet.load("tasks.jsonl")


@pytest.mark.parametrize("given", [row(source={"local": {"path": "project"}}), row(requirements_file="pins.txt")])
def test_what_lies_in_the_files_directory_is_taken(place: Path, given: dict[str, Any]) -> None:
    assert len(TaskSet.load(written(place, given))) == 1
    assert len(TaskSet.load(written(place, local(place / "project"), {**given, "instance_id": "b"}))) == 2


def test_a_trusted_file_may_name_anything(place: Path) -> None:
    for number, (_, make) in enumerate(OUTSIDE):
        if number not in (5, 6):  # no directory at all
            path = written(place, make(place.parent / "home"))
            assert len(TaskSet.load(path, allow_local_sources=True)) == 1
            assert len(read_tasks(path, allow_local_sources=True)) == 1


def test_rows_of_ones_own_program_may_name_anything(place: Path) -> None:
    assert task_from_row(local(place.parent / "home")).build.source
    assert task_from_row(local("../home"), base=place).build.source


def test_rows_of_the_hub_may_name_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(TaskFileError, match="is a path of this machine"):
        convert(local("project"), LoadContext(Path(), places=()))


@pytest.mark.parametrize("options", [(), ("--allow-local-sources",)])
def test_the_command(place: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["tasks", "show", str(written(place, local("../home"))), "o__n-1", *options])
    assert (status == 0) is bool(options)
    assert ("--allow-local-sources" in capsys.readouterr().err) is not bool(options)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://github.com/o/n", None),
        ("git@github.com:o/n", None),
        ("host:/srv/n", None),
        ("ssh://host/srv/n", None),
        ("/srv/n", "/srv/n"),
        ("../n", "../n"),
        ("n", "n"),
        ("./a:b", "./a:b"),
        ("file:///srv/a%20b", "/srv/a b"),
        ("FILE://localhost/srv/n", "/srv/n"),
    ],
)
def test_which_addresses_are_paths(url: str, path: str | None) -> None:
    assert local_repository(url) == (None if path is None else Path(path))


def test_an_index_made_by_hand_takes_nothing_from_elsewhere(place: Path) -> None:
    """git lists what the index names, where no such file would be added."""
    root = place / "project"
    (root / "own.txt").write_text("own")
    (root / "directory").mkdir()
    (root / "directory/secret.txt").write_text("own")
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"})
    (root / "directory/secret.txt").unlink()
    (root / "directory").rmdir()
    (root / "directory").symlink_to(place.parent / "home")
    index = root / ".git/index"
    _rename_in_index(index, b"own.txt", b"../y.md")
    (place / "y.md").write_text("theirs")
    found = take_snapshot(LocalSource(root))
    assert "secret.txt" not in {Path(path).name for path, _, _ in found.files}
    assert not [path for path, _, _ in found.files if ".." in path]


def _rename_in_index(index: Path, old: bytes, new: bytes) -> None:
    import hashlib  # noqa: PLC0415

    data = index.read_bytes()[:-20].replace(old, new)
    index.write_bytes(data + hashlib.sha1(data, usedforsecurity=False).digest())
