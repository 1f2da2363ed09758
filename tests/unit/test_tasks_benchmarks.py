"""SWE-bench and SWE-smith rows as tasks: by the benchmarks' own packages, which run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.builds import container_build, python_build, reference_of

from minisandbox.errors import HarnessError, TaskFileError
from minisandbox.spec import GitSource
from minisandbox.tasks import Form, Task, file_of, harness, node_id, task_from_row
from minisandbox.tasks.dialects.corrections import sort_commands
from minisandbox.tasks.dialects.environments import exported, listed, requirements_text, specified

pytestmark = pytest.mark.once  # the process of the benchmarks' packages takes seconds of CPU
DATA = Path(__file__).parent.parent / "data"


def _rows(name: str) -> dict[str, dict[str, object]]:
    lines = (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()
    return {row["instance_id"]: row for row in map(json.loads, lines)}


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    """An exported environment for every row."""
    text = (
        "dependencies:\n  - pip=21.2.2=py36h06a4308_0\n  - python=3.6.13=h12debd9_1\n  - pip:\n      - pytz==2024.2\n"
    )
    for row in _rows("swebench_rows"):
        repository, _, number = row.rpartition("-")
        folder = tmp_path / "pins" / repository / number
        folder.mkdir(parents=True)
        (folder / "environment.yml").write_text(text)
    return tmp_path / "pins"


@pytest.fixture
def bench(pins: Path) -> dict[str, Task]:
    return {name: task_from_row(row, pins=pins) for name, row in _rows("swebench_rows").items()}


def test_a_row_is_tested_as_swebench_says(bench: dict[str, Task]) -> None:
    commands = {name: task.grader.command for name, task in bench.items()}
    assert commands["pallets__flask-5014"] == "pytest -rA tests/test_blueprints.py"
    assert commands["django__django-11066"] == (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 contenttypes_tests.test_operations"
    )
    assert commands["sphinx-doc__sphinx-9711"].startswith("tox --current-env -epy39 -v -- ")
    assert commands["sympy__sympy-24443"].startswith("PYTHONWARNINGS=")
    parsers = [getattr(task.grader, "parser", "") for task in bench.values()]
    assert parsers == [f"swebench:{task.repo}" for task in bench.values()]
    assert {task.form for task in bench.values()} == {Form.SWEBENCH}


def test_a_row_with_pins_is_built_with_them_alone(bench: dict[str, Task]) -> None:
    build = python_build(bench["django__django-11066"])
    assert (build.python, build.requirements, build.complete) == ("3.6", ("pip==21.2.2", "pytz==2024.2"), True)
    assert build.install == ("python -m pip install -e .",)
    assert isinstance(build.source, GitSource)
    assert build.source.commit == bench["django__django-11066"].base_commit


def test_a_row_without_pins_is_built_as_its_specification_says() -> None:
    build = python_build(task_from_row(_rows("swebench_rows")["pylint-dev__astroid-1978"], environment="pins"))
    assert build.requirements == ("pip<24.1", "setuptools<70", "wheel")
    assert (build.overrides, build.complete, build.python) == (("pytest",), False, "3.9")


def test_requirements_of_the_repository_are_read_from_a_mirror(tmp_path: Path) -> None:
    row = {**_rows("swebench_rows")["pallets__flask-5014"]}
    with pytest.raises(TaskFileError, match="nothing says what") as caught:
        task_from_row(row, environment="pins")
    assert "requirements/dev.txt" in str(caught.value)
    assert "--repo-mirrors" in str(caught.value)
    repository = tmp_path / "mirrors" / "pallets__flask"
    (repository / "requirements").mkdir(parents=True)
    (repository / "requirements/dev.txt").write_text("-r tests.txt\nmypy==1.2.0  # for types\nWerkzeug==1\n-e .\n")
    (repository / "requirements/tests.txt").write_text("pytest==7.3.0\n")
    identity = {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@localhost"}
    identity |= {"GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@localhost"}
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True, env={**os.environ, **identity})
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    row["environment_setup_commit"] = done.stdout.strip()
    build = python_build(task_from_row(row, environment="pins", repo_mirrors=tmp_path / "mirrors"))
    assert {"pytest==7.3.0", "mypy==1.2.0", "pip<24.1"} <= set(build.requirements)
    assert "Werkzeug==2.3.7" in build.overrides  # and not what the repository asks for
    assert not any(line.startswith("Werkzeug") for line in build.requirements)


def test_a_version_that_swebench_does_not_know_is_named() -> None:
    row = {**_rows("swebench_rows")["pallets__flask-5014"], "version": "99.9"}
    with pytest.raises(TaskFileError, match=r"no specification for pallets/flask 99\.9") as caught:
        task_from_row(row, environment="pins")
    assert caught.value.field == "version"


def test_swesmith_rows_are_bugs_in_a_commit_of_their_profile(tmp_path: Path) -> None:
    rows = _rows("swesmith_rows")
    tasks = {name.partition(".")[0]: task_from_row(row, environment="pins") for name, row in rows.items()}
    similarity = tasks["luozhouyang__python-string-similarity"]
    assert similarity.form is Form.SWESMITH
    assert similarity.repo == "luozhouyang/python-string-similarity"
    assert similarity.grader.command == "pytest --disable-warnings --color=no --tb=no --verbose"
    assert getattr(similarity.grader, "parser", "") == "swesmith:luozhouyang__python-string-similarity.115acaac"
    assert python_build(similarity).python == "3.10"
    # mido's ids begin at /dev; the file that is hidden from the agent is the repository's
    assert tasks["mido__mido"].FAIL_TO_PASS[0].startswith("../dev/tests/")
    assert all(path.startswith("tests/") for path in tasks["mido__mido"].hidden_files)


def test_a_repository_that_swesmith_does_not_know_is_named() -> None:
    row = {**next(iter(_rows("swesmith_rows").values())), "instance_id": "nobody__nothing.12345678.lm_rewrite__abc"}
    with pytest.raises(TaskFileError, match="swesmith has no profile") as caught:
        task_from_row(row, environment="pins")
    assert caught.value.field == "instance_id"


def test_tasks_of_benchmarks_are_written_and_read_back(bench: dict[str, Task]) -> None:
    for task in bench.values():
        assert task_from_row(json.loads(json.dumps(task.to_row()))) == task


def test_the_benchmarks_parser_and_rules_judge_a_log() -> None:
    log = "PASSED tests/a.py::one\nFAILED tests/a.py::two - assert 0\nXFAIL tests/a.py::three\n"
    both = harness.judge("swebench:pallets/flask", log, ["tests/a.py::one"], ["tests/a.py::three"])
    assert both.resolved
    assert dict(both.statuses) == {"tests/a.py::one": "PASSED", "tests/a.py::three": "XFAIL"}
    failed = harness.judge("swebench:pallets/flask", log, ["tests/a.py::two"], ["tests/a.py::four"])
    assert (failed.resolved, failed.failed_fail_to_pass, failed.failed_pass_to_pass) == (
        False,
        ("tests/a.py::two",),
        ("tests/a.py::four",),
    )
    assert harness.judge("swebench:parse_log_django", "test_x (m.C) ... ok\n", ["test_x (m.C)"], []).resolved
    profile = "swesmith:mido__mido.a0158ff9"
    assert harness.judge(profile, "t.py::a PASSED [ 50%]\n", ["t.py::a"], []).resolved


def test_a_parser_that_hangs_is_ended_and_the_next_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.parse("swebench:pallets/flask", "PASSED a\n")  # a process that is new has more time
    monkeypatch.setattr(harness, "PARSE_TIMEOUT", 0.0)
    with pytest.raises(HarnessError, match="too long"):
        harness.judge("swebench:pallets/flask", "x" * 10_000_000, [], [])
    monkeypatch.undo()
    assert harness.parse("swebench:pallets/flask", "PASSED a\n") == {"a": "PASSED"}


def test_commands_lose_what_an_image_has_otherwise() -> None:
    sorted_ = sort_commands(
        [
            "apt-get update && apt-get install -y graphviz libenchant-2-dev",
            "sed -i 's/a;b/c/' tox.ini",
            "source /opt/miniconda3/bin/activate; conda activate testbed; pytest -x",
            "export LANG=en_US.UTF-8",
        ]
    )
    assert sorted_.remaining == ("sed -i 's/a;b/c/' tox.ini", "pytest -x")
    assert sorted_.system == ("graphviz", "libenchant-2-dev")


def test_pins_are_found_at_any_depth_and_conda_names_are_the_indexes(tmp_path: Path) -> None:
    folder = tmp_path / "swesmith" / "a__b.12345678"
    folder.mkdir(parents=True)
    (folder / "sweenv_a__b.12345678.yml").write_text(
        "dependencies:\n  - python=3.10.16=h1\n  - matplotlib-base=3.9.2=py310h1\n  - cdtime=3.1.4=py310h1\n"
        "  - backports.zoneinfo=0.2.1=py310h1\n"
    )
    found = exported(tmp_path, "a__b.12345678")
    assert found is not None
    assert (found.python, found.requirements) == ("3.10", ("matplotlib==3.9.2",))
    assert exported(tmp_path, "a__c.12345678") is None
    assert exported(None, "a__b.12345678") is None


def test_listings_of_specifications() -> None:
    assert listed("numpy=1.19 'pandas<2.0.0' pytest") == ["numpy==1.19.*", "pandas<2.0.0", "pytest"]
    assert requirements_text("a==1 # why\n-r b.txt\n--hash x\n", {"b.txt": "types-pkg_resources\n"}) == [
        "a==1",
        "types-setuptools",
    ]
    wanted = specified("3.9", ["setuptools==38", "Jinja2>=2"], ["jinja2==3"])
    assert wanted.requirements == ("pip<24.1", "wheel", "setuptools==38")


def test_what_pytest_prints_of_a_test_is_not_always_what_it_calls_it() -> None:
    assert node_id("../dev/tests/test_x.py::test_y") == "tests/test_x.py::test_y"
    assert node_id("tests/test_x.py::test_y[../z/]") == "tests/test_x.py::test_y[../z/]"
    assert file_of("../dev/tests/test_x.py::test_y") == "tests/test_x.py"
    assert file_of("test_x (tests.test_y.Case)") == ""


@pytest.mark.slow
def test_a_log_that_stalls_its_parser_holds_no_other_grading_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was one process under one lock: every grading waited until the stalled one had taken its minute."""
    monkeypatch.setattr(harness, "PATIENCE", 0.1)
    harness.parse("swebench:pallets/flask", "PASSED a\n")  # a process that is ready
    stalled, ended = threading.Event(), threading.Event()
    exchange = harness._Server.exchange

    def slow(server: harness._Server, request: bytes, timeout: float) -> bytes:
        if b"stall" in request:
            stalled.set()
            assert ended.wait(300)
        return exchange(server, request, timeout)

    monkeypatch.setattr(harness._Server, "exchange", slow)
    with ThreadPoolExecutor() as threads:
        late = threads.submit(harness.parse, "swebench:pallets/flask", "PASSED stall\n")
        assert stalled.wait(300)
        others = [threads.submit(harness.parse, "swebench:pallets/flask", f"PASSED t{n}\n") for n in range(3)]
        assert [one.result(300) for one in others] == [{f"t{n}": "PASSED"} for n in range(3)]
        assert not late.done()
        ended.set()
        assert late.result(300) == {"stall": "PASSED"}
    harness.close()


def test_no_more_processes_are_started_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PATIENCE", 0.0)
    monkeypatch.setattr(harness, "MOST", 3)
    at_once, most, lock = 0, 0, threading.Lock()

    def exchange(_: harness._Server, request: bytes, timeout: float) -> bytes:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return request

    monkeypatch.setattr(harness._Server, "exchange", exchange)
    pool = harness._Pool(None)
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda n: pool.exchange(b"%d" % n, 1.0), range(60))) == [b"%d" % n for n in range(60)]
    assert most == 3


def test_rows_name_the_images_of_their_benchmarks() -> None:
    django = {**_rows("swebench_rows")["django__django-11066"]}
    for row in (django, {**django, "image": "swebench/sweb.eval.x86_64.django_1776_django-11066"}):
        task = task_from_row(row)
        build = container_build(task)
        assert reference_of(task) == "swebench/sweb.eval.x86_64.django_1776_django-11066"
        assert not build.reset, "it has changes of its own, committed over the base commit"
    for name, row in _rows("swesmith_rows").items():
        task = task_from_row({**row, "image_name": None}, environment="image")
        profile = ".".join(name.split(".")[:2]).replace("__", "_1776_").lower()
        assert reference_of(task) == f"swebench/swesmith.x86_64.{profile}"


def test_the_process_of_the_packages_starts_without_their_large_dependencies() -> None:
    script = (
        "import sys; from minisandbox.tasks.harness import server; server._skip_imports()\n"
        "import swebench.harness.log_parsers, swebench.harness.test_spec.python, swesmith.profiles\n"
        "print({'modal', 'pandas', 'swebench.collect', 'datasets.arrow_dataset'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"
