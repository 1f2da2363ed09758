"""Open sources of rows: files, folders, or the Hugging Face hub."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import TaskFileError
from minisandbox.tasks.formats.columns import read_folder, read_hub, read_parquet
from minisandbox.tasks.formats.documents import Layout, json_file
from minisandbox.tasks.formats.jsonl import Row, json_lines
from minisandbox.tasks.harbor import CONFIG, task_directories

ENDINGS: dict[str, Layout] = {
    ".jsonl": Layout.JSONL,
    ".json": Layout.JSON,
    ".parquet": Layout.PARQUET,
}
"""The storage formats, by file name suffix."""

_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SPLIT = re.compile(r"(.+):([A-Za-z][\w.-]*)")


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one source, and how to interpret them.

    Attributes:
        rows: the rows, read lazily.
        layout: the storage format.
        name: the name of the task set.
        base: the directory for relative paths in rows.
        places: the directories that the host paths in rows must be in, unless the caller trusts the rows.
        schema: the ``pyarrow.Schema`` of rows from columnar storage, else None.
    """

    rows: Iterator[Row]
    layout: Layout
    name: str
    base: Path
    schema: object = None
    places: tuple[Path, ...] = ()


def open_source(source: str | Path) -> Source:
    """Open a source of rows and detect its storage format.

    Args:
        source: one of these; ``:split`` after a folder, directory or dataset selects one split.

            - a file: JSON Lines, JSON or Parquet, gzipped or not
            - a folder that ``datasets.load_from_disk`` reads
            - a directory of task files
            - Harbor's task directories: ``harbor:DIR``
            - a dataset of the Hugging Face hub: ``hub:owner/name``, or ``owner/name`` if there is no such file

    Raises:
        TaskFileError: the source is missing or unreadable; iterating over the rows may raise it, too.
        MissingExtra: a required package is not installed; iterating over the rows may raise it, too.
    """
    address = str(source)
    if isinstance(source, str) and address.startswith("hub:"):
        return _hub(address.removeprefix("hub:"))
    if isinstance(source, str) and address.startswith("harbor:"):
        return _harbor(Path(address.removeprefix("harbor:")))
    path, split = Path(source), None
    if not path.exists() and (match := _SPLIT.fullmatch(address)) and Path(match[1]).is_dir():
        path, split = Path(match[1]), match[2]
    if path.is_dir():
        return _directory(path, split)
    if isinstance(source, str) and not path.exists() and _is_hub_name(address):
        return _hub(address)
    return _file(path)


def _is_hub_name(address: str) -> bool:
    name = address.partition(":")[0]
    return _HUB.fullmatch(name) is not None and layout_of_name(Path(name)) is None


def layout_of_name(path: Path) -> Layout | None:
    """Return the storage format for a file name, with or without ``.gz``, or None if the suffix is unknown."""
    return ENDINGS.get(Path(path.name.removesuffix(".gz")).suffix)


def _hub(address: str) -> Source:
    name, _, split = address.partition(":")
    if _HUB.fullmatch(name) is None:
        raise TaskFileError(f"'hub:{address}' names no dataset", hint="write hub:owner/name or hub:owner/name:split")
    rows, schema = read_hub(name, split or None)
    return Source(rows, Layout.DISK, name.rpartition("/")[2], Path(), schema)


def _harbor(path: Path) -> Source:
    rows = (Row({"harbor": str(directory)}, directory / CONFIG, 1) for directory in task_directories(path))
    return Source(rows, Layout.JSONL, path.resolve().name, Path(), places=(path,))


def _directory(path: Path, split: str | None) -> Source:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        rows, schema = read_folder(path, split)
        return Source(rows, Layout.DISK, path.name, path, schema, (path,))
    files = _files_of(path, split) or _files_of(path / "data", split)  # the Hugging Face hub keeps data files in data/
    if not files:
        suffix = "" if split is None else f" of the part {split!r}"
        raise TaskFileError(
            f"directory {path} has no task files{suffix}",
            path=path,
            hint=f"files of rows end in {', '.join(ENDINGS)}, or in one of these and .gz",
        )
    first_source = _file(files[0])
    return Source(_rows_of(first_source, files[1:]), first_source.layout, path.name, path, first_source.schema, (path,))


def _rows_of(first_source: Source, more_files: list[Path]) -> Iterator[Row]:
    yield from first_source.rows
    for file in more_files:
        yield from _file(file).rows


def _files_of(path: Path, split: str | None) -> list[Path]:
    """Return the task files sorted by name; a split's files begin with its name, as on the hub."""
    files = sorted(file for file in path.glob("[!.]*") if layout_of_name(file) is not None and file.is_file())
    return [file for file in files if split is None or re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file.name)]


def _file(path: Path) -> Source:
    """Open a file; its first bytes and its name determine the format."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(4).startswith(_GZIP)
            file.seek(0)
            unzipped = gzip.decompress(file.read()) if is_gzip else None
            head = file.read(4) if unzipped is None else unzipped[:4]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TaskFileError(
            f"{path} cannot be unpacked",
            path=path,
            reason=f"it is damaged or was cut off: {error}",
            hint="copy it again; `gzip --test` looks at it",
        ) from error
    except OSError as error:
        raise _cannot_read(path, error) from error
    named_layout, name = layout_of_name(path), path.name.removesuffix(".gz")
    stem = name if named_layout is None else name.removesuffix(Path(name).suffix)
    schema, layout = None, Layout.JSONL
    if head.startswith(_PARQUET) or named_layout is Layout.PARQUET:
        layout = Layout.PARQUET
        rows, schema = read_parquet(path, unzipped)
    elif named_layout is Layout.JSON:
        layout, rows = json_file(path.read_bytes() if unzipped is None else unzipped, path)
    else:
        rows = _lines(path, unzipped)
    return Source(rows, layout, stem, path.parent, schema, (path.parent,))


def _lines(path: Path, unzipped: bytes | None) -> Iterator[Row]:
    with path.open("rb") if unzipped is None else io.BytesIO(unzipped) as file:
        yield from json_lines(file, path)


def _cannot_read(path: Path, error: OSError) -> TaskFileError:
    missing = isinstance(error, FileNotFoundError)
    hint = "check the path; the bundled set is called 'quickstart'" if missing else None
    return TaskFileError(f"task file {path} cannot be read", path=path, reason=error.strerror or str(error), hint=hint)
