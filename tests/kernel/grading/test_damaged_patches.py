"""Damaged predictions are applied as the benchmarks' harnesses apply them, and judged by what was changed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.parity.damages import DAMAGES, TREE
from benchmarks.patch_parity import outcome, theirs

from minisandbox.errors import GradingError
from minisandbox.grade import Flag, Reason, Verdict, grade
from minisandbox.grade.harness_apply import apply_like_harness
from minisandbox.grade.verdict import APPLIED_WITH_FUZZ
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image, build
from minisandbox.patches import touched_files
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.tasks import Form, ScriptGrader, Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

FUZZY = "patch --batch --fuzz=5 -p1 -i"
CODE = "".join(f"def number_{n}():\n    return {n}\n\n\n" for n in range(12))
FILES = {"pkg/code.py": CODE, "README.md": "numbers\n", ".gitignore": "*.ignored\n", "pkg/dos.py": "a = 1\r\nb = 2\r\n"}
FIX = """\
diff --git a/pkg/code.py b/pkg/code.py
index 1111111..2222222 100644
--- a/pkg/code.py
+++ b/pkg/code.py
@@ -8,6 +8,6 @@ def number_1():
\x20
 def number_2():
-    return 2
+    return 22
\x20
\x20
 def number_3():
@@ -32,6 +32,6 @@ def number_7():
\x20
 def number_8():
-    return 8
+    return 88
\x20
\x20
 def number_9():
"""
for program in ("bash", "git", "sort"):
    FILES[f"bin/{program}"] = f'#!/bin/sh\nexec /usr/bin/{program} "$@"\n'
QUICK = (
    "no final newline",
    "CRLF",
    "counts too low",
    "fuzz 1 in the last hunk",
    "reversed",
    "ignored file, trimmed",
    "name of odd bytes",
)
REWARD = "/logs/verifier/reward.txt"


class Script5(ScriptGrader):
    """A script, of a row of swebench 5."""

    parser = "swebench5:none"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of a small repository."""
    root = tmp_path_factory.mktemp("checkout") / "tree"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
        (root / name).chmod(0o755 if name.startswith("bin/") else 0o644)
    settings = ("-c", "user.name=n", "-c", "user.email=e")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one")):
        subprocess.run(["git", *settings, *command], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def numbers(tree: Path) -> Task:
    """A task on that repository; its script prints the hash of the work tree."""
    script = ScriptGrader(command=f"set -- HEAD\n{TREE}echo 0 > {REWARD}", reward_file=REWARD)
    source = PythonRecipe(source=LocalSource(tree))
    return Task("a__numbers-1", "a/numbers", "", "numbers", FIX, "", (), (), Form.SWEBENCH, build=source, grader=script)


@pytest.fixture(scope="module")
def numbers_image(numbers: Task, shared_store: Store) -> Image:
    """Its image."""
    return build(numbers.recipe(), store=shared_store, name=numbers.instance_id)


@pytest.mark.parametrize("five", [False, True])
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DAMAGES]
)
def test_it_is_applied_as_by_the_harness(
    numbers: Task, numbers_image: Image, tree: Path, tmp_path: Path, damage: str, *, five: bool
) -> None:
    patch = DAMAGES[damage](FIX.encode(), tree)
    grader = numbers.grader
    assert isinstance(grader, ScriptGrader)
    task = replace(numbers, grader=Script5(command=grader.command, reward_file=REWARD)) if five else numbers
    expected = theirs(tree, patch, tmp_path / "patch.diff", five=five)
    assert outcome(grade(task, numbers_image, patch)) == expected
    if damage == "clean":
        assert expected.command == "git apply --verbose"


def test_damaged_fixes_resolve_with_a_flag(smith: Task, smith_image: Image) -> None:
    fix = (
        b"diff --git a/calc/core.py b/calc/core.py\n--- a/calc/core.py\n+++ b/calc/core.py\n@@ -1,3 +1,3 @@\n"
        b" def add(a, b):\n-    return a - b\n+    return b + a\n     # that is all"
    )
    for patch in (fix, fix.replace(b"\n", b"\r\n") + b"\r\n", b"Here it is:\n\n" + fix):
        graded = grade(smith, smith_image, patch)
        assert graded.verdict is Verdict.RESOLVED, graded.detail
        assert graded.flags[0].kind == APPLIED_WITH_FUZZ
    assert grade(smith, smith_image, fix).flags == (Flag(APPLIED_WITH_FUZZ, "", FUZZY),)


def test_what_patch_leaves_beside_the_files_is_dropped(numbers: Task, numbers_image: Image) -> None:
    patch = DAMAGES["fuzz 2"](FIX.encode(), Path())
    applied = apply_like_harness(Workspace.of(numbers, numbers_image), patch)
    assert applied is not None
    assert touched_files(applied.patch) == ("pkg/code.py",)


OUTSIDE = "--- a/../../etc/added\n+++ b/../../etc/added\n@@ -0,0 +1 @@\n+x\n"
GIT_OWN = "--- a/.git/hooks/added\n+++ b/.git/hooks/added\n@@ -0,0 +1 @@\n+x\n"
HOOK = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+raise SystemExit(0)\n"
BROKEN = """\
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,4 @@
 def add(a, b):
     return a - b
+    # nothing is fixed
     # that is all
"""


def test_the_policy_judges_what_was_really_changed(smith: Task, smith_image: Image) -> None:
    graded = grade(smith, smith_image, (HOOK + BROKEN).rstrip().encode())
    assert (graded.verdict, graded.reason) == (Verdict.FAILED, Reason.TESTS_NOT_PASSED), graded
    assert graded.flags == (Flag(APPLIED_WITH_FUZZ, "", FUZZY), Flag("pytest_config", "conftest.py"))


@pytest.mark.parametrize("beyond", [OUTSIDE, GIT_OWN], ids=["outside", "git's own"])
def test_nothing_outside_the_repository_is_taken(numbers: Task, numbers_image: Image, beyond: str) -> None:
    applied = apply_like_harness(Workspace.of(numbers, numbers_image), (FIX + beyond).encode())
    assert applied is None or b"added" not in applied.patch


def test_a_hunk_of_a_protected_file_has_to_fit(smith: Task, smith_image: Image) -> None:
    """The harness refuses the whole patch, though the file is restored before the tests run."""
    fix = BROKEN.replace("1,4", "1,3").replace("+    # nothing is fixed\n", "")
    fix = fix.replace("     return a - b\n", "-    return a - b\n+    return b + a\n")
    setup = "--- a/setup.cfg\n+++ b/setup.cfg\n@@ -1,2 +1,2 @@\n [tool:pytest]\n-testpaths = {}\n+testpaths = x\n"
    graded = grade(smith, smith_image, (fix + setup.format("tests")).encode())
    assert (graded.verdict, graded.flags) == (Verdict.RESOLVED, (Flag("pytest_config", "setup.cfg"),)), graded
    graded = grade(smith, smith_image, (fix + setup.format("other")).encode())
    assert graded.reason is Reason.PATCH_INVALID, graded
    assert "setup.cfg" in graded.detail


def test_a_host_without_patch_is_our_failure(numbers: Task, numbers_image: Image) -> None:
    image = replace(numbers_image, environment=(("PATH", "/testbed/bin"),))
    patch = DAMAGES["no final newline"](FIX.encode(), Path())
    with pytest.raises(GradingError, match=r"there is no 'patch'.*apt-get install patch"):
        apply_like_harness(Workspace.of(numbers, image), patch)


def test_a_user_who_does_not_own_the_repository_hinders_nothing(smith: Task, smith_image: Image) -> None:
    """The harness applies patches as root, whatever the image's user is."""
    fix = BROKEN.replace("1,4", "1,3").replace("+    # nothing is fixed\n", "")
    fix = fix.replace("     return a - b\n", "-    return a - b\n+    return b + a\n")
    image = replace(smith_image, user="nobody")
    for patch in (fix, fix.rstrip()):
        graded = grade(smith, image, patch.encode())
        assert graded.verdict is Verdict.RESOLVED, graded.detail
