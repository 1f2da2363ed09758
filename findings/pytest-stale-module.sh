#!/usr/bin/env bash
# pytest 9.2.0, CPython: a changed test is noticed, a changed module under test is not.
#
# Expected: pytest runs the module as it is on disk.
# Observed: CPython validates a module's bytecode by the file's size and its modification time in whole seconds. A change
#           within one second, or one that keeps the timestamp, to a file of the same length runs the old code. pytest 9.2
#           validates the bytecode of test files by a hash, so there the same kind of change is noticed.
# Why it matters: fast sandboxes apply a patch within the second of an earlier run, and snapshots and archives round or fix
#           timestamps. `<` for `>` is a patch of the same length. Set PYTHONDONTWRITEBYTECODE=1 or remove __pycache__.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pytest==9.2.0'
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX

run() {
    touch -d @1700000000 larger.py test_larger.py # both versions within the same second
    local status=0
    venv/bin/python -m pytest -p no:cacheprovider test_larger.py >log || status=$?
    echo "$1: status $status, $(tail -n 1 log | sed -E 's/^=+ //; s/ in .*//')"
}
echo 'def larger(a, b): return a if a < b else b' >larger.py
printf 'from larger import larger\n\n\ndef test_larger():\n    assert larger(1, 2) == 2\n' >test_larger.py
{
    run 'wrong module'
    sed -i 's/</>/' larger.py
    run 'fixed module'
    sed -i 's/== 2/== 1/' test_larger.py
    run 'changed test'
    rm -r __pycache__
    run 'changed test, without __pycache__'
} >observed
cat observed
diff - observed <<'END' || { echo "the validation of bytecode by CPython or pytest has changed" >&2; exit 1; }
wrong module: status 1, 1 failed
fixed module: status 1, 1 failed
changed test: status 0, 1 passed
changed test, without __pycache__: status 1, 1 failed
END
