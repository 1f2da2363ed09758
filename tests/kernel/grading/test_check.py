"""Each planted fault of a task set is found at its task, by its name, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builds import python_build
from tests.kernel.grading.test_validations import new_file, report, rows

from minisandbox.cli.main import main
from minisandbox.grade.check import CHECKS
from minisandbox.store import Store
from minisandbox.tasks import Form, PytestGrader, ScriptGrader, Task

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.slow]

FIX = """\
diff --git a/calc/core.py b/calc/core.py
--- a/calc/core.py
+++ b/calc/core.py
@@ -6,2 +6,7 @@
 def double(a):
     return 2 * a
+
+
+def triple(a):
+    three_times = [a, a, a]
+    return sum(three_times, start=0)
"""
BREAKING = FIX.replace("+6,7 @@", "+6,8 @@").replace("2 * a\n", "2 * a\n+double = None  # as nobody needs it\n")
SOLVED = "    three_times = [a, a, a]\n    return sum(three_times, start=0)\n"
TRIPLE, OTHER = "tests/test_triple.py::test_triple", "tests/test_triple.py::test_other"
TESTS = "from calc import core\n\n\ndef test_triple():\n    assert core.triple(2) == 6\n"
MORE = "\n\ndef test_other():\n    assert core.double(2) == 4\n"
AFTER = "from calc import core\n\n\ndef test_after():\n    assert core.known\n"
DRAWN = """

DRAWN = int.from_bytes(os.urandom(8), "little") % 150


@pytest.mark.parametrize("n", range(150))
def test_other(n):
    assert n != DRAWN
"""
GIT = "git -c user.name=a -c user.email=a@example.org"
JUDGE = 'python -c "from calc.core import triple"'


def written(path: str, text: str) -> str:
    """Return the command that writes a file of an image."""
    return f"mkdir -p {Path(path).parent}; printf '{text.replace(chr(10), chr(92) + 'n')}' > {path}"


def verifier(judge: str) -> ScriptGrader:
    """Return a verifier in the agent's sandbox that a command decides."""
    place = "/logs/verifier/reward.txt"
    return ScriptGrader(f"mkdir -p /logs/verifier; if {judge}; then echo 1; else echo 0; fi > {place}", mode="live")


class Planted:
    """A task set with faults.

    Args:
        source: a task of the project without a fault.

    Attributes:
        tasks: the tasks.
        wanted: by id the name of the fault, where there is one.
    """

    def __init__(self, source: Task) -> None:
        self.honest = replace(
            source, form=Form.SWEBENCH, patch=FIX, test_patch=new_file("tests/test_triple.py", TESTS + MORE),
            FAIL_TO_PASS=(TRIPLE,), PASS_TO_PASS=(OTHER, "tests/test_add.py::test_add"),
            problem_statement="There is no triple().", grader=PytestGrader(timeout=1800.0),
        )  # fmt: skip
        self.tasks: list[Task] = []
        self.wanted: dict[str, str] = {}

    def add(self, name: str, fault: str = "", **changes: object) -> None:
        """Add a task, which is of a repository of its own: no two ask for the same."""
        known: dict[str, object] = {"instance_id": name, "repo": f"a/{name}"}
        self.tasks.append(replace(self.honest, **known | changes))  # type: ignore[arg-type] # fields of a task
        if fault:
            self.wanted[name] = fault

    def images(self) -> None:
        """Add tasks whose images have a fault."""

        def add(name: str, fault: str, *commands: str, **changes: object) -> None:
            self.add(name, fault, build=replace(python_build(self.honest), install=commands), **changes)

        add("in-packages", "solution_in_image", written("/opt/site-packages/calc.py", SOLVED))
        add("in-a-patch", "solution_in_image", written("/root/fix.patch", FIX.partition("2 * a\n")[2]))
        add("tests-left", "tests_in_image", written("/root/notes.txt", TESTS + MORE))
        history = f"git init -q; git add .; {GIT} commit -qm a; git rm -q core.py; {GIT} commit -qm b"
        add("other-clone", "history_in_image", written("/opt/clone/core.py", SOLVED), f"cd /opt/clone; {history}")
        add("unbuildable", "not_built", "false")
        judge = "#!/bin/sh\n" + JUDGE
        none: dict[str, object] = {"FAIL_TO_PASS": (), "PASS_TO_PASS": (), "test_patch": ""}
        place = written("/opt/judge.sh", judge)
        add("judge", "writable_verifier", place, "chmod 777 /opt/judge.sh", grader=verifier("/opt/judge.sh"), **none)
        self.add("verifier", "", grader=verifier(JUDGE), **none)
        self.add("silent", "no_reward", grader=replace(verifier(JUDGE), command="true"), **none)

    def runs(self) -> None:
        """Add tasks whose lists, tests or references have a fault."""

        def add(name: str, fault: str, tests: str, more: str = "", **changes: object) -> None:
            self.add(name, fault, test_patch=new_file("tests/test_triple.py", tests) + more, **changes)

        slow = "import time\n" + TESTS + "    time.sleep({})\n" + MORE
        add("late", "near_timeout", slow.format(16), grader=PytestGrader(timeout=30.0))
        add("hangs", "timeout", slow.format(600), grader=PytestGrader(timeout=8.0))
        add("wrong", "reference_fails", TESTS.replace("== 6", "== 7") + MORE)
        add("never-passes", "p2p_not_passing", TESTS + MORE.replace("== 4", "== 5"))
        drawn = tuple(f"{OTHER}[{n}]" for n in range(150))
        add("wavering", "flaky", "import os\nimport pytest\n" + TESTS + DRAWN, PASS_TO_PASS=drawn)
        both = (TRIPLE, "tests/test_x.py::test_after")
        known = TESTS + "    core.known = True\n" + MORE
        add("ordered", "order_dependent", known, new_file("tests/test_x.py", AFTER), FAIL_TO_PASS=both)
        self.add("breaking", "reference_breaks_tests", patch=BREAKING)
        self.add("gone", "missing_test", PASS_TO_PASS=("tests/test_add.py::test_gone",))
        self.add("passes", "empty_resolves", FAIL_TO_PASS=(OTHER,), PASS_TO_PASS=())
        self.add("passes-in-part", "f2p_not_failing", FAIL_TO_PASS=(TRIPLE, OTHER), PASS_TO_PASS=())

    def rows(self) -> None:
        """Add tasks whose rows have a fault, and the task without one."""
        self.add("honest")
        self.add("twin", "duplicate", repo="a/honest")
        self.add("told-all", "solution_in_instruction", problem_statement=f"Please apply this:\n\n{FIX}")
        self.add("told-nothing", "empty_instruction", problem_statement=" \n")


def kept(run: Path) -> object:
    """Return what a report says of all tasks but the one that cannot be built: its failure is now an earlier one."""
    said = report(run)
    assert isinstance(said, dict)
    return said | {"findings": [one for one in said["findings"] if one["check"] != "not_built"]}


def test_every_planted_fault_is_found_and_no_other(
    smith: Task, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = Planted(smith)
    planted.rows()
    planted.images()
    planted.runs()
    lines = [json.dumps(task.to_row()) for task in (*planted.tasks, smith)]
    lines.append(json.dumps({**planted.honest.to_row(), "instance_id": "no-task", "FAIL_TO_PASS": []}))
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("MINISANDBOX_STORE", str(store.root))
    monkeypatch.chdir(tmp_path)
    words = ["tasks", "check", "tasks.jsonl", "--allow-local-sources", "-o", "run", "-k", "3", "--workers", "4"]
    assert main(words) == 1
    said = json.loads((tmp_path / "run/report.json").read_text())
    wanted = planted.wanted | {f"tasks.jsonl, line {len(lines)} (no-task)": "unusable_row"}
    assert len(set(wanted.values())) >= 20
    assert sorted((one["task"], one["check"]) for one in said["findings"]) == sorted(wanted.items())
    assert all(one["severity"] == CHECKS[one["check"]].severity for one in said["findings"])
    places = {one["task"]: one["where"] for one in said["findings"]}
    assert places["in-packages"] == "/opt/site-packages/calc.py"
    assert places["other-clone"] == "/opt/clone/.git"
    assert places["judge"] == "/opt/judge.sh"
    passed = {one["instance_id"]: (one["reference"], one["empty"], one["runs"]) for one in said["results"]}
    assert passed["honest"] == passed["verifier"] == passed[smith.instance_id] == (3, 0, 3)
    assert "/opt/judge.sh: an agent can write it" in capsys.readouterr().out

    before, known = rows(tmp_path / "run"), kept(tmp_path / "run")
    assert main(words) == 1
    again = dict(rows(tmp_path / "run"))
    assert {name for name, body in before if again[name] != body} == {"unbuildable"}, "the others were not kept"
    assert kept(tmp_path / "run") == known
