"""Commits stored over another commit of their repository: the same to see, less on disk, and nothing of the other."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from minisandbox.errors import SourceError
from minisandbox.images import GitSource, Image, PythonRecipe, build, build_all
from minisandbox.images.travel import import_directory
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store

pytestmark = pytest.mark.kernel

LOOK = """
find . -path ./.git -prune -o -printf '%p %y %m %l ' \\( -type f -exec sha256sum {} \\; -o -printf '\\n' \\) | sort
echo "index $(od -An -tu1 -j7 -N1 .git/index | tr -d ' ')"
git status --short; git rev-list --all --count; git fsck --unreachable --no-reflogs
git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u > /tmp/all
git rev-list --objects HEAD | cut -d' ' -f1 | sort -u | cmp - /tmp/all
git cat-file --batch-all-objects --batch | wc -c
"""
BUG = "--- a/kept0.txt\n+++ b/kept0.txt\n@@ -1 +1 @@\n-kept 0\n+broken\n"


def _git(cwd: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(root: Path) -> str:
    _git(root, "add", "-A", "-f")
    _git(root, "commit", "-q", "-m", "x")
    return _git(root, "rev-parse", "HEAD")


@pytest.fixture
def commits(tmp_path: Path) -> tuple[str, str]:
    """Two commits of ``tmp_path/upstream`` between which everything changes that can."""
    root = tmp_path / "upstream"
    root.mkdir()
    _git(root, "init", "-q", "-b", "main")
    for number in range(60):
        (root / f"kept{number}.txt").write_text(f"kept {number}\n")
    for name in (
        "gone/deep/file",
        "becomes-directory",
        "becomes-file/inside",
        "executable",
        "lines.txt",
        "empty-later",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"the answer: {name}\n")
    (root / "link").symlink_to("kept0.txt")
    (root / "becomes-link").write_text("x\n")
    first = _commit(root)
    _git(root, "rm", "-q", "-r", "gone", "becomes-directory", "becomes-file", "becomes-link", "link")
    (root / "becomes-directory").mkdir()
    (root / "becomes-directory/file with\nnewline").write_text("y\n")
    (root / "becomes-file").write_text("z\n")
    (root / "becomes-link").symlink_to("gone")
    (root / "link").symlink_to("kept1.txt")
    (root / "executable").chmod(0o755)
    (root / "empty-later").write_text("")
    (root / "lines.txt").write_bytes(b"one\ntwo\n")
    (root / ".gitattributes").write_text("lines.txt eol=crlf\nkept2.txt ident\n")
    return first, _commit(root)


def _recipe(root: Path, commit: str, patch: str = "") -> PythonRecipe:
    return PythonRecipe(source=GitSource(str(root / "upstream"), commit), patch=patch)


def _look(image: Image) -> str:
    with Sandbox.create(image.spec()) as box:
        return box.exec(LOOK).stdout


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_a_commit_looks_the_same_over_another_one(tmp_path: Path, commits: tuple[str, str], turned: bool) -> None:
    first, then = reversed(commits) if turned else commits
    store, alone = Store.open(tmp_path / "store"), Store.open(tmp_path / "alone")
    build(_recipe(tmp_path, first), store=store, name="first")
    image = build(_recipe(tmp_path, then, BUG), store=store, name="then")
    whole = build(_recipe(tmp_path, then, BUG), store=alone, name="then")
    assert len(image.layers) == len(whole.layers) + 1
    assert (image.key, image.commit) == (whole.key, whole.commit)
    seen = _look(image)
    assert seen == _look(whole)
    assert seen.splitlines()[-2] == "1", "one commit, nothing changed, nothing unreachable"
    assert "kept0.txt f" in seen
    assert "\nindex 2\n" in seen, "GitPython reads no later version"


def test_what_differs_is_all_that_is_stored(tmp_path: Path, commits: tuple[str, str]) -> None:
    store = Store.open(tmp_path / "store")
    build(_recipe(tmp_path, commits[0]), store=store, name="first")
    image = build(_recipe(tmp_path, commits[1]), store=store, name="then")
    over = [one for one in image.records() if one.step["kind"] == "git"][1]
    names = {name for _, _, some in os.walk(store.layer_tree(over.key) / "testbed") for name in some}
    assert "becomes-link" in names
    assert not {name for name in names if name.startswith("kept")} - {"kept2.txt"}


@pytest.mark.slow
def test_an_image_over_another_commit_travels(tmp_path: Path, commits: tuple[str, str]) -> None:
    store, other = Store.open(tmp_path / "store"), Store.open(tmp_path / "other")
    for number, commit in enumerate(commits):
        build(_recipe(tmp_path, commit), store=store, name=f"task{number}")
    seen = _look(build(_recipe(tmp_path, commits[1]), store=store, name="task1"))
    mine = build(_recipe(tmp_path, commits[1]), store=other, name="mine")  # whole here
    import_directory(other, store.root)
    there = build(_recipe(tmp_path, commits[1]), store=other, name="task1")
    assert _look(there) == seen == _look(mine)


def test_a_commit_that_cannot_be_had_costs_the_others_nothing(tmp_path: Path, commits: tuple[str, str]) -> None:
    store = Store.open(tmp_path / "store")
    wanted = {"first": commits[0], "missing": "0" * 40, "then": commits[1]}  # the one in the middle is the anchor
    recipes: dict[str, Callable[[], PythonRecipe]] = {
        name: partial(_recipe, tmp_path, commit) for name, commit in wanted.items()
    }
    built = build_all(recipes, store=store)
    assert list(built.images) == ["first", "then"]
    assert isinstance(built.failures["missing"], SourceError)
