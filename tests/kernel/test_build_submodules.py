"""Submodules of git sources: fetched as their superproject is, and ordinary files of the one commit inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.container import commit, git

from minisandbox.errors import SourceError
from minisandbox.images import build
from minisandbox.images.plan import Planner
from minisandbox.images.sources.localsource import take_snapshot
from minisandbox.sandbox import Sandbox
from minisandbox.spec import GitSource, LocalSource, PythonRecipe
from minisandbox.store import Made, Store

pytestmark = pytest.mark.kernel

SERVER = "https://unreachable.invalid/owner/project.git"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def project(path: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> str:
    """Make a repository with files and, by path, gitlinks to commits; return its commit."""
    path.mkdir(parents=True)
    git(path, "init", "--quiet")
    for name, text in files.items():
        (path / name).write_text(text)
    git(path, "add", "--all")
    for place, linked in (links or {}).items():
        git(path, "update-index", "--add", "--cacheinfo", f"160000,{linked},{place}")
    git(path, "commit", "--quiet", "-m", "base")
    return git(path, "rev-parse", "HEAD")


def entry(path: str, url: str, more: str = "") -> str:
    return f'[submodule "{path}"]\n\tpath = {path}\n\turl = {url}\n{more}'


@pytest.fixture
def mirrors(tmp_path: Path) -> Path:
    """Clones of a project and its submodules, one of which has another; the library went on with the answer."""
    root = tmp_path / "mirrors"
    inner = project(root / "owner/inner", {"i.py": "i = 1\n"})
    modules = entry("in side", "./../inner.git/")
    library = project(root / "other__library", {"lib.py": "x = 1\n", ".gitmodules": modules}, {"in side": inner})
    (root / "other__library/lib.py").write_text("x = 2  # the answer\n")
    commit(root / "other__library", "the answer")
    modules = (
        entry("vendor/lib", "../../other/library")
        + entry("docs/theme", "https://gone.invalid/a/theme", "\tupdate = none\n")
        + entry("in side", "../inner")
    )
    links = {"vendor/lib": library, "in side": inner, "docs/theme": "1" * 40, "unnamed": "2" * 40}
    project(root / "owner__project", {"main.py": "m = 1\n", ".gitmodules": modules}, links)
    return root


def head(mirrors: Path) -> str:
    return git(mirrors / "owner__project", "rev-parse", "HEAD")


def test_files_of_submodules_are_files_of_the_one_commit(store: Store, mirrors: Path) -> None:
    recipe = PythonRecipe(source=GitSource(SERVER, head(mirrors)))
    image = build(recipe, store=store, name="merged", mirrors=mirrors)
    assert image.notes["submodules"] == "in side, vendor/lib, vendor/lib/in side"
    assert image.notes["submodules, left empty"] == "docs/theme, unnamed"
    with Sandbox.create(image.spec()) as box:
        inside = ["vendor/lib/.gitmodules", "vendor/lib/in side/i.py", "vendor/lib/lib.py"]
        assert box.exec("git ls-files").stdout.splitlines() == [".gitmodules", "in side/i.py", "main.py", *inside]
        assert box.exec("git rev-list --all --count; git fsck --unreachable; find . -name .git").stdout == "1\n./.git\n"
        assert box.exec("git cat-file --batch-all-objects --batch --buffer | grep answer").stdout == ""
        assert box.exec("git status --porcelain; git submodule status").check().stdout == ""
        box.exec("echo 'x = 2' > vendor/lib/lib.py; echo 'i = 2' > 'vendor/lib/in side/i.py'").check()
        patch = box.patch()
    with Sandbox.create(image.spec()) as box:
        box.files.write_bytes("/tmp/patch", patch)
        box.exec("git apply /tmp/patch").check()
        assert box.files.read_text("vendor/lib/lib.py") == "x = 2\n"
        assert box.files.read_text("vendor/lib/in side/i.py") == "i = 2\n"


def test_a_submodule_that_no_mirror_has_is_an_error_that_names_it(store: Store, mirrors: Path) -> None:
    (mirrors / "owner/inner").rename(mirrors.parent / "inner")
    with pytest.raises(SourceError) as caught:
        build(PythonRecipe(source=GitSource(SERVER, head(mirrors))), store=store, name="missing", mirrors=mirrors)
    assert "submodule 'in side' of https://unreachable.invalid/owner/project.git" in caught.value.what
    assert git(mirrors.parent / "inner", "rev-parse", "HEAD") in caught.value.what
    assert "DIR/owner/inner" in (caught.value.hint or "")


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_only_a_superproject_of_this_machine_may_name_repositories_of_it(
    store: Store, tmp_path: Path, form: str
) -> None:
    secret = project(tmp_path / "secret", {"s.py": "s = 1\n"})
    modules = entry("lib", form.format(tmp_path / "secret"))
    base = project(tmp_path / "given/project", {".gitmodules": modules}, {"lib": secret})
    here = PythonRecipe(source=GitSource((tmp_path / "given/project").as_uri(), base))
    assert build(here, store=store, name="here").notes["submodules"] == "lib"
    with pytest.raises(SourceError, match="submodule 'lib'") as caught:  # although the store has fetched it by now
        build(PythonRecipe(source=GitSource(SERVER, base)), store=store, name="server", mirrors=tmp_path / "given")
    assert "path of this machine" in (caught.value.reason or "")


def test_a_layer_that_left_submodules_empty_is_not_used(store: Store, mirrors: Path, tmp_path: Path) -> None:
    """Layers of earlier versions say in their records which submodules are empty; those without any stay valid."""
    source = GitSource(SERVER, head(mirrors))
    step = Planner(store, mirrors).plan("old", PythonRecipe(source=source)).steps[0]
    for empty, kept in (("", True), ("vendor/lib", False)):
        old = Store.open(tmp_path / f"old{kept}")

        def make(staging: Path, empty: str = empty) -> Made:
            (staging / "tree/testbed").mkdir(parents=True)
            (staging / "tree/testbed/main.py").write_text("m = 1\n")
            return Made(staging / "tree", {"submodules": empty, "pointers": "", "described": ""})

        old.ensure_layer(step.key, parent=None, step=step.definition, make=make)
        again = Planner(old, mirrors).plan("new", PythonRecipe(source=source)).steps[0]
        assert (again.key == step.key) is kept


def test_a_directory_brings_the_files_of_its_submodules(tmp_path: Path) -> None:
    inner, library = tmp_path / "inner", tmp_path / "library"
    project(inner, {"i.py": "i = 1\n"})
    project(library, {"lib.py": "x = 1\n", ".gitignore": "*.log\n"})
    git(library, "submodule", "--quiet", "add", str(inner), "in side")
    commit(library, "with a submodule")
    here = tmp_path / "here"
    project(here, {"main.py": "m = 1\n"})
    git(here, "submodule", "--quiet", "add", str(library), "lib")
    git(here, "submodule", "--quiet", "update", "--init", "--recursive")
    for name in ("new.py", "x.log"):
        (here / "lib" / name).write_text("new\n")
    paths = {path for path, _, _ in take_snapshot(LocalSource(here)).files}
    names = {"lib.py", "new.py", ".gitignore", ".gitmodules", "in side/i.py"}
    assert paths == {".gitmodules", "main.py", *(f"lib/{name}" for name in names)}
