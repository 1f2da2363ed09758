"""Task files that are wrong: each error says where, why and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builds import python_build

from minisandbox.errors import MiniSandboxError, PatchError, TaskFileError
from minisandbox.spec import LocalSource
from minisandbox.tasks import LoadContext, Task, TaskSet
from minisandbox.tasks.formats.jsonl import json_lines
from minisandbox.tasks.loading import tasks_of

Row = dict[str, object]


def row(**changes: object) -> Row:
    whole: Row = {
        "instance_id": "o__n-1",
        "repo": "o/n",
        "base_commit": "abc",
        "version": "1.0",
        "form": "swebench",
        "problem_statement": "It is wrong — and not ASCII.",
        "patch": "--- a/src/x.py\n+++ b/src/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n",
        "test_patch": "",
        "FAIL_TO_PASS": ["tests/test_x.py::test_a"],
        "PASS_TO_PASS": [],
        "build": {
            "python": "3.11",
            "requirements": ["pytest==8.3.4"],
            "source": {"sdist": {"name": "n", "version": "1.0", "sha256": "0" * 64}},
            "install": [],
            "environment": {"A": "b"},
        },
        "test": {"command": "python -m pytest", "timeout": 300},
    }
    return {**whole, **changes}


def without(field: str) -> Row:
    return {key: value for key, value in row().items() if key != field}


def build(**changes: object) -> Row:
    table = row()["build"]
    assert isinstance(table, dict)
    return row(build={**table, **changes})


def tasks_from_bytes(data: bytes, path: Path) -> tuple[Task, ...]:
    """The tasks of a file with this content."""
    context = LoadContext(path.parent, places=(path.parent,))
    return tuple(task for task, _ in tasks_of(json_lines(data.split(b"\n"), path), path, context))


def text(*rows: object) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in rows).encode()


def refused(data: bytes) -> TaskFileError:
    with pytest.raises(TaskFileError) as caught:
        tasks_from_bytes(data, Path("t.jsonl"))
    assert caught.value.exit_code == 4
    assert "t.jsonl" in str(caught.value)
    assert caught.value.path == Path("t.jsonl")
    return caught.value


def test_rows_come_back_exactly() -> None:
    (task,) = tasks_from_bytes(text(row()), Path("t.jsonl"))
    assert task.to_row() == row()


def test_ids_may_be_json_in_a_string_as_in_the_public_datasets() -> None:
    data = text(row(FAIL_TO_PASS='["t.py::a", "t.py::b"]', PASS_TO_PASS="[]"))
    (task,) = tasks_from_bytes(data, Path("t.jsonl"))
    assert task.FAIL_TO_PASS == ("t.py::a", "t.py::b")


def test_columns_of_the_datasets_are_ignored() -> None:
    extras = {"created_at": "2024", "hints_text": "", "environment_setup_commit": "x", "difficulty": "easy"}
    (task,) = tasks_from_bytes(text(row(**extras)), Path("t.jsonl"))
    assert task.to_row() == row()


def test_defaults() -> None:
    data = text({**without("version"), "build": {}, "test": {"command": "pytest"}})
    (task,) = tasks_from_bytes(data, Path("t.jsonl"))
    assert (task.version, task.grader.timeout, python_build(task).source, python_build(task).python) == (
        "",
        300.0,
        None,
        None,
    )


def test_blank_lines_and_windows_line_ends_are_skipped() -> None:
    data = b"\n" + text(row()).replace(b"\n", b"\r\n") + b"  \n" + text(row(instance_id="b"))
    assert [task.instance_id for task in tasks_from_bytes(data, Path("t.jsonl"))] == ["o__n-1", "b"]


def test_relative_local_paths_start_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        text(build(source={"local": {"path": "../x"}}), {**build(source={"local": {"path": "/y"}}), "instance_id": "b"})
    )
    sources = [python_build(task).source for task in TaskSet.load(path, allow_local_sources=True)]
    assert sources == [LocalSource(tmp_path / "../x"), LocalSource(Path("/y"))]


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        pytest.param(b"", None, "is empty", id="empty"),
        pytest.param(b"\n \n\n", None, "is empty", id="blank"),
        pytest.param(b"\xef\xbb\xbf" + text(row()), 1, "byte order mark", id="bom"),
        pytest.param(text(row()) + b'{"a": "\xff"}\n', 2, "byte 8 is not UTF-8", id="utf8"),
        pytest.param(text(row()) + b'{"a": 1,}\n', 2, "column 9", id="not-json"),
        pytest.param(text(row())[:30], 1, "cut off", id="cut-off"),
        pytest.param(b"[\n {}\n]\n", 1, "pretty-printed", id="pretty"),
        pytest.param(b"[]\n", 1, "not a JSON object", id="list"),
        pytest.param(b'"x"\n', 1, "not a JSON object", id="string"),
        pytest.param(b'{"repo": "a", "repo": "b"}\n', 1, "'repo' is there twice", id="key-twice"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}\n", 1, "a number in it cannot be read", id="digits"),
        pytest.param(text(row()).replace(b"300", b"3" * 400), 1, "'test.timeout' is too large", id="huge-number"),
        pytest.param(b"[" * 100_000 + b"\n", 1, "nested too deeply", id="deep"),
        pytest.param(b"\x1f\x8b\x08", None, "compressed", id="gzip"),
        pytest.param(b"PAR1\x15", None, "Parquet", id="parquet"),
        pytest.param(text(row(), row(instance_id="b"), row()), 3, "on line 1 already", id="duplicate-id"),
    ],
)
def test_files_that_are_wrong(data: bytes, line: int | None, words: str) -> None:
    error = refused(data)
    assert error.line == line
    assert words in str(error)


@pytest.mark.parametrize(
    "field",
    ["instance_id", "repo", "form", "problem_statement", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "build", "test"],
)
def test_missing_fields(field: str) -> None:
    error = refused(text(row(instance_id="ok"), without(field)))
    assert (error.field, error.line) == (field, 2)
    assert "is missing" in str(error)


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        pytest.param(row(repo=1), "repo", "a number, not a string", id="number"),
        pytest.param(row(patch=None), "patch", "null, not a string", id="null"),
        pytest.param(row(patch=""), "patch", "empty", id="empty-patch"),
        pytest.param(row(form="swegym"), "form", "'swegym'", id="form"),
        pytest.param(row(FAIL_TO_PASS=[]), "FAIL_TO_PASS", "empty", id="no-f2p"),
        pytest.param(row(FAIL_TO_PASS="[]"), "FAIL_TO_PASS", "empty", id="no-f2p-string"),
        pytest.param(row(FAIL_TO_PASS={}), "FAIL_TO_PASS", "an object, not a list", id="f2p-object"),
        pytest.param(row(FAIL_TO_PASS="t.py::a"), "FAIL_TO_PASS", "not JSON", id="f2p-text"),
        pytest.param(row(FAIL_TO_PASS='"t.py::a"'), "FAIL_TO_PASS", "not a list", id="f2p-json-text"),
        pytest.param(row(FAIL_TO_PASS=["a", 1]), "FAIL_TO_PASS[1]", "a number", id="f2p-item"),
        pytest.param(row(PASS_TO_PASS=None), "PASS_TO_PASS", "null", id="p2p-null"),
        pytest.param(row(instance_id="a/b"), "instance_id", "'a/b'", id="id-slash"),
        pytest.param(row(instance_id=".a"), "instance_id", "'.a'", id="id-dot"),
        pytest.param(row(patchh="x"), "patchh", "did you mean 'patch'?", id="unknown"),
        pytest.param(row(problem_statement="\ud800"), "problem_statement", "surrogate", id="surrogate"),
        pytest.param(row(test={}), "test.command", "is missing", id="no-command"),
        pytest.param(row(test={"command": ""}), "test.command", "empty", id="empty-command"),
        pytest.param(row(test={"command": ["pytest"]}), "test.command", "a list", id="command-list"),
        pytest.param(row(test={"command": "x", "timeout": "1"}), "test.timeout", "a string", id="timeout-text"),
        pytest.param(row(test={"command": "x", "timeout": True}), "test.timeout", "true or false", id="timeout-bool"),
        pytest.param(row(test={"command": "x", "timeout": -1}), "test.timeout", "-1", id="timeout-negative"),
        pytest.param(row(test={"command": "x", "time": 1}), "test.time", "did you mean 'timeout'?", id="test-unknown"),
        pytest.param(row(build=[]), "build", "a list, not an object", id="build-list"),
        pytest.param(build(pyhton="3.11"), "build.pyhton", "did you mean 'python'?", id="build-unknown"),
        pytest.param(build(python=3.11), "build.python", "a number, not a string", id="python-number"),
        pytest.param(build(requirements="x"), "build.requirements", "a string, not a list", id="requirements"),
        pytest.param(build(environment={"A": 1}), "build.environment.A", "a number", id="environment"),
        pytest.param(build(environment={"A=B": "1"}), "build.environment", "'A=B'", id="environment-name"),
        pytest.param(row(build="[" * 100_000), "build", "not JSON", id="build-deep"),
        pytest.param(row(test="[" * 100_000), "test", "not JSON", id="test-deep"),
        pytest.param(row(FAIL_TO_PASS="[" * 100_000), "FAIL_TO_PASS", "not JSON", id="f2p-deep"),
        pytest.param(
            build(requirements_file="."), "build.requirements_file", "cannot read the pins", id="pins-directory"
        ),
        pytest.param(build(source={}), "build.source", "exactly one key", id="no-source"),
        pytest.param(build(source={"svn": {}}), "build.source.svn", "known are sdist", id="svn"),
        pytest.param(
            build(source={"sdist": {"name": "n"}}), "build.source.sdist.version", "missing", id="sdist-version"
        ),
        pytest.param(
            build(source={"sdist": {"name": "n", "version": "1", "sha256": "abc"}}),
            "build.source.sdist.sha256",
            "64 lower-case hex digits",
            id="sha256",
        ),
        pytest.param(
            build(source={"git": {"url": "u", "branch": "b"}}), "build.source.git.branch", "unknown", id="git"
        ),
    ],
)
def test_fields_that_are_wrong(bad: Row, field: str, words: str) -> None:
    error = refused(text(row(instance_id="ok"), bad))
    assert (error.field, error.line) == (field, 2)
    assert words in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch: patch.replace("src/x.py", "../x.py"), "leaves the repository"),
        (lambda patch: patch.replace("\n", "\r\n"), "CRLF"),
        (lambda patch: patch + "\0", "NUL"),
        (lambda patch: patch.replace("-b\n", ""), "hunk's header"),
    ],
)
@pytest.mark.parametrize("field", ["patch", "test_patch"])
def test_bad_patches_name_file_line_id_and_field(field: str, change: Callable[[str], str], words: str) -> None:
    bad = row(**{field: change(str(row()["patch"]))})
    with pytest.raises(PatchError, match=words) as caught:
        tasks_from_bytes(text(row(instance_id="ok"), bad), Path("t.jsonl"))
    assert caught.value.what.startswith(f"t.jsonl, line 2 (o__n-1): field '{field}', line ")
    assert caught.value.exit_code == 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"none\.jsonl cannot be read.*No such file"):
        TaskSet.load(tmp_path / "none.jsonl")
    with pytest.raises(TaskFileError, match="has no task files"):
        TaskSet.load(tmp_path)
    if os.geteuid() != 0:
        closed = tmp_path / "closed.jsonl"
        closed.touch(mode=0)
        with pytest.raises(TaskFileError, match="Permission denied"):
            TaskSet.load(closed)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(row())), value=_JSON)
def test_any_value_of_any_field_is_taken_or_refused_with_its_place(field: str, value: object) -> None:
    try:
        tasks_from_bytes(text(row(**{field: value})), Path("t.jsonl"))
    except MiniSandboxError as refusal:
        what = refusal.what
    else:
        return
    assert what.startswith("t.jsonl, line 1")


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    with pytest.raises(TaskFileError):
        tasks_from_bytes(data, Path("t.jsonl"))
