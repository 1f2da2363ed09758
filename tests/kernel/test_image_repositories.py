"""Repositories that container images bring along: reset, cut to one commit, nothing of the later history reachable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest
from tests.container import commit, git, tar_of
from tests.unit.oci_tools import MadeImage

from minisandbox import Sandbox
from minisandbox.errors import BuildError
from minisandbox.images import Image, build
from minisandbox.spec import CheckOut, CutHistory, HiddenTests, ImageSource, OciBase, Recipe, Step
from minisandbox.store import Store
from minisandbox.types import FileType

pytestmark = pytest.mark.kernel

APP = PurePosixPath("/app")
ANSWER = "return 42  # the answer"
TEST = "from code import answer\n\n\ndef test_answer():\n    assert answer() == 42\n"
HIDDEN = ("tests/test_code.py",)
Prepare = Callable[[Path], None]


class Project:
    """A root filesystem with a repository at /app of three commits, and an ignored environment beside it.

    Attributes:
        root: the filesystem.
        base: the commit of the task.
        later: the commit with the answer.
    """

    def __init__(self, root: Path, *options: str) -> None:
        self.root, app = root, root / "app"
        (app / "tests").mkdir(parents=True)
        git(app, "init", "--quiet", "--initial-branch=main", *options)
        (app / "code.py").write_text("def answer():\n    return 41\n")
        (app / "gone.py").write_text("")
        (app / ".gitignore").write_text("/.venv\n")
        self.base = commit(app, "base")
        git(app, "tag", "v1")
        (app / "code.py").write_text(f"def answer():\n    {ANSWER}\n")
        (app / "gone.py").unlink()
        (app / "tests/test_code.py").write_text(TEST)
        self.later = commit(app, "the answer")
        git(app, "branch", "fixed")
        (app / ".venv").mkdir()
        (app / ".venv/installed").write_text("x")

    @property
    def app(self) -> Path:
        """The repository."""
        return self.root / "app"

    def base_image(self, owner: int = 0) -> OciBase:
        """The filesystem as a container image."""
        made = MadeImage([tar_of(self.root, owner=owner)], {"WorkingDir": "/app"})
        return OciBase(f"oci:{made.write_layout(self.root.parent / 'layout')}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "root").mkdir()
    return Project(tmp_path / "root")


def files(box: Sandbox, folder: str = "/") -> Iterator[PurePosixPath]:
    """Yield every path of an image."""
    for found in box.files.list(folder):
        if found.path.parts[1] not in ("proc", "dev", "sys", "run", "tmp"):
            yield found.path
            if found.type is FileType.DIRECTORY:
                yield from files(box, str(found.path))


def cut(store: Store, base: OciBase, commit: str, *steps: Step, **more: tuple[str, ...]) -> Image:
    recipe = Recipe(base, (CheckOut(ImageSource(commit, **more)), *(steps or (CutHistory(),))))
    return build(recipe, store=store, name="cut")


def check(image: Image, tmp_path: Path, lost: str) -> set[str]:
    """Check that an image's repository is one clean commit without a lost one; return its committed files."""
    copy = tmp_path / "copy"
    with Sandbox.create(image.spec()) as box:
        found = list(files(box))
        for path in found:
            here = copy / path.relative_to("/")
            info = box.files.stat(path)
            if info.type is FileType.DIRECTORY:
                here.mkdir(parents=True, exist_ok=True)
            elif path.is_relative_to(APP) and info.type is FileType.FILE:
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_bytes(box.files.read_bytes(path))
    assert [path for path in found if path.name == "objects"] == [APP / ".git/objects"]
    assert [path for path in found if path.suffix == ".bundle" or path.name == "modules"] == []
    app = copy / "app"
    assert git(app, "rev-parse", "HEAD") == image.commit
    assert git(app, "rev-list", "--all", "--count") == "1"
    assert "dangling" not in git(app, "fsck", "--full", "--unreachable")
    missing = subprocess.run(["git", "-C", app, "cat-file", "-e", lost], check=False, capture_output=True)
    assert missing.returncode != 0, "the later commit can be had"
    assert git(app, "status", "--porcelain") == ""
    return set(git(app, "ls-files").splitlines())


def packed(project: Project) -> None:
    git(project.app, "gc", "--quiet", "--aggressive", "--prune=now")
    git(project.app, "pack-refs", "--all")


def worktree(project: Project) -> None:
    """The workdir is a worktree of a repository elsewhere, named by absolute paths of the image."""
    app, main = project.app, project.root / "srv/main"
    main.parent.mkdir()
    app.rename(main)
    git(main, "worktree", "add", "--quiet", "--force", "-B", "work", str(app), "HEAD")
    for pointer in (app / ".git", main / ".git/worktrees/app/gitdir"):
        pointer.write_text(pointer.read_text().replace(str(project.root), ""))
    (app / ".venv").mkdir()


def borrowed(project: Project) -> None:
    """The workdir's objects lie in a mirror elsewhere (alternates)."""
    app, mirror = project.app, project.root / "var/mirror.git"
    mirror.parent.mkdir()
    git(project.root, "clone", "--quiet", "--mirror", str(app), str(mirror))
    git(app, "repack", "-a", "-d", "-l", "-q")
    for path in (app / ".git/objects").rglob("*"):
        if path.is_file():
            path.unlink()
    (app / ".git/objects/info").mkdir(exist_ok=True)
    (app / ".git/objects/info/alternates").write_text("/var/mirror.git/objects\n")


def linked(project: Project) -> None:
    """The workdir's .git is a link with an absolute target, through a linked directory."""
    place = project.root / "srv/git"
    place.mkdir(parents=True)
    (project.app / ".git").rename(place / "app.git")
    (project.root / "store").symlink_to("/srv/git")
    (project.app / ".git").symlink_to("/store/app.git")


def cloned(project: Project) -> None:
    """A clone lies elsewhere."""
    git(project.root, "clone", "--quiet", str(project.app), str(project.root / "opt"))


def hostile(project: Project) -> None:
    """The repository has hooks, filters and settings that would run programs."""
    (project.app / ".git/hooks/post-checkout").write_text("#!/bin/sh\ntouch /image/app/ran\n")
    (project.app / ".git/hooks/post-checkout").chmod(0o755)
    git(project.app, "config", "core.fsmonitor", "touch /image/app/ran")
    git(project.app, "config", "filter.x.smudge", "touch /image/app/ran; cat")
    git(project.app, "config", "core.worktree", "/elsewhere")
    (project.app / ".git/info/attributes").write_text("* filter=x\n")


@pytest.mark.parametrize("prepare", [packed, worktree, borrowed, linked, cloned, hostile])
def test_history_is_cut_wherever_it_lies(
    store: Store, project: Project, tmp_path: Path, prepare: Callable[[Project], None]
) -> None:
    prepare(project)
    image = cut(store, project.base_image(), project.base)
    assert check(image, tmp_path, project.later) == {".gitignore", "code.py", "gone.py"}
    app = tmp_path / "copy/app"
    assert "41" in (app / "code.py").read_text()
    assert not (app / "tests/test_code.py").exists()
    assert not (app / "ran").exists()
    assert (app / ".venv").is_dir(), "what is ignored stays"


@pytest.fixture
def library(project: Project, tmp_path: Path) -> Path:
    """The upstream of a library with a submodule of its own, checked out in the project's base commit."""
    library, inner = tmp_path / "library", tmp_path / "inner"
    for folder, name in ((inner, "inner.py"), (library, "lib.py")):
        folder.mkdir()
        git(folder, "init", "--quiet")
        (folder / name).write_text("x = 1\n")
        (folder / ".gitignore").write_text("*.so\n")
        commit(folder, "base")
    git(library, "submodule", "--quiet", "add", str(inner), "in side")
    commit(library, "with a submodule")
    git(project.app, "submodule", "--quiet", "add", str(library), "vendor/lib")
    git(project.app, "submodule", "--quiet", "update", "--init", "--recursive")
    (project.app / "vendor/lib/built.so").write_text("built\n")
    project.base = commit(project.app, "with submodules")
    return library


MERGED = {
    f"vendor/lib/{name}" for name in (".gitignore", ".gitmodules", "lib.py", "in side/.gitignore", "in side/inner.py")
}


def bump(project: Project, library: Path) -> None:
    """Commit the answer to the library, and have the project use it in a later commit."""
    (library / "lib.py").write_text(f"{ANSWER}\n")
    (library / "later.py").write_text("")
    answer = commit(library, "the answer")
    git(project.app / "vendor/lib", "fetch", "--quiet", "origin")
    git(project.app / "vendor/lib", "checkout", "--quiet", answer)
    project.later = commit(project.app, "use the answer")


def inside(project: Project) -> None:
    """The submodules' repositories lie in their work trees, as old versions of git made them."""
    for name in ("vendor/lib/in side", "vendor/lib"):
        git(project.app, "-C", name, "config", "--unset", "core.worktree")
        place = Path(git(project.app / name, "rev-parse", "--absolute-git-dir"))
        (project.app / name / ".git").unlink()
        place.rename(project.app / name / ".git")


def elsewhere(project: Project) -> None:
    """A submodule's repository lies outside of the superproject's, and another clone of it does too."""
    (project.root / "opt").mkdir()
    git(project.root, "clone", "--quiet", "--bare", str(project.app / "vendor/lib"), "opt/clone.git")
    (project.app / ".git/modules").rename(project.root / "gits")
    (project.app / "vendor/lib/.git").write_text("gitdir: /gits/vendor/lib\n")
    (project.app / "vendor/lib/in side/.git").write_text("gitdir: /gits/vendor/lib/modules/in side\n")


def lost(project: Project) -> None:
    """The image has the submodules' files alone."""
    subprocess.run(["rm", "-rf", project.app / ".git/modules"], check=True)


@pytest.mark.parametrize("prepare", [packed, inside, elsewhere, lost])
def test_files_of_submodules_are_files_of_the_one_commit(
    store: Store, project: Project, library: Path, tmp_path: Path, prepare: Callable[[Project], None]
) -> None:
    prepare(project)
    (project.app / "vendor/lib/lib.py").write_text("x = 3  # the image changed it\n")
    image = cut(store, project.base_image(), project.base)
    tracked = check(image, tmp_path, git(library, "rev-parse", "HEAD"))
    assert {name for name in tracked if name.startswith("vendor")} == MERGED
    assert image.notes["submodules"] == "vendor/lib, vendor/lib/in side" or prepare is lost
    lib = tmp_path / "copy/app/vendor/lib"
    assert (lib / "lib.py").read_text().startswith("x = 3")
    assert (lib / "built.so").read_text() == "built\n"


def test_submodules_are_reset_with_their_superproject(
    store: Store, project: Project, library: Path, tmp_path: Path
) -> None:
    bump(project, library)
    tracked = check(cut(store, project.base_image(), project.base), tmp_path, project.later)
    assert {name for name in tracked if name.startswith("vendor")} == MERGED
    assert (tmp_path / "copy/app/vendor/lib/lib.py").read_text() == "x = 1\n"
    assert not (tmp_path / "copy/app/vendor/lib/later.py").exists()


def test_a_submodule_that_cannot_be_reset_is_named(store: Store, project: Project, library: Path) -> None:
    bump(project, library)
    lost(project)
    with pytest.raises(BuildError) as failed:
        cut(store, project.base_image(), project.base)
    assert failed.value.log is not None
    assert "the submodule at /app/vendor/lib has no commit" in failed.value.log.read_text()


def test_a_submodule_that_the_image_lacks_is_left_empty(
    store: Store, project: Project, library: Path, tmp_path: Path
) -> None:
    git(project.app, "submodule", "--quiet", "deinit", "--force", "--all")
    image = cut(store, project.base_image(), project.base)
    assert check(image, tmp_path, git(library, "rev-parse", "HEAD")).isdisjoint(MERGED)
    assert image.notes["submodules, left empty"] == "vendor/lib"


def test_an_image_at_its_commit_keeps_what_was_changed_there(store: Store, project: Project, tmp_path: Path) -> None:
    (project.app / "code.py").write_text("prepared = True\n")
    image = cut(store, project.base_image(), project.later)
    assert "tests/test_code.py" in check(image, tmp_path, project.later)
    assert (tmp_path / "copy/app/code.py").read_text() == "prepared = True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="with one id, every file is the user's own")
def test_a_repository_keeps_its_owner(store: Store, project: Project, tmp_path: Path) -> None:
    image = cut(store, project.base_image(owner=1000), project.base)
    check(image, tmp_path, project.later)
    with Sandbox.create(image.spec()) as box:
        for path in ("/app", "/app/code.py", "/app/.git", "/app/.git/HEAD", "/app/.git/index"):
            assert box.files.stat(path).uid == 1000, path


def test_hidden_tests_and_answers_leave_the_image(store: Store, project: Project, tmp_path: Path) -> None:
    (project.root / "opt").mkdir()
    (project.root / "opt/copy.py").write_text(TEST)
    (project.root / "solution").mkdir()
    (project.root / "solution/solve.sh").write_text("true\n")
    steps = (HiddenTests(HIDDEN), CutHistory("", HIDDEN))
    image = cut(store, project.base_image(), "", *steps, remove=("/solution",))
    assert HIDDEN[0] not in check(image, tmp_path, project.later)
    with Sandbox.create(image.spec()) as box:
        assert not box.files.exists("/opt/copy.py")
        assert not box.files.exists("/solution")
    folder = image.tests_dir()
    assert folder is not None
    assert (folder / HIDDEN[0]).read_text() == TEST


def test_files_without_a_repository_become_one(store: Store, project: Project, tmp_path: Path) -> None:
    subprocess.run(["rm", "-rf", project.app / ".git"], check=True)
    image = cut(store, project.base_image(), "")
    assert check(image, tmp_path, project.later) == {".gitignore", "code.py", "tests/test_code.py"}


def test_a_repository_of_sha256_stays_one(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    project = Project(tmp_path / "root", "--object-format=sha256")
    image = cut(store, project.base_image(), project.base)
    assert len(image.commit) == 64
    check(image, tmp_path, project.later)


def test_a_commit_that_the_image_lacks_is_named(store: Store, project: Project) -> None:
    with pytest.raises(BuildError, match="'source' of image 'cut' failed") as failed:
        cut(store, project.base_image(), "0" * 39 + "1")
    assert f"its HEAD is {project.later}" in (failed.value.reason or "")


def test_a_workdir_within_a_repository_is_refused(store: Store, project: Project) -> None:
    recipe = Recipe(project.base_image(), (CheckOut(ImageSource()), CutHistory()), workdir=APP / "tests")
    with pytest.raises(BuildError) as failed:
        build(recipe, store=store, name="within")
    assert "the repository at /app" in (failed.value.reason or "")
