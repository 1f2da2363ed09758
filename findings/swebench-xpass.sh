#!/usr/bin/env bash
# swebench 5.0.2, pytest 9.2.0: a fix that makes an expected failure pass counts as a regression.
#
# Expected: a PASS_TO_PASS test marked xfail (XFAIL before the fix, which counts as passed) still counts as passed when the
#           fix makes it pass.
# Observed: pytest then writes XPASS. No status of swebench has that name, the line is ignored, and a test without a
#           status is a failure of PASS_TO_PASS.
# Why it matters: the better patch loses the reward. Leave tests marked xfail out of PASS_TO_PASS, or map XPASS yourself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2' 'pytest==9.2.0'

cat >test_half.py <<'END'
import pytest
from half import half


@pytest.mark.xfail(reason="odd numbers are rounded")
def test_odd():
    assert half(3) == 1.5


def test_even():
    assert half(4) == 2
END
cat >grade.py <<'END'
import sys
from types import SimpleNamespace

from swebench.harness.grading import get_eval_tests_report
from swebench.harness.log_parsers import PARSER_REGISTRY

statuses = PARSER_REGISTRY["parse_log_pytest"](sys.stdin.read(), SimpleNamespace(instance_id="a__a-1", version="1"))
expected = {"FAIL_TO_PASS": [], "PASS_TO_PASS": ["test_half.py::test_odd", "test_half.py::test_even"]}
print("  statuses:", statuses)
print("  PASS_TO_PASS:", get_eval_tests_report(statuses, expected)["PASS_TO_PASS"])
END
for operator in '//' '/'; do
    printf 'def half(number):\n    return number %s 2\n' "$operator" >half.py
    rm -rf __pycache__
    venv/bin/python -m pytest -rA -p no:cacheprovider test_half.py >log
    echo "number $operator 2: $(tail -n 1 log | grep -oE '[0-9]+ passed, [0-9]+ x[a-z]+')"
    venv/bin/python grade.py <log
done >observed
cat observed
diff - observed <<'END' || { echo "swebench's treatment of XPASS has changed" >&2; exit 1; }
number // 2: 1 passed, 1 xfailed
  statuses: {'test_half.py::test_even': 'PASSED', 'test_half.py::test_odd': 'XFAIL'}
  PASS_TO_PASS: {'success': ['test_half.py::test_odd', 'test_half.py::test_even'], 'failure': []}
number / 2: 1 passed, 1 xpassed
  statuses: {'test_half.py::test_even': 'PASSED'}
  PASS_TO_PASS: {'success': ['test_half.py::test_even'], 'failure': ['test_half.py::test_odd']}
END
