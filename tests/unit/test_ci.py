"""`.ci/run` on a small project: the README's command as typed, then everything; pytest's closing line last.

`.ci/suites` leaves out suites of which no path has changed since a commit that is known, and otherwise none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = """\
test:
\t@echo "test: CI=$$CI SSL_CERT_FILE=$$SSL_CERT_FILE stdin=$$(wc -c)"
\t@{first}
test-all test-passes:
\t@echo "$@: SSL_CERT_FILE=$$SSL_CERT_FILE PYTEST_ARGS=$$PYTEST_ARGS"
\t@{second}
"""
PASSED, FAILED = "== 5 passed in 3.00s ==", "== 1 failed, 3 passed in 2.00s =="
PASS, FAIL, BREAK = f"echo {PASSED!r}", f"echo FAILED x.py::y; echo {FAILED!r}; exit 1", f"echo {PASSED!r}; exit 3"

pytestmark = pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="there is no .ci/run in this tree")


COMMIT = "-c user.name=a -c user.email=a@localhost commit -qm a --allow-empty"


def git(place: Path, *commands: str) -> None:
    for words in commands:
        subprocess.run(["git", *words.split()], cwd=place, check=True)


def ci(place: Path, first: str, second: str) -> tuple[int, list[str]]:
    (place / ".ci").mkdir()
    for name in ("run", "suites"):
        shutil.copy(ROOT / ".ci" / name, place / ".ci")
    (place / "README.md").write_text("```\nmake quickstart\nmake test      # optional\n```\n")
    (place / "Makefile").write_text(MAKEFILE.format(first=first, second=second))
    git(place, "init -q", "add -A", COMMIT)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**outer, "SSL_CERT_FILE": "/ca.pem", "PYTEST_ARGS": "-x", "TMPDIR": str(place)}
    done = subprocess.run([place / ".ci/run"], capture_output=True, text=True, env=environment, check=False)
    assert not list(place.glob("minisandbox-ci.*"))
    return done.returncode, done.stdout.splitlines()


def test_both_pass(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, PASS, PASS)
    assert (status, lines[-1]) == (0, PASSED)
    assert "test: CI=true SSL_CERT_FILE= stdin=0" in lines
    assert "test-all: SSL_CERT_FILE=/ca.pem PYTEST_ARGS=-x" in lines, "nothing is known of earlier commits"


@pytest.mark.parametrize(("first", "second"), [(FAIL, PASS), (PASS, FAIL)])
def test_a_failure_of_either_is_the_last_line(tmp_path: Path, first: str, second: str) -> None:
    status, lines = ci(tmp_path, first, second)
    assert status != 0
    assert lines[-2:] == ["FAILED x.py::y", FAILED]
    assert any(line.startswith("test-all: ") for line in lines), "the second pass runs in any case"


def test_what_fails_besides_tests_is_reported(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, PASS, BREAK)
    assert (status, lines[-1]) == (2, "failed with exit status 2, though no test failed: see above")


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    keep = 'mkdir .pytest_cache && echo "[1]" > .pytest_cache/passed.json; '
    _, lines = ci(tmp_path, keep + PASS, f"cat $$MINISANDBOX_TEST_PASSED_BEFORE; {PASS}")
    assert "[1]" in lines


def must_run_learning(place: Path, **variables: str) -> tuple[bool, str]:
    """Return what `.ci/suites learning` decides, and what it prints."""
    environment = {**os.environ, "MINISANDBOX_SUITES": "changed", **variables}
    done = subprocess.run(
        [place / ".ci/suites", "learning"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stderr == ""
    return done.returncode == 0, done.stdout


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository with 22 commits, of which the second changed training."""
    place = tmp_path / "history"
    (place / ".ci").mkdir(parents=True)
    (place / "src/minisandbox/train").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/suites", place / ".ci")
    git(place, "init -qb main", "add -A", COMMIT)
    (place / "src/minisandbox/train/rl.py").write_text("")
    git(place, "add -A", *[COMMIT] * 21)
    return place


def test_suites_run_if_their_paths_changed(history: Path) -> None:
    decided, text = must_run_learning(history)
    assert (decided, "none of its paths changed" in text) == (False, True)
    assert must_run_learning(history, MINISANDBOX_SUITES="always") == (True, "")
    assert must_run_learning(history, MINISANDBOX_CI_BASE="HEAD~21")[0]
    (history / "src/minisandbox/train/sft.py").write_text("")
    assert "train/sft.py changed" in must_run_learning(history)[1], "it is not committed"


def test_suites_are_compared_with_the_main_branch(history: Path) -> None:
    git(history, "update-ref refs/remotes/origin/main HEAD~20")
    assert not must_run_learning(history)[0]
    git(history, "update-ref refs/remotes/origin/main HEAD~21")
    assert must_run_learning(history)[0]


def test_suites_run_where_nothing_is_known(history: Path, tmp_path: Path) -> None:
    assert "knows no commit" in must_run_learning(history, MINISANDBOX_CI_BASE="0" * 40)[1]
    git(tmp_path, f"clone -q --depth 5 file://{history} shallow")
    decided, text = must_run_learning(tmp_path / "shallow")
    assert (decided, "knows no commit" in text) == (True, True)
    shutil.rmtree(history / ".git")
    assert must_run_learning(history)[0]


def test_paths_of_the_suites_cover_the_tests_that_need_them() -> None:
    """Every file of tests or sources that mentions torch, Ray or a model of transformers is a path of a suite."""
    text = (ROOT / ".ci/suites").read_text("utf-8")
    paths = re.compile(
        "|".join(re.findall(r"^(?:LEARNING|SKYRL|VLLM)\+?='(.*)'$", text, re.MULTILINE)).replace("||", "|")
    )
    needs = re.compile(
        r"importorskip\((_name|name|\"(torch|trl|transformers)\")|tiny_model import|saved_tokenizer"
        r"|^ *(import|from) (torch|ray|trl|peft|transformers|vllm|skyrl)\b", re.MULTILINE,
    )  # fmt: skip
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    named = {str(path.relative_to(ROOT)) for path in files if needs.search(path.read_text("utf-8"))}
    assert len(named) > 20
    assert [name for name in sorted(named) if not paths.match(name)] == ["tests/unit/test_ci.py"]
