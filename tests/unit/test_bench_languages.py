"""benchmarks.languages: a source package becomes a repository of a base and a commit, split into fix and tests."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from benchmarks.languages.projects import PROJECTS, Project
from benchmarks.languages.running import DOCKERFILES, name_of
from benchmarks.languages.sources import make_repository

EARLIER = "--- a/calc.c\n+++ b/calc.c\n@@ -1 +1 @@\n-old\n+wrong\n"
FIX = """From: somebody
Subject: add

--- a/calc.c
+++ b/calc.c
@@ -1 +1 @@
-wrong
+right
--- a/tests/calc.c
+++ b/tests/calc.c
@@ -1 +1,2 @@
 test
+more
"""


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, Path]:
    """An upstream release, and Debian's part of two patches."""
    files = {
        "calc-1.0/calc.c": "old\n",
        "calc-1.0/tests/calc.c": "test\n",
        "debian/patches/series": "# a comment\n\nearlier.patch\nfix.patch\nlater.patch\n",
        "debian/patches/earlier.patch": EARLIER,
        "debian/patches/fix.patch": FIX,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made = []
    for folder in ("calc-1.0", "debian"):
        made.append(tmp_path / f"{folder}.tar.gz")
        with tarfile.open(made[-1], "w:gz") as tar:
            tar.add(tmp_path / folder, folder)
    return made[0], made[1]


@pytest.mark.skipif(shutil.which("patch") is None, reason="GNU patch is not installed")
def test_a_source_package_becomes_a_repository(tmp_path: Path, package: tuple[Path, Path]) -> None:
    project = Project("c", "calc", "1.0-1", "jq", "make check", ("tests/*",), ("fix.patch",))
    tree = tmp_path / "made" / "repository"
    commit = make_repository(project, "fix.patch", package, tree)
    assert (tree / "calc.c").read_text() == "wrong\n"
    assert not (tree / "debian").exists(), "it has the answer in it"
    head = subprocess.check_output(["git", "-C", str(tree), "rev-parse", "HEAD"], text=True).strip()
    assert commit.base == head
    assert commit.message == "From: somebody\nSubject: add"
    assert ("+right" in commit.patch, "+more" in commit.patch) == (True, False)
    assert ("+right" in commit.test_patch, "+more" in commit.test_patch) == (False, True)
    assert make_repository(project, "fix.patch", package, tree) == commit
    with pytest.raises(SystemExit, match=r"calc 1.0-1 has no patch none.patch: earlier.patch, fix.patch"):
        make_repository(project, "none.patch", package, tree)


def test_every_task_has_a_name_and_a_dockerfile() -> None:
    names = [name_of(project, patch) for project in PROJECTS for patch in project.patches]
    assert len(set(names)) == len(names)
    assert all((DOCKERFILES / f"{project.language}.Dockerfile").exists() for project in PROJECTS)
