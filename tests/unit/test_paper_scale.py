"""The count of what whole data sets take: the choice of wheels, and a task's size beside the scripts themselves."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from benchmarks.scale.index import MISSING, WHEEL, Index, choose, nearest
from benchmarks.scale.layers import commit_of as one_commit
from benchmarks.scale.layers import (
    index_bytes,
    objects_of,
    own_objects,
    shared_objects,
)
from benchmarks.scale.pins import Pin
from benchmarks.scale.tasks import find_mirror
from benchmarks.scale.trees import BEST, LOOSE, PACK, Repository

from minisandbox.images.python.simple_api import IndexLink
from minisandbox.index_settings import IndexSettings


def links(*names: str) -> list[IndexLink]:
    return [IndexLink(f"https://example.invalid/{name}") for name in names]


def test_an_interpreter_gets_the_wheel_that_an_installer_would_take() -> None:
    files = links(
        "a-1.0.tar.gz",
        "a-1.0-py3-none-any.whl",
        "a-1.0-cp39-cp39-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1.0-cp39-cp39-musllinux_1_1_x86_64.whl",
        "a-1.0-cp310-cp310-macosx_11_0_arm64.whl",
    )
    assert choose("3.9", files) == files[2]
    assert choose("3.10", files) == files[1]
    assert choose("3.10", files[:1] + files[2:]) == files[0], "a source archive where no wheel fits"
    assert nearest("3.10", files[:1] + files[2:]) == files[2]
    assert choose("3.10", []) is None


def wheel(path: Path, **files: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_py", ".py"), content)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """An index of files, without network."""
    project = tmp_path / "simple/a"
    project.mkdir(parents=True)
    wheel(project / "a-1.0-cp39-cp39-manylinux2014_x86_64.whl", a__x_py=b"x = 1\n" * 1000, a__y_py=b"")
    (project / "index.html").write_text('<a href="a-1.0-cp39-cp39-manylinux2014_x86_64.whl">a</a>')
    settings = IndexSettings(index_url=(tmp_path / "simple").as_uri())
    return Index(tmp_path / "cache", settings)


def test_the_list_of_a_wheel_is_read_once_and_kept(index: Index, tmp_path: Path) -> None:
    found = index.contents(Pin("a", "1.0"), "3.9")
    assert (found.kind, [(path, size) for path, _, size, _ in found.members]) == (
        WHEEL,
        [("a/x.py", 6000), ("a/y.py", 0)],
    )
    (tmp_path / "simple/a/index.html").unlink()
    (tmp_path / "simple/a/a-1.0-cp39-cp39-manylinux2014_x86_64.whl").unlink()
    assert index.contents(Pin("a", "1.0"), "3.9") == found, "the cache alone answers"


def test_what_is_not_on_the_index_is_missing(index: Index) -> None:
    assert index.contents(Pin("b", "1.0"), "3.9").kind == MISSING
    assert index.contents(Pin("a", "2.0"), "3.9").kind == MISSING


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "gc.auto=0")
    return subprocess.check_output(["git", "-C", str(root), *identity, *arguments], text=True).strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Repository, list[str]]:
    """A repository with three commits: the second changes, moves and removes one file, the third all."""
    root = tmp_path / "owner+name"
    root.mkdir()
    git(root, "init", "--quiet")
    for number in range(200):
        path = root / f"package{number % 5}" / f"m{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Random(number).randbytes(4090))
    (root / "link").symlink_to("package0")
    (root / "old").mkdir()
    (root / "old/gone.py").write_text("x\n")
    commits = []
    for number in range(3):
        if number == 1:
            (root / "package1/m1.py").write_text("x = 1\n")
            (root / "package1/m6.py").rename(root / "package2/m6 moved.py")
            (root / "old/gone.py").unlink()
        elif number == 2:
            for path in root.glob("package*/*"):
                path.write_text(Random(path.name).randbytes(1500).hex())
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", "x")
        commits.append(git(root, "rev-parse", "HEAD"))
    found = find_mirror(tmp_path, "owner/name") or root / ".git"
    return Repository(found, tmp_path / "kept.json.gz"), commits


SCRIPTS = Path("src/minisandbox/images/scripts")


def run_scripts(root: Path, commits: Sequence[str], place: Path) -> Path:
    """Run repository.sh on the first commit, then task_commit.sh on the second; return the repository."""
    work, build = place / "work", place / "build"
    build.mkdir()
    git(root, "worktree", "add", "--quiet", "--detach", str(work), commits[0])
    (work / ".git").unlink()
    tools = (SCRIPTS / "tools.sh").read_text()
    functions = tools[tools.index("start_repository()") :] + (SCRIPTS / "patching.sh").read_text()
    steps = (
        (SCRIPTS / "repository.sh").read_text(),
        (SCRIPTS / "task_commit.sh").read_text().partition("unset GIT_OBJECT_DIRECTORY")[0],
    )
    for commit, step in zip(commits, steps, strict=True):
        for path in [path for path in work.iterdir() if path.name != ".git"]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        subprocess.run(["tar", "-xC", work], input=archive(root, commit), check=True)
        (build / "touched").touch()
        head = f"set -euo pipefail; MOMENT=@946684800; export GIT_CONFIG_GLOBAL=/dev/null; clean=$PWD\n{functions}"
        text = step.replace("/testbed", str(work)).replace("/tmp/build", str(build))
        subprocess.run(["bash", "-c", f"{head}\n{text}"], cwd=work, check=True)
    return work / ".git"


def archive(root: Path, commit: str) -> bytes:
    return subprocess.check_output(["git", "-C", str(root), "archive", commit])


@pytest.mark.parametrize("number", [0, 1, 2], ids=["same", "near", "far"])
def test_a_task_is_stored_as_the_scripts_do(
    repository: tuple[Repository, list[str]], tmp_path: Path, number: int
) -> None:
    """Beside the very scripts: the same pack of the same objects, the same objects below left, equal sizes."""
    found, commits = repository
    below, objects = found.tree(commits[0]), found.tree(commits[number])
    found.measure(below, BEST)
    found.measure(objects, LOOSE, PACK)
    made = run_scripts(tmp_path / "owner+name", [commits[0], commits[number]], tmp_path)

    commit = one_commit(objects[0].name, found)
    has = {commit.name: commit, **objects_of(objects)}
    own, hidden = own_objects(has, shared_objects(below))
    assert bool(hidden) == (number > 0)
    (index,) = (made / "objects/pack").glob("*.idx")
    assert packed(index) == frozenset(own)
    counted = 32 + sum(found.sizes[PACK][name] for name in own)
    assert index.with_suffix(".pack").stat().st_size == pytest.approx(counted, rel=0.03, abs=8)

    left = [path for path in (made / "objects").glob("??/*") if path.is_file()]
    there = {name for name in shared_objects(below) if name in has}
    assert {path.parent.name + path.name for path in left} == there
    assert [path.stat().st_size for path in left] == pytest.approx(
        [found.sizes[BEST][path.parent.name + path.name] for path in left], abs=8
    )
    assert index_bytes(objects) == pytest.approx((made / "index").stat().st_size, rel=0.02)


def packed(idx: Path) -> frozenset[str]:
    listed = subprocess.check_output(["git", "show-index"], input=idx.read_bytes()).decode()
    return frozenset(line.split()[1] for line in listed.splitlines())


def test_a_commit_that_is_not_there(repository: tuple[Repository, list[str]]) -> None:
    assert repository[0].resolve("f" * 40) is None
    assert repository[0].resolve(repository[1][0][:8]) == repository[1][0]
