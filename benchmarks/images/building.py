"""Build the images with buildah, once, into an OCI layout in a directory outside of the repository."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.images.engine import Engine, private_engine, run, say
from benchmarks.images.projects import PROJECTS, Family, Project

DOCKERFILES = Path(__file__).parent / "dockerfiles"


def layout_of(cache: Path) -> Path:
    """Return the layout of all images; each is a tag."""
    return cache / "layout"


def build_all(cache: Path) -> Path:
    """Build what the cache lacks; returns the layout.

    Raises:
        SystemExit: a program failed; what is finished stays.
    """
    done = cache / "complete"
    layout = layout_of(cache)
    if done.exists():
        return layout
    cache.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(layout, ignore_errors=True)
    with private_engine(cache / "building", resume=True) as engine:
        for family in {project.family.suite: project.family for project in PROJECTS}.values():
            _build_base(engine, family, cache / "contexts")
        for project in PROJECTS:
            _build_project(engine, project, cache / "contexts", layout)
    done.touch()
    return layout


def _bud(engine: Engine, kind: str, name: str, context: Path, **arguments: str) -> None:
    say(f"building {name}")
    words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    engine.buildah(
        "bud", "--isolation", "chroot", "--layers", "--cap-add", "MKNOD", "--pull-never", "--format", "docker",
        *words,
        "--file", str(DOCKERFILES / f"{kind}.Dockerfile"), "--tag", name, str(context),
    )  # fmt: skip


def bootstrap(suite: str, context: Path) -> None:
    """Make ``root.tar`` of a release of Debian in a directory, the context of ``root.Dockerfile``, unless it is there.

    Raises:
        SystemExit: debootstrap failed.
    """
    archive = context / "root.tar"
    if archive.exists():
        return
    say(f"debootstrap {suite}")
    tree = context / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    run("debootstrap", "--variant=minbase", suite, tree)
    shutil.rmtree(tree / "var/cache/apt/archives")
    run("tar", "-C", tree, "--format=pax", "--xattrs", "--exclude=./dev/*", "-cf", f"{archive}.new", ".")
    Path(f"{archive}.new").rename(archive)
    shutil.rmtree(tree)


def _build_base(engine: Engine, family: Family, contexts: Path) -> None:
    context = contexts / family.suite
    bootstrap(family.suite, context)
    _bud(engine, "root", f"root-{family.suite}", context)
    _bud(engine, "base", f"base-{family.suite}", context, ROOT=f"root-{family.suite}")


def _build_project(engine: Engine, project: Project, contexts: Path, layout: Path) -> None:
    context = contexts / project.name
    commits = _prepare(project, context)
    base, environment = f"base-{project.family.suite}", f"environment-{project.name}"
    _bud(engine, "environment", environment, context, BASE=base, PREFIX=project.family.prefix)
    for image, commit in zip(project.images, commits, strict=True):
        user = "root" if project.odd else project.user
        _bud(engine, "instance", image, context, ENVIRONMENT=environment, COMMIT=commit, USER=user)
        if project.odd:
            _bud(engine, "odd", image, context, INSTANCE=image, USER=project.user, WORKDIR=project.workdir)
        engine.buildah("push", "--quiet", image, f"oci:{layout}:{image}")


def _prepare(project: Project, context: Path) -> list[str]:
    """Fetch wheels and releases; returns the commits of the releases in a repository made of them."""
    shutil.rmtree(context, ignore_errors=True)
    repository = context / "repository"
    repository.mkdir(parents=True)
    shutil.copy(DOCKERFILES / "odd.py", context)
    (context / "requirements.txt").write_text("\n".join((*project.requirements, "")))
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    run(
        *pip, "--only-binary", ":all:", "--python-version", project.family.python, "--implementation", "cp",
        "--dest", context / "wheels", "-r", context / "requirements.txt",
    )  # fmt: skip
    git = ("git", "-C", repository, "-c", "user.name=release", "-c", "user.email=release@localhost")
    run(*git, "init", "--quiet", "--initial-branch", "main")
    commits = []
    for release in project.releases:
        sdist = context / "sdist" / release
        run(*pip, "--no-binary", ":all:", "--dest", sdist, f"{project.name}=={release}")
        run("git", "-C", repository, "rm", "-r", "-q", "--ignore-unmatch", ".")
        archive = next(sdist.iterdir())
        run("tar", "-xzf", archive, "-C", repository, "--strip-components", "1", "--no-same-owner")
        run(*git, "add", "--all")
        run(*git, "commit", "--quiet", "--message", f"Release {release}")
        commits.append(run("git", "-C", repository, "rev-parse", "HEAD").strip())
    return commits
