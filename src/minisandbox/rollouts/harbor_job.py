"""Export a run as a Harbor job, with ATIF trajectories and the results that ``harbor view`` displays."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from minisandbox.rollouts.examples import example_in
from minisandbox.rollouts.export import names_of
from minisandbox.rollouts.rundir import RunReader
from minisandbox.runs import write_whole
from minisandbox.trajectories import Trajectory
from minisandbox.trajectories.atif import FILE, PATCH, atif_of

_NAMESPACE = uuid.UUID("5d3c9c3e-3f0b-4b7e-9c57-0d7b1d1f3c55")
_ENVIRONMENT = {"import_path": "minisandbox.integrations.harbor:MiniSandboxEnvironment"}


def export_harbor(run: Path, out: Path, *, tokens: bool = True) -> Iterator[str]:
    """Write a run as the directory of a Harbor job, with one trial per rollout.

    Args:
        run: the run's directory.
        out: the job's directory; created if missing. Pass its parent directory to ``harbor view``.
        tokens: whether trajectories contain token ids and log-probabilities.

    Yields:
        The name of each written trial: the task's id, with ``_ATTEMPT`` if any task has several attempts.

    Raises:
        RunError: the database cannot be read.
        TrajectoryError: a trajectory cannot be read.
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with RunReader(run) as reader:
        names = names_of(list(reader.summaries()))
        for trajectory in reader.trajectories():
            name = names[trajectory.instance_id, trajectory.attempt]
            results.append(_write_trial(trajectory, run, out, name, tokens))
            yield name
    agents = {json.dumps(result["config"]["agent"]): result["config"]["agent"] for result in results}
    config = {"job_name": out.resolve().name, "jobs_dir": str(out.resolve().parent), "agents": list(agents.values())}
    _write(out / "config.json", {**config, "environment": _ENVIRONMENT})
    _write(out / "result.json", _job(out, results))


def _write_trial(trajectory: Trajectory, run: Path, out: Path, name: str, tokens: bool) -> dict[str, Any]:
    trial, graded = out / name, trajectory.grade
    for folder in ("agent", "verifier"):
        (trial / folder).mkdir(parents=True, exist_ok=True)
    body = atif_of(trajectory, example=example_in(trajectory, run.resolve().name), tokens=tokens)
    if body is not None:
        _write(trial / FILE, body)
    if trajectory.submission is not None:
        write_whole(trial / "agent" / PATCH, trajectory.submission)
    if graded is not None:
        write_whole(trial / "verifier/test-stdout.txt", graded.log.encode("utf-8", "replace"))
    result = _result(trajectory, out, name)
    _write(trial / "config.json", result["config"])
    _write(trial / "result.json", result)
    return result


def _result(trajectory: Trajectory, out: Path, name: str) -> dict[str, Any]:
    """Return the content of a trial's ``result.json``, which is Harbor's ``TrialResult``."""
    started = datetime.fromisoformat(trajectory.started)
    ended = (started + timedelta(seconds=trajectory.timings.total)).isoformat()
    agent = {"name": trajectory.agent, "model_name": trajectory.model or None}
    failure, reward = trajectory.failure, trajectory.reward
    return {
        "id": str(uuid.uuid5(_NAMESPACE, f"{out.resolve()}/{name}")),
        "task_name": trajectory.instance_id,
        "trial_name": name,
        "trial_uri": (out / name).resolve().as_uri(),
        "task_id": {"path": trajectory.instance_id},
        "task_checksum": trajectory.image_key,
        "config": {
            "task": {"path": trajectory.instance_id},
            "trial_name": name,
            "trials_dir": str(out.resolve()),
            "agent": agent,
            "environment": _ENVIRONMENT,
        },
        "agent_info": {
            "name": trajectory.agent,
            "version": trajectory.minisandbox,
            "model_info": {"name": trajectory.model} if trajectory.model else None,
        },
        "agent_result": {
            "n_input_tokens": trajectory.usage.prompt,
            "n_cache_tokens": trajectory.usage.cached,
            "n_output_tokens": trajectory.usage.completion,
            "cost_usd": trajectory.cost,
        },
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
        "exception_info": failure
        and {
            "exception_type": failure.kind,
            "exception_message": f"{failure.phase}: {failure.detail}",
            "exception_traceback": "",
            "occurred_at": ended,
        },
        "started_at": started.isoformat(),
        "finished_at": ended,
        **_phases(trajectory, started),
    }


def _phases(trajectory: Trajectory, started: datetime) -> dict[str, Any]:
    times = trajectory.timings
    intervals: dict[str, Any] = {}
    phases = (("environment_setup", times.sandbox_ready), ("agent_execution", times.agent), ("verifier", times.grade))
    for phase, seconds in phases:
        ended = started + timedelta(seconds=seconds)
        intervals[phase] = {"started_at": started.isoformat(), "finished_at": ended.isoformat()}
        started = ended
    return intervals


def _job(out: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the job's ``result.json``: Harbor's ``JobResult``, with statistics per agent and model."""
    evals: dict[str, dict[str, Any]] = {}
    for result in results:
        model = result["config"]["agent"]["model_name"]
        key = "__".join(filter(None, (result["agent_info"]["name"], model, "adhoc")))
        stats = evals.setdefault(
            key, {"n_trials": 0, "n_errors": 0, "reward_stats": {"reward": {}}, "exception_stats": {}}
        )
        if result["exception_info"]:
            stats["n_errors"] += 1
            kind = result["exception_info"]["exception_type"]
            stats["exception_stats"].setdefault(kind, []).append(result["trial_name"])
        if result["verifier_result"]:
            stats["n_trials"] += 1
            reward = str(result["verifier_result"]["rewards"]["reward"])
            stats["reward_stats"]["reward"].setdefault(reward, []).append(result["trial_name"])
    for stats in evals.values():
        total = sum(float(reward) * len(names) for reward, names in stats["reward_stats"]["reward"].items())
        stats["metrics"] = [{"mean": total / stats["n_trials"]}] if stats["n_trials"] else []
    now = datetime.now().astimezone().isoformat()
    errors = sum(stats["n_errors"] for stats in evals.values())
    return {
        "id": str(uuid.uuid5(_NAMESPACE, str(out.resolve()))),
        "started_at": min((result["started_at"] for result in results), default=now),
        "finished_at": max((result["finished_at"] for result in results), default=now),
        "n_total_trials": len(results),
        "stats": {"n_completed_trials": len(results), "n_errored_trials": errors, "evals": evals},
    }


def _write(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")
