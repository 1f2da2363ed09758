"""`.ci/run` on a small project: the README's command as typed, then everything; pytest's closing line last."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = """\
test:
\t@echo "test: CI=$$CI SSL_CERT_FILE=$$SSL_CERT_FILE stdin=$$(wc -c)"
\t@{first}
test-all:
\t@echo "all: SSL_CERT_FILE=$$SSL_CERT_FILE PYTEST_ARGS=$$PYTEST_ARGS"
\t@{second}
"""
PASSED, FAILED = "== 5 passed in 3.00s ==", "== 1 failed, 3 passed in 2.00s =="
PASS, FAIL, BREAK = f"echo {PASSED!r}", f"echo FAILED x.py::y; echo {FAILED!r}; exit 1", f"echo {PASSED!r}; exit 3"

pytestmark = pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="there is no .ci/run in this tree")


def ci(place: Path, first: str, second: str) -> tuple[int, list[str]]:
    (place / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", place / ".ci")
    (place / "README.md").write_text("```\nmake quickstart\nmake test      # optional\n```\n")
    (place / "Makefile").write_text(MAKEFILE.format(first=first, second=second))
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@localhost commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=place, check=True)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**outer, "SSL_CERT_FILE": "/ca.pem", "PYTEST_ARGS": "-x", "TMPDIR": str(place)}
    done = subprocess.run([place / ".ci/run"], capture_output=True, text=True, env=environment, check=False)
    assert not list(place.glob("minisandbox-ci.*"))
    return done.returncode, done.stdout.splitlines()


def test_both_pass(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, PASS, PASS)
    assert (status, lines[-1]) == (0, PASSED)
    assert "test: CI=true SSL_CERT_FILE= stdin=0" in lines
    assert "all: SSL_CERT_FILE=/ca.pem PYTEST_ARGS=-x" in lines


@pytest.mark.parametrize(("first", "second"), [(FAIL, PASS), (PASS, FAIL)])
def test_a_failure_of_either_is_the_last_line(tmp_path: Path, first: str, second: str) -> None:
    status, lines = ci(tmp_path, first, second)
    assert status != 0
    assert lines[-2:] == ["FAILED x.py::y", FAILED]
    assert any(line.startswith("all: ") for line in lines), "the second pass runs in any case"


def test_what_fails_besides_tests_is_reported(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, PASS, BREAK)
    assert (status, lines[-1]) == (2, "failed with exit status 2, though no test failed: see above")


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    keep = 'mkdir .pytest_cache && echo "[1]" > .pytest_cache/passed.json; '
    _, lines = ci(tmp_path, keep + PASS, f"cat $$MINISANDBOX_TEST_PASSED_BEFORE; {PASS}")
    assert "[1]" in lines
