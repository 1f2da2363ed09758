"""Task files of the projects: images by our builder, lists of tests as measured, verdicts here and in podman."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.images.building import DOCKERFILES as ROOTS
from benchmarks.images.building import bootstrap
from benchmarks.images.engine import say
from benchmarks.languages.projects import Project
from benchmarks.languages.sources import Archive, Commit, make_repository

from minisandbox import Store
from minisandbox.grade import Reason, derive_test_lists, measure
from minisandbox.images import build, read_dockerfile
from minisandbox.tasks import task_from_row

DOCKERFILES = Path(__file__).parent / "dockerfiles"
_DRAFT = ("to be measured",)
_TIMEOUT = 900.0


def name_of(project: Project, patch: str) -> str:
    """Return a task's id."""
    return f"{project.package}-{patch.removesuffix('.patch')[:20].rstrip('-')}"


def build_root(suite: str, context: Path, store: Store) -> None:
    """Build the image of a release of Debian that images start from."""
    bootstrap(suite, context)
    recipe = read_dockerfile(ROOTS / "root.Dockerfile", context, store=store)
    build(recipe, store=store, name=f"root-{suite}")


def draft(project: Project, patch: str, archive: Archive, place: Path) -> dict[str, Any]:
    """Make a task's repository, and its row without measured lists.

    Args:
        project: the project.
        patch: the commit.
        archive: where its source is.
        place: the directory of the task file.
    """
    name = name_of(project, patch)
    context = place / "contexts" / name
    commit = _commit(project, patch, archive, context)
    (place / "dockerfiles").mkdir(exist_ok=True)
    shutil.copy(DOCKERFILES / f"{project.language}.Dockerfile", place / "dockerfiles")
    return {
        "instance_id": name,
        "repo": f"debian/{project.package}",
        "base_commit": commit.base,
        "version": project.version,
        "form": "swebench",
        "problem_statement": commit.message,
        "patch": commit.patch,
        "test_patch": commit.test_patch,
        "FAIL_TO_PASS": _DRAFT,
        "PASS_TO_PASS": (),
        "build": {
            "dockerfile": f"dockerfiles/{project.language}.Dockerfile",
            "context": f"contexts/{name}",
            **({"remove": project.remove} if project.remove else {}),
            "args": {"ROOT": f"root-{project.suite}", "WORKDIR": project.workdir, **project.arguments},
        },
        "test": {
            "grader": "log",
            "command": project.command,
            "parser": f"swebench5:parse_log_{project.parser}",
            "timeout": _TIMEOUT,
        },
    }


def _commit(project: Project, patch: str, archive: Archive, context: Path) -> Commit:
    """Make a task's repository unless it is there: git's index differs from time to time, and so would the image."""
    known = context / "commit.json"
    made_of = [project.package, project.version, patch, list(project.tests)]
    if known.exists() and (found := json.loads(known.read_text())).pop("made_of") == made_of:
        return Commit(**found)
    commit = make_repository(project, patch, archive.fetch(project), context / "repository")
    known.write_text(json.dumps({"made_of": made_of, **asdict(commit)}))
    return commit


def measured(row: Mapping[str, Any], place: Path, store: Store) -> tuple[dict[str, Any], int]:
    """Build a task's image, and measure its lists of tests.

    Returns:
        The row with its lists, and how many tests the parser finds after the reference.

    Raises:
        MiniSandboxError: the image cannot be built, or no sandbox be made.
        SystemExit: a run of the tests shows nothing.
    """
    task = task_from_row(row, base=place)
    say(f"building {task.instance_id}")
    image = build(task.recipe(), store=store, name=task.instance_id)
    say(f"measuring {task.instance_id}")
    solved, unsolved = (measure(task, image, reference=yes) for yes in (True, False))
    for run in (solved, unsolved):
        # what does not compile without the reference has no results
        if not run.believed and (run is solved or run.reason is not Reason.NO_RESULTS):
            raise SystemExit(f"{task.instance_id}: {run.reason}: {run.detail}\n{run.log[-3000:]}")
    failing, passing = derive_test_lists([solved], [unsolved])
    return {**row, "FAIL_TO_PASS": failing, "PASS_TO_PASS": passing}, len(solved.outcomes)


def compared(tasks: Path, store: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Validate a file with one task here and in podman; returns what ``minisandbox compare`` says of it."""
    say("comparing with podman")
    command = [sys.executable, "-m", "minisandbox", "compare", str(tasks), "--backend", "podman", "--json"]
    done = subprocess.run(
        command, env={**environment, "MINISANDBOX_STORE": str(store)}, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout.strip():
        raise SystemExit(f"minisandbox compare {tasks} ended with {done.returncode}")
    (found,) = json.loads(done.stdout)["tasks"]
    return dict(found)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return results as a table of Markdown."""
    titles = ("task", "language", "parser", "tests seen", "F2P", "P2P", "sandbox", "podman", "sandbox, s", "podman, s")
    lines = [titles, ("---",) * 3 + ("--:",) * 3 + ("---",) * 2 + ("--:",) * 2]
    for one in results:
        sides = [one["verdicts"][side] for side in ("sandbox", "engine")]
        verdicts = [" ".join(filter(None, (side["status"], side["cause"]))) for side in sides]
        if not one["verdicts"]["equal"]:
            verdicts[1] += " (DIFFERENT)"
        numbers = (one["seen"], len(one["row"]["FAIL_TO_PASS"]), len(one["row"]["PASS_TO_PASS"]))
        parser = one["row"]["test"]["parser"].partition("parse_log_")[2]
        seconds = (f"{side['seconds']:.1f}" for side in sides)
        lines.append((one["row"]["instance_id"], one["language"], parser, *map(str, numbers), *verdicts, *seconds))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
