"""Rows from every kind of file, and back into it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_tasks_jsonl import Row, row

from minisandbox.errors import InvalidValue, MissingExtra, TaskFileError
from minisandbox.tasks import Layout, TaskSet
from minisandbox.tasks.formats.columns import is_json
from minisandbox.tasks.reading import open_source

pyarrow = pytest.importorskip("pyarrow")
pyarrow_parquet = pytest.importorskip("pyarrow.parquet")


def datasets() -> Any:
    """Import the package, which takes two seconds, only where a test uses it."""
    return pytest.importorskip("datasets")


ROWS = [
    row(),
    row(instance_id="b", build={"python": None, "environment": {"B": "c"}}),
    row(instance_id="c", test={"command": "x"}),
]


def own(rows: list[Row]) -> list[Row]:
    """Rows whose objects differ, as JSON in strings: what a column of Parquet can hold."""
    return [{**one, "build": json.dumps(one["build"]), "test": json.dumps(one["test"])} for one in rows]


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def lines(rows: list[Row]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


def parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow_parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def refused(source: str | Path) -> TaskFileError:
    with pytest.raises(TaskFileError) as caught:
        list(open_source(source).rows)
    return caught.value


@pytest.mark.parametrize(
    ("name", "text", "layout"),
    [
        ("t.jsonl", lines(ROWS), Layout.JSONL),
        ("t.jsonl.gz", lines(ROWS), Layout.JSONL),
        ("t", lines(ROWS), Layout.JSONL),
        ("lines.json", lines(ROWS), Layout.JSONL),
        ("one.json", lines(ROWS[:1]), Layout.JSONL),
        ("t.json", json.dumps(ROWS), Layout.JSON),
        ("t.json.gz", json.dumps(ROWS, indent=2), Layout.JSON),
        ("pretty.json", json.dumps(ROWS[0], indent=2), Layout.JSON),
        ("ids.json", json.dumps({one["instance_id"]: one for one in ROWS}), Layout.JSON_BY_ID),
        ("pretty-ids.json", json.dumps({one["instance_id"]: one for one in ROWS}, indent=1), Layout.JSON_BY_ID),
    ],
)
def test_text_files(tmp_path: Path, name: str, text: str, layout: Layout) -> None:
    source = open_source(write(tmp_path / name, text))
    found = [one.values for one in source.rows]
    assert found == ROWS[: len(found)]
    assert len(found) in (1, len(ROWS))
    assert source.layout is layout
    assert source.name == name.partition(".")[0]


def test_ids_of_an_object_are_the_rows_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json", json.dumps({"x": {key: value for key, value in row().items() if key != "instance_id"}})
    )
    assert [task.instance_id for task in TaskSet.load(path)] == ["x"]


@pytest.mark.parametrize(
    ("name", "text", "line", "words"),
    [
        ("t.json", '[\n {"a": 1},\n {"a": }\n]', 3, "not JSON at column 8"),
        ("t.json", '[{"a": 1}', 1, "cut off"),
        ("t.json", "[1]", 1, "row 1 is not an object"),
        ("t.json", '{\n "a": 1\n}', 1, "the value of 'a' is not an object"),
        ("t.json", '{"a": {"instance_id": "b"}}', 1, "has the instance_id 'b'"),
        ("t.json", "7", None, "neither a list nor an object"),
        ("t.json", '{\n"a": {},\n"a": {}}', None, "'a' is there twice"),
        ("t.json", '[\n"\udcff"]', 2, "byte 2 is not UTF-8"),
        ("t.jsonl", "[]", 1, "not a JSON object"),
    ],
)
def test_text_files_that_are_wrong(tmp_path: Path, name: str, text: str, line: int | None, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    error = refused(path)
    assert error.line == line
    assert str(path) in error.what
    assert words in str(error)


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS).encode())[:-20])
    assert "damaged or was cut off" in str(refused(path))


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    rows = open_source(write(tmp_path / "t.jsonl", lines(ROWS[:1]) + "no JSON\n")).rows
    assert next(rows).values == ROWS[0]
    with pytest.raises(TaskFileError, match="line 2"):
        next(rows)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path) -> None:
    for name in ("t.parquet", "named-otherwise"):
        source = open_source(parquet(tmp_path / name, own(ROWS)))
        assert source.layout is Layout.PARQUET
        assert [one.values for one in source.rows] == own(ROWS)
    assert TaskSet.load(tmp_path / "t.parquet") == TaskSet.load(write(tmp_path / "t.jsonl", lines(ROWS)))


def test_keys_that_a_row_lacks_are_no_nulls_in_columns_of_objects(tmp_path: Path) -> None:
    rows = [row(), row(instance_id="b", build={**dict(row()["build"]), "environment": {"C": "d"}})]  # type: ignore[call-overload] # an object
    tasks = TaskSet.load(parquet(tmp_path / "t.parquet", rows))
    assert [dict(task.build.environment) for task in tasks] == [{"A": "b"}, {"C": "d"}]


MIXED: list[dict[str, Any]] = [
    {
        "instance_id": "a",
        "messages": [{"role": "user", "content": 'say "hi"\n'}, {"role": "tool", "content": [{"type": "text"}]}],
        "answer": "no",
        "nested": {"inner": {"value": "yes", "null": None}},
        "anything": None,
    },
    {
        "instance_id": "b",
        "messages": [{"role": "user", "content": "é"}],
        "answer": 2**40,
        "nested": {"inner": {"value": [1, None, {"x": 0.1}], "null": None}},
        "anything": {"key": None},
    },
]


def test_columns_of_mixed_types_are_read_as_datasets_reads_them(tmp_path: Path) -> None:
    package = datasets()
    kinds = {"messages": [{"role": package.Value("string"), "content": package.Json()}], "anything": package.Json()}
    features = package.Dataset.from_list(MIXED, on_mixed_types="use_json").features | kinds
    mixed = package.Dataset.from_list(MIXED, features=package.Features(features))
    mixed.to_parquet(str(tmp_path / "t.parquet"))
    mixed.save_to_disk(str(tmp_path / "folder"))
    assert list(mixed) == MIXED
    expected: list[dict[str, Any]] = [
        {**one, "nested": {"inner": {"value": one["nested"]["inner"]["value"]}}} for one in MIXED
    ]
    for source in (tmp_path / "t.parquet", tmp_path / "folder"):
        assert [one.values for one in open_source(source).rows] == expected


def test_whole_rows_of_mixed_types(tmp_path: Path) -> None:
    mixed = datasets().Dataset.from_list(MIXED, on_mixed_types="use_json")
    mixed.to_parquet(str(tmp_path / "t.parquet"))
    assert [one.values["messages"] for one in open_source(tmp_path / "t.parquet").rows] == [
        one["messages"] for one in mixed
    ]


def test_text_in_a_json_column_that_is_no_json_is_refused(tmp_path: Path) -> None:
    column = pyarrow.array(["{"], pyarrow.string()).cast(pyarrow.json_())
    pyarrow_parquet.write_table(pyarrow.table({"a": column}), tmp_path / "t.parquet")
    assert "Expecting property name" in (refused(tmp_path / "t.parquet").reason or "")


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", own(ROWS))
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read as Parquet" in refused(path).what
    (tmp_path / "empty.parquet").touch()
    assert "cannot be read as Parquet" in refused(tmp_path / "empty.parquet").what


def test_folders_of_datasets(tmp_path: Path) -> None:
    whole = datasets().Dataset.from_list(own(ROWS))
    whole.save_to_disk(str(tmp_path / "whole"))
    datasets().DatasetDict({"train": whole.select([0, 2]), "test": whole.select([1])}).save_to_disk(
        str(tmp_path / "parts")
    )
    datasets().DatasetDict({"only": whole}).save_to_disk(str(tmp_path / "only"))
    for name, ids in (
        ("whole", "o__n-1 b c"),
        ("only", "o__n-1 b c"),
        ("parts:train", "o__n-1 c"),
        ("parts:test", "b"),
    ):
        tasks = TaskSet.load(str(tmp_path / name))
        assert (tasks.layout, " ".join(tasks.ids)) == (Layout.DISK, ids)
    assert "has several parts: train, test" in refused(str(tmp_path / "parts")).what
    assert "has no part 'dev'" in refused(str(tmp_path / "parts:dev")).what
    (tmp_path / "whole" / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    assert "cannot be read as a folder of datasets" in refused(tmp_path / "whole").what


def test_directories_of_files_as_the_hub_has_them(tmp_path: Path) -> None:
    data = tmp_path / "SWE" / "data"
    data.mkdir(parents=True)
    parquet(data / "test-00000-of-00002.parquet", own(ROWS[:1]))
    parquet(data / "test-00001-of-00002.parquet", own(ROWS[1:2]))
    write(data / "train.jsonl", lines(ROWS[2:]))
    (tmp_path / "SWE" / "README.md").touch()
    assert TaskSet.load(tmp_path / "SWE").ids == ("o__n-1", "b", "c")
    assert TaskSet.load(str(tmp_path / "SWE:test")).ids == ("o__n-1", "b")
    assert TaskSet.load(str(data) + ":train").ids == ("c",)
    assert "has no task files of the part 'dev'" in refused(str(tmp_path / "SWE:dev")).what
    write(data / "train-again.jsonl", lines(ROWS[:1]))
    with pytest.raises(TaskFileError, match=r"is in .*test-00000-of-00002\.parquet, row 1 already"):
        TaskSet.load(tmp_path / "SWE")


@pytest.mark.slow
def test_datasets_of_the_hub_come_from_its_cache_without_network(tmp_path: Path) -> None:
    """The cache as an earlier download left it, and a hub that cannot be reached."""
    script = (
        "import sys, datasets, pathlib; cache = pathlib.Path(sys.argv[2]); "
        "datasets.load_dataset('json', data_files=sys.argv[1], split='train', cache_dir=str(cache)); "
        "(cache / 'json').rename(cache / 'o___json'); "
        "(made,) = (cache / 'o___json').glob('default-*'); made.rename(made.with_name('default'))"
    )
    path, cache = write(tmp_path / "t.jsonl", lines(own(ROWS))), tmp_path / "cache"
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings}
    subprocess.run([sys.executable, "-c", script, path, cache], check=True, env=environment, timeout=300)
    command = [sys.executable, "-m", "minisandbox", "tasks", "filter"]
    for name in ("hub:o/json", "hub:o/json:train", "o/json"):
        done = subprocess.run(
            [*command, name], capture_output=True, text=True, env=environment, timeout=300, check=True
        )
        assert done.stdout.split() == ["o__n-1", "b", "c"]
    done = subprocess.run(
        [*command, "o/other"], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == TaskFileError.exit_code
    assert "cannot be had from the Hugging Face hub" in done.stderr


def test_names_of_no_dataset_are_missing_files() -> None:
    for name in ("a/b.jsonl", "./a/b", "a/b/c", "nothing"):
        assert "cannot be read" in refused(name).what
    assert "names no dataset" in refused("hub:a").what


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "t.parquet", own(ROWS))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"'pyarrow' is not installed.*pip install 'swe-minisandbox\[data\]'"):
        open_source(path)


def test_reading_text_loads_no_heavy_package(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", lines(ROWS))
    script = (
        "import sys; from minisandbox.tasks import TaskSet; TaskSet.load(sys.argv[1]); "
        "print({'pyarrow', 'datasets', 'yaml', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


# --- back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["t.jsonl", "t.jsonl.gz", "t.json", "ids.json"])
def test_text_is_written_as_it_was_read(tmp_path: Path, kept: str) -> None:
    rows: list[Row] = [
        {**one, "created_at": None, "difficulty": value} for one, value in zip(ROWS, _VALUES, strict=True)
    ]
    whole: object = {str(one["instance_id"]): one for one in rows} if kept == "ids.json" else rows
    tasks = TaskSet.load(write(tmp_path / kept, lines(rows) if "jsonl" in kept else json.dumps(whole)))
    tasks.take(["c", "o__n-1"]).save(tmp_path / f"again-{kept}")
    again = TaskSet.load(tmp_path / f"again-{kept}")
    assert again.layout is tasks.layout
    assert [again.row(name) for name in again.ids] == [rows[2], rows[0]]


_VALUES = (1.5, "\ud800", "Ü")


def test_a_name_without_ending_gets_the_format_of_the_set(tmp_path: Path) -> None:
    for name in ("t.jsonl", "t.parquet"):
        (parquet if "parquet" in name else lambda path, rows: write(path, lines(rows)))(tmp_path / name, own(ROWS))
        tasks = TaskSet.load(tmp_path / name)
        tasks.save(tmp_path / "again")
        again = TaskSet.load(tmp_path / "again")
        assert (again, again.layout) == (tasks, tasks.layout)


def test_columns_are_written_with_their_types(tmp_path: Path) -> None:
    rows = [{**one, "created_at": None, "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": []} for one in own(ROWS)]
    texts = pyarrow.list_(pyarrow.string())
    kinds = {"FAIL_TO_PASS": texts, "PASS_TO_PASS": texts, "created_at": pyarrow.timestamp("us")}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in rows[0]])
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    pyarrow_parquet.write_table(table, tmp_path / "t.parquet")
    datasets().Dataset(table).save_to_disk(str(tmp_path / "disk"))
    for name in ("t.parquet", "disk"):
        tasks = TaskSet.load(tmp_path / name)
        tasks.select(["b"]).save(tmp_path / f"again-{name}")
        again = open_source(tmp_path / f"again-{name}")
        assert (again.layout, [one.values["instance_id"] for one in again.rows]) == (tasks.layout, ["b"])
        assert isinstance(again.schema, pyarrow.Schema)
        assert again.schema.equals(schema)


def test_columns_of_mixed_types_are_written_as_they_were(tmp_path: Path) -> None:
    rows = [{**one, "FAIL_TO_PASS": value} for one, value in zip(ROWS, (["a"], '["b"]', ["c", "d"]), strict=True)]
    mixed = datasets().Dataset.from_list(rows, on_mixed_types="use_json")
    kinds = {
        name for name, field in zip(mixed.column_names, mixed.features.arrow_schema, strict=True) if is_json(field.type)
    }
    assert kinds == {"build", "test", "FAIL_TO_PASS"}
    mixed.to_parquet(str(tmp_path / "t.parquet"))
    mixed.save_to_disk(str(tmp_path / "disk"))
    for name in ("t.parquet", "disk"):
        tasks = TaskSet.load(tmp_path / name)
        assert tasks == TaskSet.load(write(tmp_path / "t.jsonl", lines(rows)))
        tasks.select(["b", "c"]).save(tmp_path / f"again-{name}")
        again = open_source(tmp_path / f"again-{name}")
        assert [one.values for one in again.rows] == list(mixed)[1:]
        assert isinstance(again.schema, pyarrow.Schema)
        assert again.schema.equals(mixed.features.arrow_schema)


def test_the_ending_of_a_name_decides_the_format(tmp_path: Path) -> None:
    tasks = TaskSet.load("quickstart")
    for name, layout in (("t.json", Layout.JSON), ("t.parquet", Layout.PARQUET), ("t.jsonl.gz", Layout.JSONL)):
        tasks.save(tmp_path / name)
        again = TaskSet.load(tmp_path / name)
        assert again.layout is layout
        assert again == tasks
    tasks.select(["*"]).save(tmp_path / "t.jsonl")
    assert (tmp_path / "t.jsonl").read_text() == tasks.to_jsonl()


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    TaskSet.load(parquet(tmp_path / "t.parquet", own(ROWS)))
    datasets().Dataset.from_list(own(ROWS)).save_to_disk(str(tmp_path / "disk"))
    tasks = TaskSet.load(tmp_path / "disk")
    with pytest.raises(InvalidValue, match="is there already"):
        tasks.save(tmp_path / "disk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "t.parquet"]


def test_rows_that_go_into_no_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", lines([row(difficulty=1), row(instance_id="b", difficulty="x")]))
    with pytest.raises(InvalidValue, match="do not go into columns"):
        TaskSet.load(path).save(tmp_path / "t.parquet")
    assert [one.name for one in tmp_path.iterdir()] == ["t.jsonl"]
