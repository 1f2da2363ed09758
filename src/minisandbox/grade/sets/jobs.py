"""Make the jobs of a task set, and write reports about their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import MiniSandboxError
from minisandbox.runs import Job, JobRecord, write_whole
from minisandbox.store import canonical_json
from minisandbox.tasks import ScriptGrader, Task

if TYPE_CHECKING:
    from minisandbox.images import Image

_LONGEST = 500  # characters of a table cell


def task_job(
    task: Task,
    do: Callable[[Task, Image], JobRecord],
    failed: Callable[[Task, MiniSandboxError, bool], JobRecord],
    *depends: str,
) -> Job[Task]:
    """Return the job of one task.

    Args:
        task: the task.
        do: returns the result, given the task and its image.
        failed: turns an error into the result, as :class:`.Job` describes it.
        depends: further inputs that the result depends on, besides the task and its image.
    """
    name = task.instance_id
    return Job(name, partial(fingerprint, task, depends), partial(_do, task, do), partial(failed, task), task)


def _do(task: Task, do: Callable[[Task, Image], JobRecord], image: Image | None) -> JobRecord:
    assert image is not None
    return do(task, image)


def fingerprint(task: Task, inputs: tuple[str, ...], image_key: str) -> str:
    """Return a hash of a task's row, the files of its scripts, its image's key and further strings."""
    row = canonical_json(task.to_row())  # type: ignore[arg-type] # a row has only JSON values
    digest = hashlib.sha256(row)
    for component in (image_key, *inputs, *_script_files(task)):
        digest.update(b"\n" + hashlib.sha256(component.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()


def _script_files(task: Task) -> Iterator[str]:
    """Yield the path and the hash of each file of a task's scripts."""
    scripts = (task.grader if isinstance(task.grader, ScriptGrader) else None, task.solution)
    for folder in (script.files for script in scripts if script is not None and script.files is not None):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def write_reports(out: Path, report: Mapping[str, object], markdown: str) -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: the run directory.
        report: the machine-readable report.
        markdown: the same report in Markdown.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_json(out / "report.json", report)
    write_whole(out / "report.md", markdown.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: object, indent: int = 1) -> None:
    """Write a value as a JSON file."""
    write_whole(path, json.dumps(value, indent=indent).encode() + b"\n")


def write_log(path: Path, content: str | bytes) -> None:
    """Write a file; without content, remove the file of an earlier call."""
    if content:
        write_whole(path, content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    else:
        path.unlink(missing_ok=True)


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], number_columns: Collection[str] = ()
) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        columns: the headings.
        rows: the cells; long cells are cut off.
        number_columns: the headings of right-aligned columns.
    """
    rule = ["--:" if name in number_columns else "---" for name in columns]
    return [_row(cells) for cells in (columns, rule, *rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split())[:_LONGEST] for cell in cells) + " |"
