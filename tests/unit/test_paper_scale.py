"""The count of what whole data sets take: pins, choice of wheels, equal files, blocks, pieces of repositories."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import IO, cast

import pytest
from benchmarks.scale.blocks import BLOCK, Ledger, directory_bytes, on_disk
from benchmarks.scale.environments import ByteCode, add_environment, place
from benchmarks.scale.index import MISSING, WHEEL, Contents, Index, Tail, choose, installed_of, nearest, zip_members
from benchmarks.scale.pins import Environment, Pin, read_environments
from benchmarks.scale.sample import line, source_of
from benchmarks.scale.tasks import changed_objects, commit_of, find_mirror, repository_of
from benchmarks.scale.trees import Object, Repository, add_repository, add_source, border, index_bytes, pieces

from minisandbox.images.index import IndexSettings
from minisandbox.images.simple_api import Link

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


def links(*names: str) -> list[Link]:
    return [Link(f"https://example.invalid/{name}") for name in names]


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
    """A repository with two commits; the second changes one of 200 files."""
    root = tmp_path / "owner+name"
    root.mkdir()
    git(root, "init", "--quiet")
    for number in range(200):
        path = root / f"package{number % 5}" / f"m{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {number}\n" * 200)
    (root / "link").symlink_to("package0")
    commits = []
    for text in ("", "changed\n"):
        (root / "package1/m1.py").write_text(f"x = 1\n{text}" * 200)
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", "x")
        commits.append(git(root, "rev-parse", "HEAD"))
    found = find_mirror(tmp_path, "owner/name") or root / ".git"
    return Repository(found, tmp_path / "kept.json.gz"), commits


def test_pieces_are_those_of_the_script(repository: tuple[Repository, list[str]], tmp_path: Path) -> None:
    """Beside task.sh's own pack_in_pieces, run on the same tree: as many packs, of the same size on disk."""
    found, commits = repository
    objects = found.tree(commits[0])
    found.measure(objects)
    script = Path("src/minisandbox/images/scripts/task.sh").read_text()
    function = script[script.index("pack_in_pieces() {") : script.index("# What is committed")]
    work = tmp_path / "work"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "owner+name"), str(work))
    tree = git(work, "rev-parse", f"{commits[0]}^{{tree}}")
    git(work, "checkout", "--quiet", "--orphan", "one")
    git(work, "read-tree", tree)
    git(work, "commit", "--quiet", "--message", "Initial commit")
    packs = work / ".git/objects/pack"
    git(work, "remote", "remove", "origin")
    for old in packs.iterdir():
        old.unlink()
    assert pieces(objects)
    text = function.replace("/tmp/build", str(tmp_path / "build"))
    # the clone's own objects were in what was just removed, or are hard links of loose ones
    alternates = work / ".git/objects/info/alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_text(f"{found.path / 'objects'}\n")
    (tmp_path / "build").mkdir()
    subprocess.run(["bash", "-ec", f"{text}\npack_in_pieces"], cwd=work, check=True)
    made = sorted(path.stat().st_size for path in packs.glob("*.pack"))
    counted = sorted(32 + sum(found.packed[name] for name in piece) for piece in pieces(objects))
    assert len(made) == len(counted)
    assert sum(made) == pytest.approx(sum(counted), rel=0.03, abs=300)


def test_index_is_as_large_as_gits(repository: tuple[Repository, list[str]]) -> None:
    found, commits = repository
    assert index_bytes(found.tree(commits[1])) == pytest.approx((found.path / "index").stat().st_size, rel=0.02)


def test_a_second_commit_shares_what_it_did_not_change(repository: tuple[Repository, list[str]]) -> None:
    found, commits = repository
    ledger, sizes = Ledger(), []
    for commit in commits:
        objects = found.tree(commit)
        add_source(ledger, objects)
        add_repository(ledger, found, objects, commit)
        sizes.append((ledger.files("source"), ledger.files("repository")))
    assert sizes[0][0] == 200 * BLOCK, "the link takes no block"
    assert sizes[1][0] - sizes[0][0] == BLOCK, "one file changed"
    assert sizes[1][1] - sizes[0][1] < sizes[0][1] / 3
    assert Repository(found.path, found.kept).packed == found.packed, "compressed sizes are kept"


def test_a_changed_file_changes_the_directories_above_it() -> None:
    tree = [
        Object("040000", "tree", "0" * 40, 0, ""),
        Object("040000", "tree", "1" * 40, 0, "a"),
        Object("100644", "blob", "2" * 40, 9, "a/b.py"),
        Object("100644", "blob", "3" * 40, 9, "c.py"),
    ]
    changed = changed_objects(tree, "a/b.py", "mark")
    assert [old.name == new.name for old, new in zip(tree, changed, strict=True)] == [False, False, False, True]
    assert border("000") == 256 + 16 + 1


def test_a_commit_that_is_not_there(repository: tuple[Repository, list[str]]) -> None:
    assert repository[0].resolve("f" * 40) is None
    assert repository[0].resolve(repository[1][0][:8]) == repository[1][0]


def test_a_tail_is_enough_for_a_list(tmp_path: Path) -> None:
    wheel(tmp_path / "a.whl", a__big=b"\0" * 300_000, a__z_py=b"1")
    data = (tmp_path / "a.whl").read_bytes()
    listed = zip_members(cast("IO[bytes]", Tail(len(data), data[-300:])))
    assert [(path, size) for path, _, size, _ in listed] == [("a/big", 300_000), ("a/z.py", 1)]
