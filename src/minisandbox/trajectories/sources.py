"""Read examples lazily from any supported source: this package, SWE-agent, mini-swe-agent, Harbor, published data."""

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
    """Options for reading the files of other programs.

    Attributes:
        style: the style of the responses; "" to detect it.
        evaluation: the directory with the files ``NAME/report.json`` for SWE-agent's trajectories; None if the reports
            are next to the trajectories.
        numbered: whether SWE-agent's file names end in ``_N``, the number of the rollout.
    """

    style: str = ""
    evaluation: Path | None = None
    numbered: bool = False


def read_examples(path: Path, reading: Reading | None = None) -> Iterator[Example]:
    """Read examples lazily, one by one.

    Args:
        path: a file or folder of rows (JSON Lines, JSON, Parquet, ``datasets``), written by this package or
            published; a directory of SWE-agent's ``.traj`` or mini-swe-agent's ``.traj.json`` files; an ATIF file; or
            the directory of a Harbor job or trial.
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
    finally:  # close the file even if a row is rejected
        if isinstance(source.rows, Generator):
            source.rows.close()
