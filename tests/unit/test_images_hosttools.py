"""The host's programs that images are built with: git and uv; where they are missing, and where git is led astray."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import uv

from minisandbox.errors import ProgramNotFound, SourceError
from minisandbox.images.python.index import default_index_url, find_uv
from minisandbox.images.sources.localsource import take_snapshot
from minisandbox.images.sources.mirrors import Mirrors
from minisandbox.spec import GitSource, LocalSource
from minisandbox.store import Store

IDENTITY = ("-c", "user.name=x", "-c", "user.email=x@localhost")


def _git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *IDENTITY, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A work tree with a tracked, an untracked and an ignored file."""
    path = tmp_path / "checkout"
    path.mkdir()
    _git(path, "init", "--quiet")
    for name in ("tracked", "untracked", "ignored"):
        (path / name).write_text(name, encoding="ascii")
    (path / ".gitignore").write_text("ignored\n", encoding="ascii")
    _git(path, "add", "tracked", ".gitignore")
    _git(path, "commit", "--quiet", "-m", "x")
    return path


def _names(path: Path) -> list[str]:
    return [name for name, _, _ in take_snapshot(LocalSource(path)).files]


def test_a_repository_that_a_hook_names_is_not_the_one_that_is_read(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _git(other, "init", "--quiet")
    commit = _git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert _names(checkout) == [".gitignore", "tracked", "untracked"]
    (tmp_path / "work").mkdir()
    taken = Mirrors(Store.open(tmp_path / "store")).take(GitSource(str(checkout), commit), tmp_path / "work")
    assert len(taken.tree) == 40


def test_without_git_no_work_tree_is_taken_for_a_plain_directory(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "inner").mkdir()
    (checkout / "inner/file").write_text("x", encoding="ascii")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").write_text("x", encoding="ascii")
    monkeypatch.setenv("PATH", str(tmp_path))
    for path in (checkout, checkout / "inner"):
        with pytest.raises(ProgramNotFound, match="git") as caught:
            take_snapshot(LocalSource(path))
        assert caught.value.hint
    with pytest.raises(ProgramNotFound):
        Mirrors(Store.open(tmp_path / "store")).take(GitSource(str(checkout), "0" * 40), tmp_path)
    if not any((parent / ".git").exists() for parent in plain.parents):
        assert _names(plain) == ["file"]


def test_a_work_tree_that_git_cannot_read_is_an_error_below_its_top_too(checkout: Path) -> None:
    (checkout / "inner").mkdir()
    (checkout / ".git/HEAD").write_text("nonsense", encoding="ascii")
    for path in (checkout, checkout / "inner"):
        with pytest.raises(SourceError, match="git cannot list"):
            take_snapshot(LocalSource(path))


def _exchanging(root: Path, number: int) -> Callable[[FrameType, str, object], None]:
    """A profiler that puts a link in the place of a directory at that call of the system, then the directory again."""
    calls = itertools.count(1)

    def notice(frame: FrameType, event: str, argument: object) -> None:
        system = event == "c_call" and getattr(argument, "__module__", "") == "posix"
        if (system or (event == "call" and frame.f_code.co_name == "openat2")) and next(calls) == number:
            sys.setprofile(None)
            for old, new in (("d", "kept"), ("l", "d"), ("kept", "l")):
                (root / old).rename(root / new)

    return notice


@pytest.mark.slow
@pytest.mark.parametrize("tracked", [False, True])
def test_a_directory_that_becomes_a_link_while_it_is_read(tmp_path: Path, tracked: bool) -> None:
    """Whoever else may write it has nothing read that lies behind the link, at whatever call the two are exchanged."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/file").write_text("secret", encoding="ascii")
    (tmp_path / "home/other").write_text("secret", encoding="ascii")
    contents = set()
    for number in range(1, 1000):
        root = tmp_path / f"theirs{number}"
        (root / "d").mkdir(parents=True)
        for name in ("file", "d/file"):
            (root / name).write_text("own", encoding="ascii")
        (root / "l").symlink_to(tmp_path / "home")
        if tracked:
            _git(root, "init", "--quiet")
        sys.setprofile(_exchanging(root, number))
        try:
            files = take_snapshot(LocalSource(root)).files
        except SourceError:
            files = ()
        finally:
            sys.setprofile(None)
        contents |= {content for _, kind, content in files if kind == "file"}
        if not (root / "d").is_symlink():  # there were fewer calls
            break
    assert number > 10
    assert contents == {hashlib.sha256(b"own").hexdigest()}


def test_links_are_packed_and_pipes_left_out(tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/file").touch()
    (tmp_path / "d/link").symlink_to("e")
    os.mkfifo(tmp_path / "d/pipe")
    assert take_snapshot(LocalSource(tmp_path)).files == (
        ("d/e/file", "file", hashlib.sha256().hexdigest()),
        ("d/link", "link", hashlib.sha256(b"e").hexdigest()),
    )


def test_a_tracked_directory_that_became_a_file(checkout: Path) -> None:
    (checkout / "thing").mkdir()
    (checkout / "thing/file").write_text("x", encoding="ascii")
    _git(checkout, "add", "thing/file")
    (checkout / "thing/file").unlink()
    (checkout / "thing").rmdir()
    (checkout / "thing").write_text("now a file", encoding="ascii")
    assert "thing" in _names(checkout)


def test_without_the_uv_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise FileNotFoundError("no uv in any of these places")

    monkeypatch.setattr(uv, "find_uv_bin", absent)
    for ask in (find_uv, default_index_url):
        with pytest.raises(ProgramNotFound, match="uv") as caught:
            ask()
        assert "pip install" in str(caught.value.hint)


def test_the_index_can_be_asked_for_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, os.devnull)
    assert default_index_url().startswith("https://")
