"""The helper process of :mod:`minisandbox.tasks.harness`, which imports the benchmarks' packages.

It reads requests, one JSON object per line, and writes one response line for each. It does not inherit the caller's
environment, because the packages read ``.env`` files and tokens. It must be safe to kill, because a malicious log may
make the packages' regular expressions run for very long.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import json
import resource
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minisandbox.tasks.harness.misreadings import misreadings

_MEMORY = 4 * 1024**3
_FIVE = "swebench5"


def main() -> None:
    """Serve requests until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep the output of imports out of the responses
    _skip_imports()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": _OPERATIONS[request.pop("operation")](**request)}
        except ImportError as error:
            answer = {"error": str(error), "kind": "missing"}
        except _UnknownParserError as error:
            answer = {"error": str(error), "kind": "unknown"}
        except Exception as error:  # noqa: BLE001 - report any error of the benchmark's code to the caller
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _specification(repo: str, version: str, test_patch: str) -> dict[str, Any]:
    """Return SWE-bench's specification for a row; if there is none, the known ``versions``."""
    constants = importlib.import_module("swebench.harness.constants")
    python = importlib.import_module("swebench.harness.test_spec.python")
    versions = constants.MAP_REPO_VERSION_TO_SPECS.get(repo, {})
    spec = versions.get(version)
    if spec is None:
        return {"versions": sorted(versions)}
    if "python" not in spec:
        return {"python": ""}
    command = spec["test_cmd"] if isinstance(spec["test_cmd"], str) else spec["test_cmd"][-1]
    return {
        "python": spec["python"],
        "packages": spec.get("packages", ""),
        "pip_packages": list(spec.get("pip_packages", ())),
        "commands": [*spec.get("pre_install", ()), *filter(None, (spec.get("install"),))],
        "before_tests": list(spec.get("eval_commands", ())),
        "test_command": " ".join((command, *python.get_test_directives({"repo": repo, "test_patch": test_patch}))),
        "requirements_files": list(constants.MAP_REPO_TO_REQS_PATHS.get(repo, ())),
    }


def _profile(row: dict[str, Any]) -> dict[str, Any]:
    """Return SWE-smith's profile for a row; empty if the repository is unknown."""
    registry = importlib.import_module("swesmith.profiles").registry
    name = row["instance_id"].rsplit(".", 1)[0]
    if name not in registry.keys():  # noqa: SIM118 - the registry is no dict
        return {}
    profile = registry.get(name)
    if not getattr(profile, "python_version", ""):
        return {"python": ""}
    command, _ = profile.get_test_cmd(row)
    return {
        "repo": f"{profile.owner}/{profile.repo}",
        "commit": profile.commit,
        "mirror": profile.mirror_name,
        "name": profile.repo_name,
        "python": profile.python_version,
        "commands": list(getattr(profile, "install_cmds", [])),
        "test_command": command,
        "timeout": float(profile.timeout_ref),
    }


class _UnknownParserError(Exception):
    """There is no parser with this name."""

    def __init__(self, name: str, names: Iterable[str]) -> None:
        similar = difflib.get_close_matches(name, list(names), n=3)
        super().__init__(f"there is no {name!r}" + (f"; did you mean {' or '.join(similar)}?" if similar else ""))


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    """Return SWE-bench's test script for a row, and the rule that grades the log."""
    constants = importlib.import_module("swebench.harness.constants")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {}).get(row["version"])
    if specs is None:
        return {}
    lines = scripts.make_eval_script_list(row, specs, "testbed", "/testbed", row["base_commit"], row["test_patch"])
    rule = "fail_only" if row["repo"] in constants.FAIL_ONLY_REPOS else "pass_and_fail"
    return {"script": "\n".join(lines), "rule": rule}


def _parser(parser: str) -> Callable[..., Mapping[str, str]]:
    """Return a parser by name; it takes a log and the row's columns."""
    family, _, name = parser.partition(":")
    if family == "swesmith":
        registry = importlib.import_module("swesmith.profiles").registry
        if name not in registry.keys():  # noqa: SIM118 - the registry is no dict
            raise _UnknownParserError(name, registry.keys())
        return lambda log, _: registry.get(name).log_parser(log)
    if family == _FIVE:
        parsers = dict(importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY)
    else:
        by_repo = importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER
        python = vars(importlib.import_module("swebench.harness.log_parsers.python"))
        named = {parse.__name__: parse for parse in by_repo.values()}
        parsers = {**{key: parse for key, parse in python.items() if key.startswith("parse_log_")}, **named, **by_repo}
    if name not in parsers:
        raise _UnknownParserError(name, parsers)
    function: Callable[..., Mapping[str, str]] = parsers[name]
    return function


def _skip_imports() -> None:
    """Make swebench importable without importing its heavy dependencies: datasets, modal, docker.

    The functions that this module calls do not need them, and they take 1.2 of the 1.3 CPU seconds of the import.
    """
    spec = importlib.util.find_spec("swebench")
    if spec is None:
        return
    for name, folder in (("swebench", ""), ("swebench.harness", "/harness")):
        package = types.ModuleType(name)
        package.__path__ = [directory + folder for directory in spec.submodule_search_locations or ()]
        sys.modules[name] = package
    setattr(sys.modules["swebench"], "harness", sys.modules["swebench.harness"])  # noqa: B010 - an import sets this attribute, too
    datasets = types.ModuleType("datasets")  # swebench.harness.utils imports names from datasets that are not used here
    datasets.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    vars(datasets).update(Dataset=None, load_dataset=None, load_from_disk=None)
    sys.modules["datasets"] = datasets


def _known(parser: str) -> dict[str, Any]:
    _parser(parser)
    return {}


def _read(parser: str, log: str, about: types.SimpleNamespace, exit_code: int | None) -> tuple[dict[str, str], bool]:
    """Return the status of each test, and whether the benchmark accepts the log as a test run."""
    parse = _parser(parser)
    if not parser.startswith(_FIVE):
        statuses = dict(parse(log, about))
        return statuses, bool(statuses) or exit_code == 0
    grading = importlib.import_module("swebench.harness.grading")
    harmless = log.replace(">>>>> ", ">>>> ")  # code under test must not write the end marker
    lines = [grading.START_TEST_OUTPUT, harmless, grading.END_TEST_OUTPUT]
    if exit_code is not None:
        lines.append(f"{grading.TEST_EXIT_CODE}: {exit_code}")
    with tempfile.NamedTemporaryFile("w", errors="replace") as file:
        file.write("\n".join(lines))
        file.flush()
        statuses, has_results = grading.get_logs_eval(about, file.name)
    return statuses, has_results


def _judgement(
    parser: str,
    log: str,
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    rule: str,
    about: dict[str, str],
    exit_code: int | None,
) -> dict[str, Any]:
    """Return the status of the named tests, and whether the task is resolved by the benchmark's rules."""
    spec = types.SimpleNamespace(**about, log_parser=parser.partition(":")[2], eval_type=rule)
    statuses, has_results = _read(parser, log, spec, exit_code)
    grading = importlib.import_module("swebench.harness.grading")
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    report = grading.get_eval_tests_report(statuses, lists, eval_type=grading.EvalType(rule))
    return {
        "found": has_results,
        "statuses": {test: statuses[test] for tests in lists.values() for test in tests if test in statuses},
        "resolved": has_results and grading.get_resolution_status(report) == "RESOLVED_FULL",
        **{
            f"failed_{kind.lower()}": [test for test in tests if test not in set(report[kind]["success"])]
            for kind, tests in lists.items()
        },
    }


def _parsed(parser: str, log: str, about: dict[str, str]) -> dict[str, Any]:
    return {"statuses": dict(_parser(parser)(log, types.SimpleNamespace(**about)))}


def _misread(parser: str, log: str, named: list[str], about: dict[str, str]) -> dict[str, Any]:
    """Return the results that a parser misreads."""
    parse, spec = _parser(parser), types.SimpleNamespace(**about)
    return {"misread": misreadings(lambda text: parse(text, spec), parse.__name__, log, frozenset(named))}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "specification": _specification,
    "profile": _profile,
    "evaluation": _evaluation,
    "known": _known,
    "judge": _judgement,
    "parse": _parsed,
    "misread": _misread,
}

if __name__ == "__main__":
    main()
