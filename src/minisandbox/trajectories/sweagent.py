"""Read trajectory files of SWE-agent (``.traj``) and mini-swe-agent (``.traj.json``), with the files next to them.

SWE-agent writes a prediction and a patch next to each trajectory, and an evaluation adds a report.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from minisandbox.errors import TrajectoryError
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.mini_swe_agent import example_of_mini, is_mini
from minisandbox.trajectories.published import Json, as_object, as_text, messages_of, read_json, reward_of
from minisandbox.trajectories.styles import style_of

_ENDINGS = (".traj", ".traj.json")
_REPORT = "report.json"
_NUMBER = re.compile(r"(.+)_(\d+)")


def has_traj_files(path: Path) -> bool:
    """Return whether a path is a trajectory file, or a directory that contains one, at most one level down."""
    if path.is_dir():
        return any(next(path.glob(f"{level}*{end}"), None) for level in ("", "*/") for end in _ENDINGS)
    return path.name.endswith(_ENDINGS)


def read_traj_files(
    path: Path, *, evaluation: Path | None = None, numbered: bool = False, style: str = ""
) -> Iterator[Example]:
    """Read trajectory files lazily, one by one.

    Args:
        path: a file, or a run's directory.
        evaluation: the directory of an evaluation, with ``NAME/report.json``; None if the report is next to the file.
        numbered: whether file names end in ``_N``, the number of the rollout. If False, the task's id comes from the
            prediction or trajectory, or else is the file name, because ids may end in numbers too.
        style: the style of the responses; "" to detect it.

    Raises:
        TrajectoryError: a file cannot be read, or is not a trajectory.
    """
    files = sorted(file for end in _ENDINGS for file in path.rglob(f"*{end}")) if path.is_dir() else [path]
    for file in files:
        yield _example(file, path, evaluation, numbered, style)


def _example(file: Path, run: Path, evaluation: Path | None, numbered: bool, style: str) -> Example:
    body = _object(file)
    name = file.name.removesuffix(".json").removesuffix(".traj")
    info = as_object(body.get("info"))
    prediction_file = file.with_name(f"{name}.pred")
    prediction = _object(prediction_file) if prediction_file.is_file() else {}
    instance_id, attempt = _named(name, prediction.get("instance_id") or body.get("instance_id"), numbered)
    digest = hashlib.sha256(f"{run.resolve()}\0{file}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    if is_mini(body):
        example = example_of_mini(body, location=str(file), source=run.name, style=style)
    else:
        example = _example_of_swe_agent(body, prediction, location=str(file), source=run.name, style=style)
    return replace(
        example,
        traj_id=f"{name}.{digest}",
        instance_id=instance_id,
        attempt=attempt,
        submission=_patch(file.with_name(f"{name}.patch"), info, prediction),
        reward=_reward(file, name, instance_id, evaluation, info, prediction),
    )


def _example_of_swe_agent(body: Json, prediction: Json, *, location: str, source: str, style: str) -> Example:
    messages = messages_of(body.get("history"), location)
    status = as_object(body.get("info")).get("exit_status")
    return Example(
        traj_id=location,
        instance_id=location,
        messages=messages,
        style=style or style_of(messages),
        exit_status=status if isinstance(status, str) else None,
        model=_model(body, prediction),
        agent="swe-agent",
        source=source,
    )


def _named(name: str, recorded_id: object, numbered: bool) -> tuple[str, int]:
    """Return the task's id and the number of the rollout."""
    match = _NUMBER.fullmatch(name)
    if match is not None and (numbered or recorded_id == match[1]):
        return match[1], int(match[2])
    return (recorded_id if isinstance(recorded_id, str) and recorded_id and not numbered else name), 0


def _patch(patch_file: Path, info: Json, prediction: Json) -> bytes | None:
    if patch_file.is_file():
        return patch_file.read_bytes()
    for value in (info.get("submission"), prediction.get("model_patch")):
        if isinstance(value, str):
            return value.encode("utf-8", "surrogateescape")
    return None


def _reward(
    file: Path,
    name: str,
    instance_id: str,
    evaluation: Path | None,
    info: Json,
    prediction: Json,
) -> float | None:
    """Return the reward from the report, as SWE-smith does. Without a report, use the trajectory or prediction."""
    report = (file.parent if evaluation is None else evaluation / name) / _REPORT
    if report.is_file():
        body = _object(report)
        result = body.get(name, body.get(instance_id, body))
        return reward_of(result) if isinstance(result, Mapping) else None
    if evaluation is not None:
        return None
    return reward_of(info) if "reward" in info else reward_of(prediction)


def _model(body: Json, prediction: Json) -> str:
    """Return the model's name from SWE-agent's configuration, a JSON string, or else from the prediction."""
    config: object = body.get("replay_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            config = None
    for key in ("agent", "model", "name"):
        config = as_object(config).get(key)
    return as_text(config or prediction.get("model_name_or_path"))


def _object(file: Path) -> Json:
    value = read_json(file)
    if not isinstance(value, dict):
        raise TrajectoryError(f"{file} is not a JSON object", reason="it is not a trajectory")
    return value
