"""Checks on patch text. Where git has an opinion, the real git is asked too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import PatchError
from minisandbox.patches import (
    FileChange,
    FileStatus,
    explain_line_endings,
    leads_inside,
    parse_patch,
    removed_files,
    touched_files,
)

PLAIN = "--- a/src/x.py\n+++ b/src/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
GIT = "diff --git a/src/x.py b/src/x.py\nindex 1111111..2222222 100644\n" + PLAIN
RENAME = "diff --git a/x b/new.py\nsimilarity index 100%\nrename from old.py\nrename to new.py\n"


def git(repo: Path, *args: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    settings = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main", "-c", "core.autocrlf=false"]
    return subprocess.run(["git", *settings, *args], cwd=repo, input=stdin, capture_output=True, check=False)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one commit of a few awkward files."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("a\nb\n")
    (tmp_path / "with space.txt").write_text("".join(f"line {n}\n" for n in range(20)))
    (tmp_path / "café.txt").write_text("one\n")
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    (tmp_path / "link").symlink_to("src/x.py")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    assert git(tmp_path, "commit", "-m", "one").returncode == 0
    return tmp_path


def diff(repo: Path, *options: str) -> bytes:
    git(repo, "add", "-A")
    done = git(repo, "diff", "--cached", "--binary", *options)
    assert done.returncode == 0
    return done.stdout


def counts(change: FileChange) -> tuple[int, int]:
    """How many lines are added, and removed."""
    return len(list(change.signed(b"+"))), len(list(change.signed(b"-")))


def test_lists_what_git_lists(repo: Path) -> None:
    (repo / "src" / "x.py").write_text("a\nc\nd\n")
    (repo / "with space.txt").rename(repo / "other space.txt")
    (repo / "café.txt").unlink()
    (repo / "data.bin").write_bytes(bytes(range(255)))
    (repo / "new.py").write_text("print()")
    (repo / "empty").touch()
    (repo / "dos.txt").chmod(0o755)
    (repo / "link").unlink()
    changes = {change.path: change for change in parse_patch(diff(repo, "-M"))}
    assert {path: change.status for path, change in changes.items()} == {
        "src/x.py": FileStatus.MODIFIED,
        "other space.txt": FileStatus.RENAMED,
        "café.txt": FileStatus.DELETED,
        "data.bin": FileStatus.MODIFIED,
        "new.py": FileStatus.ADDED,
        "empty": FileStatus.ADDED,
        "dos.txt": FileStatus.MODIFIED,
        "link": FileStatus.DELETED,
    }
    assert counts(changes["src/x.py"]) == (2, 1)
    assert changes["other space.txt"].old_path == "with space.txt"


def test_touched_files_has_both_names_of_a_renamed_file(repo: Path) -> None:
    (repo / "with space.txt").rename(repo / "b.txt")
    assert touched_files(diff(repo, "-M")) == ("b.txt", "with space.txt")


@pytest.mark.parametrize("blank", ["", "\n", "  \n\n", b""])
def test_nothing_is_no_files(blank: str | bytes) -> None:
    assert parse_patch(blank) == ()


@pytest.mark.parametrize("patch", [PLAIN, GIT, f"From: me\nSubject: x\n\n{GIT}-- \n2.40.0\n\n"])
def test_plain_git_and_mail(patch: str) -> None:
    (change,) = parse_patch(patch)
    assert (change.path, change.status, *counts(change)) == ("src/x.py", FileStatus.MODIFIED, 1, 1)


def test_context_line_without_its_blank_is_accepted() -> None:
    assert parse_patch("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n")


def test_plain_diff_with_times() -> None:
    patch = "--- old/x.py\t2024-01-01 00:00:00\n+++ new/x.py\t2024-01-02 00:00:00\n@@ -1 +1 @@\n-b\n+c\n"
    assert touched_files(patch) == ("x.py",)


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        pytest.param("hello\n", "no diff", id="no-diff"),
        pytest.param(PLAIN.replace("src/x.py", "../x.py"), "leaves the repository", id="dotdot"),
        pytest.param(PLAIN.replace("a/src", "/src").replace("b/src", "/src"), "absolute", id="absolute"),
        pytest.param(PLAIN.replace("a/src", "a//etc").replace("b/src", "b//etc"), "absolute", id="absolute-stripped"),
        pytest.param(GIT.replace("src/x.py", "src/../../x.py"), "leaves the repository", id="git-dotdot"),
        pytest.param(
            GIT.replace("a/src/x.py", '"a/..\\057x"').replace("b/src/x.py", '"b/..\\057x"'), "leaves", id="octal"
        ),
        pytest.param(PLAIN.replace("src/x.py", ".git/config"), "git's own", id="dot-git"),
        pytest.param(PLAIN.replace("src/x.py", "x/" * 2**21 + "x.py"), "longer than any", id="long"),
        pytest.param(GIT.replace("src/x.py", "x/" * 2**21 + "x.py"), "longer than any", id="git-long"),
        pytest.param(RENAME.replace("old.py", '"' + "\\141/" * 2**21 + 'x"'), "longer than any", id="rename-long"),
        pytest.param(RENAME.replace("old.py", "old.py\rx"), "control character", id="rename-carriage-return"),
        pytest.param(PLAIN.replace("src/x.py", "src/x.py\rx"), "control character", id="carriage-return"),
        pytest.param(PLAIN.replace("src/x.py", "sub/.GIT/hooks/x"), "git's own", id="dot-git-case"),
        pytest.param(PLAIN.replace("a/src/", "").replace("b/src/", ""), "no leading directory", id="noprefix"),
        pytest.param(GIT.replace("a/src", "src").replace("b/src", "src"), "no a/ and b/", id="git-noprefix"),
        pytest.param(PLAIN.replace("-b", "-b\0"), "NUL", id="nul"),
        pytest.param(PLAIN.replace("\n", "\r\n"), "CRLF", id="crlf"),
        pytest.param(GIT.replace("\n", "\r\n"), "CRLF", id="git-crlf"),
        pytest.param(PLAIN.replace("@@ -1,2 +1,2 @@", "@@ -1,3 +1,3 @@"), "2 and 2 follow", id="short-hunk"),
        pytest.param(PLAIN.replace("@@ -1,2 +1,2 @@", "@@ -1,1 +1,1 @@"), "more lines", id="long-hunk"),
        pytest.param(PLAIN.replace("@@ -1,2 +1,2 @@", "@@ -1,2 @@"), "cannot be read", id="bad-header"),
        pytest.param(PLAIN.rstrip("\n"), "no newline", id="trimmed"),
        pytest.param(PLAIN.split("@@", maxsplit=1)[0], "without a hunk", id="no-hunk"),
        pytest.param("@@ -1 +1 @@\n-a\n+b\n", "without a file", id="no-file"),
        pytest.param("diff --git a/x b/x\nindex 1..2 100644\n", "no change", id="no-change"),
        pytest.param("diff --git a/x b/x\nindex 0..1 120000\n", "no change", id="changed-link"),
        pytest.param("diff --git a/x b/x\nnew file mode 160000\nindex 0..1\n", "gitlink", id="gitlink"),
        pytest.param("diff --git a/x b/x\nnew file mode rwx\n", "not a file's mode", id="mode"),
        pytest.param("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "--binary", id="binary-without-content"),
        pytest.param("diff --git a/x b/x\nGIT binary patch\nliteral 3\nKc", "without its end", id="binary-cut"),
        pytest.param("diff --git a/x b/y\n--- a/z\n+++ b/z\n@@ -1 +1 @@\n-a\n+b\n", None, id="other-names"),
        pytest.param("diff --git a/x b/x\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "does not agree", id="disagree"),
        pytest.param("diff --git a/x b/x\nsimilarity index 1%\nrename from ../x\nrename to y\n", "leaves", id="rename"),
        pytest.param(GIT.replace("b/src/x.py\n@@", "/dev/null\n@@").replace("+++ b", "+++ "), "not agree", id="null"),
        pytest.param("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "both sides", id="null-null"),
    ],
)
def test_refused(patch: str, words: str | None) -> None:
    if words is None:
        assert parse_patch(patch)
        return
    with pytest.raises(PatchError) as caught:
        parse_patch(patch, name="p.diff")
    assert words in str(caught.value)
    assert caught.value.what.startswith("p.diff, line ")
    assert caught.value.reason or caught.value.hint


def test_the_place_is_a_line_number() -> None:
    with pytest.raises(PatchError, match=r"the patch, line 10: "):
        parse_patch(GIT + "diff --git a/y b/y\n--- a/../y\n+++ b/y\n")


def test_links_are_read_with_their_targets(repo: Path) -> None:
    (repo / "new").symlink_to("src/x.py")
    (repo / "link").unlink()
    (repo / "link").symlink_to("with space.txt\nx")
    changes = parse_patch(diff(repo))
    assert {change.path: change.link for change in changes} == {"new": b"src/x.py", "link": b"with space.txt\nx"}


def test_a_file_that_becomes_a_link_is_deleted_and_added(repo: Path) -> None:
    (repo / "café.txt").unlink()
    (repo / "café.txt").symlink_to("dos.txt")
    (repo / "link").unlink()
    (repo / "link").write_text("a file\n")
    patch = diff(repo)
    changes = [(change.path, change.status, change.link) for change in parse_patch(patch)]
    assert changes == [
        ("café.txt", FileStatus.DELETED, None),
        ("café.txt", FileStatus.ADDED, b"dos.txt"),
        ("link", FileStatus.DELETED, None),
        ("link", FileStatus.ADDED, None),
    ]
    assert removed_files(patch) == ()


def test_a_link_without_its_target_has_an_empty_one() -> None:
    binary = "GIT binary patch\nliteral 4\nLcmZQzWMT#Y01f~L\n\nliteral 0\nHcmV?d00001\n\n"
    (change,) = parse_patch(f"diff --git a/x b/x\nnew file mode 120000\n{binary}")
    assert change.link == b""


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("a", "b", True),
        ("a/b/c", "../../d", True),
        ("a/b", "./../c/", True),
        ("a", ".", True),
        ("a", "", False),
        ("a", "/etc/passwd", False),
        ("a", "../x", False),
        ("a/b", "../../x", False),
        ("a/b", "c/../../x", False),
        ("a/b", "c/../d", False),
        ("a", ".git/config", False),
        ("a/b", "../x/.GIT/hooks", False),
    ],
)
def test_where_links_may_lead(path: str, target: str, expected: bool) -> None:
    assert leads_inside(path, target.encode()) is expected


NAMES = st.text(alphabet=st.sampled_from('ab \t\n"\\é\udcff.'), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)


@given(old=NAMES, new=NAMES)
def test_names_are_read_as_git_writes_them(tmp_path_factory: pytest.TempPathFactory, old: str, new: str) -> None:
    folder = tmp_path_factory.mktemp("names")
    git(folder, "init")
    (folder / old).write_text("one\n" * 9)
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "one")
    (folder / old).write_text("one\n" * 8)
    changed = diff(folder)
    assert [change.path for change in parse_patch(changed)] == [old]
    (folder / old).rename(folder / new)
    assert touched_files(diff(folder, "-M")) == tuple(sorted({old, new}))


def test_nested_repository_is_refused(repo: Path) -> None:
    (repo / "inner").mkdir()
    (repo / "inner" / "f").touch()
    git(repo / "inner", "init")
    git(repo / "inner", "add", "-A")
    git(repo / "inner", "commit", "-m", "one")
    with pytest.raises(PatchError, match="gitlink"):
        parse_patch(diff(repo))


def test_file_with_crlf_is_no_patch_with_crlf(repo: Path) -> None:
    (repo / "dos.txt").write_bytes(b"one\r\nthree\r\n")
    changes = parse_patch(diff(repo))
    assert sum(line.endswith(b"\r") for line in changes[0].lines) == 3
    said = explain_line_endings(changes)
    assert said is not None
    assert "dos.txt" in said
    assert explain_line_endings(parse_patch(PLAIN)) is None


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for patch in (data, GIT.encode() + data, GIT.encode()[: len(data)] + data):
        try:
            parse_patch(patch)
        except PatchError:
            continue


@given(
    st.lists(st.sampled_from([*GIT.splitlines(), "rename from x", "rename to y", "\\ No newline", "GIT binary patch"]))
)
def test_shuffled_lines_are_read_or_refused(lines: list[str]) -> None:
    try:
        parse_patch("\n".join(lines) + "\n")
    except PatchError:
        return


_LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "-- d", "++ e", "@@ f"]), max_size=12)


@given(before=_LINES, after=_LINES, last_newline=st.booleans())
def test_whatever_git_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, before: list[str], after: list[str], last_newline: bool
) -> None:
    folder = tmp_path_factory.mktemp("diff")
    for name, lines in (("old", before), ("new", after)):
        (folder / name).write_text("\n".join(lines) + "\n" * (last_newline or not lines))
    made = git(folder, "diff", "--no-index", "--src-prefix=a/", "--dst-prefix=b/", "old", "new").stdout
    numbers = git(folder, "diff", "--no-index", "--numstat", "old", "new").stdout.split()
    changes = parse_patch(made)
    assert [str(n) for c in changes for n in counts(c)] == [n.decode() for n in numbers[:2]]


EPOCHS = ("", "\t1970-01-01 00:00:00.000000000 +0000", "\t1969-12-31 16:00:00 -0800", "\t2020-01-01 00:00:00 +0000")
HUNKS = (
    "@@ -0,0 +1 @@\n+x\n",
    "@@ -1,0 +1,2 @@\n+x\n+y\n",
    "@@ -0,0 +1 @@\n+x\n@@ -0,0 +2 @@\n+y\n",
    "@@ -1 +1 @@\n-a\n+x\n",
)


@pytest.mark.parametrize("hunks", HUNKS)
@pytest.mark.parametrize("old", EPOCHS)
@pytest.mark.parametrize("new", EPOCHS)
def test_what_git_makes_of_a_plain_diff_counts_as_added(repo: Path, old: str, new: str, hunks: str) -> None:
    """git makes the file of a diff without old lines where there is none, whatever the names say."""
    patch = f"--- a/shlex.py{old}\n+++ b/shlex.py{new}\n{hunks}".encode()
    applied = git(repo, "apply", "-", stdin=patch).returncode == 0
    assert applied == (repo / "shlex.py").exists()
    (change,) = parse_patch(patch)
    assert change.status is FileStatus.ADDED or not applied
    if hunks == HUNKS[0] and not old + new:
        assert applied
    if hunks == HUNKS[-1] and not old:
        assert change.status is FileStatus.MODIFIED
