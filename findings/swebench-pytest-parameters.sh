#!/usr/bin/env bash
# swebench 5.0.2, pytest 9.2.0: two parametrised tests become one test.
#
# Expected: each line of pytest's summary gives one test with its whole id.
# Observed: parse_log_pytest cuts the id at its first space; parse_log_pytest_v2 removes numbers from it. Tests that differ
#           only there share one name, and the last line decides the outcome of all of them.
# Why it matters: a FAIL_TO_PASS list may name a merged test. One passing parameter can then hide a failing one, or the
#           other way round. Compare the number of collected tests with the number of parsed names.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2' 'pytest==9.2.0'

cat >test_limits.py <<'END'
import pytest


@pytest.mark.parametrize("limit", ["5m", "30m"])
def test_wait(limit):
    assert limit == "5m"


@pytest.mark.parametrize("command", ["git push", "git log"])
def test_run(command):
    assert command == "git log"
END
venv/bin/python -m pytest -rA -p no:cacheprovider test_limits.py >log || true
cat >read_log.py <<'END'
from types import SimpleNamespace

from swebench.harness.log_parsers import PARSER_REGISTRY

log = open("log").read()
for name in ("parse_log_pytest", "parse_log_pytest_v2"):
    print(name)
    for test, status in PARSER_REGISTRY[name](log, SimpleNamespace(instance_id="a__a-1", version="1")).items():
        print(f"  {status} {test}")
END
{
    grep -E '^(PASSED|FAILED) ' log | sed 's/ - .*//'
    venv/bin/python read_log.py
} >observed
cat observed
diff - observed <<'END' || { echo "swebench's parsers of pytest's log have changed" >&2; exit 1; }
PASSED test_limits.py::test_wait[5m]
PASSED test_limits.py::test_run[git log]
FAILED test_limits.py::test_wait[30m]
FAILED test_limits.py::test_run[git push]
parse_log_pytest
  PASSED test_limits.py::test_wait[5m]
  FAILED test_limits.py::test_run[git
  FAILED test_limits.py::test_wait[30m]
parse_log_pytest_v2
  FAILED test_limits.py::test_wait]
  PASSED test_limits.py::test_run[git log]
  FAILED test_limits.py::test_run[git push]
END
