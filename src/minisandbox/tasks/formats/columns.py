"""Read rows from columnar storage: Parquet, folders of the ``datasets`` package, and the Hugging Face hub.

``pyarrow`` and ``datasets`` belong to an optional extra. They are imported only when needed, because the import takes
longer than reading a file.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from minisandbox import certificates
from minisandbox.errors import MissingExtra, TaskFileError
from minisandbox.tasks.formats.jsonl import Row

_BATCH = 256  # rows


Table = tuple[Iterator[Row], object]
"""The rows, and their ``pyarrow.Schema``, which is needed to write them back unchanged."""


def read_parquet(path: Path, data: bytes | None = None) -> Table:
    """Read a Parquet file.

    Args:
        path: the file.
        data: the content of the file, if the file on disk is compressed.

    Raises:
        TaskFileError: the file is not Parquet, or is damaged.
        MissingExtra: ``pyarrow`` is not installed.
    """
    parquet = package("pyarrow.parquet", f"read {path}")
    with _arrow_faults(path):
        table = parquet.ParquetFile(path if data is None else io.BytesIO(data))
        return _rows(table.iter_batches(batch_size=_BATCH), path), table.schema_arrow


def read_folder(path: Path, split: str | None) -> Table:
    """Read a folder written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``.

    Args:
        path: the folder.
        split: the split to read, if there are several.

    Raises:
        TaskFileError: the folder cannot be read, or it has several splits and none is named.
        MissingExtra: ``datasets`` is not installed.
    """
    datasets = package("datasets", f"read {path}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the reader raises errors of many kinds for malformed files
        raise _unreadable(f"{path} cannot be read as a folder of datasets", path, error) from error
    return _table(_one_split(dataset, split, str(path)), path)


def read_hub(name: str, split: str | None) -> Table:
    """Read a dataset from the Hugging Face hub, or from the local cache.

    Args:
        name: ``owner/name``.
        split: the split to read, if there are several.

    Raises:
        TaskFileError: the dataset does not exist, the hub is unreachable, or there are several splits and none is
            named.
        MissingExtra: ``datasets`` is not installed.
    """
    datasets = package("datasets", f"read {name} of the hub")
    path = Path(f"hub:{name}")
    try:
        certificates.export()
        dataset = datasets.load_dataset(name)
    except Exception as error:  # the hub, the network and the cache each raise exceptions of their own
        raise TaskFileError(
            f"no file is called {name}, and the dataset of that name cannot be had from the Hugging Face hub",
            path=path,
            reason=_first_line(error),
            hint="check the name and the network (HF_HUB_OFFLINE=1 asks the cache at once); or download it elsewhere, "
            "and give the path of the copy",
        ) from error
    return _table(_one_split(dataset, split, f"hub:{name}"), path)


def package(name: str, purpose: str) -> ModuleType:
    """Import a package of the extra ``data``.

    Args:
        name: the module.
        purpose: the task that needs the package, for the error.

    Raises:
        MissingExtra: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"cannot {purpose}: the package {name.partition('.')[0]!r} is not installed",
            hint="pip install 'swe-minisandbox[data]'",
        ) from error


def _one_split(dataset: Any, split: str | None, source: str) -> Any:
    """Return the named split of a dataset, or its only split."""
    if not isinstance(dataset, dict):
        if split is None:
            return dataset
        raise TaskFileError(f"{source} has no parts", hint=f"leave out ':{split}'")
    if split is None and len(dataset) == 1:
        return next(iter(dataset.values()))
    if split is None or split not in dataset:
        problem = "has several parts" if split is None else f"has no part {split!r}"
        raise TaskFileError(
            f"{source} {problem}: {', '.join(dataset)}", hint=f"name one: {source}:{next(iter(dataset), 'test')}"
        )
    return dataset[split]


def _table(dataset: Any, path: Path) -> Table:
    return _rows(dataset.with_format("arrow").iter(batch_size=_BATCH), path), dataset.features.arrow_schema


def _rows(batches: Iterable[Any], path: Path) -> Iterator[Row]:
    row_number = 0
    with _arrow_faults(path):
        for batch in batches:
            types = {field.name: field.type for field in batch.schema}
            for columns in batch.to_pylist():
                row_number += 1
                yield Row({name: _decoded(value, types[name]) for name, value in columns.items()}, path, row_number)


def _decoded(value: object, kind: Any) -> object:
    """Convert a value as ``datasets`` does: JSON text is parsed, also inside lists and structs.

    Nulls in structs are dropped, because a struct column has the keys of all rows, and null where a row lacks a key.
    """
    if value is None:
        return None
    if is_json(kind):
        return json.loads(str(value))
    if isinstance(value, dict):
        items = ((name, _decoded(item, kind.field(name).type)) for name, item in value.items())
        return {name: item for name, item in items if item is not None}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_decoded(item, kind.value_type) for item in value]
    return value


def is_json(kind: object) -> bool:
    """Return whether an Arrow type is JSON text, which ``datasets`` 5 uses for columns of mixed types."""
    return getattr(kind, "extension_name", "") == "arrow.json"


@contextlib.contextmanager
def _arrow_faults(path: Path) -> Iterator[None]:
    arrow = package("pyarrow", f"read {path}")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, RecursionError) as error:
        raise _unreadable(f"{path} cannot be read as Parquet", path, error) from error


def _unreadable(problem: str, path: Path, error: Exception) -> TaskFileError:
    return TaskFileError(problem, path=path, reason=_first_line(error), hint="write or copy it again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
