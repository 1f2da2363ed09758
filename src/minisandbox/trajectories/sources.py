"""Where examples come from: our own files, published sets, SWE-agent's files. One at a time is in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.tasks.reading import open_source
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.published import example_of_row
from minisandbox.trajectories.sweagent import has_traj_files, read_traj_files


@dataclass(frozen=True, slots=True)
class Reading:
    """How files of others are understood.

    Attributes:
        style: the style of the answers; empty: what they look like.
        evaluation: of SWE-agent's files: where ``NAME/report.json`` lies; None: beside them.
        numbered: of SWE-agent's files: names end in ``_N``, the number of the rollout.
    """

    style: str = ""
    evaluation: Path | None = None
    numbered: bool = False


def read_examples(path: Path, reading: Reading | None = None) -> Iterator[Example]:
    """Read examples, one by one as they are asked for.

    Args:
        path: a file or folder of rows (JSON Lines, JSON, Parquet, ``datasets``), of ours or of a published set; or a
            directory of SWE-agent's ``.traj`` files.
        reading: how files of others are understood.

    Raises:
        TrajectoryError: a row or a file is no trajectory.
        TaskFileError: the file cannot be read.
        MissingExtra: a package that it takes is not installed.
    """
    reading = reading or Reading()
    if has_traj_files(path):
        yield from read_traj_files(path, evaluation=reading.evaluation, numbered=reading.numbered, style=reading.style)
        return
    source = open_source(path)
    try:
        for row in source.rows:
            yield example_of_row(row.values, place=row.place, source=source.name, style=reading.style)
    finally:  # a row that is refused must not leave the file open
        if isinstance(source.rows, Generator):
            source.rows.close()
