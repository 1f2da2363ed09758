"""Write rows as JSON Lines, Parquet, or folders of the ``datasets`` package, with one batch in memory at a time."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from minisandbox.errors import InvalidValue
from minisandbox.tasks.formats.columns import package
from minisandbox.tasks.formats.writing import written_whole
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.published import without_surrogates

Row = Mapping[str, object]
Kind = Literal["chat", "plain", "tokens"]
"""The kind of columns: full conversations, conversations with only role and text, or tokens."""

_BATCH = 64  # rows in memory; a trajectory has about 100 kB, and larger batches are not faster


def chat_row(example: Example) -> dict[str, object]:
    """Return an example in SWE-smith's published layout: its messages in OpenAI's format, and its origin.

    Invalid UTF-8 in patches becomes U+FFFD, and unpaired surrogates in messages become question marks, because readers
    of these rows reject both.

    Args:
        example: the example.
    """
    patch = "" if example.submission is None else example.submission.decode("utf-8", "replace")
    row: dict[str, object] = {
        "messages": [message.to_json() for message in example.messages],
        "instance_id": example.instance_id,
        "resolved": None if example.reward is None else example.reward >= 1,
        "model": example.model,
        "traj_id": example.traj_id,
        "patch": patch,
    }
    if example.tools:
        row["tools"] = json.dumps([dict(tool) for tool in example.tools])
    return without_surrogates(row)


def _chat_schema(arrow: Any, *, plain: bool = False) -> Any:
    """Return the Arrow schema of chat rows; messages of plain rows have only a role and text."""
    text = arrow.string()
    function = arrow.struct([("name", text), ("arguments", text)])
    call = arrow.struct([("id", text), ("type", text), ("function", function)])
    fields = [("role", text), ("content", text)]
    names = ["instance_id", "model", "traj_id", "patch"]
    if not plain:
        fields += [("tool_calls", arrow.list_(call)), ("tool_call_id", text), ("reasoning_content", text)]
        names.append("tools")
    messages = ("messages", arrow.list_(arrow.struct(fields)))
    return arrow.schema([messages, ("resolved", arrow.bool_()), *((name, text) for name in names)])


def _token_schema(arrow: Any) -> Any:
    """Return the Arrow schema of tokenised rows."""
    columns = [
        ("input_ids", arrow.list_(arrow.int32())),
        ("labels", arrow.list_(arrow.int64())),
        ("loss_mask", arrow.list_(arrow.int8())),
        ("logprobs", arrow.list_(arrow.float64())),
        ("reward", arrow.float64()),
        ("instance_id", arrow.string()),
        ("traj_id", arrow.string()),
        ("row", arrow.int32()),
        ("versions", arrow.list_(arrow.list_(arrow.int64()))),
    ]
    return arrow.schema(columns)


_SCHEMAS: Mapping[Kind, Callable[[Any], Any]] = {
    "chat": _chat_schema,
    "plain": partial(_chat_schema, plain=True),
    "tokens": _token_schema,
}


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Replace a file atomically with lines, which must end in newlines, and return the number of lines.

    Raises:
        OSError: the file cannot be written; its earlier content is unchanged.
    """
    count = 0
    with written_whole(path) as part, part.open("w", encoding="ascii") as file:
        for count, line in enumerate(lines, start=1):  # noqa: B007 - the total is returned
            file.write(line)
    return count


def write_rows(path: Path, rows: Iterable[Row], kind: Kind) -> int:
    """Write rows in the format that the path implies, and return the number of rows.

    Args:
        path: a ``.parquet`` file, a ``.jsonl`` or ``.json`` file for JSON Lines, or else a folder for the ``datasets``
            package. A file is replaced atomically; a folder must be missing or empty.
        rows: the rows.
        kind: the columns, for Parquet and folders.

    Raises:
        InvalidValue: the folder is not empty, or a value has the wrong type for its column.
        MissingExtra: a required package is not installed.
        OSError: the target cannot be written; its earlier content is unchanged.
    """
    if path.suffix in (".jsonl", ".json"):
        return write_lines(path, (json.dumps(row) + "\n" for row in rows))
    if path.suffix == ".parquet":
        with written_whole(path) as part:
            return _write_parquet(part, rows, kind, path)
    if path.is_dir() and any(path.iterdir()):
        raise InvalidValue(f"{path} is not empty", hint="name a new folder, or remove this one")
    return _write_folder(path, rows, kind)


def _write_parquet(part: Path, rows: Iterable[Row], kind: Kind, path: Path) -> int:
    arrow = package("pyarrow", f"write {path}")
    parquet = package("pyarrow.parquet", f"write {path}")
    types, count = _SCHEMAS[kind](arrow), 0
    try:
        with parquet.ParquetWriter(part, types) as writer:
            for batch in _batches(rows):
                writer.write_table(arrow.Table.from_pylist(batch, schema=types))
                count += len(batch)
    except arrow.ArrowException as error:
        raise InvalidValue(f"{path} is not written: the rows do not fit its columns", reason=str(error)) from error
    return count


def _write_folder(path: Path, rows: Iterable[Row], kind: Kind) -> int:
    """Write a folder of ``datasets`` from a temporary Parquet file, so that the rows need not fit in memory."""
    datasets = package("datasets", f"write a folder of the datasets package: {path}")
    shown = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    try:
        with written_whole(path) as part, tempfile.TemporaryDirectory(dir=path.parent, prefix=".rows-") as directory:
            file = Path(directory) / "rows.parquet"
            count = _write_parquet(file, rows, kind, path)
            loaded = datasets.Dataset.from_parquet(str(file), cache_dir=f"{directory}/cache")
            loaded.save_to_disk(str(part))
            del loaded
    finally:
        if shown:
            datasets.utils.enable_progress_bars()
    return count


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while batch := list(itertools.islice(remaining, _BATCH)):
        yield batch
