"""What a benchmark's own package says of logs: run by an interpreter that has the package, and importing nothing else.

    python official_verdicts.py CASES.json > VERDICTS.json

CASES.json is a list of objects: ``case`` (a name), ``row`` (as its data set has it), ``log`` (a file with what the
test command printed), ``exit_code`` (its exit status, or null), ``patch``. The entry point is the package's own
``get_eval_report``, which gets a file in which the log stands between its markers, as the benchmark's own script
prints them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def main() -> None:
    """Grade every log."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever an import prints is no answer
    cases = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        verdicts = {case["case"]: verdict(case, Path(folder) / "log") for case in cases}
    json.dump({"packages": packages(), "verdicts": verdicts}, answers, indent=1)


def packages() -> dict[str, str]:
    """Return the versions of the packages that there are."""
    found = {}
    for name in ("swebench", "swesmith"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def verdict(case: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return whether a log resolves its task, and which tests it says passed."""
    row = {**case["row"], **{kind: _tests(case["row"][kind]) for kind in TESTS}}
    log = Path(case["log"]).read_bytes()
    # what `: 'MARKER'` prints in a shell that traces what it runs
    file.write_bytes(b"+ : '%s'\n%s\n+ : '%s'\n" % (START.encode(), log, END.encode()))
    prediction = {"instance_id": row["instance_id"], "model_name_or_path": "parity", "model_patch": case["patch"]}
    grade = _smith if _is_smith(row) else _bench_5 if _is_5() else _bench_4
    try:
        report, parser = grade(row, prediction, file, case["exit_code"])
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises is an answer
        return {"error": f"{type(error).__name__}: {error}"}
    status = report.get("tests_status", {})
    passed = {kind: status.get(kind, {}).get("success", []) for kind in TESTS}
    return {"resolved": bool(report["resolved"]), "passed": passed, "log_parser": parser}


Graded = tuple[Mapping[str, Any], str]


def _bench_4(row: Mapping[str, Any], prediction: Mapping[str, Any], file: Path, _: int | None) -> Graded:
    """By swebench 4, whose own way to a TestSpec asks the network."""
    specs = importlib.import_module("swebench.harness.test_spec.test_spec")
    parsers = importlib.import_module("swebench.harness.log_parsers")
    grading = importlib.import_module("swebench.harness.grading")
    spec = specs.TestSpec(
        **{name: row[name] for name in ("instance_id", "repo", "version", *TESTS)},
        **{name: [] for name in ("repo_script_list", "eval_script_list", "env_script_list")},
        arch="x86_64",
        language="py",
        docker_specs={},
        namespace=None,
    )
    report = grading.get_eval_report(spec, prediction, str(file), include_tests_status=True)
    return report[row["instance_id"]], parsers.MAP_REPO_TO_PARSER[row["repo"]].__name__


def _bench_5(row: Mapping[str, Any], prediction: Mapping[str, Any], file: Path, exit_code: int | None) -> Graded:
    """By swebench 5, whose script also prints the exit status."""
    utils: Callable[..., Any] = importlib.import_module("swebench.harness.utils").make_test_spec
    grading = importlib.import_module("swebench.harness.grading")
    if exit_code is not None:
        with file.open("a") as stream:
            stream.write(f"{EXIT_CODE}: {exit_code}\n")
    report = grading.get_eval_report(utils(row), prediction, str(file), include_tests_status=True)
    return report[row["instance_id"]], row["log_parser"]


def _smith(row: Mapping[str, Any], prediction: Mapping[str, Any], file: Path, _: int | None) -> Graded:
    grading = importlib.import_module("swesmith.harness.grading")
    profile = importlib.import_module("swesmith.profiles").registry.get_from_inst(row)
    return grading.get_eval_report(prediction, row, str(file)), type(profile).__name__


def _is_smith(row: Mapping[str, Any]) -> bool:
    return "test_patch" not in row or row.get("form") == "swesmith"


def _is_5() -> bool:
    return int(importlib.metadata.version("swebench").split(".")[0]) >= 5


def _tests(value: Any) -> list[str]:
    """A list of tests; the data sets also have it as a text."""
    return list(json.loads(value) if isinstance(value, str) else value)


if __name__ == "__main__":
    main()
