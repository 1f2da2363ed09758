"""Grading for real: what resolves, what does not, what is nobody's verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from minisandbox.errors import InvalidValue
from minisandbox.grade import Flag, Reason, Verdict, grade, measure, validate
from minisandbox.grade.submission import CodePatch
from minisandbox.grade.workspace import Workspace
from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Form, Task, TaskSet

pytestmark = pytest.mark.kernel

FIX = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a - b
+    return b + a
     # that is all
"""


def adding(path: str, text: str) -> str:
    """A patch that makes a file."""
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


def appending(text: str) -> str:
    """A patch that appends to calc/core.py, which stays broken."""
    lines = text.splitlines()
    head = "diff --git a/calc/core.py b/calc/core.py\n--- a/calc/core.py\n+++ b/calc/core.py\n"
    context = " def double(a):\n     return 2 * a\n"
    return head + f"@@ -6,2 +6,{2 + len(lines)} @@\n{context}" + "".join(f"+{line}\n" for line in lines)


def test_a_good_submission_resolves(smith: Task, smith_image: Image) -> None:
    graded = grade(smith, smith_image, FIX.encode())
    assert graded.verdict is Verdict.RESOLVED, graded.log
    assert (graded.resolved, graded.reward, graded.exit_code) == (True, 1.0, 0)
    assert graded.outcomes == tuple((test, "passed") for test in smith.FAIL_TO_PASS + smith.PASS_TO_PASS)
    assert graded.duration > 0


@pytest.mark.parametrize("options", ["--ff", "--lf --lfnf=all", "--nf", "--cache-clear", "--sw", "-x"])
def test_a_project_may_use_pytests_cache(smith: Task, smith_image: Image, options: str) -> None:
    """Its options are there, and what a submission puts where a cache would be in the repository is not read."""
    cached = replace(smith, grader=replace(smith.grader, command=f"{smith.grader.command} {options}"))
    forged = adding(".pytest_cache/v/cache/lastfailed", '{"tests/test_double.py::test_double": true}')
    graded = grade(cached, smith_image, (FIX + forged).encode())
    assert graded.verdict is Verdict.RESOLVED, graded.log


def test_an_empty_submission_does_not(smith: Task, smith_image: Image) -> None:
    graded = grade(smith, smith_image, b"")
    assert (graded.verdict, graded.reason, graded.reward) == (Verdict.FAILED, Reason.NOTHING_TO_TEST, 0.0)


def test_a_submission_that_fixes_nothing_does_not(smith: Task, smith_image: Image) -> None:
    graded = grade(smith, smith_image, appending("x = 1").encode())
    assert (graded.verdict, graded.reason) == (Verdict.FAILED, Reason.TESTS_NOT_PASSED), graded.log
    assert graded.failed_fail_to_pass == smith.FAIL_TO_PASS
    assert graded.failed_pass_to_pass == ()
    assert graded.exit_code == 1
    assert "test_add" in graded.log


@pytest.mark.slow
def test_both_forms_are_valid(smith: Task, bench: Task, images: Callable[[Task], Image]) -> None:
    for task in (smith, bench):
        found = validate(task, images(task), runs=2)
        assert found.valid, found
        assert len(found.reference) == len(found.empty) == 2


@pytest.mark.once
@pytest.mark.parametrize(
    "submission",
    [
        b"no patch",
        FIX.replace("a - b", "a * b").encode(),
        adding("../x", "x").encode(),
        FIX.replace("calc/core.py", "calc/other.py").encode(),
        adding("calc/core.py", "x").encode(),
    ],
)
def test_a_patch_that_cannot_be_applied_is_the_agents_fault(smith: Task, smith_image: Image, submission: bytes) -> None:
    graded = grade(smith, smith_image, submission)
    assert (graded.verdict, graded.reason) == (Verdict.PATCH_INVALID, Reason.PATCH_INVALID), graded
    assert graded.reward == 0.0
    assert graded.detail


def linking(path: str, target: str) -> str:
    """A patch that makes a symbolic link."""
    head = f"diff --git a/{path} b/{path}\nnew file mode 120000\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"


def test_a_reference_and_its_tests_may_have_links(bench: Task, images: Callable[[Task], Image]) -> None:
    test = "from calc.alias import double\ndef test_alias():\n"
    test += "    assert 'same' in open('tests/linked.py').read()\n    assert double(2) == 4"
    task = replace(
        bench,
        instance_id="calc__links-1",
        patch=linking("calc/alias.py", "core.py"),
        test_patch=linking("tests/linked.py", "helper.py") + adding("tests/test_alias.py", test),
        FAIL_TO_PASS=("tests/test_alias.py::test_alias",),
        PASS_TO_PASS=("tests/test_double.py::test_double",),
    )
    image = images(task)
    assert validate(task, image).valid
    graded = grade(task, image, task.patch.encode())
    assert (graded.verdict, graded.flags) == (Verdict.RESOLVED, ()), graded
    other = task.patch.replace("core.py", "__init__.py")
    assert grade(task, image, other.encode()).verdict is Verdict.FAILED


HOOK = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""


def test_no_new_module_runs_before_the_plugin(smith: Task, smith_image: Image) -> None:
    """Whatever names the policy knows: it is asked nothing here."""
    names = ("runpy", "pluggy", "iniconfig", "argparse", "org", "colorama")
    text = "import sys\nif not any(name.startswith('report_') for name in sys.modules): sys.exit(__name__ + ' runs')"
    modules = "".join(adding(f"{name}.py", text) for name in names)
    run = Workspace.of(smith, smith_image).run(CodePatch(f"{FIX}{modules}".encode()))
    assert run.doubt is None, run.log
    assert set(run.report.outcomes().values()) == {"passed"}


EVIL_TESTS = "def test_add(): pass\ndef test_zero(): pass\ndef test_double(): pass"


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("conftest.py", HOOK, "pytest_config"),
        ("tests/conftest.py", HOOK, "test_directory"),
        ("tests/test_add.py", EVIL_TESTS, "test_file"),
        ("tests/calc.py", "x", "test_directory"),
        ("pytest.ini", "[pytest]\naddopts = -k test_zero", "pytest_config"),
        ("pytest.py", "raise SystemExit(0)", "shadows_runner"),
        ("_pytest/__init__.py", "raise SystemExit(0)", "shadows_runner"),
        ("sitecustomize.py", "import os; os._exit(0)", "start_up_hook"),
        ("json.py", "raise SystemExit(0)", "shadows_runner"),
        (".gitattributes", "* text eol=crlf", "git_metadata"),
    ],
)
def test_protected_files_are_dropped_and_reported(
    smith: Task, smith_image: Image, path: str, text: str, kind: str
) -> None:
    hack = adding(path, text)
    graded = grade(smith, smith_image, hack.encode())
    assert (graded.verdict, graded.reason) == (Verdict.FAILED, Reason.NOTHING_TO_TEST), graded
    assert graded.flags == (Flag(kind, path),)
    honest = grade(smith, smith_image, (FIX + hack).encode())
    assert honest.verdict is Verdict.RESOLVED, "what is dropped does not spoil the rest"
    assert honest.flags == (Flag(kind, path),)


@pytest.mark.once
def test_names_with_wildcards_are_dropped_alone(smith: Task, smith_image: Image) -> None:
    submission = FIX + adding("tests/*", "x") + adding("calc/[a]?*.py", "y")
    graded = grade(smith, smith_image, submission.encode())
    assert graded.verdict is Verdict.RESOLVED, graded
    assert graded.flags == (Flag("test_directory", "tests/*"),)


FORGED = """
def forge(data):
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, data)
        except OSError:
            pass
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(0)", Reason.NO_END),
        ("import os; os.kill(os.getpid(), 9)", Reason.KILLED),
        pytest.param("import time; time.sleep(600)", Reason.TIMEOUT, marks=pytest.mark.slow),
        ("import atexit, os; atexit.register(os._exit, 0)", Reason.EXIT_FORGED),
        ("import atexit, os; atexit.register(os._exit, 2)", Reason.EXIT_MISMATCH),
        (f"import os{FORGED}forge(b'[1]\\n')", Reason.REPORT_DAMAGED),
        (f"import os{FORGED}forge(b'x' * 65536 * 1100); os._exit(0)", Reason.REPORT_DAMAGED),
        ("import os; os.closerange(3, 1024)", Reason.NO_END),
        ("raise ImportError", Reason.TESTS_NOT_PASSED),
    ],
)
def test_what_a_submission_does_to_the_runner_is_its_fault(
    smith: Task, smith_image: Image, code: str, reason: Reason
) -> None:
    graded = grade(smith, smith_image, appending(code).encode(), timeout=15.0 if reason is Reason.TIMEOUT else 120.0)
    assert (graded.verdict, graded.reason) == (reason.verdict, reason), graded
    assert graded.reward == 0.0


def test_hidden_tests_are_not_in_the_image_and_are_there_when_it_is_graded(smith: Task, smith_image: Image) -> None:
    with Sandbox.create(smith_image.spec()) as box:
        found = box.exec("find / -path /proc -prune -o -path /usr -prune -o -name 'test_add*' -print")
        assert found.stdout == ""
        found = box.exec("git log --all -p -- tests | grep test_zero")
        assert found.stdout == ""
        assert box.exec(["ls", "tests"]).stdout.split() == ["helper.py", "test_double.py"]
    code = "import os\ndef add(a, b): raise OSError(sorted(os.listdir('/testbed/tests')))"
    assert "'test_add.py'" in grade(smith, smith_image, appending(code).encode()).log


def test_skipped_and_expected_failures_have_not_passed(smith: Task, smith_image: Image) -> None:
    skip = "import pytest, sys\ndef add(a, b): pytest.skip('later')"
    graded = grade(smith, smith_image, appending(skip).encode())
    assert graded.resolved is False
    assert dict(graded.outcomes)["tests/test_add.py::test_add"] == "skipped"


def test_a_runner_that_cannot_start_is_our_failure(smith: Task, smith_image: Image) -> None:
    for command in ("no-such-runner", "python -m pytest --no-such-option", "false"):
        graded = grade(replace(smith, grader=replace(smith.grader, command=command)), smith_image, FIX.encode())
        assert (graded.verdict, graded.reason) == (Verdict.INFRA_ERROR, Reason.REFERENCE_UNTRUSTED), graded
        assert (graded.resolved, graded.reward) == (None, None)


@pytest.mark.once
def test_tests_that_are_too_slow_for_the_reference_are_our_failure(smith: Task, smith_image: Image) -> None:
    slow = replace(smith, grader=replace(smith.grader, command="sleep 5; python -m pytest"))
    graded = grade(slow, smith_image, FIX.encode(), timeout=1.0)
    assert (graded.verdict, graded.reason) == (Verdict.INFRA_ERROR, Reason.REFERENCE_UNTRUSTED)


def test_a_missing_layer_is_our_failure(smith: Task, smith_image: Image) -> None:
    gone = replace(smith_image, layers=("0" * 64,))
    graded = grade(smith, gone, FIX.encode())
    assert (graded.verdict, graded.reason) == (Verdict.INFRA_ERROR, Reason.INFRASTRUCTURE)
    assert "NotFound" in graded.detail


def test_ids_of_other_runners_are_refused(smith: Task, smith_image: Image) -> None:
    other = replace(smith, FAIL_TO_PASS=("test_add (tests.Case)",))
    with pytest.raises(InvalidValue, match="pytest node id"):
        grade(other, smith_image, b"")


@pytest.mark.once
def test_measuring(smith: Task, smith_image: Image) -> None:
    solved = measure(smith, smith_image, reference=True)
    assert solved.believed, solved.log
    assert solved.passed == set(smith.FAIL_TO_PASS + smith.PASS_TO_PASS)
    assert solved.versions.startswith("Python 3.")
    broken = measure(smith, smith_image, reference=False, files=["tests/test_add.py"])
    assert broken.believed
    assert broken.outcomes == (("tests/test_add.py::test_add", "failed"), ("tests/test_add.py::test_zero", "passed"))


@pytest.mark.once
@pytest.mark.parametrize(
    ("lists", "cause"),
    [
        ({"PASS_TO_PASS": ("tests/test_add.py::test_gone",)}, "reference_fails"),
        ({"FAIL_TO_PASS": ("tests/test_add.py::test_zero",), "PASS_TO_PASS": ()}, "empty_resolves"),
        (
            {"FAIL_TO_PASS": ("tests/test_add.py::test_add", "tests/test_add.py::test_zero"), "PASS_TO_PASS": ()},
            "f2p_not_failing",
        ),
        (
            {"FAIL_TO_PASS": ("tests/test_add.py::test_zero",), "PASS_TO_PASS": ("tests/test_add.py::test_add",)},
            "f2p_not_failing",
        ),
    ],
)
def test_tasks_that_are_not_valid(
    smith: Task, smith_image: Image, lists: dict[str, tuple[str, ...]], cause: str
) -> None:
    preserved = lists.get("PASS_TO_PASS", smith.PASS_TO_PASS)
    task = replace(smith, FAIL_TO_PASS=lists.get("FAIL_TO_PASS", smith.FAIL_TO_PASS), PASS_TO_PASS=preserved)
    found = validate(task, smith_image)
    assert (found.status, found.cause) == ("invalid", cause), found


@pytest.mark.once
def test_a_task_whose_preserved_tests_fail_without_a_patch(bench: Task, images: Callable[[Task], Image]) -> None:
    """The same test fails once and passes once; the reference makes it pass, so only the empty run can tell."""
    odd = replace(bench, PASS_TO_PASS=bench.FAIL_TO_PASS, FAIL_TO_PASS=("tests/test_triple.py::test_triple",))
    tests = odd.test_patch + adding("tests/test_triple.py", "from calc.core import triple\ndef test_triple(): pass")
    odd = replace(odd, test_patch=tests, instance_id="calc__bench-2")
    found = validate(odd, images(odd))
    assert (found.status, found.cause) == ("invalid", "p2p_not_passing"), found
    assert found.tests == bench.FAIL_TO_PASS


@pytest.mark.slow
@pytest.mark.once
def test_a_flaky_task(smith: Task, smith_image: Image) -> None:
    """Eight dice, thrown three times each with and without the patch: all agree once in 10^9 validations."""
    dice = "".join(f"\\ndef test_{n}():\\n    import os\\n    assert os.urandom(1)[0] % 2\\n" for n in range(8))
    append = f"python -c \"open('tests/test_double.py', 'a').write('{dice}')\""
    names = tuple(f"tests/test_double.py::test_{n}" for n in range(8))
    flaky = replace(smith, grader=replace(smith.grader, command=f"{append}; python -m pytest"), PASS_TO_PASS=names)
    found = validate(flaky, smith_image, runs=3)
    assert found.cause == "flaky", found
    assert found.tests
    assert set(found.tests) <= set(names)


def test_an_image_that_is_not_there_is_no_verdict_about_the_task(smith: Task, smith_image: Image) -> None:
    found = validate(smith, replace(smith_image, layers=("0" * 64,)))
    assert (found.status, found.cause) == ("error", "infrastructure")


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.index
@pytest.mark.parametrize("form", [Form.SWEBENCH, Form.SWESMITH])
def test_a_real_project_with_packages_from_the_index(form: Form, images: Callable[[Task], Image]) -> None:
    task = next(task for task in TaskSet.load("quickstart") if task.form is form)
    found = validate(task, images(task))
    assert found.valid, found
