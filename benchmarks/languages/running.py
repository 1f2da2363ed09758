"""Task files of the projects: images by our builder, lists of tests as measured, verdicts here and in podman."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.images.building import DOCKERFILES as ROOTS
from benchmarks.images.building import bootstrap
from benchmarks.images.engine import say
from benchmarks.languages.projects import Project
from benchmarks.languages.sources import Archive, make_repository

from minisandbox import Store
from minisandbox.grade import Reason, derive_test_lists, measure
from minisandbox.images import build, read_dockerfile
from minisandbox.tasks import task_from_row

DOCKERFILES = Path(__file__).parent / "dockerfiles"
RUNS = 2
_DRAFT = ("to be measured",)
_TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class Made:
    """A task with measured lists.

    Attributes:
        row: its row.
        language: its language.
        seen: how many tests the parser finds after the reference.
    """

    row: Mapping[str, Any]
    language: str
    seen: int


def name_of(project: Project, patch: str) -> str:
    """Return a task's id."""
    return f"{project.package}-{patch.removesuffix('.patch')[:20].rstrip('-')}"


def build_roots(suites: Sequence[str], contexts: Path, store: Store) -> None:
    """Build the image of each release of Debian that images start from."""
    for suite in suites:
        bootstrap(suite, contexts / suite)
        recipe = read_dockerfile(ROOTS / "root.Dockerfile", contexts / suite, store=store)
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
    commit = make_repository(project, patch, archive.fetch(project), context / "repository")
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
            "args": {"ROOT": f"root-{project.suite}", "WORKDIR": project.workdir, **project.arguments},
        },
        "test": {
            "grader": "log",
            "command": project.command,
            "parser": f"swebench5:parse_log_{project.parser}",
            "timeout": _TIMEOUT,
        },
    }


def measured(row: dict[str, Any], language: str, place: Path, store: Store) -> Made:
    """Build a task's image, and fill its lists of tests.

    Raises:
        MiniSandboxError: the image cannot be built, or no sandbox be made.
        SystemExit: a run of the tests shows nothing.
    """
    task = task_from_row(row, base=place)
    say(f"building {task.instance_id}")
    image = build(task.recipe(), store=store, name=task.instance_id)
    say(f"measuring {task.instance_id}")
    solved = [measure(task, image, reference=True) for _ in range(RUNS)]
    unsolved = [measure(task, image, reference=False) for _ in range(RUNS)]
    for run in (*solved, *unsolved):
        # what does not compile without the reference has no results
        if not run.believed and (run in solved or run.reason is not Reason.NO_RESULTS):
            raise SystemExit(f"{task.instance_id}: {run.reason}: {run.detail}\n{run.log[-3000:]}")
    failing, passing = derive_test_lists(solved, unsolved)
    return Made({**row, "FAIL_TO_PASS": failing, "PASS_TO_PASS": passing}, language, len(solved[0].outcomes))


def verdicts(tasks: Path, store: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Validate a task file here and in podman: what ``minisandbox compare`` says of each task."""
    command = [sys.executable, "-m", "minisandbox", "compare", str(tasks), "--backend", "podman", "--json"]
    done = subprocess.run(
        command, env={**environment, "MINISANDBOX_STORE": str(store)}, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout.strip():
        raise SystemExit(f"minisandbox compare ended with {done.returncode}")
    return {row["instance_id"]: row for row in json.loads(done.stdout)["tasks"]}


def table(made: Sequence[Made], found: Mapping[str, Any]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| task | language | parser | tests seen | F2P | P2P | sandbox | podman | sandbox, s | podman, s |",
        "|---|---|---|--:|--:|--:|---|---|--:|--:|",
    ]
    for one in made:
        row, both = one.row, found[one.row["instance_id"]]
        verdict = [" ".join(filter(None, (both[side]["status"], both[side]["cause"]))) for side in ("sandbox", "engine")]
        if not both["equal"]:
            verdict[1] += " (DIFFERENT)"
        cells = [
            row["instance_id"], one.language, row["test"]["parser"].partition("parse_log_")[2], str(one.seen),
            str(len(row["FAIL_TO_PASS"])), str(len(row["PASS_TO_PASS"])), *verdict,
            f"{both['sandbox']['seconds']:.1f}", f"{both['engine']['seconds']:.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
