"""The count of what whole data sets take: pins, choice of wheels, equal files, blocks, repositories."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import IO, cast

import pytest
from benchmarks.scale.blocks import BLOCK, Ledger, directory_bytes, on_disk
from benchmarks.scale.environments import ByteCode, add_environment, place
from benchmarks.scale.index import MISSING, WHEEL, Contents, Index, Tail, choose, installed_of, nearest, zip_members
from benchmarks.scale.layers import (
    OBJECTS,
    SOURCE,
    TASK,
    add_objects,
    add_source,
    add_task,
    index_bytes,
    objects_of,
    own_objects,
    shared_objects,
)
from benchmarks.scale.layers import commit_of as one_commit
from benchmarks.scale.pins import Environment, Pin, read_environments
from benchmarks.scale.sample import line, source_of
from benchmarks.scale.survey import without_cuda
from benchmarks.scale.tasks import Row, add_rows, bug_bytes, changed_objects, commit_of, find_mirror, repository_of
from benchmarks.scale.trees import BEST, LOOSE, PACK, Object, Repository

from minisandbox.images.python.simple_api import IndexLink
from minisandbox.index_settings import IndexSettings

EXPORT = """\
name: testbed
channels:
  - defaults
dependencies:
  - libffi=3.4.4=h6a678d5_1
  - python=3.9.20=he870216_1
  - wheel=0.44.0=py39h06a4308_0
  - pip:
      - Attrs==23.1.0
      - pytest_cov==4.1.0
prefix: /opt/miniconda3/envs/testbed
"""
PINS = frozenset({Pin("wheel", "0.44.0"), Pin("attrs", "23.1.0"), Pin("pytest-cov", "4.1.0")})


def test_equal_exports_are_one_environment(tmp_path: Path) -> None:
    for number, text in (("1", EXPORT), ("2", EXPORT), ("3", EXPORT.replace("python=3.9.20", "python=3.6.13"))):
        (tmp_path / "psf__requests" / number).mkdir(parents=True)
        (tmp_path / "psf__requests" / number / "environment.yml").write_text(text)
    assert read_environments(tmp_path) == [
        Environment("3.9", PINS, ("psf__requests/1", "psf__requests/2"), 1),
        Environment("3.6", PINS, ("psf__requests/3",), 1),
    ]


def test_names_of_exports_say_repository_and_commit() -> None:
    assert repository_of("pallets__flask/5014") == "pallets/flask"
    assert repository_of("pdfminer__pdfminer.six.1a8bd2f7") == "pdfminer/pdfminer.six"
    assert commit_of("pdfminer__pdfminer.six.1a8bd2f7") == "1a8bd2f7"


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


def test_of_a_source_archive_its_packages_count() -> None:
    members = [
        (f"a-1.0/{path}", 0, 1, False) for path in ("setup.py", "src/a/__init__.py", "src/a/d.txt", "tests/t.py")
    ]
    assert [path for path, *_ in installed_of(members)] == ["a/__init__.py", "a/d.txt"]
    assert [path for path, *_ in installed_of([("b-1/b.py", 0, 1, False), ("b-1/setup.py", 0, 1, False)])] == ["b.py"]


def test_blocks() -> None:
    assert [on_disk(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert directory_bytes([]) == BLOCK
    assert directory_bytes([10] * 300) == 2 * BLOCK


def test_equal_files_of_layers_are_one_inode_and_within_one_they_are_copies() -> None:
    ledger = Ledger()
    ledger.add_layer("packages", [("a", 5000, 1), ("b", 10, 3), ("empty", 0, 9)], BLOCK, 4)
    ledger.add_layer("packages", [("a", 5000, 1), ("b", 10, 2), ("c", 10, 1)], BLOCK, 4)
    assert ledger.files("packages") == 2 * BLOCK + 3 * BLOCK + BLOCK
    assert ledger.inodes("packages") == 5
    assert ledger.names["packages"] == 2 * 2 * BLOCK + 5 * BLOCK + BLOCK
    assert ledger.directories["packages"] == 2 * BLOCK
    ledger.add_layer("source", [("a", 5000, 1)], BLOCK, 1)
    assert ledger.files("packages") == 6 * BLOCK, "layers of another kind have other times and share nothing"


def contents(*members: tuple[str, int, int]) -> Contents:
    return Contents(WHEEL, "a.whl", 1, tuple((path, crc, size, False) for path, crc, size in members))


def count(*environments: tuple[str, Contents]) -> Ledger:
    ledger, pin = Ledger(), Pin("a", "1")
    for python, one in environments:
        add_environment(ledger, Environment(python, frozenset({pin}), (python,)), {pin: one}, ByteCode(100, 1.0))
    return ledger


def test_sources_are_equal_for_all_interpreters_and_byte_code_is_not() -> None:
    one = contents(("a/x.py", 1, 5000), ("a/data", 2, 1))
    assert count(("3.9", one)).files("packages") == (2 + 1 + 2) * BLOCK
    assert count(("3.9", one), ("3.9", one)).files("packages") == (2 + 1 + 2) * BLOCK
    assert count(("3.9", one), ("3.10", one)).files("packages") == (2 + 1 + 2 + 2) * BLOCK


def test_versions_share_files_that_did_not_change() -> None:
    old, new = contents(("a/x.py", 1, 5000), ("a/y.py", 2, 1)), contents(("a/x.py", 1, 5000), ("a/y.py", 3, 1))
    assert count(("3.9", old), ("3.9", new)).files("packages") == (2 + 2 + 2 * (1 + 1)) * BLOCK


def test_byte_code_of_equal_sources_at_other_paths_is_another() -> None:
    one = contents(("a/x.py", 1, 10), ("b/x.py", 1, 10))
    assert count(("3.9", one)).inodes("packages") == 2 + 2


def test_tests_of_packages_have_no_byte_code() -> None:
    one = contents(("a/x.py", 1, 10), ("a/tests/x.py", 2, 10), ("a/b/test/x.py", 3, 10), ("tests/x.py", 4, 10))
    assert count(("3.9", one)).inodes("packages") == 4 + 2


def test_where_a_wheel_puts_its_files() -> None:
    one = contents(("a-1.data/scripts/run", 1, 1), ("a-1.data/purelib/a.py", 2, 1), ("a-1.dist-info/METADATA", 3, 1),
                   ("a-1.dist-info/entry_points.txt", 4, 1))  # fmt: skip
    assert {each.path for each in place(one)} >= {"../../../scripts/run", "a.py", "a-1.dist-info/INSTALLER"}
    assert any("bin/" in each.path for each in place(one)), "a program for its entry points"
    assert place(Contents(MISSING)) == []


def test_sources_of_byte_code() -> None:
    assert source_of("a/__pycache__/b.cpython-310.pyc") == ("a/b.py", "3.10")
    assert source_of("a/__pycache__/b.c.cpython-36.pyc") == ("a/b.c.py", "3.6")
    assert source_of("a/b.pyc") == ("", "")


def test_a_line_is_fitted() -> None:
    assert line([(0, 100), (1000, 800), (2000, 1500)]) == ByteCode(100, 0.7)


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


def test_sources_share_equal_files(repository: tuple[Repository, list[str]]) -> None:
    found, commits = repository
    ledger = Ledger()
    add_source(ledger, found.tree(commits[0]))
    assert ledger.files(SOURCE) == 201 * BLOCK, "the link takes no block"
    assert ledger.directories[SOURCE] == 7 * BLOCK
    add_source(ledger, found.tree(commits[1]))
    assert ledger.files(SOURCE) < 210 * BLOCK
    assert ledger.directories[SOURCE] > 10 * BLOCK, "directories share nothing"


def test_tasks_of_a_commit_share_its_objects(repository: tuple[Repository, list[str]]) -> None:
    found, commits = repository
    ledger, tree = Ledger(), found.tree(commits[0])
    add_objects(ledger, found, tree)
    assert ledger.inodes(OBJECTS) == 201 + 1 + 6 + 3, "blobs, the link, trees but the root's, HEAD, config, exclude"
    add_task(ledger, found, tree, tree, "same")
    assert ledger.total(TASK) < ledger.total(OBJECTS) / 10
    add_objects(ledger, found, found.tree(commits[2]))
    kept = Repository(found.path, found.kept).sizes
    assert all(name in kept[LOOSE] for name in objects_of(tree))


def test_tasks_at_one_commit_have_one_source(repository: tuple[Repository, list[str]], tmp_path: Path) -> None:
    _, commits = repository
    rows = [Row(f"name__{number}", "owner/name", commits[number], "") for number in (0, 0, 1)]
    rows.append(Row("absent", "owner/name", "f" * 40, ""))
    mirrors = tmp_path / "mirrors"
    mirrors.mkdir()
    (mirrors / "owner__name").symlink_to(tmp_path / "owner+name/.git")
    ledger = Ledger()
    assert list(add_rows(ledger, rows, mirrors, tmp_path / "cache", lambda _: None)) == [True, True, True, False]
    assert (ledger.layers[SOURCE], ledger.layers[OBJECTS], ledger.layers[TASK]) == (2, 2, 3)


def test_a_bug_takes_little_of_a_repository(repository: tuple[Repository, list[str]]) -> None:
    found, commits = repository
    objects = found.tree(commits[0])
    found.measure(objects, LOOSE, PACK)
    assert 10 * BLOCK < bug_bytes(found, objects, 1) < 50 * BLOCK


def test_a_build_without_cuda_lacks_its_libraries() -> None:
    one = contents(("torch/lib/libtorch_cuda.so", 1, 9), ("torch/lib/libtorch_cpu.so", 2, 9), ("torch/cuda.py", 3, 9))
    assert [path for path, *_ in without_cuda("torch", one).members] == ["torch/lib/libtorch_cpu.so"]
    assert without_cuda("torchvision", one) == one
    assert without_cuda("nvidia-cudnn-cu12", one).members == ()


def test_a_changed_file_changes_the_directories_above_it() -> None:
    tree = [
        Object("040000", "tree", "0" * 40, 0, ""),
        Object("040000", "tree", "1" * 40, 0, "a"),
        Object("100644", "blob", "2" * 40, 9, "a/b.py"),
        Object("100644", "blob", "3" * 40, 9, "c.py"),
    ]
    changed = changed_objects(tree, "a/b.py", "mark")
    assert [old.name == new.name for old, new in zip(tree, changed, strict=True)] == [False, False, False, True]
    without = changed_objects(tree, "c.py", "mark", ["a/b.py"])
    assert [one.path for one in without] == ["", "a", "c.py"]
    assert not {one.name for one in without} & {one.name for one in tree}, "the directory of a hidden file is another"


def test_a_commit_that_is_not_there(repository: tuple[Repository, list[str]]) -> None:
    assert repository[0].resolve("f" * 40) is None
    assert repository[0].resolve(repository[1][0][:8]) == repository[1][0]


def test_a_tail_is_enough_for_a_list(tmp_path: Path) -> None:
    wheel(tmp_path / "a.whl", a__big=b"\0" * 300_000, a__z_py=b"1")
    data = (tmp_path / "a.whl").read_bytes()
    listed = zip_members(cast("IO[bytes]", Tail(len(data), data[-300:])))
    assert [(path, size) for path, _, size, _ in listed] == [("a/big", 300_000), ("a/z.py", 1)]
