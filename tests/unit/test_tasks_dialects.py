"""Rows in the layouts of public datasets: made up after the datasets' own descriptions, except where a test says so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.builds import container_build, python_build, reference_of
from tests.unit.test_tasks_jsonl import Row
from tests.unit.test_tasks_jsonl import row as own_row

from minisandbox.errors import InvalidValue, PatchError, TaskFileError
from minisandbox.spec import GitSource
from minisandbox.tasks import DIALECTS, Form, Task, TaskSet, task_from_row
from minisandbox.tasks.dialects import form_of
from minisandbox.tasks.dialects.skyrl import inner_row
from minisandbox.tasks.fields import Fields

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATCH = "--- a/src/x.py\n+++ b/src/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
TESTS = "--- /dev/null\n+++ b/tests/test_y.py\n@@ -0,0 +1 @@\n+def test_y(): pass\n"


def bench(**changes: object) -> Row:
    whole: Row = {
        "instance_id": "o__n-1",
        "repo": "o/n",
        "base_commit": COMMIT,
        "patch": PATCH,
        "test_patch": TESTS,
        "problem_statement": "It is wrong.",
        "hints_text": "",
        "created_at": "2023-03-04",
        "version": "2.3",
        "FAIL_TO_PASS": '["tests/test_y.py::test_y", "tests/test_y.py::test_y"]',
        "PASS_TO_PASS": '["tests/test_x.py::test_x", "tests/test_y.py::test_y"]',
    }
    return {**whole, **changes}


SMITH_ID = "o__n.0123abcd.func_pm_remove_cond__abc123"
SMITH = {
    "instance_id": SMITH_ID,
    "patch": PATCH,
    "FAIL_TO_PASS": ["tests/test_x.py::test_x"],
    "PASS_TO_PASS": [],
    "image_name": "jyangballin/swesmith.x86_64.o_1776_n.0123abcd",
    "repo": "swesmith/o__n.0123abcd",
    "problem_statement": "",
}
CUSTOM = {
    **SMITH,
    "instance_id": "mine-1",
    "repo": "o/n",
    "image_name": "mine",
    "base_commit": COMMIT,
    "python_version": "3.9",
}


def r2e(**changes: object) -> Row:
    def diff(path: str, old: str, new: str) -> dict[str, object]:
        return {"header": {"file": {"path": path}}, "old_file_content": old, "new_file_content": new}

    log = (
        "collected 3 items\n=========== short test summary info ===========\n"
        "{0} r2e_tests/test_1.py::TestA::test_a\n"
        "\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::test_b\n"
        "FAILED r2e_tests/test_1.py::test_c - AssertionError: no\n=== 3 ===\n"
    )
    execution = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": ["class TestA: ...\n"],
        "old_commit_res_stdout": log.format("FAILED"),
        "new_commit_res_stdout": log.format("PASSED"),
    }
    commit = {
        "file_diffs": [
            diff("src/x.py", "a\nb", "a\nc\n"),
            diff("tests/test_x.py", "", "x\n"),
            diff("new.py", "", "n\n"),
        ],
        "old_commit_hash": COMMIT,
        "new_commit_hash": "f" * 40,
    }
    expected = {"TestA.test_a": "PASSED", "\x1b[1mtest_b\x1b[0m": "PASSED", "test_c - AssertionError": "FAILED"}
    whole: Row = {
        "repo_name": "aiohttp",
        "docker_image": "namanjain12/aiohttp_final:" + "f" * 40,
        "commit_hash": "f" * 40,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps(execution),
        "expected_output_json": json.dumps(expected),
        "modified_files": ["src/x.py"],
        "prompt": "…",
        "problem_statement": "[ISSUE]\nIt is wrong.\n[/ISSUE]",
    }
    return {**whole, **changes}


REBENCH = bench(
    environment_setup_commit=COMMIT,
    docker_image="swerebench/sweb.eval.x86_64.o_1776_n-1",
    FAIL_TO_PASS=["tests/test_y.py::test_y"],
    PASS_TO_PASS=[],
    requirements="attrs==23.1.0\n# a comment\npytest==7.4.0\n-e .\n",
    install_config={
        "python": "3.9",
        "pre_install": ["apt-get install -y gcc", "touch x"],
        "install": "pip install -e .[dev]",
        "pip_packages": ["pytest"],
        "test_cmd": "pytest --no-header -rA",
        "log_parser": "parse_log_pytest",
        "env_vars": None,
    },
)


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (own_row(), "minisandbox"),
        (own_row(environment_setup_commit=COMMIT), "minisandbox"),
        ({"instance_id": "a", "build": {}}, "minisandbox"),
        (bench(environment_setup_commit=COMMIT, difficulty="<15 min fix"), "swebench"),
        (bench(eval_script="#!/bin/bash", log_parser="p", eval_type="pass_and_fail", image="swebench/x"), "swebench"),
        (bench(), "swegym"),
        (bench(environment_setup_commit=COMMIT, image_name="swebench/sweb.eval.x86_64.o_1776_n-1"), "swebench"),
        (SMITH, "swesmith"),
        ({**SMITH, "image_name": "swebench/swesmith.x86_64.o_1776_n.0123abcd", "instance_id": "a"}, "swesmith"),
        ({key: SMITH[key] for key in ("instance_id", "patch", "FAIL_TO_PASS", "PASS_TO_PASS")}, "swesmith"),
        (CUSTOM, "custom"),
        ({**SMITH, "test_cmd": "pytest"}, "custom"),
        (r2e(), "r2e"),
        (REBENCH, "swe-rebench"),
    ],
)
def test_columns_say_which_layout_it_is(row: Row, form: str) -> None:
    assert form_of(row) == form


def test_rows_of_no_known_layout_are_refused() -> None:
    with pytest.raises(TaskFileError, match=r"no known dataset.*it has question, answer.*--dataset.*swebench"):
        task_from_row({"question": "1", "answer": "2"})
    with pytest.raises(TaskFileError, match="it has none"):
        task_from_row({})


def test_a_layout_that_is_named_is_taken() -> None:
    assert task_from_row(bench(environment_setup_commit=COMMIT), form="swegym").instance_id == "o__n-1"
    with pytest.raises(InvalidValue, match="did you mean 'swegym'"):
        task_from_row(bench(), form="swe-gym")
    with pytest.raises(TaskFileError, match="'form' is missing"):
        task_from_row({"instance_id": "a", "repo": "o/n", "test": {}}, form="minisandbox")


def test_every_test_counts_once_and_what_fails_now_has_to_pass() -> None:
    task = task_from_row(bench())
    assert task.FAIL_TO_PASS == ("tests/test_y.py::test_y",)
    assert task.PASS_TO_PASS == ("tests/test_x.py::test_x",)


def test_our_own_layout_stays_strict() -> None:
    with pytest.raises(TaskFileError, match="did you mean 'patch'"):
        task_from_row(own_row(patchh=""))
    with pytest.raises(TaskFileError, match="'build' is a string that is not JSON"):
        task_from_row(own_row(build="{"))
    task_from_row(bench(anything="else"))


def test_swe_gym(tmp_path: Path) -> None:
    task = task_from_row(bench(repo="getmoto/moto", instance_id="getmoto__moto-1"), environment="pins")
    build = python_build(task)
    assert (task.form, build.python, build.install) == (Form.SWEBENCH, "3.12", ("make init",))
    assert build.source == GitSource("https://github.com/getmoto/moto", COMMIT)
    (tmp_path / "o__n" / "1").mkdir(parents=True)
    (tmp_path / "o__n" / "1" / "environment.yml").write_text(
        "dependencies:\n  - python=3.8.18=h1\n  - pip:\n    - attrs==23.1.0\n"
    )
    pinned = python_build(task_from_row(bench(), pins=tmp_path))
    assert (pinned.python, pinned.requirements, pinned.complete) == ("3.8", ("attrs==23.1.0",), True)


def test_swe_rebench() -> None:
    task = task_from_row(REBENCH)
    assert python_build(task).python == "3.9"
    assert python_build(task).requirements[-2:] == ("attrs==23.1.0", "pytest==7.4.0")
    assert python_build(task).install == ("touch x", "pip install -e .[dev]")
    assert python_build(task).system == ("gcc",)
    assert task.grader.command == "pytest --no-header -rA"
    assert task_from_row({**REBENCH, "install_config": json.dumps(REBENCH["install_config"])}) == task
    with pytest.raises(TaskFileError, match="for Python alone"):
        task_from_row({**REBENCH, "install_config": {"install": "npm ci", "test_cmd": "npm test"}})


def test_custom_rows_as_the_original_documents_them() -> None:
    commands: Row = {"install_cmds": ["pip install -e .", "true"], "test_cmd": "pytest -x"}
    task = task_from_row({**CUSTOM, **commands, "test_patch": TESTS})
    assert (task.form, task.patch, task.test_patch) == (Form.BUGGY, PATCH, TESTS)
    assert (task.reference.reverse, task.hidden_files, task.test_files) == (
        True,
        (),
        ("tests/test_x.py", "tests/test_y.py"),
    )
    assert (python_build(task).python, python_build(task).install) == ("3.9", ("pip install -e .", "true"))
    assert task.grader.command == "pytest -x"
    plain = task_from_row({key: value for key, value in CUSTOM.items() if key != "python_version"}, form="custom")
    assert (python_build(plain).python, python_build(plain).install) == ("3.11", ("python -m pip install -e .",))
    assert plain.grader.command == "python -m pytest"
    named = task_from_row({**CUSTOM, "custom_install_cmd": "make", "requirements": ["attrs==23.1.0"]})
    assert python_build(named).install == ("make",)
    assert python_build(named).requirements[-1] == "attrs==23.1.0"


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"patch": PATCH.replace("@@", "@")}, PatchError, "field 'patch'"),
        ({"install_cmds": 1}, TaskFileError, "'install_cmds' is neither a command nor a list"),
        ({"test_cmd": ["x", None]}, TaskFileError, "'test_cmd' is neither a command nor a list"),
        ({"requirements": {}}, TaskFileError, "'requirements' holds no requirements"),
        ({"base_commit": "main"}, TaskFileError, "'main', which is not a full commit.*with a clone of o/n"),
        ({"base_commit": ""}, TaskFileError, "'mine-1', which is not a full commit"),
        ({"FAIL_TO_PASS": []}, TaskFileError, "'FAIL_TO_PASS' is empty"),
    ],
)  # fmt: skip
def test_custom_rows_that_are_wrong(changes: Row, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        task_from_row({**CUSTOM, **changes})


def test_branches_and_parents_are_looked_up_in_mirrors(tmp_path: Path) -> None:
    repository = tmp_path / "o__n"
    repository.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        command = ["git", "-C", str(repository), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("commit", "-q", "--allow-empty", "-m", "second")
    git("branch", "mine-1")
    first, second = git("rev-parse", "HEAD^"), git("rev-parse", "HEAD")
    assert task_from_row({**CUSTOM, "base_commit": None}, repo_mirrors=tmp_path).base_commit == second
    commit = {**json.loads(str(r2e()["parsed_commit_content"])), "old_commit_hash": f"{second}^"}
    row = r2e(repo_name="o/n", commit_hash=second, parsed_commit_content=json.dumps(commit))
    assert task_from_row(row, repo_mirrors=tmp_path, environment="pins").base_commit == first
    with pytest.raises(TaskFileError, match=r"no repository in .* knows it"):
        task_from_row({**CUSTOM, "base_commit": "nothing"}, repo_mirrors=tmp_path)


def test_r2e() -> None:
    task = task_from_row(r2e())
    assert task.instance_id == "aiohttp__" + "f" * 40
    assert (task.repo, task.base_commit, task.problem_statement) == ("aio-libs/aiohttp", COMMIT, "It is wrong.\n")
    assert task.FAIL_TO_PASS == ("r2e_tests/test_1.py::TestA::test_a",)
    assert task.PASS_TO_PASS == ("r2e_tests/test_1.py::test_b",)
    assert "+++ b/src/x.py" in task.patch
    assert "-b\n\\ No newline at end of file\n+c\n" in task.patch
    assert "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n" in task.patch
    assert "tests/test_x.py" not in task.patch
    assert task.test_patch.endswith("--- /dev/null\n+++ b/r2e_tests/test_1.py\n@@ -0,0 +1 @@\n+class TestA: ...\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo_name": "unheard-of"}, "write it as OWNER/NAME"),
        ({"parsed_commit_content": "{"}, "'parsed_commit_content' is a string that is not JSON"),
        ({"execution_result_content": None}, "'execution_result_content' is null"),
        ({"execution_result_content": "{}"}, "none of the tests that should pass"),
        ({"parsed_commit_content": {"file_diffs": [{}], "old_commit_hash": COMMIT}}, "a change without a path"),
        ({"parsed_commit_content": {"old_commit_hash": COMMIT}}, "'patch' is empty"),
    ],
)  # fmt: skip
def test_r2e_rows_that_are_wrong(changes: Row, words: str) -> None:
    with pytest.raises(TaskFileError, match=words):
        task_from_row(r2e(**changes))


def test_tasks_of_other_layouts_are_rows_of_ours() -> None:
    for row in (bench(), CUSTOM, r2e(), REBENCH):
        task = task_from_row(row)
        assert task_from_row(task.to_row()) == task


def test_a_set_may_leave_out_what_is_no_task(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [bench(), bench(instance_id="b", FAIL_TO_PASS=[]), bench(instance_id="c", patch="no patch"), bench(), r2e()]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    refused: list[Exception] = []
    assert TaskSet.load(path, on_refused=refused.append).ids == ("o__n-1", "aiohttp__" + "f" * 40)
    assert [str(error).split(": ")[0].rpartition("/")[2] for error in refused] == [
        "t.jsonl, line 2 (b)", "t.jsonl, line 3 (c)", "t.jsonl, line 4",
    ]  # fmt: skip
    with pytest.raises(TaskFileError, match=r"line 2 \(b\): field 'FAIL_TO_PASS' is empty"):
        TaskSet.load(path)


def test_an_environment_that_cannot_be_read_costs_the_rows_that_name_it(tmp_path: Path) -> None:
    path, image = tmp_path / "t.jsonl", tmp_path / "pins/image"
    path.write_text("".join(json.dumps(one) + "\n" for one in (CUSTOM | {"image_name": "x/image"}, r2e())))
    image.mkdir(parents=True)
    (image / "environment.yml").write_text("dependencies: []\n")
    refused: list[Exception] = []
    tasks = TaskSet.load(path, pins=tmp_path / "pins", on_refused=refused.append)
    assert tasks.ids == ("aiohttp__" + "f" * 40,)
    assert [str(error).count("environment.yml names no python") for error in refused] == [1]


def test_names_of_layouts_are_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "task-files.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in DIALECTS)


def test_json_that_is_too_deep_is_told() -> None:
    deep = "[" * 100_000
    with pytest.raises(TaskFileError, match="not JSON"):
        Fields({"extra_info": deep}).table("extra_info")
    with pytest.raises(TaskFileError, match="not JSON"):
        inner_row({"instance": deep})


TESTBED = "/opt/miniconda3/envs/testbed/bin:"
PRO = {
    "instance_id": "instance_o__n-0123-v1", "repo": "o/n", "base_commit": COMMIT, "patch": PATCH, "test_patch": TESTS,
    "problem_statement": "It is wrong.", "requirements": "- It is right.", "interface": "No new interfaces",
    "repo_language": "python", "fail_to_pass": "['tests/test_y.py::test_y']", "pass_to_pass": "[]",
    "dockerhub_tag": "o.n-o__n-0123-v1",
}  # fmt: skip


def image_of(row: Row, **options: str) -> Task:
    return task_from_row(row, environment=options.get("environment", "image"))


@pytest.mark.parametrize(
    ("row", "reference", "workdir", "first_on_path"),
    [
        (bench(), "xingyaoww/sweb.eval.x86_64.o_s_n-1", "/testbed", TESTBED),
        (bench(image_name="mine/o:1"), "mine/o:1", "/testbed", TESTBED),
        (REBENCH, "swerebench/sweb.eval.x86_64.o_1776_n-1", "/testbed", TESTBED),
        (r2e(), "namanjain12/aiohttp_final:" + "f" * 40, "/testbed", "/testbed/.venv/bin:"),
        (PRO, "jefzda/sweap-images:o.n-o__n-0123-v1", "/app", ""),
        ({**CUSTOM, "image_name": "mine/n:1"}, "mine/n:1", "", ""),
    ],
)
def test_official_images(row: Row, reference: str, workdir: str, first_on_path: str) -> None:
    task = image_of(row)
    build = container_build(task)
    assert (reference_of(task), build.workdir) == (reference, workdir)
    assert dict(build.environment).get("PATH", "").startswith(first_on_path)


def test_auto_takes_exact_pins_where_there_are_any(tmp_path: Path) -> None:
    assert reference_of(task_from_row(bench()))
    (tmp_path / "o__n/1").mkdir(parents=True)
    (tmp_path / "o__n/1/environment.yml").write_text("dependencies:\n  - python=3.8.18=h1\n")
    assert python_build(task_from_row(bench(), pins=tmp_path)).complete
    assert reference_of(image_of(bench())) == reference_of(image_of(bench(), environment="auto"))
    assert reference_of(task_from_row(bench(), pins=tmp_path, environment="image"))
    assert python_build(task_from_row(REBENCH)).python == "3.9", "its requirements are exact"
    assert python_build(task_from_row({**CUSTOM, "image_name": "a/b"})).python == "3.9"


def test_an_image_that_nothing_names_and_an_unknown_environment() -> None:
    with pytest.raises(TaskFileError, match="no column names the image") as caught:
        task_from_row({**CUSTOM, "image_name": ""}, environment="image")
    assert caught.value.field == "image_name"
    with pytest.raises(InvalidValue, match="environment is 'docker'"):
        task_from_row(bench(), environment="docker")


def test_images_of_r2e_need_no_clone_and_lose_their_tests() -> None:
    parsed = json.loads(str(r2e()["parsed_commit_content"])) | {"old_commit_hash": "f" * 40 + "^"}
    task = task_from_row(r2e(parsed_commit_content=json.dumps(parsed)))
    assert "/r2e_tests" in container_build(task).remove
    assert not container_build(task).reset


def test_swe_bench_pro() -> None:
    task = task_from_row(PRO)
    assert task.FAIL_TO_PASS == ("tests/test_y.py::test_y",)
    assert "It is wrong." in task.problem_statement
    assert "- It is right." in task.problem_statement
    assert container_build(task).reset
    assert task_from_row(task.to_row()) == task
    with pytest.raises(TaskFileError, match="nothing but its image"):
        task_from_row(PRO, environment="pins")
    with pytest.raises(TaskFileError, match="'fail_to_pass' is no list"):
        task_from_row({**PRO, "fail_to_pass": "[x"})
