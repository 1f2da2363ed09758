"""Read examples from our own files, published data sets, SWE-agent's, mini-swe-agent's and Harbor's files, lazily."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.tasks.reading import open_source
from minisandbox.trajectories.atif import has_atif, read_atif
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.mini_swe_agent import example_of_mini, is_mini
from minisandbox.trajectories.published import example_of_row
from minisandbox.trajectories.sweagent import has_traj_files, read_traj_files


@dataclass(frozen=True, slots=True)
class Reading:
    """How to interpret files of other programs.

    Attributes:
        style: the style of the responses; detected if empty.
        evaluation: the directory with SWE-agent's ``NAME/report.json``; next to the trajectories if None.
        numbered: whether SWE-agent's file names end in ``_N``, the number of the rollout.
    """

    style: str = ""
    evaluation: Path | None = None
    numbered: bool = False


def read_examples(path: Path, reading: Reading | None = None) -> Iterator[Example]:
    """Read examples lazily, one by one.

    Args:
        path: a file or folder of rows (JSON Lines, JSON, Parquet, ``datasets``), ours or published; a directory of
            SWE-agent's ``.traj`` or mini-swe-agent's ``.traj.json`` files; or an ATIF file, or the directory of a
            Harbor job or trial.
        reading: how to interpret files of other programs.

    Raises:
        TrajectoryError: a row or a file is not a trajectory.
        TaskFileError: the file cannot be read.
        MissingExtra: a required package is not installed.
    """
    reading = reading or Reading()
    if has_traj_files(path):
        yield from read_traj_files(path, evaluation=reading.evaluation, numbered=reading.numbered, style=reading.style)
        return
    if has_atif(path):
        yield from read_atif(path, style=reading.style)
        return
    source = open_source(path)
    try:
        for row in source.rows:
            convert = example_of_mini if is_mini(row.values) else example_of_row
            yield convert(row.values, location=row.place, source=source.name, style=reading.style)
    finally:  # a rejected row must not leave the file open
        if isinstance(source.rows, Generator):
            source.rows.close()
