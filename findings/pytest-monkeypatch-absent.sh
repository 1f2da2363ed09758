#!/usr/bin/env bash
# pytest 9.1.1: monkeypatch.delenv(NAME, raising=False) restores nothing if the variable was absent.
#
# Expected: after the test the variable is as it was before: absent.
# Observed: pytest records no undo for a variable that was not there, so one that the tested code sets stays for the next test.
#           monkeypatch.setenv followed by delenv does restore it; so does delenv of a variable that was present.
# Why it matters: a test that clears a variable "to be safe" leaks what the code under test exports, and only on machines where
#           the variable was absent. A hidden test then passes or fails with the order and the selection of tests.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pytest==9.1.1'

cat >test_order.py <<'END'
import os


def test_absent(monkeypatch):
    monkeypatch.delenv("ABSENT", raising=False)
    os.environ["ABSENT"] = "leaked"


def test_set_first(monkeypatch):
    monkeypatch.setenv("SET_FIRST", "")
    monkeypatch.delenv("SET_FIRST")
    os.environ["SET_FIRST"] = "leaked"


def test_present(monkeypatch):
    monkeypatch.delenv("PRESENT")
    os.environ["PRESENT"] = "leaked"


def test_after():
    print()
    for name in ("ABSENT", "SET_FIRST", "PRESENT"):
        print(f"{name}: {os.environ.get(name)}")
END
PRESENT=original venv/bin/python -m pytest -q -s -p no:cacheprovider test_order.py | grep -E '^[A-Z_]+: ' >observed
cat observed
diff - observed <<'END' || { echo "what monkeypatch restores has changed" >&2; exit 1; }
ABSENT: leaked
SET_FIRST: None
PRESENT: original
END
