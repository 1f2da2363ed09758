"""Make the bundled task set ``quickstart``: measure what is written by hand in ``tools/quickstart``.

Written by hand, one TOML file per project: the sdist (name, version, sha256), and for each task its patches, the tests
to run and the issue's text. Measured here, with the product itself (an image per task, the grader's own runner): which
tests fail without the reference and pass with it (FAIL_TO_PASS), and which pass both ways (PASS_TO_PASS), on several
interpreters and several times. A test whose outcome differs between them is left out, and the reason is recorded in
``tools/quickstart/measured.json``, from which ``docs/quickstart-tasks.md`` is written too.

    python tools/make_quickstart_tasks.py                      # everything, on CPython 3.11, 3.12 and 3.13
    python tools/make_quickstart_tasks.py --only 'pallets__*'  # some tasks; the other rows stay
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
"""Stands for FAIL_TO_PASS until it is known; it names no file, so that nothing is hidden while it is measured."""

Row = dict[str, object]
Measure = Callable[[Task, str, bool, Sequence[str]], Measurement]
"""Runs the tests of a task: the task, the Python version, whether the reference is applied, the tests to run."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A task as it is written by hand.

    Attributes:
        task: the task, without its measured lists.
        tests: what pytest is given: files and directories.
        project: the project's name.
        licence: its licence, as an SPDX identifier.
        summary: what is wrong, in half a sentence, for the documentation.
        origin: where a real fix comes from; empty for a made bug.
    """

    task: Task
    tests: tuple[str, ...]
    project: str
    licence: str
    summary: str
    origin: str


@dataclass(frozen=True, slots=True)
class Lists:
    """What was measured of one task.

    Attributes:
        fail_to_pass: as in Task.
        pass_to_pass: as in Task.
        excluded: tests in neither list, each with the reason.
        seconds: the longest run of the tests.
        versions: of Python and pytest in the runs.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    seconds: float
    versions: tuple[str, ...]


def read_drafts(directory: Path) -> tuple[Draft, ...]:
    """Read the hand-written part, sorted by project.

    Raises:
        MiniSandboxError: a task in it is not one.
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
    """Make one draft; everything that is checked in a task file is checked here."""
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
        SystemExit: a run cannot be believed, or no test goes from failing to passing.
    """
    solved: list[Measurement] = []
    unsolved: list[Measurement] = []
    for python in pythons:
        for _ in range(runs):
            for reference, results in ((True, solved), (False, unsolved)):
                one = run(draft.task, python, reference, draft.tests)
                if not one.believed:
                    raise SystemExit(f"{draft.task.instance_id} on {python}: {one.detail}\n{one.log}")
                results.append(one)
    fail_to_pass, pass_to_pass = derive_test_lists(solved, unsolved)
    if not fail_to_pass:
        raise SystemExit(f"{draft.task.instance_id}: no test fails without the reference and passes with it")
    return Lists(
        fail_to_pass,
        pass_to_pass,
        tuple(_excluded(solved, unsolved, {*fail_to_pass, *pass_to_pass})),
        max(one.duration for one in solved + unsolved),
        tuple(dict.fromkeys(one.versions for one in solved)),
    )


def _excluded(
    solved: Sequence[Measurement], unsolved: Sequence[Measurement], listed: set[str]
) -> Iterable[tuple[str, str]]:
    """Yield every test that is in neither list, with what it did."""
    seen = dict.fromkeys(test for one in (*solved, *unsolved) for test, _ in one.outcomes)
    for test in seen:
        if test not in listed:
            after, before = (_words(test, results) for results in (solved, unsolved))
            yield test, after if after == before else f"{after} with the reference, {before} without"


def _words(test: str, results: Sequence[Measurement]) -> str:
    """Say what a test did: one word, or each word with the versions it was seen on."""
    seen: dict[str, list[str]] = {}
    for one in results:
        versions = seen.setdefault(dict(one.outcomes).get(test, "missing"), [])
        if one.versions not in versions:
            versions.append(one.versions)
    if len(seen) == 1:
        return next(iter(seen))
    return ", ".join(f"{word} on {' and '.join(versions)}" for word, versions in seen.items())


class Product:
    """Measures with the product: an image of the task for each interpreter, and the grader's runner.

    Args:
        store: where images are built.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, task: Task, python: str, reference: bool, tests: Sequence[str]) -> Measurement:
        """Run a task's tests once; see ``Measure``."""
        assert isinstance(task.build, PythonRecipe)
        other = dataclasses.replace(task, build=dataclasses.replace(task.build, python=python))
        image = build(other.recipe(), store=self._store, name=f"{task.instance_id}-py{python}")
        return measure(task, image, reference=reference, files=tests)


# --- writing ----------------------------------------------------------------------------------------------------------


def record(lists: Lists) -> Row:
    """Return what ``measured.json`` keeps of one task."""
    return {
        "seconds": round(lists.seconds, 2),
        "versions": list(lists.versions),
        "fail_to_pass": len(lists.fail_to_pass),
        "pass_to_pass": len(lists.pass_to_pass),
        "excluded": dict(lists.excluded),
    }


def write_docs(drafts: Sequence[Draft], records: dict[str, Row], path: Path) -> None:
    """Write the page that describes the set."""
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
        kept = records[draft.task.instance_id]
        excluded = kept["excluded"]
        lines.append(
            f"| `{draft.task.instance_id}` | {draft.task.form} | {draft.summary} | {kept['fail_to_pass']} "
            f"| {kept['pass_to_pass']} | {len(excluded) if isinstance(excluded, dict) else 0} | {kept['seconds']} |"
        )
    lines += ["", "Seconds: the slowest run of the tests, on a machine with two busy cores.", ""]
    path.write_text("\n".join([*lines, *_projects(drafts), *_left_out(drafts, records)]), encoding="utf-8")


def _projects(drafts: Sequence[Draft]) -> list[str]:
    lines = ["## Projects", "", "| project | version | licence | repository | fixes |", "|---|---|---|---|---|"]
    rows: dict[str, list[Draft]] = {}
    for draft in drafts:
        rows.setdefault(draft.project, []).append(draft)
    for project, its in rows.items():
        origins = ", ".join(sorted({draft.origin for draft in its if draft.origin})) or "-"
        task = its[0].task
        lines.append(f"| {project} | {task.version} | {its[0].licence} | `{task.repo}` | {origins} |")
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
    """Measure, and write the set, the record and the page."""
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
    """Measure the chosen tasks, and write everything after each, so that nothing finished is lost.

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
        ready = [one for one in drafts if one.task.instance_id in tasks]
        names = [one.task.instance_id for one in ready]
        OUTPUT.write_text(TaskSet(tasks[name] for name in names).to_jsonl(), encoding="utf-8")
        kept = {name: records[name] for name in names}
        MEASURED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_docs(ready, kept, DOCS)


if __name__ == "__main__":
    raise SystemExit(main())
