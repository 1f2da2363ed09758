"""Repositories: fetched into one mirror, taken from mirrors made elsewhere, and never more than one commit inside."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minisandbox.errors import SourceError
from minisandbox.git import run_git
from minisandbox.images import build
from minisandbox.images.plan import Planner
from minisandbox.images.sources.mirrors import Mirrors, mirror_name
from minisandbox.sandbox import Sandbox
from minisandbox.spec import GitSource, PythonRecipe
from minisandbox.store import Store

pytestmark = pytest.mark.kernel


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _git(cwd: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    allowed = ("-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *identity, *allowed, *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository with two commits, a tag, another branch, a note and a stash."""
    root = tmp_path / "upstream"
    root.mkdir()
    _git(root, "init", "-q", "-b", "main")
    for number in range(40):
        (root / f"file{number}.txt").write_text(f"file {number}\n" * 50)
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", "first")
    _git(root, "tag", "v1")
    (root / "file0.txt").write_text("the answer\n")
    _git(root, "commit", "-qam", "second")
    _git(root, "notes", "add", "-m", "the answer in a note")
    _git(root, "branch", "future")
    (root / "file1.txt").write_text("stashed\n")
    _git(root, "stash", "-q")
    return root


def _commits(upstream: Path) -> tuple[str, str]:
    return _git(upstream, "rev-parse", "v1"), _git(upstream, "rev-parse", "main")


def test_a_commit_is_fetched_once_and_the_next_brings_what_is_new(upstream: Path, store: Store, tmp_path: Path) -> None:
    url = upstream.as_uri()
    mirror = store.root / "repositories" / mirror_name(url)
    sizes = []
    for number, commit in enumerate(_commits(upstream)):
        work = tmp_path / f"work{number}"
        work.mkdir()
        Mirrors(store).take(GitSource(url, commit), work)
        sizes.append(int(_git(mirror, "count-objects", "-v").split("count: ")[1].split()[0]))
    assert sizes[1] - sizes[0] == 3, "a commit, a tree and a blob are new"
    shutil.move(upstream, tmp_path / "gone")
    (tmp_path / "offline").mkdir()
    Mirrors(store).take(GitSource(url, _git(tmp_path / "gone", "rev-parse", "v1")), tmp_path / "offline")


def test_the_repository_inside_has_one_commit_and_no_other_object(upstream: Path, store: Store) -> None:
    first, _ = _commits(upstream)
    image = build(PythonRecipe(source=GitSource(upstream.as_uri(), first)), store=store, name="one")
    check = (
        "git rev-list --all --count; git for-each-ref; git remote; git tag; git reflog; git stash list; git notes list;"
        "ls .git/logs .git/objects/info/alternates .git/shallow 2>/dev/null; wc -l < .git/packed-refs;"
        "git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u > /tmp/all;"
        "git rev-list --objects HEAD | cut -d' ' -f1 | sort -u > /tmp/reachable;"
        "cmp /tmp/all /tmp/reachable && echo same;"
        "git cat-file --batch-all-objects --batch --buffer | grep -c answer"
    )
    with Sandbox.create(image.spec()) as box:
        lines = box.exec(check).stdout.splitlines()
    assert lines == ["1", f"{image.commit} commit\trefs/heads/main", "2", "same", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["owner/name", "owner__name", "owner__name.git", "name.git"])
def test_mirrors_made_elsewhere_need_no_network(upstream: Path, store: Store, tmp_path: Path, place: str) -> None:
    given = tmp_path / "given"
    bare = ["--bare"] if place.endswith(".git") else []
    (given / place).parent.mkdir(parents=True)
    _git(tmp_path, "clone", "-q", *bare, str(upstream), str(given / place))
    first, _ = _commits(upstream)
    source = GitSource("https://unreachable.invalid/owner/name.git", first)
    image = build(PythonRecipe(source=source), store=store, name="offline", mirrors=given)
    with Sandbox.create(image.spec()) as box:
        assert box.exec("head -1 file0.txt").stdout == "file 0\n"
    missing = GitSource("https://unreachable.invalid/owner/name.git", "0" * 40)
    with pytest.raises(SourceError) as caught:
        build(PythonRecipe(source=missing), store=store, name="missing", mirrors=given)
    assert "has no commit" in (caught.value.reason or "")


def test_a_repository_that_cannot_be_reached_names_the_way_out(store: Store) -> None:
    with pytest.raises(SourceError) as caught:
        build(PythonRecipe(source=GitSource("https://unreachable.invalid/o/n", "0" * 40)), store=store, name="x")
    assert "--repo-mirrors" in (caught.value.hint or "")


def _pull_request(upstream: Path) -> str:
    """A commit that no branch or tag leads to, but a name that GitHub gives to the one after it."""
    _git(upstream, "switch", "-q", "--orphan", "pull")
    (upstream / "pull.txt").write_text("a change that somebody proposes\n")
    _git(upstream, "add", "-A")
    _git(upstream, "commit", "-q", "-m", "proposed")
    commit = _git(upstream, "rev-parse", "HEAD")
    _git(upstream, "commit", "-q", "--allow-empty", "-m", "proposed too")  # the last one would be served
    _git(upstream, "update-ref", "refs/pull/7/head", "HEAD")
    _git(upstream, "switch", "-q", "main")
    _git(upstream, "branch", "-qD", "pull")
    return commit


@pytest.fixture
def old_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git of this process speaks the protocol in which a server gives out only what it names."""
    for name, value in {"COUNT": "1", "KEY_0": "protocol.version", "VALUE_0": "0"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)


@pytest.mark.usefixtures("old_protocol")
def test_a_server_that_serves_no_commit_by_name_is_asked_for_branches_and_tags(
    upstream: Path, store: Store, tmp_path: Path
) -> None:
    proposed, (first, _) = _pull_request(upstream), _commits(upstream)
    _git(upstream, "tag", "-d", "v1")  # an ancestor of a branch now, and named by nothing
    url = upstream.as_uri()
    Mirrors(store).take(GitSource(url, first), tmp_path)
    mirror = store.root / "repositories" / mirror_name(url)
    names = _git(mirror, "for-each-ref", "--format=%(refname)").split()
    assert sorted(names) == ["refs/fetched/heads/future", "refs/fetched/heads/main"]
    held = _git(mirror, "cat-file", "--batch-check", "--batch-all-objects")
    assert first in held
    assert proposed not in held
    with pytest.raises(SourceError, match=f"has no commit {proposed}") as caught:
        Mirrors(store).take(GitSource(url, proposed), tmp_path)
    assert "no branch or tag leads to it" in str(caught.value)
    assert "--repo-mirrors" in str(caught.value)


def test_a_fetch_that_fails_is_not_followed_by_a_larger_one(
    upstream: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[list[str]] = []

    def counted(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if "fetch" in arguments:
            fetches.append(list(arguments))
        return run_git(arguments, **options)

    first, _ = _commits(upstream)
    shutil.rmtree(upstream / ".git/objects")
    monkeypatch.setattr("minisandbox.images.sources.mirrors.run_git", counted)
    with pytest.raises(SourceError, match=f"cannot fetch {first[:12]}"):
        Mirrors(store).take(GitSource(upstream.as_uri(), first), tmp_path)
    assert len(fetches) == 1


def test_the_tags_that_an_installation_is_told_of_are_in_its_key(upstream: Path, store: Store, tmp_path: Path) -> None:
    """A mirror with tags and one without them are not the same source to tools that ask git for a version."""
    tagged, _ = _commits(upstream)
    shutil.copytree(upstream, tmp_path / "given/upstream")
    _git(upstream, "tag", "-d", "v1")
    install = ("echo $LAST_TAG > version",)
    recipe = PythonRecipe(source=GitSource(upstream.as_uri(), tagged), install=install)
    planner = Planner(store, tmp_path / "given")
    planned = planner.plan("one", recipe)
    image = build(recipe, store=store, name="one", mirrors=tmp_path / "given")
    assert image.layers == planned.layers == planner.plan("one", recipe).layers
    with Sandbox.create(image.spec()) as box:
        assert box.files.read_text("version") == f"v1-0-g{tagged[:7]}\n"
    other = Store.open(tmp_path / "other")
    assert {one.name for one in Planner(other).plan("one", recipe).steps if one.key not in image.layers} == {
        "install",
        "task",
    }
    untagged = build(recipe, store=other, name="one")
    with Sandbox.create(untagged.spec()) as box:
        assert box.files.read_text("version") == "\n"
    assert untagged.key != image.key


def test_pointers_are_told(upstream: Path, store: Store) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"
    (upstream / "big.bin").write_text(pointer)
    _git(upstream, "add", "-A")
    _git(upstream, "commit", "-q", "-m", "a pointer")
    source = GitSource(str(upstream), _git(upstream, "rev-parse", "HEAD"))
    image = build(PythonRecipe(source=source), store=store, name="pointers")
    assert image.notes["Git LFS pointers, left as they are"] == "big.bin"


def test_names_of_mirrors() -> None:
    one = mirror_name("https://user:secret@github.com/owner/name.git")
    assert one == mirror_name("https://github.com/owner/name")
    assert one.startswith("github.com_owner_name-")
    assert mirror_name("https://github.com/owner/other") != one
    assert "/" not in mirror_name("/a/../b c")
