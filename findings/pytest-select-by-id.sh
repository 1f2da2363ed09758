#!/usr/bin/env bash
# pytest 9.2.0: --deselect takes a prefix, a positional id does not, and one unknown id runs nothing.
#
# Expected: `--deselect FILE::test_wait` removes one test, as `pytest FILE::test_wait` selects one test. If one of several
#           ids does not exist, the others run.
# Observed: --deselect also removes every test whose id starts with these characters, without a message. A positional id
#           that does not exist ends the run with status 4 before any test.
# Why it matters: lists of flaky tests remove tests that nobody listed. Lists of tests to run, made at another commit, run
#           none, which reads as "all failed".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pytest==9.2.0'

cat >test_wait.py <<'END'
def test_wait():
    pass


def test_wait_forever():
    raise AssertionError
END
run() {
    local status=0
    venv/bin/python -m pytest -p no:cacheprovider "$@" >log 2>/dev/null || status=$?
    echo "pytest $*: status $status, $(tail -n 1 log | sed -E 's/^=+ //; s/ in .*//')"
}
{
    run test_wait.py
    run test_wait.py --deselect test_wait.py::test_wait
    run test_wait.py::test_wait
    run test_wait.py::test_wait test_wait.py::test_gone
} >observed
cat observed
diff - observed <<'END' || { echo "pytest's selection by id has changed" >&2; exit 1; }
pytest test_wait.py: status 1, 1 failed, 1 passed
pytest test_wait.py --deselect test_wait.py::test_wait: status 5, 2 deselected
pytest test_wait.py::test_wait: status 0, 1 passed
pytest test_wait.py::test_wait test_wait.py::test_gone: status 4, no tests ran
END
