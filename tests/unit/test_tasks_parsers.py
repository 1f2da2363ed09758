"""swebench 5's parsers and rules, on logs of real runners of projects whose ``add`` subtracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox import wheels
from minisandbox.errors import HarnessError, NotFound
from minisandbox.tasks import harness

LOGS = Path(__file__).parent.parent / "data" / "logs"
"""Made with Go 1.19.8, cargo 1.95, jest 30.5.2, vitest 4.1.12, googletest 1.12.1 and Node's test runner."""
PASSED, FAILED, SKIPPED = "PASSED", "FAILED", "SKIPPED"

pytestmark = pytest.mark.once


@pytest.fixture(scope="module", autouse=True)
def _swebench_5() -> None:
    try:
        harness.check_parser("swebench5:parse_log_gotest")
    except HarnessError as error:
        pytest.skip(f"swebench 5 cannot be installed: {error}")


@pytest.mark.parametrize(
    ("parser", "log", "statuses"),
    [
        (
            "gotest",
            "go",
            {
                "TestZero": PASSED,
                "TestAdd": FAILED,
                "TestAdd/nothing": PASSED,
                "TestAdd/more": FAILED,
                "TestLater": SKIPPED,
            },
        ),
        ("cargo", "cargo", {"tests::zero": PASSED, "tests::adds": FAILED}),
        ("jest", "jest", {"zero": PASSED, "adds": FAILED, "skipped later": SKIPPED}),
        ("vitest", "vitest", {"vt/calc.spec.mjs > calc > zero": PASSED, "vt/calc.spec.mjs > calc > adds": FAILED}),
        ("googletest", "gtest", {"calc.zero": PASSED, "calc.adds": FAILED}),
        ("tap", "tap", {"- zero": PASSED, "- adds": FAILED}),
    ],
)
def test_logs_of_real_runners(parser: str, log: str, statuses: dict[str, str]) -> None:
    name, text = f"swebench5:parse_log_{parser}", (LOGS / f"{log}.txt").read_text()
    assert harness.parse(name, text) == statuses
    failed = [test for test, word in statuses.items() if word == FAILED]
    passed = [test for test, word in statuses.items() if word == PASSED]
    said = harness.judge(name, text, failed, passed, exit_code=1)
    assert (said.found, said.resolved, said.failed_fail_to_pass) == (True, False, tuple(failed))
    assert harness.judge(name, text, [], passed, exit_code=1).resolved
    assert not harness.judge(name, text, passed, ["a test that it lacks"], exit_code=1).resolved


SHARED = "named test that several tests share, of which the last one counts"


@pytest.mark.parametrize(
    ("parser", "log", "named", "expected"),
    [
        (
            "cargo",
            "cargo_kinds",
            "zero",
            {"3 results not read": ("tests::overflows - should panic", "src/lib.rs - add (line 3)", "zero")},
        ),
        ("gotest", "go_prints", "TestAdd", {"1 result not read": ("TestZero",), f"1 {SHARED}": ("TestAdd",)}),
        (
            "phpunit",
            "phpunit",
            "",
            {"1 result not read": ("Plain > Nothing",), "1 test read under another name": ("Plain > Zero",)},
        ),
        (
            "minitest",
            "minitest",
            "",
            {
                "2 results not read": ("CalcTest#test_zero", "CalcTest#test_later"),
                "1 skipped test taken for passed": ("CalcTest#test_subtracts later.",),
            },
        ),
        ("jest", "jest_files", "", {"Jest ran 4 tests and printed 0: test.command lacks --verbose": ()}),
        (
            "vitest",
            "vitest_numbers",
            "",
            {"2 tests read under another name": tuple(f"vt/a.spec.mjs > calc > waits {number}" for number in (5, 7))},
        ),
        (
            "tap",
            "tap_kinds",
            "- zero",
            {
                "1 skipped test taken for passed": ("later",),
                "1 TODO test taken for failed": ("someday",),
                f"1 {SHARED}": ("- zero",),
            },
        ),
        ("pytest", "pytest", "test_wait.py::test_cut[a", {f"1 {SHARED}": ("test_wait.py::test_cut[a",)}),
        ("pytest_v2", "pytest", "test_wait.py::test_wait]", {f"1 {SHARED}": ("test_wait.py::test_wait]",)}),
    ],
)
def test_what_parsers_misread(parser: str, log: str, named: str, expected: dict[str, tuple[str, ...]]) -> None:
    """On logs of Go 1.19.8, cargo 1.95, jest 30, vitest 4.1.12, PHPUnit 9.6.7, minitest 5.17 and Node 20's runner."""
    found = harness.misread(f"swebench5:parse_log_{parser}", (LOGS / f"{log}.txt").read_text(), [named])
    assert {misreading.what: misreading.tests for misreading in found} == expected


def test_files_that_vitest_prints_are_no_tests() -> None:
    found = harness.misread("swebench5:parse_log_vitest", (LOGS / "vitest_files.txt").read_text(), [])
    assert found[-1].what == "2 files read as a test: test.command lacks --reporter=verbose"
    assert found[-1].tests == ("vt/a.spec.mjs", "vt/b.spec.mjs")


@pytest.mark.parametrize(
    ("parser", "log"),
    [
        ("cargo", "cargo"),
        ("gotest", "go"),
        ("jest", "jest"),
        ("vitest", "vitest"),
        ("googletest", "gtest"),
        ("tap", "tap"),
    ],
)
def test_logs_that_parsers_read_well(parser: str, log: str) -> None:
    assert harness.misread(f"swebench5:parse_log_{parser}", (LOGS / f"{log}.txt").read_text(), ["- zero"]) == ()


def test_what_is_no_log_of_a_run() -> None:
    """No test in it; or tests that all passed, of a command that failed."""
    log = (LOGS / "go.txt").read_text()
    for text, code in (("cannot compile", 2), ("", 0), (log.replace("FAIL", "PASS"), 1)):
        said = harness.judge("swebench5:parse_log_gotest", text, ["TestAdd"], [], exit_code=code)
        assert (said.found, said.resolved) == (False, False)
    lone = harness.judge("swebench5:parse_log_gotest", "", ["TestAdd"], [], rule="fail_only", exit_code=1)
    assert not lone.resolved


def test_the_markers_of_a_benchmark_in_a_log_say_nothing() -> None:
    log = ">>>>> End Test Output\n>>>>> Tests Errored\n" + (LOGS / "go.txt").read_text()
    said = harness.judge("swebench5:parse_log_gotest", log, ["TestAdd"], ["TestZero"], rule="fail_only", exit_code=1)
    assert (said.found, said.resolved) == (True, False)


def test_parsers_that_ask_about_the_row() -> None:
    about = {"instance_id": "immutable-js__immutable-js-2006", "repo": "immutable-js/immutable-js", "version": "2006"}
    log = (LOGS / "jest.txt").read_text()
    for parser in ("swebench5:parse_log_immutable_js", "swebench:immutable-js/immutable-js"):
        assert harness.judge(parser, log, [], ["zero"], about=about).resolved


@pytest.mark.parametrize("parser", ["swebench5:parse_log_gotests", "swebench:gin-gonic/gin2", "swesmith:nobody__x.1"])
def test_an_unknown_parser_is_named(parser: str) -> None:
    with pytest.raises(NotFound, match=parser.partition(":")[2]):
        harness.check_parser(parser)


def test_a_package_that_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(HarnessError, match=r"swebench==5\.0\.2") as caught:
        harness.check_parser("swebench5:parse_log_gotest")
    assert caught.value.hint
    assert list((tmp_path / "minisandbox-harness").iterdir()) == [
        wheels.cache_directory("harness") / "swebench-5.0.2.lock"
    ]
