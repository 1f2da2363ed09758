"""Generate the bundled task set ``quickstart`` from ``tools/quickstart``, with measured test lists.

``tools/quickstart`` has a handwritten TOML file per project: the sdist (name, version, sha256), and for each task its
patches, the tests to run and the issue's text. This tool builds an image per task and interpreter, and runs the tests
several times with the grader's own runner. Tests that fail without the reference and pass with it become FAIL_TO_PASS.
Tests that pass both ways become PASS_TO_PASS. A test whose outcome differs between runs is left out, and the reason is
recorded in ``tools/quickstart/measured.json``. ``docs/quickstart-tasks.md`` is generated from these records.

    python tools/make_quickstart_tasks.py                      # all tasks, on CPython 3.11, 3.12 and 3.13
    python tools/make_quickstart_tasks.py --only 'pallets__*'  # some tasks; the other rows are unchanged
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import MiniSandboxError
from minisandbox.grade import Measurement, derive_test_lists, measure
from minisandbox.images import build
from minisandbox.spec import PythonRecipe
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet, task_from_row

HERE = Path(__file__).resolve().parent
INPUTS = HERE / "quickstart"
MEASURED = INPUTS / "measured.json"
OUTPUT = HERE.parent / "src" / "minisandbox" / "tasks" / "data" / "quickstart.jsonl"
DOCS = HERE.parent / "docs" / "quickstart-tasks.md"
PYTHONS = ("3.11", "3.12", "3.13")
RUNS = 3
LICENCES = frozenset({"MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"})
UNMEASURED = ("not measured yet",)
"""Placeholder for FAIL_TO_PASS until it is measured; it names no file, so no test file is hidden from the runs."""

Row = dict[str, object]
Measure = Callable[[Task, str, bool, Sequence[str]], Measurement]
"""Runs tests once; called with the task, the Python version, whether to apply the reference, and the tests."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A handwritten task, whose test lists are not measured yet.

    Attributes:
        task: the task, without its measured lists.
        tests: files and directories to pass to pytest.
        project: the project's name.
        licence: the SPDX identifier of the project's licence.
        summary: the bug in half a sentence, for the documentation.
        origin: source of a real fix; empty for a bug made for this set.
    """

    task: Task
    tests: tuple[str, ...]
    project: str
    licence: str
    summary: str
    origin: str


@dataclass(frozen=True, slots=True)
class Lists:
    """The measured test lists of one task.

    Attributes:
        fail_to_pass: tests that fail without the reference and pass with it.
        pass_to_pass: tests that pass with and without the reference.
        excluded: (test, reason) for each test in neither list.
        seconds: duration of the longest run.
        versions: versions of Python and pytest in the runs.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    seconds: float
    versions: tuple[str, ...]


def read_drafts(directory: Path) -> tuple[Draft, ...]:
    """Read the handwritten tasks, sorted by project.

    Raises:
        MiniSandboxError: a task is invalid.
        OSError: a file is missing.
    """
    common = tomllib.loads((directory / "common.toml").read_text(encoding="utf-8"))
    drafts: list[Draft] = []
    for path in sorted(directory.glob("*.toml")):
        if path.name != "common.toml":
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            drafts += [_draft(entry, table["project"], common, directory) for entry in table["task"]]
    return tuple(drafts)


def _draft(entry: dict[str, object], project: dict[str, str], common: dict[str, object], directory: Path) -> Draft:
    """Create a draft from its TOML entry, with the same checks as for a row of a task file."""
    texts = {key: value for key, value in entry.items() if isinstance(value, str)}
    patch = texts["bug" if texts["form"] == "swesmith" else "fix"]
    row: Row = {
        "instance_id": texts["id"],
        "repo": project["repo"],
        "base_commit": f"{project['name']}-{project['version']}",
        "version": project["version"],
        "form": texts["form"],
        "problem_statement": texts["statement"].strip() + "\n",
        "patch": (directory / patch).read_text(encoding="utf-8"),
        "test_patch": (directory / texts["test_patch"]).read_text(encoding="utf-8") if "test_patch" in texts else "",
        "FAIL_TO_PASS": list(UNMEASURED),
        "PASS_TO_PASS": [],
        "build": {
            "python": common["python"],
            "requirements": common["requirements"],
            "source": {"sdist": {key: project[key] for key in ("name", "version", "sha256")}},
            "install": common["install"],
            "environment": {},
        },
        "test": {"command": common["test_command"], "timeout": common["test_timeout"]},
    }
    if project["licence"] not in LICENCES:
        raise SystemExit(f"{project['name']}: the licence {project['licence']} is not one of {sorted(LICENCES)}")
    tests = entry["tests"]
    if not isinstance(tests, list):
        raise SystemExit(f"{texts['id']}: tests is not a list")
    origin = texts.get("origin", "")
    return Draft(
        task_from_row(row), tuple(map(str, tests)), project["name"], project["licence"], texts["summary"], origin
    )


def with_lists(task: Task, fail_to_pass: Iterable[str], pass_to_pass: Iterable[str]) -> Task:
    """Return a task with its measured lists."""
    return dataclasses.replace(task, FAIL_TO_PASS=tuple(fail_to_pass), PASS_TO_PASS=tuple(pass_to_pass))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_task(draft: Draft, run: Measure, *, pythons: Sequence[str], runs: int) -> Lists:
    """Run a draft's tests with and without the reference, on every interpreter, several times.

    Raises:
        SystemExit: a run's results cannot be trusted, or no test fails without the reference and passes with it.
    """
    solved: list[Measurement] = []
    unsolved: list[Measurement] = []
    for python in pythons:
        for _ in range(runs):
            for reference, results in ((True, solved), (False, unsolved)):
                measurement = run(draft.task, python, reference, draft.tests)
                if not measurement.believed:
                    raise SystemExit(f"{draft.task.instance_id} on {python}: {measurement.detail}\n{measurement.log}")
                results.append(measurement)
    fail_to_pass, pass_to_pass = derive_test_lists(solved, unsolved)
    if not fail_to_pass:
        raise SystemExit(f"{draft.task.instance_id}: no test fails without the reference and passes with it")
    return Lists(
        fail_to_pass,
        pass_to_pass,
        tuple(_excluded(solved, unsolved, {*fail_to_pass, *pass_to_pass})),
        max(measurement.duration for measurement in solved + unsolved),
        tuple(dict.fromkeys(measurement.versions for measurement in solved)),
    )


def _excluded(
    solved: Sequence[Measurement], unsolved: Sequence[Measurement], listed: set[str]
) -> Iterable[tuple[str, str]]:
    """Yield each test that is in neither list, with its outcomes."""
    tests = dict.fromkeys(test for measurement in (*solved, *unsolved) for test, _ in measurement.outcomes)
    for test in tests:
        if test not in listed:
            after, before = (_words(test, results) for results in (solved, unsolved))
            yield test, after if after == before else f"{after} with the reference, {before} without"


def _words(test: str, results: Sequence[Measurement]) -> str:
    """Describe a test's outcomes: the outcome of all runs, or each outcome with its versions."""
    versions_of: dict[str, list[str]] = {}
    for measurement in results:
        versions = versions_of.setdefault(dict(measurement.outcomes).get(test, "missing"), [])
        if measurement.versions not in versions:
            versions.append(measurement.versions)
    if len(versions_of) == 1:
        return next(iter(versions_of))
    return ", ".join(f"{outcome} on {' and '.join(versions)}" for outcome, versions in versions_of.items())


class Product:
    """Measures tests in sandboxes, with an image per task and interpreter, and the grader's runner.

    Args:
        store: the store for the images.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, task: Task, python: str, reference: bool, tests: Sequence[str]) -> Measurement:
        """Run a task's tests once; see :data:`Measure`."""
        assert isinstance(task.build, PythonRecipe)
        variant = dataclasses.replace(task, build=dataclasses.replace(task.build, python=python))
        image = build(variant.recipe(), store=self._store, name=f"{task.instance_id}-py{python}")
        return measure(task, image, reference=reference, files=tests)


# --- writing ----------------------------------------------------------------------------------------------------------


def record(lists: Lists) -> Row:
    """Return the record of one task for ``measured.json``."""
    return {
        "seconds": round(lists.seconds, 2),
        "versions": list(lists.versions),
        "fail_to_pass": len(lists.fail_to_pass),
        "pass_to_pass": len(lists.pass_to_pass),
        "excluded": dict(lists.excluded),
    }


def write_docs(drafts: Sequence[Draft], records: dict[str, Row], path: Path) -> None:
    """Write the page that describes the task set."""
    lines = [
        "# The task set `quickstart`",
        "",
        "The bundled tasks: the bug of each, its tests, and the project with its licence.",
        "Generated by `tools/make_quickstart_tasks.py` from `tools/quickstart/`; do not edit.",
        "",
        f"The lists of tests are measured. Each test ran {RUNS} times with and {RUNS} times without the reference, on",
        f"each of CPython {', '.join(PYTHONS)}, in sandboxes, with the grader's own runner. A test is left out unless",
        "it passed both ways, or went from failing to passing, in every run.",
        "",
        "The form is SWE-smith's (a bug made for this set in a released version; the reference is its reverse) or",
        "SWE-bench's (a real fix, reduced to one issue, with its tests).",
        "",
        "| task | form | what is wrong | FAIL_TO_PASS | PASS_TO_PASS | left out | seconds |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for draft in drafts:
        row = records[draft.task.instance_id]
        excluded = row["excluded"]
        lines.append(
            f"| `{draft.task.instance_id}` | {draft.task.form} | {draft.summary} | {row['fail_to_pass']} "
            f"| {row['pass_to_pass']} | {len(excluded) if isinstance(excluded, dict) else 0} | {row['seconds']} |"
        )
    lines += ["", "Seconds: the slowest run of the tests, on a machine with two busy cores.", ""]
    path.write_text("\n".join([*lines, *_projects(drafts), *_left_out(drafts, records)]), encoding="utf-8")


def _projects(drafts: Sequence[Draft]) -> list[str]:
    lines = ["## Projects", "", "| project | version | licence | repository | fixes |", "|---|---|---|---|---|"]
    drafts_of: dict[str, list[Draft]] = {}
    for draft in drafts:
        drafts_of.setdefault(draft.project, []).append(draft)
    for project, project_drafts in drafts_of.items():
        origins = ", ".join(sorted({draft.origin for draft in project_drafts if draft.origin})) or "-"
        task = project_drafts[0].task
        lines.append(f"| {project} | {task.version} | {project_drafts[0].licence} | `{task.repo}` | {origins} |")
    return [*lines, ""]


def _left_out(drafts: Sequence[Draft], records: dict[str, Row]) -> list[str]:
    lines = ["## Tests that are left out", ""]
    for draft in drafts:
        excluded = records[draft.task.instance_id]["excluded"]
        if isinstance(excluded, dict) and excluded:
            lines += [f"`{draft.task.instance_id}`:", ""]
            lines += [f"- `{test}`: {reason}" for test, reason in excluded.items()]
            lines.append("")
    return lines if len(lines) > 2 else [*lines, "None.", ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the tasks, and write the task set, the records and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="GLOB", default="*", help="measure these tasks only; other rows stay")
    parser.add_argument("--python", action="append", metavar="VERSION", help=f"interpreters; default {PYTHONS}")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs per interpreter with and without the reference")
    parser.add_argument("--store", type=Path, help="where images are built; default: the user's store")
    options = parser.parse_args(arguments)
    try:
        run = Product(Store.open(options.store))
        generate(run, only=options.only, pythons=options.python or PYTHONS, runs=options.runs)
    except MiniSandboxError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def generate(run: Measure, *, only: str, pythons: Sequence[str], runs: int) -> None:
    """Measure the selected tasks, and write all files after each task, so that an interruption loses no results.

    Raises:
        SystemExit: see :func:`measure_task`.
    """
    drafts = read_drafts(INPUTS)
    tasks = {task.instance_id: task for task in TaskSet.load(OUTPUT)} if OUTPUT.exists() else {}
    records: dict[str, Row] = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    for draft in drafts:
        name = draft.task.instance_id
        if fnmatch.fnmatchcase(name, only):
            lists = measure_task(draft, run, pythons=pythons, runs=runs)
            tasks[name] = with_lists(draft.task, lists.fail_to_pass, lists.pass_to_pass)
            records[name] = record(lists)
            print(
                f"{name}: {len(lists.fail_to_pass)} FAIL_TO_PASS, {len(lists.pass_to_pass)} PASS_TO_PASS, "
                f"{len(lists.excluded)} left out, {lists.seconds:.2f} s",
                flush=True,
            )
        ready = [draft for draft in drafts if draft.task.instance_id in tasks]
        names = [draft.task.instance_id for draft in ready]
        OUTPUT.write_text(TaskSet(tasks[name] for name in names).to_jsonl(), encoding="utf-8")
        ready_records = {name: records[name] for name in names}
        MEASURED.write_text(json.dumps(ready_records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_docs(ready, ready_records, DOCS)


if __name__ == "__main__":
    raise SystemExit(main())
