"""A patch turned round undoes what it does, as git sees it."""

from __future__ import annotations

import subprocess
from difflib import unified_diff
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisandbox.errors import PatchError
from minisandbox.patches import parse_patch, reversed_patch


def git(repository: Path, *arguments: str, stdin: str = "") -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.autocrlf=false")
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, input=stdin.encode(), capture_output=True, check=True, timeout=60).stdout.decode()


def change(repository: Path) -> None:
    (repository / "edited.py").write_text("a\nB\nc\nd\ne\nf\ng\nh\ni\nj\nk\nL")
    (repository / "crlf.txt").write_bytes(b"one\r\nTWO\r\n")
    (repository / "old name.py").rename(repository / "new name.py")
    (repository / "gone.py").unlink()
    (repository / "made.py").write_text("x\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "moved" / "é.py").rename(repository / "é.py")
    (repository / "é.py").write_text("1\n2\n3\n4\n5\n6\n7\nnine\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "é.py").write_text("1\n2\n3\n4\n5\n6\n7\n8\n")
    (tmp_path / "edited.py").write_text("a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\nl\n")
    (tmp_path / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "old name.py").write_text("same\n" * 9)
    (tmp_path / "gone.py").write_text("y\n")
    (tmp_path / "run.sh").write_text("true\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before")
    return tmp_path


def test_git_applies_it(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD^{tree}")
    change(repository)
    git(repository, "add", "-A")
    patch = git(repository, "diff", "--cached", "-M")
    assert "rename from" in patch
    assert "old mode" in patch
    assert "\\ No newline" in patch
    git(repository, "apply", "--index", stdin=reversed_patch(patch))
    assert git(repository, "write-tree") == before


LINES = st.lists(st.sampled_from("abc"), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(old=LINES, new=LINES)
def test_twice_is_the_patch_itself(old: list[str], new: list[str]) -> None:
    before, after = ([f"{line}\n" for line in lines] for lines in (old, new))
    patch = "".join(unified_diff(before, after, "a/x", "b/x", n=1))
    turned = reversed_patch(patch)
    assert reversed_patch(turned) == patch
    assert [(c.removed, c.added) for c in parse_patch(turned)] == [(c.added, c.removed) for c in parse_patch(patch)]


def test_what_git_alone_can_turn_round_is_refused() -> None:
    binary = (
        "diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZPo000\n\nliteral 0\nHcmV?d00001\n\n"
    )
    with pytest.raises(PatchError, match="binary change of x cannot be turned round"):
        reversed_patch(binary)
    copy = "diff --git a/x b/y\nsimilarity index 100%\ncopy from x\ncopy to y\n"
    with pytest.raises(PatchError, match="a copied file cannot be turned round"):
        reversed_patch(copy)
    with pytest.raises(PatchError, match="field 'patch', line 1"):
        reversed_patch("no patch\n", name="field 'patch'")


def test_a_form_feed_ends_no_line() -> None:
    hunks = [("x", " a\n \x0c\n-b\n+c\x1c\n"), ("y", "-1\x85\n+2\n")]
    counts = {"x": "1,3", "y": "1"}
    patch = "".join(f"--- a/{n}\n+++ b/{n}\n@@ -{counts[n]} +{counts[n]} @@\n{text}" for n, text in hunks)
    turned = reversed_patch(patch)
    assert "+b\n" in turned
    assert "+1\x85\n" in turned
    assert len(parse_patch(turned)) == 2
