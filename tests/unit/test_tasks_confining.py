"""Rows of a file name nothing of this machine but what lies in the file's directory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.builds import python_build

from minisandbox.cli.main import main
from minisandbox.errors import SourceError, TaskFileError
from minisandbox.images.sources import mirrors
from minisandbox.images.sources.localsource import take_snapshot
from minisandbox.spec import GitSource, LocalSource, Source
from minisandbox.tasks import TaskSet, rows, task_from_row
from minisandbox.tasks.context import LoadContext, problem_of
from minisandbox.tasks.dialects import convert
from minisandbox.tasks.dialects.environments import exported

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
    (tmp_path / "theirs/more.txt").write_text("-r pins.txt\n-r ../home/secret.txt\n")
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
    ("build.source.git.url", lambda home: repository(f"file://host{home}")),
    ("build.source.git.url", lambda home: repository(f"file://[proc/self/cwd/x]{home}")),
    ("build.source.git.url", lambda home: repository(f"file:///proc/self/cwd/x@[y]{home}")),
    ("build.source.git.url", lambda home: repository(f"file:///proc/self/cwd/x%40%5by]{home}")),
    ("build.source.git.url", lambda home: repository(f"x@[y]{home}")),
    ("build.source.git.url", lambda home: repository("~/repository")),
    ("build.source.git.url", lambda home: repository(f"{home}/../theirs/x://../../home")),
    ("build.source.git.url", lambda home: repository("./theirs/x://../../home")),
    ("build.source.git.url", lambda home: repository("ftp://host/x")),
    ("build.source.git.url", lambda home: repository("file:x")),
    ("build.requirements_file", lambda home: row(requirements_file=str(home / "secret.txt"))),
    ("build.requirements_file", lambda home: row(requirements_file="link/secret.txt")),
    ("build.requirements_file", lambda home: row(requirements_file="more.txt")),
]


@pytest.mark.parametrize(("field", "make"), OUTSIDE)
def test_what_lies_elsewhere_is_refused_with_its_place(place: Path, field: str, make: Any) -> None:
    path = written(place, make(place.parent / "home"))
    with pytest.raises(TaskFileError, match=r"tasks\.jsonl, line 1 \(o__n-1\)") as caught:
        TaskSet.load(path)
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
            assert len(TaskSet.load(path, allow_local_sources=True)) == 1


def test_rows_of_ones_own_program_may_name_anything(place: Path) -> None:
    assert python_build(task_from_row(local(place.parent / "home"))).source
    assert python_build(task_from_row(local("../home"), base=place)).source


def test_rows_of_the_hub_may_name_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(TaskFileError, match="is a path of this machine"):
        convert(local("project"), LoadContext(Path(), places=()))


@pytest.mark.parametrize("options", [(), ("--allow-local-sources",)])
def test_the_command(place: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["tasks", "show", str(written(place, local("../home"))), "o__n-1", *options])
    assert (status == 0) is bool(options)
    assert ("--allow-local-sources" in capsys.readouterr().err) is not bool(options)


def _git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", "-C", place, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _repository(place: Path) -> Path:
    place.mkdir(parents=True)
    _git(place, "init", "-q")
    (place / "secret.py").write_text("KEY = 1\n")
    _git(place, "add", ".")
    _git(place, "commit", "-qm", "first")
    return place


def test_listing_a_work_tree_asks_no_promisor_for_objects(tmp_path: Path) -> None:
    theirs, marker = _repository(tmp_path / "theirs"), tmp_path / "ran"
    _git(theirs, "update-index", "--add", "--cacheinfo", f"100644,{'12' * 20},.gitignore")
    _git(theirs, "update-index", "--skip-worktree", ".gitignore")
    settings = {
        "core.repositoryformatversion": "1", "extensions.partialclone": "x", "remote.x.promisor": "true",
        "remote.x.url": str(theirs), "remote.x.uploadpack": f"touch {marker}; false",
    }  # fmt: skip
    for name, value in settings.items():
        _git(theirs, "config", name, value)
    (theirs / "new.py").touch()
    assert [path for path, _, _ in take_snapshot(LocalSource(theirs)).files] == ["new.py", "secret.py"]
    assert not marker.exists()
    _git(theirs, "ls-files", "--others", "--exclude-standard")  # what git itself would do
    assert marker.exists()


@pytest.mark.parametrize(
    "url", ["https://github.com/o/n", "git@github.com:o/n", "host:/srv/n", "ssh://host/srv/n", "h:srv/n", "git://h/n"]
)
def test_repositories_of_servers(place: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A directory that is called like an address is none."""
    (place / url).mkdir(parents=True)
    monkeypatch.chdir(place)
    assert mirrors._location(GitSource(url, COMMIT)) == url
    assert len(TaskSet.load(written(place, repository(url)))) == 1


@pytest.mark.parametrize("bare", [False, True])
def test_a_repository_of_this_machine_is_refused_wherever_it_lies(place: Path, bare: bool) -> None:
    """Behind ``project/.`` git tries ``project/..git``, beside it ``project.git``; objects may be anybody's."""
    mine = _repository(place / "mine")
    if bare:
        _git(place, "clone", "-q", "--bare", "mine", "bare.git")
        mine = place / "bare"
    for url in (mine, f"file://{mine}", f"file://{mine}/.", f"FILE://localhost{mine}", "mine", "./mine", "~/mine"):
        path = written(place, repository(url))
        with pytest.raises(TaskFileError, match="is no address of a server") as caught:
            TaskSet.load(path)
        assert "--repo-mirrors" in str(caught.value.hint)
        assert len(TaskSet.load(path, allow_local_sources=True)) == 1


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


def test_a_source_that_leads_elsewhere_after_its_row_was_read_is_not_taken(place: Path) -> None:
    (place / "project/own.py").touch()
    (place.parent / "home/private.py").touch()
    path = written(place, local("project"))
    loaded = (TaskSet.load(path, allow_local_sources=free)["o__n-1"] for free in (False, True))
    kept, free = (python_build(task).source for task in loaded)
    assert kept is not None
    assert free is not None
    assert [name for name, _, _ in take_snapshot(_local(kept)).files] == ["own.py"]
    (place / "project").rename(place / "before")
    (place / "project").symlink_to(place.parent / "home")
    with pytest.raises(SourceError, match=f"leads to {place.parent}/home now, outside of {place}"):
        take_snapshot(_local(kept))
    assert [name for name, _, _ in take_snapshot(_local(free)).files] == ["private.py", "secret.txt"]


def _local(source: Source) -> LocalSource:
    assert isinstance(source, LocalSource)
    return source


def test_a_list_that_becomes_a_link_when_it_was_looked_at_is_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchanging(path: Path, places: Sequence[Path] | None) -> tuple[str, str, str] | None:
        found = problem_of(path, places)
        if not (place / "pins.txt").is_symlink():
            (place / "pins.txt").unlink()
            (place / "pins.txt").symlink_to(place.parent / "home/secret.txt")
        return found

    monkeypatch.setattr(rows, "problem_of", exchanging)
    with pytest.raises(TaskFileError, match="requirements_file") as caught:
        TaskSet.load(written(place, row(requirements_file="pins.txt")))
    assert f"is '{place.parent}/home/secret.txt', outside of {place}" in str(caught.value)


def _rename_in_index(index: Path, old: bytes, new: bytes) -> None:
    import hashlib  # noqa: PLC0415

    data = index.read_bytes()[:-20].replace(old, new)
    index.write_bytes(data + hashlib.sha1(data, usedforsecurity=False).digest())


@pytest.mark.parametrize(
    "names", [("", "project"), ("..", "project"), ("../home",), ("/",), ("a/../../home", "project")]
)
def test_what_rows_call_an_environment_lies_below_its_directory(place: Path, names: tuple[str, ...]) -> None:
    exports = place.parent / "home/project"
    exports.mkdir()
    (exports / "environment.yml").write_text("dependencies:\n  - python=3.11\n  - pip:\n    - theirs==1\n")
    (place / "pins/a").mkdir(parents=True)
    (place / "pins/project").symlink_to(exports)  # the user's own
    inside = exported(place / "pins", "project")
    assert inside
    assert inside.requirements == ("theirs==1",)
    absolute = tuple(f"{place.parent}/home" if name == "/" else name for name in names)
    assert exported(place / "pins", *absolute) is None
    assert exported(place / "pins", str(exports)) is None
