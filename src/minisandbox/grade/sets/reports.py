"""Reports in a run directory: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from minisandbox.store.rundir import write_whole

_LONGEST = 500


def write_reports(out: Path, report: Mapping[str, object], text: str) -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: the run directory.
        report: the one for programs.
        text: the one for people.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_whole(out / "report.json", json.dumps(report, indent=1).encode() + b"\n")
    write_whole(out / "report.md", text.encode("utf-8", "backslashreplace"))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> list[str]:
    """Return the lines of a table.

    Args:
        columns: its headings.
        rows: its cells; long ones are cut off.
        numbers: headings of columns that are aligned to the right.
    """
    rule = ["--:" if name in numbers else "---" for name in columns]
    return [_row(cells) for cells in (columns, rule, *rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split())[:_LONGEST] for cell in cells) + " |"
