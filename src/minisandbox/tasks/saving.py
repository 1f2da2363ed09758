"""Write rows to task files, unchanged or in another storage format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisandbox.errors import InvalidValue
from minisandbox.tasks.formats.columns import is_json, package
from minisandbox.tasks.formats.documents import Layout
from minisandbox.tasks.formats.writing import written_whole

Rows = Mapping[str, Mapping[str, object]]
"""The rows by ``instance_id``, in order."""


def write_rows(path: Path, rows: Rows, layout: Layout, *, schema: object = None) -> None:
    """Write rows to a file, which is replaced atomically, or to a folder, which must be missing or empty.

    Args:
        path: the file, which is gzipped if its name ends in ``.gz``; the folder for :attr:`Layout.DISK`.
        rows: the rows.
        layout: the storage format.
        schema: the original ``pyarrow.Schema`` of the rows, or None.

    Raises:
        InvalidValue: Parquet cannot store a column's values, or the folder already exists.
        MissingExtra: a required package is not installed.
        OSError: writing failed; the earlier file is unchanged.
    """
    with written_whole(path) as temporary_path:
        if layout is Layout.DISK:
            _write_folder(temporary_path, _table(list(rows.values()), schema, path))
        elif layout is Layout.PARQUET:
            table = _table(list(rows.values()), schema, path)
            package("pyarrow.parquet", f"write {path}").write_table(table, temporary_path)
        else:
            encoded = _WRITERS[layout](rows).encode()
            temporary_path.write_bytes(gzip.compress(encoded, mtime=0) if path.suffix == ".gz" else encoded)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON that UTF-8 can encode; values of other types (a date from Parquet) become strings."""
    encoded = json.dumps(value, ensure_ascii=False, indent=indent, default=_as_text)
    try:
        encoded.encode()
    except UnicodeEncodeError:  # a column that tasks do not use may have an unpaired surrogate
        return json.dumps(value, indent=indent, default=_as_text)
    return encoded


def _as_text(value: object) -> str:
    iso: Callable[[], str] | None = getattr(value, "isoformat", None)
    return str(value) if iso is None else iso()


_WRITERS: Mapping[Layout, Callable[[Rows], str]] = {
    Layout.JSONL: lambda rows: "".join(json_text(row) + "\n" for row in rows.values()),
    Layout.JSON: lambda rows: json_text(list(rows.values()), indent=1) + "\n",
    Layout.JSON_BY_ID: lambda rows: json_text(rows, indent=1) + "\n",
}


def _table(rows: Sequence[Mapping[str, object]], schema: Any, path: Path) -> Any:
    arrow = package("pyarrow", f"write {path}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        if schema is not None and set(names) <= set(schema.names):
            stored = arrow.schema([field.with_type(_stored(arrow, field.type)) for field in schema])
            values = [{name: _encoded(value, schema.field(name).type) for name, value in row.items()} for row in rows]
            return arrow.Table.from_pylist(values, schema=stored).cast(schema)
        return arrow.table({name: _column([row.get(name) for row in rows]) for name in names})
    except arrow.ArrowException as error:
        raise InvalidValue(
            f"these rows do not go into columns: {path} is not written",
            reason=str(error).splitlines()[0],
            hint="write JSON Lines: give the file a name that ends in .jsonl",
        ) from error


def _stored(arrow: Any, kind: Any) -> Any:
    """Replace JSON types by strings in an Arrow type, because Arrow cannot build JSON columns from Python values."""
    if is_json(kind):
        return kind.storage_type
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_type(_stored(arrow, field.type)) for field in kind])
    if arrow.types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(_stored(arrow, kind.value_type)))
    if arrow.types.is_large_list(kind):
        return arrow.large_list(kind.value_field.with_type(_stored(arrow, kind.value_type)))
    return kind


def _encoded(value: object, kind: Any) -> object:
    """Encode the JSON parts of a value as strings, as the column's original Arrow type requires."""
    if value is None:
        return None
    if is_json(kind):
        return json_text(value)
    if isinstance(value, Mapping) and hasattr(kind, "get_field_index"):
        fields = {name: kind.field(name).type for name in value if kind.get_field_index(name) >= 0}
        return {name: _encoded(value[name], field) for name, field in fields.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_encoded(item, kind.value_type) for item in value]
    return value


def _column(values: list[object]) -> list[object]:
    """Make the values of a column uniform: objects, and lists mixed with strings, become JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if dict not in kinds and not ({str, list} <= kinds):
        return values
    return [value if value is None or isinstance(value, str) else json_text(value) for value in values]


def _write_folder(folder: Path, table: Any) -> None:
    datasets = package("datasets", "write a folder of the datasets package")
    with _no_progress_bars(datasets):
        datasets.Dataset(table).save_to_disk(str(folder))


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    was_enabled = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if was_enabled:
            datasets.utils.enable_progress_bars()
