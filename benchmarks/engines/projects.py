"""Build the measured projects: sdists and pinned packages from the package index, programs from this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.engine import ENVIRONMENT, SUITE, WORKDIR, Project, run_program

from minisandbox.images.base import base_entries, write_base

PYTHON = "/usr/bin/python3"
PINS = Path(__file__).parents[1] / "projects.json"
_TOOLS = ("pip==25.3", "setuptools==80.9.0")  # what an agent finds in an environment
_PROGRAMS = "bash cat cp env find grep head id ls mkdir mktemp mv python3 rm sed sh sleep sort tail test touch true wc"


def build_projects(place: Path, names: Sequence[str]) -> list[Project]:
    """Build projects of ``benchmarks/projects.json`` below a directory, in every form that an engine needs."""
    pins = json.loads(PINS.read_text())
    place.mkdir()
    write_base(base_entries(), place / "base")
    copy_programs(place / "programs")
    projects = []
    for name in names:
        version = re.sub(r"^\D*", "", pins[name]["tags"][-1])
        projects.append(Project(place / name))
        build_tree(projects[-1], f"{name}=={version}", pins[name]["requirements"])
        pack(projects[-1], place / "programs")
    return projects


def build_tree(project: Project, release: str, requirements: Sequence[str]) -> None:
    """Build a project's environment and repository, and run its tests once so that no engine compiles them."""
    environment, testbed = project.tree / "opt/env", project.tree / WORKDIR[1:]
    testbed.mkdir(parents=True)
    run(sys.executable, "-m", "uv", "--quiet", "venv", "--python", PYTHON, environment)
    run(sys.executable, "-m", "uv", "--quiet", "pip", "install", "--python", environment / "bin/python",
        "--link-mode", "copy", "--compile-bytecode", *requirements, *_TOOLS, release)  # fmt: skip
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
        "--dest", project.home / "sdist", release)  # fmt: skip
    sdist = next((project.home / "sdist").iterdir())
    run("tar", "-xzf", sdist, "-C", testbed, "--strip-components", "1", "--no-same-owner")
    git = ("git", "-C", testbed, "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    for words in ("init --quiet", "add --all", f"commit --quiet --message {release}", "gc --quiet"):
        run(*git, *words.split())
    variables = {**ENVIRONMENT, "PYTHONPATH": f"{project.tree}{ENVIRONMENT['PYTHONPATH']}"}
    run(f"{project.tree}{SUITE[0]}", *SUITE[1:], directory=testbed, environment=variables)


def pack(project: Project, programs: Path) -> None:
    """Make the forms of a project that other engines start from."""
    for path in (project.base, project.tree):
        run("cp", "-al", f"{path}/.", project.root)
    run("tar", "-C", project.root, "--exclude", "./usr", "-cf", project.image, ".")
    run("tar", "-C", programs, "-rf", project.image, "usr")
    for archive, part in zip(project.archives, ("opt/env", WORKDIR[1:]), strict=True):
        with tarfile.open(archive, "w:gz") as out:  # as the original packs: Python's default level
            out.add(project.tree / part, part)


def copy_programs(target: Path) -> None:
    """Copy a shell, small programs and Python with their libraries: the ``/usr`` of containers."""
    program = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(subprocess.check_output([PYTHON, "-I", "-c", program], text=True).strip())
    ignored = shutil.ignore_patterns("test", "idlelib", "ensurepip", "dist-packages", "config-*")
    shutil.copytree(library, target / str(library)[1:], ignore=ignored, ignore_dangling_symlinks=True)
    programs = [path for name in _PROGRAMS.split() if (path := shutil.which(name, path="/usr/bin:/bin"))]
    linked = run_program(["ldd", *programs, *library.rglob("*.so")], os.environ).text
    for file in {*programs, *re.findall(r"^\t(?:.* => )?(/\S+) \(", linked, re.MULTILINE)}:
        copy = target / os.path.realpath(os.path.dirname(file))[1:] / os.path.basename(file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def copy_for(projects: Sequence[Project], place: Path, uid: int) -> list[Project]:
    """Return copies of projects with layers that belong to another user, and no other form."""
    copies = [Project(place / project.home.name) for project in projects]
    run("cp", "-a", projects[0].base, place)
    for project, copy in zip(projects, copies, strict=True):
        copy.home.mkdir()
        run("cp", "-a", project.tree, copy.home)
    run("chown", "-R", f"{uid}:{uid}", place)
    return copies


def run(*command: str | Path, directory: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a program.

    Raises:
        SystemExit: it failed, with what it printed.
    """
    output = run_program(command, environment or os.environ, directory)
    if output.status != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed with {output.status}:\n{output.text[-2000:]}")
