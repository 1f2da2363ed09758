"""The parts of the comparison with the official verdicts that need no image: variants, comparing, the page."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.parity.cases import Case
from benchmarks.parity.comparison import Compared, Standing, beside, compare, is_parity, summary, table
from benchmarks.parity.diffs import read_patch, reversed_patch, write_patch
from benchmarks.parity.variants import RAISE, changed, touched_module, unimportable, with_a_change, without_the_end
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "".join(f"value_{number} = {number}\n" for number in range(1, 41))
Edits = dict[int, str]
"""Lines by their numbers, and what stands there instead: empty for nothing."""


def git(repository: Path, *arguments: str, stdin: str = "") -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(
        command, cwd=repository, input=stdin, capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(BEFORE)
    (tmp_path / "NEWS.rst").write_text("news\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "before")
    return tmp_path


def patch_of(repository: Path, edits: Edits, news: bool = False) -> str:
    lines = BEFORE.splitlines(keepends=True)
    after = "".join(edits.get(number, line) for number, line in enumerate(lines, start=1))
    (repository / "code.py").write_text(after)
    if news:
        (repository / "NEWS.rst").write_text("news\nmore news\n")
    patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    return patch


def applied(repository: Path, patch: str) -> str:
    git(repository, "apply", "-", stdin=patch)
    text = (repository / "code.py").read_text()
    git(repository, "checkout", "-q", ".")
    return text


def edited(edits: Edits) -> str:
    lines = BEFORE.splitlines(keepends=True)
    return "".join(edits.get(number, line) for number, line in enumerate(lines, start=1))


def test_a_patch_is_written_as_it_was_read(repository: Path) -> None:
    patch = patch_of(repository, {2: "new = 2\nmore = 2\n", 20: "", 39: "new = 39\n"}, news=True)
    (file, code) = read_patch(patch)
    assert (file.path, code.path, len(code.hunks)) == ("NEWS.rst", "code.py", 3)
    assert applied(repository, write_patch((file, code))) == applied(repository, patch)


def test_shortened_lacks_the_last_hunk_of_code(repository: Path) -> None:
    patch = patch_of(repository, {2: "new = 2\n", 39: "new = 39\n"}, news=True)
    assert applied(repository, without_the_end(patch)) == edited({2: "new = 2\n"})
    assert "more news" in without_the_end(patch)


@pytest.mark.parametrize(
    ("edits", "left"),
    [
        ({20: "new = 20\nmore = 20\n"}, {20: "new = 20\n"}),
        ({20: "value_20 = 20\nmore = 20\n", 21: "new = 21\n"}, {20: "value_20 = 20\nmore = 20\n", 21: ""}),
        ({20: "", 21: ""}, {20: ""}),
    ],
)
def test_a_single_hunk_is_shortened_by_a_line(repository: Path, edits: Edits, left: Edits) -> None:
    assert applied(repository, without_the_end(patch_of(repository, edits))) == edited(left)


def test_a_reference_of_one_line_has_nothing_shorter(repository: Path) -> None:
    assert without_the_end(patch_of(repository, {20: "value_20 = 20\nmore = 20\n"})) == ""


@given(seed=st.text(max_size=8))
def test_one_added_line_is_changed_the_same_way_each_time(seed: str) -> None:
    patch = (
        "--- a/code.py\n+++ b/code.py\n@@ -1,2 +1,5 @@\n value_1 = 1\n+# a comment\n+new = old == 5 and 'text'\n"
        "+second = third\n value_2 = 2\n"
    )
    variant = with_a_change(patch, seed)
    assert variant == with_a_change(patch, seed)
    differing = [(a, b) for a, b in zip(patch.splitlines(), variant.splitlines(), strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0][0].startswith("+")
    assert "comment" not in differing[0][0]


def test_where_nothing_is_added_a_removed_line_comes_back_changed(repository: Path) -> None:
    variant = with_a_change(patch_of(repository, {20: ""}), "seed")
    lines = applied(repository, variant).splitlines()
    assert len(lines) == 40
    assert lines[19] != "value_20 = 20"


def test_what_can_be_changed_in_a_line() -> None:
    chance = random.Random(1)
    lines = ("if a == 'b':", "x = 3 + y", "return not found", "}")
    seen = {line: {changed(line, chance) for _ in range(100)} for line in lines}
    assert {"if a != 'b':", "if a == 'b changed':", "if a_changed == 'b':"} <= seen[lines[0]]
    assert {"x = 4 + y", "x = 3 - y", "x = 3 + y_changed"} <= seen[lines[1]]
    assert seen[lines[2]] == {"return not found_changed"}
    assert seen[lines[3]] == {None}


@pytest.mark.parametrize("line", range(1, 9))
def test_a_module_that_cannot_be_imported(repository: Path, line: int) -> None:
    edits = {line: "new = 0\nmore = 0\n", 30: "new = 30\n"}
    patch = patch_of(repository, edits)
    assert touched_module(patch) == ("code.py", False)
    assert applied(repository, unimportable(patch, BEFORE)) == RAISE + edited(edits)


def test_a_new_module_that_cannot_be_imported(repository: Path) -> None:
    patch = "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+new = 1\n"
    assert touched_module(patch) == ("new.py", True)
    git(repository, "apply", "-", stdin=unimportable(patch, ""))
    assert (repository / "new.py").read_text() == RAISE + "new = 1\n"


CASE = Case("t-1", "reference", "", "", "resolved", "resolved", "", "", (), 0, 1.0, "t-1.reference.log")
NAMED = ("a", "b")


def verdict(resolved: bool, *passed: str) -> dict[str, object]:
    return {"resolved": resolved, "passed": {"FAIL_TO_PASS": passed[:1], "PASS_TO_PASS": passed[1:]}}


@pytest.mark.parametrize(
    ("case", "official", "standing", "tests"),
    [
        (CASE, verdict(True, "a", "b"), Standing.EQUAL, ()),
        (CASE, verdict(False, "a"), Standing.DIFFERENT, ("b",)),
        (replace(CASE, verdict="failed", not_passed=("b",)), verdict(False, "a"), Standing.EQUAL, ()),
        (replace(CASE, verdict="failed", not_passed=("a",)), verdict(False, "a"), Standing.DIFFERENT, ("a", "b")),
        (replace(CASE, verdict="failed", not_passed=("b",)), verdict(True, "a", "b"), Standing.DIFFERENT, ("b",)),
        (replace(CASE, verdict="timeout", doubt="timeout"), None, Standing.NOT_BELIEVED, ()),
        (replace(CASE, verdict="tampered", doubt="log"), verdict(True, "a", "b"), Standing.NOT_BELIEVED, ()),
        (CASE, None, Standing.DIFFERENT, ()),
        (CASE, {"error": "KeyError: 'x'"}, Standing.DIFFERENT, ()),
    ],
)
def test_comparing(case: Case, official: dict[str, object] | None, standing: Standing, tests: tuple[str, ...]) -> None:
    found = compare(case, NAMED, official)
    assert (found.standing, found.tests) == (standing, tests)


def test_only_a_broken_variant_may_be_disbelieved() -> None:
    equal = Compared(CASE, Standing.EQUAL, True)
    doubted = Compared(replace(CASE, doubt="timeout", reason="timeout"), Standing.NOT_BELIEVED, None)
    variant = replace(doubted, case=replace(doubted.case, variant="changed"))
    assert is_parity([equal, variant])
    assert not is_parity([equal, doubted])
    assert not is_parity([equal, Compared(CASE, Standing.DIFFERENT, False)])
    assert not is_parity([])


def test_what_is_said() -> None:
    found = [
        Compared(CASE, Standing.EQUAL, True),
        Compared(replace(CASE, variant="empty"), Standing.DIFFERENT, False, ("a",)),
        Compared(replace(CASE, variant="changed", reason="timeout", doubt="too long"), Standing.NOT_BELIEVED, None),
    ]
    assert summary(found, "x 1") == [
        "Against x 1:",
        "",
        "- 1 of 2 verdicts on believed runs are equal (50.0 %)",
        "- 1 runs are not believed (1 timeout), 0 of them with the reference",
        "- 0 of those are officially resolved",
        "- 1 of 3 verdicts, believed or not, agree on whether the task is resolved",
        "- different: t-1 empty: ours resolved, officially not resolved; 1 tests differ: a",
        "- not believed: t-1 changed: too long; officially unknown",
    ]
    reference = replace(found[2], case=replace(found[2].case, variant="reference"), official=True)
    assert summary([reference], "x 1")[-1] == "- not believed: t-1 reference: too long; officially resolved"
    rows = table(found, {"t-2": "no image"}).splitlines()
    assert rows[2] == "| t-1 | resolved | **resolved, officially not resolved** |  | (timeout) |  |"
    assert rows[3].startswith("| t-2 | no image |")


def test_two_environments_differ_in_a_verdict_or_a_test() -> None:
    cases = [CASE, replace(CASE, variant="empty"), replace(CASE, variant="changed"), replace(CASE, variant="shortened")]
    there = [CASE, replace(cases[1], not_passed=(*CASE.not_passed, "b")), replace(cases[2], reason="timeout")]
    assert beside(cases, {one.name: one for one in there}) == [
        "- 1 of 3 runs have the same verdict, reason and passed tests in both environments",
        "- other outcome: t-1.empty: resolved (resolved), there resolved (resolved); 1 tests differ: b",
        "- other outcome: t-1.changed: resolved (resolved), there resolved (timeout); 0 tests differ: ",
    ]


def make_page(tmp_path: Path, verdict: str, text: str) -> tuple[int, str]:
    measured = {"build_seconds": 2.0, "unique_bytes": 3e6, "shared_bytes": 4e6, "validate_seconds": 5.0}
    result = {"instance_id": "t-1", "python": "3.11.7", "verdict": verdict, "cause": None, "measured": measured}
    totals = {"layer_bytes": 7e6, "build_seconds": 2.0, "validate_seconds": 5.0}
    report = {"tasks": 1, "counts": {verdict: 1}, "measured": totals, "results": [result]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instance_id": "t-1", "validation": {"python": "3.11.7"}}) + "\n")
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- validation: made -->\nold t-1\n<!-- validation: end -->\n{text}\n")
    command = [sys.executable, "-m", "tools.make_validation_page", str(tmp_path)]
    done = subprocess.run(
        [*command, "--rows", str(tmp_path / "rows.jsonl"), "--page", str(page)],
        check=False,
        timeout=60,
        capture_output=True,
        cwd=ROOT,
    )
    return done.returncode, page.read_text()


def test_the_page_keeps_what_people_wrote(tmp_path: Path) -> None:
    status, page = make_page(tmp_path, "valid", "after")
    assert status == 0
    assert page.startswith("before\n<!-- validation: made -->\n\n| row |")
    assert page.endswith("<!-- validation: end -->\nafter\n")
    assert "| t-1 | 3.11.7 | 2.0 | 3.0 | 4.0 | 5.0 | valid | valid |" in page
    assert "1 of 1 rows are valid" in page
    assert "old" not in page


def test_an_exception_needs_words(tmp_path: Path) -> None:
    assert make_page(tmp_path, "invalid", "nothing about it")[0] == 1
    status, page = make_page(tmp_path, "invalid", "t-1 needs the internet")
    assert status == 0
    assert "| **invalid** | valid |" in page


def test_a_reversed_patch_undoes_it(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / "code.py").write_text("new\n" + BEFORE.replace("value_7 = 7\n", "").replace("_39 ", "_x ") + "end")
    (repository / "NEWS.rst").unlink()
    (repository / "made.py").write_text("x\n")
    git(repository, "add", "-A")
    patch = git(repository, "diff", "--cached")
    assert "\\ No newline" in patch
    git(repository, "apply", "--index", "-", stdin=reversed_patch(patch))
    assert git(repository, "write-tree") == before
