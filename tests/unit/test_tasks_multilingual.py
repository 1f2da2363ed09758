"""Rows of SWE-bench in other languages: built from their images, judged by the benchmark's commands and parsers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.builds import container_build, reference_of
from tests.unit.test_tasks_dialects import bench

from minisandbox.errors import TaskFileError
from minisandbox.tasks import LogGrader, TaskSet, task_from_row
from minisandbox.tasks.dialects.swebench import tests_of as command_of
from minisandbox.tasks.loading import Refused

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
TESTS = PATCH.format("path_test.go")
GO = bench(
    repo="gin-gonic/gin", instance_id="gin-gonic__gin-4003", version="4003", patch=PATCH.format("path.go"),
    test_patch=TESTS, FAIL_TO_PASS=["TestPathParam"], PASS_TO_PASS=[],
)  # fmt: skip
SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
export GOFLAGS=-mod=mod
git checkout abc path_test.go
git apply --verbose --reject - <<'EOF_114329324912'
{TESTS}
cd /never
EOF_114329324912
go build ./...
: '>>>>> Start Test Output'
go test -v . -run "TestPathParam"
: '>>>>> End Test Output'
git checkout abc path_test.go
"""


@pytest.mark.once  # it asks the benchmarks' packages
def test_a_row_of_the_hub() -> None:
    for row in (GO, {**GO, "environment_setup_commit": "0" * 40}, {**GO, "language": "Go"}):
        task = task_from_row(row)
        assert reference_of(task) == "swebench/sweb.eval.x86_64.gin-gonic_1776_gin-4003"
        assert container_build(task).environment == ()
        command = 'set -uxo pipefail\ngo test . -v -run "TestMethodNotAllowedNoRoute"'
        assert task.grader == LogGrader(command, "swebench:gin-gonic/gin", timeout=1800.0)
        assert task.test_files == ("path_test.go",)


def test_a_row_of_swebench_5() -> None:
    row = {**GO, "image": "o/i:1", "eval_script": SCRIPT, "log_parser": "parse_log_gotest", "eval_type": "fail_only"}
    task = task_from_row(row)
    command = 'set -uxo pipefail\nexport GOFLAGS=-mod=mod\ngo build ./...\ngo test -v . -run "TestPathParam"'
    assert task.grader == LogGrader(command, "swebench5:parse_log_gotest", "fail_only", timeout=1800.0)
    assert reference_of(task) == "o/i:1"
    assert task_from_row(task.to_row()) == task


def test_a_script_without_markers_is_taken_whole() -> None:
    assert command_of("cd /testbed\nmake\n\nmake check\n") == "make\nmake check"


def test_what_cannot_be_had_is_named() -> None:
    with pytest.raises(TaskFileError) as caught:
        task_from_row(GO, environment="pins")
    assert (caught.value.field, "--environment image" in str(caught.value.hint)) == ("repo", True)
    with pytest.raises(TaskFileError) as caught:
        task_from_row({**GO, "eval_script": SCRIPT, "log_parser": "parse_log_gotest", "eval_type": "most"})
    assert caught.value.field == "test.rule"


@pytest.mark.once
def test_a_version_that_swebench_does_not_know(tmp_path: Path) -> None:
    rows = [{**GO, "version": "1.2.3"}, GO]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "instance_id": f"g__g-{n}"}) + "\n" for n, row in enumerate(rows)))
    left_out: list[Refused] = []
    assert TaskSet.load(file, on_refused=left_out.append).ids == ("g__g-1",)
    assert "swebench has no specification for gin-gonic/gin 1.2.3" in str(left_out[0])
