"""Test files are laid out on the host: no name of a row leads out of the tests layer."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import cast

import pytest

from minisandbox.grade.submission import CodePatch
from minisandbox.grade.testfiles import hidden_files, prepare_files
from minisandbox.grade.verdict import Reason
from minisandbox.grade.workspace import _apply
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task

WORKDIR = PurePosixPath("/testbed")


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A tests layer, beside a file that is nobody's business."""
    hidden = tmp_path / "layer"
    (hidden / "tests").mkdir(parents=True)
    (hidden / "tests" / "test_a.py").write_text("def test(): pass\n")
    (hidden / "tests" / "linked.py").symlink_to(tmp_path / "secret.py")
    secret = tmp_path / "secret.py"
    secret.write_text("secret\n")
    secret.chmod(0o600)
    return hidden


def test_names_that_lead_out_of_the_layer_are_no_files_of_it(layer: Path) -> None:
    """The host's file was unlinked, made anew for all to read, and shown to the tests."""
    secret = layer.parent / "secret.py"
    before = secret.stat()
    names = ("tests/test_a.py", str(secret), "../secret.py", "tests/../../secret.py", "tests/linked.py")
    assert set(hidden_files(layer, names)) == {"tests/test_a.py"}
    with prepare_files(layer, names, {str(secret): b"other\n", "../secret.py": b"other\n"}, WORKDIR) as laid:
        assert set(laid.checked) == {"tests/test_a.py"}
        assert {str(mount.target) for mount in laid.mounts} == {"/hidden", "/testbed/tests/test_a.py"}
    after = secret.stat()
    assert (after.st_ino, after.st_mode, secret.read_text()) == (before.st_ino, before.st_mode, "secret\n")


def test_files_outside_of_the_repository_are_no_test_files_of_a_task() -> None:
    ids = ("tests/test_a.py::t", "/etc/passwd::t", "/etc/x.py", "../up.py::t", "a/../../b.py::t")
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n"
    task = Task("a__b-1", "a/b", "c0", "", patch, "", ids[:1], ids[1:])
    assert task.test_files == ("tests/test_a.py",)


def test_more_protected_names_than_git_can_be_told_are_a_mistake_of_the_patch() -> None:
    """They were more than a command can have, which counted as a fault of the machine: no reward."""
    change = CodePatch(b"a patch", leave_out=tuple(f"{'*' * 4000}/{number}/conftest.py" for number in range(200)))
    run = _apply(cast("Sandbox", None), change)
    assert run is not None
    assert run.doubt is not None
    assert run.doubt.reason is Reason.PATCH_INVALID
