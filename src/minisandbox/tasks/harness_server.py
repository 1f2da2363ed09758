"""The side of :mod:`minisandbox.tasks.harness` that imports the benchmarks' own packages: a process of its own.

It reads requests, one JSON object a line, and answers each with one line. It is started with nothing of the caller's
environment, because what is imported reads ``.env`` files and tokens; and it can be ended, because a log that a
submission wrote meets regular expressions that nobody made for that.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

_MEMORY = 4 * 1024**3


def main() -> None:
    """Answer requests until the caller goes."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever an import prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": _OPERATIONS[request.pop("operation")](**request)}
        except ImportError as error:
            answer = {"error": str(error), "kind": "missing"}
        except Exception as error:  # noqa: BLE001 - whatever foreign code raises is an answer
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _specification(repo: str, version: str, test_patch: str) -> dict[str, Any]:
    """What SWE-bench says of how a row is built and tested."""
    constants = importlib.import_module("swebench.harness.constants")
    python = importlib.import_module("swebench.harness.test_spec.python")
    versions = constants.MAP_REPO_VERSION_TO_SPECS.get(repo, {})
    return {
        "specification": versions.get(version),
        "versions": sorted(versions),
        "requirements_files": constants.MAP_REPO_TO_REQS_PATHS.get(repo, []),
        "directives": python.get_test_directives({"repo": repo, "test_patch": test_patch}),
    }


def _profile(row: dict[str, Any]) -> dict[str, Any]:
    """What SWE-smith says of how a row is built and tested; nothing where it does not know its repository."""
    registry = importlib.import_module("swesmith.profiles").registry
    name = row["instance_id"].rsplit(".", 1)[0]
    if name not in registry.keys():  # noqa: SIM118 - it is no dict
        return {}
    profile = registry.get(name)
    if not getattr(profile, "python_version", ""):
        return {"python": ""}
    command, _ = profile.get_test_cmd(row)
    return {
        "repo": f"{profile.owner}/{profile.repo}",
        "commit": profile.commit,
        "mirror": profile.mirror_name,
        "profile": profile.repo_name,
        "python": profile.python_version,
        "install": list(getattr(profile, "install_cmds", [])),
        "test_command": command,
        "timeout": profile.timeout_ref,
    }


def _statuses(parser: str, log: str) -> dict[str, str]:
    """What a log says of each test, by the parser that its benchmark has for it."""
    family, _, name = parser.partition(":")
    if family == "swesmith":
        profile = importlib.import_module("swesmith.profiles").registry.get(name)
        return dict(profile.log_parser(log))
    parsers = importlib.import_module("swebench.harness.log_parsers")
    parse: Callable[..., Mapping[str, str]]
    if name.startswith("parse_log_"):
        parse = getattr(importlib.import_module("swebench.harness.log_parsers.python"), name)
    else:
        parse = parsers.MAP_REPO_TO_PARSER[name]
    return dict(parse(log, None))


def _judgement(parser: str, log: str, fail_to_pass: list[str], pass_to_pass: list[str]) -> dict[str, Any]:
    """What a log says of the named tests, and whether the task is resolved by the benchmark's own rules."""
    grading = importlib.import_module("swebench.harness.grading")
    seen = _statuses(parser, log)
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    report = grading.get_eval_tests_report(seen, lists)
    return {
        "statuses": {test: seen[test] for tests in lists.values() for test in tests if test in seen},
        "others": len(seen.keys() - set(fail_to_pass) - set(pass_to_pass)),
        "resolved": grading.get_resolution_status(report) == "RESOLVED_FULL",
        "not_passed": {
            kind: [test for test in tests if test not in set(report[kind]["success"])] for kind, tests in lists.items()
        },
    }


def _parsed(parser: str, log: str) -> dict[str, Any]:
    return {"statuses": _statuses(parser, log)}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "specification": _specification,
    "profile": _profile,
    "judge": _judgement,
    "parse": _parsed,
}

if __name__ == "__main__":
    main()
