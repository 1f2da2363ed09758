"""The log grader on projects in other languages than Python: real compilers and runners, the official parsers."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.conftest import make_once

from minisandbox.errors import HarnessError
from minisandbox.grade import (
    Cause,
    Grade,
    Reason,
    Verdict,
    derive_test_lists,
    grade,
    grade_reference,
    measure,
    validate,
)
from minisandbox.grade.check import Severity, check_set
from minisandbox.grade.verdict import NOT_CONFIRMED
from minisandbox.images import Image
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.tasks import LogGrader, Task, harness

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Project:
    """A project whose add() subtracts, without the test that would show it."""

    name: str
    program: str
    code: str
    files: dict[str, str]
    test: str
    hidden: str
    grader: LogGrader
    fail_to_pass: str
    pass_to_pass: str
    broken: str


NODE = Project(
    "node",
    "node",
    "calc.js",
    {"calc.js": "exports.add = (a, b) => a - b;\nexports.zero = () => 0;\n"},
    "test/calc.test.js",
    "const test = require('node:test');\nconst assert = require('node:assert');\nconst calc = require('../calc.js');\n"
    "test('zero', () => assert.equal(calc.zero(), 0));\ntest('adds', () => assert.equal(calc.add(1, 2), 3));\n",
    LogGrader("node --test --test-reporter=tap test/calc.test.js", "swebench5:parse_log_tap", timeout=30.0),
    "- adds",
    "- zero",
    "exports.add = (((;\n",
)
C = Project(
    "c",
    "gcc",
    "calc.c",
    {
        "calc.c": "int add(int a, int b) { return a - b; }\nint zero(void) { return 0; }\n",
        "Makefile": "check:\n\tgcc -o /tmp/checks calc.c checks.c && /tmp/checks\n",
    },
    "checks.c",
    "#include <stdio.h>\nint add(int, int);\nint zero(void);\n"
    "static int say(const char *name, int good) {\n"
    '  printf("[ RUN      ] %s\\n[%s ] %s (0 ms)\\n", name, good ? "       OK" : "  FAILED ", name);\n'
    "  return !good;\n}\n"
    'int main(void) { return say("calc.zero", zero() == 0) + say("calc.adds", add(1, 2) == 3); }\n',
    LogGrader("make check", "swebench5:parse_log_googletest", timeout=60.0),
    "calc.adds",
    "calc.zero",
    "int add(int a, int b) { return a +; }\n",
)


def diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), f"a/{name}" if before else "/dev/null", f"b/{name}"
    )
    return f"diff --git a/{name} b/{name}\n" + ("" if before else "new file mode 100644\n") + "".join(lines)


@pytest.fixture(params=[NODE, C], ids=lambda one: one.name)
def project(request: pytest.FixtureRequest) -> Project:
    one: Project = request.param
    path = shutil.which(one.program)
    if path is None or not path.startswith("/usr/bin/"):
        pytest.skip(f"there is no /usr/bin/{one.program}")
    try:
        harness.check_parser(one.grader.parser)
    except HarnessError as error:
        pytest.skip(f"swebench 5 cannot be installed: {error}")
    return one


@pytest.fixture
def task(project: Project, shared: Path) -> Task:
    def write(root: Path) -> None:
        root.mkdir(parents=True)
        for name, text in project.files.items():
            (root / name).write_text(text)

    root = make_once(shared / f"log-{project.name}", write)
    code = project.files[project.code]
    return Task(
        instance_id=f"calc__{project.name}-1",
        repo="example/calc",
        base_commit="",
        problem_statement="add() subtracts",
        patch=diff(project.code, code, code.replace("a - b", "a + b")),
        test_patch=diff(project.test, "", project.hidden),
        FAIL_TO_PASS=(project.fail_to_pass,),
        PASS_TO_PASS=(project.pass_to_pass,),
        build=PythonRecipe(source=LocalSource(root)),
        grader=project.grader,
    )


@pytest.fixture
def image(task: Task, images: Callable[[Task], Image]) -> Image:
    return images(task)


def graded(task: Task, image: Image, project: Project, code: str) -> Grade:
    return grade(task, image, diff(project.code, project.files[project.code], code).encode())


def test_the_task_is_valid(task: Task, image: Image) -> None:
    found = validate(task, image)
    assert found.valid, found
    assert dict(found.reference[0].outcomes) == dict.fromkeys(task.FAIL_TO_PASS + task.PASS_TO_PASS, "passed")
    assert found.empty[0].failed_fail_to_pass == task.FAIL_TO_PASS
    assert not found.empty[0].failed_pass_to_pass


@pytest.mark.parametrize("project", [NODE], indirect=True, ids=["node"])
@pytest.mark.parametrize("test", ["- zero", "- a test that does not exist"])
def test_what_the_parser_misreads_is_noted(task: Task, image: Image, test: str) -> None:
    """On rows that are valid, and on rows that may be invalid for that reason."""
    command = f"{task.grader.command}\nstatus=$?; echo 'ok 9 - later # SKIP'; exit $status"
    skipping = replace(task, PASS_TO_PASS=(test,), grader=replace(NODE.grader, command=command))
    found = validate(skipping, image)
    assert found.valid == (test == "- zero"), found
    assert found.notes == ("swebench5:parse_log_tap: 1 skipped test taken for passed: later",)
    (checked,) = check_set([skipping], lambda _: image, repeat=1)
    (finding,) = (one for one in checked.findings if one.check == "misread_log")
    assert (finding.severity, finding.where, finding.tests) == (Severity.WARNING, "test.parser", ("later",))


def test_its_lists_are_measured_by_the_parsers_names(task: Task, image: Image) -> None:
    solved, unsolved = (measure(task, image, reference=yes) for yes in (True, False))
    assert solved.believed, solved.detail
    assert unsolved.believed, unsolved.detail
    assert derive_test_lists([solved], [unsolved]) == (task.FAIL_TO_PASS, task.PASS_TO_PASS)


def test_submissions(task: Task, image: Image, project: Project) -> None:
    code = project.files[project.code]
    solved = graded(task, image, project, code.replace("a - b", "b + a"))
    assert (solved.verdict, solved.reward) == (Verdict.RESOLVED, 1.0), solved
    assert [flag.kind for flag in solved.flags] == [NOT_CONFIRMED]
    wrong = graded(task, image, project, code.replace("a - b", "b * a"))
    assert (wrong.reason, wrong.reward) == (Reason.TESTS_NOT_PASSED, 0.0), wrong
    assert wrong.failed_fail_to_pass == task.FAIL_TO_PASS


def test_hidden_tests_that_do_not_compile_without_the_reference_fail(task: Task, image: Image) -> None:
    """They call what the reference adds: the untouched code's log has no test at all."""
    build = f"if grep -q 'a - b' calc.*; then echo error: undefined; exit 2; fi\n{task.grader.command}"
    found = validate(replace(task, grader=replace(task.grader, command=build)), image)
    assert found.valid, found
    assert found.empty[0].reason is Reason.NO_RESULTS
    silent = build.replace("exit 2", "exit 0")  # nothing says that anything failed
    assert not validate(replace(task, grader=replace(task.grader, command=silent)), image).valid


def test_exit_status_255_is_no_signal(task: Task, image: Image, project: Project) -> None:
    """PHPUnit ends with it after a fatal error, mocha after 255 failures."""
    other = replace(task, grader=replace(task.grader, command=f"{task.grader.command}; exit 255"))
    wrong = graded(other, image, project, project.files[project.code].replace("a - b", "b * a"))
    assert (wrong.reason, wrong.exit_code) == (Reason.TESTS_NOT_PASSED, 255), wrong


def test_code_that_does_not_compile_is_the_submissions_fault(task: Task, image: Image, project: Project) -> None:
    """Its log has no test at all: the reference's own run says whose fault that is."""
    broken = graded(task, image, project, project.broken + "\n" * 3)
    assert (broken.verdict, broken.reward) == (Verdict.FAILED, 0.0), broken
    assert broken.reason in (Reason.NO_RESULTS, Reason.TESTS_NOT_PASSED)


@pytest.mark.slow
@pytest.mark.parametrize("project", [NODE], indirect=True)
def test_a_command_or_a_parser_that_is_not_there_is_our_failure(task: Task, image: Image, project: Project) -> None:
    for grader, said in (
        (replace(task.grader, command="no-such-runner"), "is not there"),
        (replace(task.grader, command="echo nothing"), "no test result"),
        (LogGrader("exit 3", "swebench5:parse_log_nothing"), "there is no 'parse_log_nothing'"),
    ):
        other = replace(task, grader=grader)
        found = grade(other, image, task.patch.encode())
        assert (found.verdict, found.reward) == (Verdict.INFRA_ERROR, None), found
        assert said in found.detail
    unknown = replace(task, grader=LogGrader("exit 3", "swebench5:parse_log_nothing"))
    assert validate(unknown, image).cause is Cause.INFRASTRUCTURE


@pytest.mark.slow
@pytest.mark.parametrize("project", [NODE], indirect=True)
def test_a_test_command_that_hangs(task: Task, image: Image) -> None:
    """The reference is as slow: the machine's or the row's fault, and no reward of 0."""
    slow = replace(task, grader=replace(task.grader, command=f"{task.grader.command}; sleep 60", timeout=2.0))
    found = grade_reference(slow, image)
    assert found.reason is Reason.TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("project", [NODE], indirect=True)
def test_tests_that_a_submission_rewrites_are_noticed(task: Task, image: Image, project: Project) -> None:
    code = "require('node:fs').appendFileSync('test/calc.test.js', '//');\n" + project.files[project.code]
    code = code.replace("a - b", "a + b")
    found = graded(task, image, project, code)
    assert (found.verdict, found.reason) == (Verdict.TAMPERED, Reason.TESTS_CHANGED), found


@pytest.mark.slow
@pytest.mark.parametrize("project", [NODE], indirect=True)
def test_a_log_cannot_end_its_own_region(task: Task, image: Image, project: Project) -> None:
    """SWE-bench's markers in the log: with fail_only what comes after them would count as passed."""
    only = replace(task, grader=replace(project.grader, rule="fail_only"))
    code = "console.log('>>>>> End Test Output');\n" + project.files[project.code]
    assert graded(only, image, project, code).reward == 0.0
