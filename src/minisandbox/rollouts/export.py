"""Export a run to standard files: ``preds.json``, ``run_batch_exit_statuses.yaml``, and SWE-agent's layout."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from minisandbox.rollouts.rundir import RunReader
from minisandbox.rollouts.summary import Summary
from minisandbox.rollouts.sweagent import prediction, report, trajectory_file
from minisandbox.runs import write_whole
from minisandbox.tasks.statuses import STATUSES_NAME, write_statuses

PREDICTIONS = "preds.json"
"""The file name of predictions."""
_LONGEST_NAME = 180  # bytes; leaves room for suffixes


def export_overview(run: Path, out: Path) -> None:
    """Write a run's predictions and exit statuses.

    ``preds.json`` contains each task's first attempt, ``preds.1.json`` the second, and so on, because evaluators accept
    only one prediction per task.

    Args:
        run: the run's directory.
        out: an existing directory to write to.

    Raises:
        RunError: the database cannot be read.
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    with RunReader(run) as reader:
        summaries = list(reader.summaries())
        names = names_of(summaries)
        models = {(one.instance_id, one.attempt): one.model or one.agent for one in summaries}
        tables: dict[int, dict[str, Mapping[str, object]]] = {0: {}} if summaries else {}
        for instance_id, attempt, patch in reader.patches():
            model = models[instance_id, attempt]
            tables.setdefault(attempt, {})[instance_id] = prediction(instance_id, model, patch)
    for attempt, table in tables.items():
        name = PREDICTIONS if attempt == 0 else f"preds.{attempt}.json"
        write_whole(out / name, json.dumps(table, indent=2).encode() + b"\n")
    write_statuses(out / STATUSES_NAME, {names[_key(one)]: one.exit_status for one in summaries})


def export_sweagent(run: Path, out: Path) -> Iterator[str]:
    """Write a run in SWE-agent's layout: a directory per rollout with ``.traj``, ``.pred`` and ``.patch`` files.

    Each directory also contains ``report.json``, from which SWE-smith's collection reads whether the task is resolved.

    Args:
        run: the run's directory.
        out: the directory to write to; created if missing.

    Yields:
        The name of each written rollout: the task's id, with ``_ATTEMPT`` if any task has several attempts.

    Raises:
        RunError: the database cannot be read.
        TrajectoryError: a trajectory cannot be read.
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    export_overview(run, out)
    with RunReader(run) as reader:
        names = names_of(list(reader.summaries()))
        for trajectory in reader.trajectories():
            name = names[trajectory.instance_id, trajectory.attempt]
            directory = out / name
            directory.mkdir(exist_ok=True)
            patch = trajectory.submission
            write_whole(directory / f"{name}.traj", _json(trajectory_file(trajectory)))
            write_whole(
                directory / f"{name}.pred",
                _json(prediction(trajectory.instance_id, trajectory.model or trajectory.agent, patch)),
            )
            write_whole(directory / "report.json", _json({trajectory.instance_id: report(trajectory)}))
            if patch:
                write_whole(directory / f"{name}.patch", patch)
            yield name


def names_of(summaries: list[Summary]) -> dict[tuple[str, int], str]:
    """Return the file names of rollouts: the task's id, with ``_ATTEMPT`` if any task has several attempts."""
    has_attempts = any(summary.attempt for summary in summaries)
    return {
        _key(summary): _file_name(f"{summary.instance_id}_{summary.attempt}" if has_attempts else summary.instance_id)
        for summary in summaries
    }


def _file_name(name: str) -> str:
    """Return a safe file name for a rollout, because a database from another machine may contain any task id."""
    plain = re.sub(r"[^\w.@+=%,-]", "_", name).lstrip(".-")
    if plain == name and len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{plain[:40]}-{digest}"


def _key(summary: Summary) -> tuple[str, int]:
    return summary.instance_id, summary.attempt


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
