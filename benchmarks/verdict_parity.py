"""Compare our verdicts with those of the benchmarks' own packages, on the very same logs.

python -m benchmarks.verdict_parity ROWS... -o DIR [--pins DIR] [--repo-mirrors DIR] [--only GLOB]
    [--python PATH [--rows-5 FILE]] [--beside DIR]

ROWS are SWE-bench or SWE-smith rows whose images are in the store (MINISANDBOX_STORE). Of each, five patches are
graded: the reference, none, and three broken variants of the reference, made mechanically: without its last hunk of
code (its last added line, if it has one hunk); with one literal, operator or name of an added line changed; with the
first touched module raising at its top. What the test command printed is kept, and the package that the row comes from
grades the same text by its own entry point: `get_eval_report` of swebench 4.1 or of swesmith, which the interpreter
that runs this has to have. A verdict of ours that rests on a believed run has to be the same, test by test.

--python names an interpreter that has swebench 5: it grades the logs of SWE-bench rows again. --rows-5 has rows in the
layout of swebench 5; for rows that are not in it the parser is the one of swebench 4.1.

--beside names the directory of a run in another environment, such as the official Dockerfiles'
(``benchmarks.parity.dockerfiles``): verdicts and passed tests are compared with those there.

The run goes on where it was cut off; --minutes ends it early. It ends with 1 where verdicts differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.parity.cases import VARIANTS, Case, grade_cases, read_case
from benchmarks.parity.comparison import Compared, beside, compare, is_parity, summary, table

from minisandbox.errors import MiniSandboxError, NotFound
from minisandbox.images import load_image
from minisandbox.runs import as_finished
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet

_SCRIPT = Path(__file__).with_name("parity") / "official_verdicts.py"
_OFFICIAL_TIMEOUT = 3600.0


def main() -> int:
    """Grade, compare and print; 0 if all is equal, 1 if not."""
    options = _options()
    for folder in ("cases", "logs"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    sets = [TaskSet.load(name, pins=options.pins, repo_mirrors=options.repo_mirrors) for name in options.rows]
    rows = {task.instance_id: dict(each.row(task.instance_id)) for each in sets for task in each}
    tasks = [task for each in sets for task in (each.select([options.only]) if options.only else each)]
    left_out = _grade_all(tasks, options)
    cases = [case for task in tasks for case in _kept(options.out, task)]
    named = {task.instance_id: task.FAIL_TO_PASS + task.PASS_TO_PASS for task in tasks}

    own = official(sys.executable, cases, rows, options.out)
    found = [compare(case, named[case.instance_id], own["verdicts"].get(case.name)) for case in cases]
    report = [table(found, left_out), "", *summary(found, _packages(own))]
    if options.python is not None:
        report += ["", *_against_5(options, cases, rows, named, own)]
    if options.beside is not None:
        there = [case for task in tasks for case in _kept(options.beside, task)]
        report += ["", f"Beside {options.beside.name}:", "", *beside(cases, {case.name: case for case in there})]
    text = "\n".join(report) + "\n"
    (options.out / "report.md").write_text(text)
    (options.out / "report.json").write_text(json.dumps([asdict(one) for one in found], indent=1))
    print(text, end="")
    return 0 if is_parity(found) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROWS", help="files of rows")
    parser.add_argument("--pins", type=Path, metavar="DIR", help="exported environments, as validate takes them")
    parser.add_argument("--repo-mirrors", type=Path, metavar="DIR", help="git repositories, as validate takes them")
    parser.add_argument("--only", metavar="GLOB", help="an id, or a glob of ids")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the run's directory")
    parser.add_argument("--python", metavar="PATH", help="an interpreter that has swebench 5")
    parser.add_argument("--rows-5", type=Path, metavar="FILE", help="rows in the layout of swebench 5, JSON Lines")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="the directory of a run in another environment")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="tasks at once (default: 2)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="what a run may take (default: the task's)")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no grading after that (0: only compare)")
    return parser.parse_args()


def _grade_all(tasks: Sequence[Task], options: argparse.Namespace) -> dict[str, str]:
    """Grade what is not finished; returns why tasks were left out."""
    store = Store.open()
    end = None if options.minutes is None else time.monotonic() + options.minutes * 60

    def serve(task: Task) -> str:
        try:
            image = load_image(store, task.instance_id)
        except NotFound:
            return "no image"
        try:
            for case in grade_cases(
                task, image, options.out, options.timeout, lambda: end is None or time.monotonic() < end
            ):
                progress(f"{case.name}: {case.verdict} in {case.seconds:.1f} s {case.doubt[:100]}")
        except MiniSandboxError as error:
            return f"{type(error).__name__}: {error.what}"
        return ""

    said = {tasks[number].instance_id: why for number, why in as_finished(serve, tasks, options.workers)}
    graded = {task.instance_id for task in tasks if any(_kept(options.out, task))}
    return {
        task.instance_id: said[task.instance_id] or "not graded yet" for task in tasks if task.instance_id not in graded
    }


def progress(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def _kept(out: Path, task: Task) -> list[Case]:
    files = (out / "cases" / f"{task.instance_id}.{variant}.json" for variant in VARIANTS)
    return [case for file in files if (case := read_case(file)) is not None]


def official(python: str, cases: Sequence[Case], rows: Mapping[str, Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """Have the package of an interpreter grade the logs of cases; see ``official_verdicts.py``."""
    asked = [
        {
            "case": case.name,
            "row": rows[case.instance_id],
            "log": str((out / "logs" / case.log).resolve()),
            "exit_code": case.exit_code,
            "patch": case.patch,
        }
        for case in cases
        if case.log and case.instance_id in rows
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        done = subprocess.run(
            [python, str(_SCRIPT), file.name], capture_output=True, text=True, timeout=_OFFICIAL_TIMEOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{python} {_SCRIPT.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _packages(answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in answer["packages"].items())


def _against_5(
    options: argparse.Namespace,
    cases: Sequence[Case],
    rows: Mapping[str, Mapping[str, Any]],
    named: Mapping[str, Sequence[str]],
    own: Mapping[str, Any],
) -> list[str]:
    """Compare with the verdicts of swebench 5 on the same logs."""
    lines = options.rows_5.read_text().splitlines() if options.rows_5 is not None else []
    published = {row["instance_id"]: row for row in map(json.loads, lines)}
    of_swebench = [case for case in cases if "test_patch" in rows[case.instance_id] and case.log]
    of_swebench = [case for case in of_swebench if rows[case.instance_id].get("form") != "swesmith"]
    rows_5 = {
        case.instance_id: published.get(case.instance_id)
        or {
            **rows[case.instance_id],
            "log_parser": own["verdicts"][case.name].get("log_parser", ""),
            "eval_type": "pass_and_fail",
            "eval_script": "",
            "image": "",
        }
        for case in of_swebench
    }
    answer = official(options.python, of_swebench, rows_5, options.out)
    found: list[Compared] = [
        compare(case, named[case.instance_id], answer["verdicts"].get(case.name)) for case in of_swebench
    ]
    derived = sorted(rows_5.keys() - published.keys())
    said = summary(found, _packages(answer))
    return [*said, f"- rows that are not in its layout, graded with the parser of 4.1: {', '.join(derived) or 'none'}"]


if __name__ == "__main__":
    sys.exit(main())
