"""Render the official Dockerfiles of rows, with replacements for what cannot be had here, as tasks to build from them.

    python -m benchmarks.parity.dockerfiles ROWS... -o DIR --pins DIR --repo-mirrors DIR [--only GLOB ...]

For each row, ``DIR/ID/official`` has the Dockerfiles and scripts as swebench 4.1 or swesmith make them: base,
environment and instance, one below the other in one file. ``DIR/ID`` has them with the replacements of
:data:`REPLACEMENTS`, and what they need: a Debian system instead of Ubuntu's, a stand-in for conda with an interpreter
of this machine, the repository's mirror. ``DIR/ID/difference.diff`` is what was replaced. ``DIR/rows.jsonl`` has the
rows; ``minisandbox validate`` and ``benchmarks.verdict_parity`` take them. Needs root and Debian's debootstrap.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import shutil
import subprocess
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.images.building import bootstrap
from benchmarks.images.engine import say

from minisandbox.images.image import DEFAULT_PATH
from minisandbox.images.python.interpreters import find_interpreter
from minisandbox.images.python.prefix import copy_prefix
from minisandbox.spec import DockerfileBase, PythonRecipe
from minisandbox.tasks import ContainerBuild, Task, TaskSet
from minisandbox.tasks.dialects.environments import OFFICIAL

SUITE = "bookworm"
_ENVIRONMENT = "/opt/miniconda3/envs/testbed"
_CLONED = (
    "--mount=type=bind,source=repository,target=/mirror/{repo} "
    "GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=url./mirror/.insteadOf GIT_CONFIG_VALUE_0=https://github.com/ "
    "GIT_CONFIG_KEY_1=safe.directory GIT_CONFIG_VALUE_1='*' /bin/bash"
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Something of the official files that cannot be had here.

    Attributes:
        old: the official text.
        new: what stands in its place; ``{repo}`` is the repository to clone.
        why: the reason.
    """

    old: str
    new: str
    why: str


REPLACEMENTS: Mapping[str, tuple[Replacement, ...]] = {
    "base": (
        Replacement(
            "FROM --platform=linux/x86_64 ubuntu:22.04\n",
            f"FROM scratch AS base\nADD root.tar /\nENV PATH={DEFAULT_PATH}\n",
            "no registry: Debian 12 by debootstrap",
        ),
        Replacement(
            "RUN wget 'https://repo.anaconda.com/miniconda/Miniconda3-py311_23.11.0-2-Linux-x86_64.sh'"
            " -O miniconda.sh \\\n    && bash miniconda.sh -b -p /opt/miniconda3\n",
            "COPY conda /opt/miniconda3\n",
            "no conda: a stand-in that copies an interpreter and calls pip",
        ),
    ),
    "environment": (
        Replacement(
            "FROM --platform=linux/x86_64 {base}\n",
            "FROM base AS environment\nCOPY python /opt/miniconda3/python\nCOPY pins.txt /root/\n",
            "CPython of this machine instead of conda's; conda's export as pip's requirements",
        ),
    ),
    "instance": (
        Replacement("FROM --platform=linux/x86_64 {environment}\n", "FROM environment\n", "one file instead of three"),
        Replacement("RUN /bin/bash /root/setup_repo.sh", f"RUN {_CLONED} /root/setup_repo.sh", "no GitHub: a mirror"),
    ),
    "setup_repo.sh": (
        Replacement("git gc --prune=now --aggressive", "git gc --prune=now", "minutes for the same objects"),
    ),
    "smith": (
        Replacement(
            "FROM --platform=linux/x86_64 {base}\n",
            "FROM base\nCOPY python /opt/miniconda3/python\nCOPY pins.txt /root/\n",
            "CPython of this machine instead of conda's; conda's export as pip's requirements",
        ),
        Replacement(
            'required=false /bin/bash -c "source', f'required=false {_CLONED} -c "source', "no GitHub: a mirror"
        ),
    ),
}
"""What is replaced, by the part of the official files that has it."""


@dataclass(frozen=True, slots=True)
class Official:
    """The official files of a row.

    Attributes:
        parts: Dockerfiles by the keys of :data:`REPLACEMENTS`, in the order in which they are built.
        scripts: the scripts that they copy, by name.
        names: the images that they name.
        repo: the repository that they clone, ``owner/name``.
    """

    parts: Mapping[str, str]
    scripts: Mapping[str, str]
    names: Mapping[str, str]
    repo: str


def main() -> None:
    """Render what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROWS", help="files of rows")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--pins", type=Path, required=True, metavar="DIR", help="exported environments")
    parser.add_argument("--repo-mirrors", type=Path, required=True, metavar="DIR", help="git repositories")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="ids, or globs of ids")
    options = parser.parse_args()
    rendered = []
    for name in options.rows:
        tasks = TaskSet.load(name, pins=options.pins, repo_mirrors=options.repo_mirrors, environment="pins")
        wanted = {task.instance_id for glob in options.only for task in tasks if _matches(task, glob)}
        for task in tasks:
            if task.instance_id in wanted:
                row = tasks.row(task.instance_id)
                say(f"rendering {task.instance_id}")
                rendered.append(_render(task, row, options))
    (options.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rendered))


def _matches(task: Task, glob: str) -> bool:
    return Path(task.instance_id).match(glob)


def _render(task: Task, row: Mapping[str, object], options: argparse.Namespace) -> dict[str, object]:
    """Write the files of a row; returns the row with its build."""
    assert isinstance(task.build, PythonRecipe)
    folder = options.out / task.instance_id
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "official").mkdir(parents=True)
    official = _smith(task, options.pins) if str(row["repo"]).startswith("swesmith/") else _bench(row, options.pins)
    ours = {name: _replaced(name, text, official) for name, text in {**official.parts, **official.scripts}.items()}
    dockerfile = ["\n".join(parts) for parts in (official.parts.values(), [ours[name] for name in official.parts])]
    difference: list[str] = []
    for name, texts in {"Dockerfile": dockerfile, **{n: [t, ours[n]] for n, t in official.scripts.items()}}.items():
        for place, text in zip((folder / "official", folder), texts, strict=True):
            (place / name).write_text(text)
        old, new = (text.splitlines(keepends=True) for text in texts)
        difference += difflib.unified_diff(old, new, f"official/{name}", name, n=1)
    (folder / "difference.diff").write_text("".join(difference))
    _add_parts(folder, task.build, _mirror(options.repo_mirrors, task.base_commit), options.out / "parts")
    relative = Path(task.instance_id)
    base = DockerfileBase(relative / "Dockerfile", relative)
    build = ContainerBuild(base, "/testbed", OFFICIAL["swebench"].environment)
    # the packages find a row's parser by the repository as the data set names it
    return replace(task, build=build, repo=str(row["repo"])).to_row()


def _replaced(name: str, text: str, official: Official) -> str:
    for one in REPLACEMENTS.get(name, ()):
        old = one.old.replace("{base}", official.names["base"]).replace("{environment}", official.names["environment"])
        if old not in text:
            raise SystemExit(f"the official {name} does not have {old!r}")
        text = text.replace(old, one.new.replace("{repo}", official.repo))
    return text


def _bench(row: Mapping[str, object], pins: Path) -> Official:
    """The files as swebench makes them; the pins are the exports that its repository has and its distribution lacks."""
    python: Any = importlib.import_module("swebench.harness.test_spec.python")

    def export(instance_id: str) -> str | None:
        repository, _, number = instance_id.rpartition("-")
        file = pins / "swebench" / repository / number / "environment.yml"
        return file.read_text() if file.is_file() else None

    python.load_cached_environment_yml = export
    spec: Any = importlib.import_module("swebench.harness.test_spec.test_spec").make_test_spec(dict(row))
    return Official(
        {"base": spec.base_dockerfile, "environment": spec.env_dockerfile, "instance": spec.instance_dockerfile},
        {"setup_env.sh": spec.setup_env_script, "setup_repo.sh": spec.install_repo_script},
        {"base": spec.base_image_key, "environment": spec.env_image_key},
        spec.repo,
    )


def _smith(task: Task, pins: Path) -> Official:
    """The files as swesmith's ``PythonProfile.build_image`` writes them, before it calls docker: here, nothing."""
    module: Any = importlib.import_module("swesmith.profiles.python")
    profile: Any = importlib.import_module("swesmith.profiles").registry.get(task.instance_id.rsplit(".", 1)[0])
    kind: Any = type(profile)
    kind._is_repo_private, kind._docker_ssh_arg = lambda _: False, ""  # they would ask GitHub and look for keys
    module.subprocess = types.SimpleNamespace(run=lambda *_, **__: None, STDOUT=None)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, profile.repo_name)
        shutil.copytree(pins / "swesmith" / profile.repo_name, made)
        module.LOG_DIR_ENV = Path(folder)
        profile.build_image()
        dockerfile, script = (made / "Dockerfile").read_text(), (made / "setup_env.sh").read_text()
    dockerfiles: Any = importlib.import_module("swebench.harness.dockerfiles")
    defaults = importlib.import_module("swebench.harness.constants").DEFAULT_DOCKER_SPECS
    base = dockerfiles.get_dockerfile_base(profile.pltf, profile.arch, "py", **defaults)
    names = {"base": f"{module.ORG_NAME_DH}/swesmith.x86_64", "environment": ""}
    return Official({"base": base, "smith": dockerfile}, {"setup_env.sh": script}, names, profile.mirror_name)


def _mirror(folder: Path, commit: str) -> Path:
    """Return the repository that has a commit."""
    for head in sorted((*folder.glob("*/HEAD"), *folder.glob("*/*/HEAD"))):
        probe = ["git", "--git-dir", str(head.parent), "cat-file", "-e", f"{commit}^{{commit}}"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return head.parent
    raise SystemExit(f"no repository in {folder} has the commit {commit}")


def _add_parts(folder: Path, build: PythonRecipe, mirror: Path, parts: Path) -> None:
    """Link what the Dockerfile copies into its context; the parts that rows share are made once."""
    bootstrap(SUITE, parts / SUITE)
    os.link(parts / SUITE / "root.tar", folder / "root.tar")
    shutil.copytree(Path(__file__).with_name("conda"), folder / "conda")
    assert build.python is not None
    interpreter = find_interpreter(build.python)
    python = parts / f"python-{interpreter.version}"
    if not python.exists():
        copy_prefix(interpreter, python, _ENVIRONMENT)
    for source, name in ((python, "python"), (mirror, "repository")):
        shutil.copytree(source, folder / name, symlinks=True, copy_function=os.link)
    pins = build.requirements if build.complete else ()
    (folder / "pins.txt").write_text("".join(f"{line}\n" for line in pins))


if __name__ == "__main__":
    main()
