#!/usr/bin/env bash
# pytest 9.2.0: a unittest test with a failed subtest is PASSED in the summary, and failed in the JUnit report.
#
# Expected: both ways to write a subtest report the test as failed, in every report.
# Observed: with pytest's own `subtests` fixture the summary of -rA has FAILED and SUBFAILED. With unittest's subTest() it
#           has PASSED for the test, next to SUBFAILED. The JUnit report counts both tests as failed.
# Why it matters: a harness that reads PASSED and FAILED from the summary takes the broken test as passed. Read the JUnit
#           report, or treat SUBFAILED as a failure of its test.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pytest==9.2.0'

cat >test_even.py <<'END'
import unittest


def test_fixture(subtests):
    for number in (2, 3, 4):
        with subtests.test(number=number):
            assert number % 2 == 0


class Even(unittest.TestCase):
    def test_unittest(self):
        for number in (2, 3, 4):
            with self.subTest(number=number):
                assert number % 2 == 0
END
status=0
venv/bin/python -m pytest -rA -p no:cacheprovider --junitxml=junit.xml test_even.py >log || status=$?
cat >read_junit.py <<'END'
import xml.etree.ElementTree as ET

for case in ET.parse("junit.xml").iter("testcase"):
    print(case.get("name"), "failed" if case.find("failure") is not None else "passed")
END
{
    echo "exit status $status"
    grep -E '^(PASSED|FAILED|SUBFAILED)' log | sort
    echo 'JUnit report:'
    venv/bin/python read_junit.py
} >observed
cat observed
diff - observed <<'END' || { echo "pytest's report of subtests has changed" >&2; exit 1; }
exit status 1
FAILED test_even.py::test_fixture - contains 1 failed subtest
PASSED test_even.py::Even::test_unittest
SUBFAILED(number=3) test_even.py::Even::test_unittest - assert (3 % 2) == 0
SUBFAILED(number=3) test_even.py::test_fixture - assert (3 % 2) == 0
JUnit report:
test_fixture failed
test_unittest failed
END
