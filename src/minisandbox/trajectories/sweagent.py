"""Read SWE-agent's ``.traj`` files, with the prediction, patch and evaluation report next to them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from minisandbox.errors import TrajectoryError
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.published import messages_of, reward_of
from minisandbox.trajectories.styles import style_of

_ENDING = ".traj"
_REPORT = "report.json"
_NUMBER = re.compile(r"(.+)_(\d+)")


def has_traj_files(path: Path) -> bool:
    """Return whether a path is a ``.traj`` file, or a directory with some in it or one level below."""
    if path.is_dir():
        return any(path.glob(f"*{_ENDING}")) or any(path.glob(f"*/*{_ENDING}"))
    return path.suffix == _ENDING


def read_traj_files(
    path: Path, *, evaluation: Path | None = None, numbered: bool = False, style: str = ""
) -> Iterator[Example]:
    """Read SWE-agent's files lazily, one by one.

    Args:
        path: a ``.traj`` file, or a run's directory.
        evaluation: an evaluation's directory, with ``NAME/report.json``; next to the ``.traj`` file if None.
        numbered: whether names end in ``_N``, the number of the rollout. If not, the prediction names the task, or
            else the whole name does, since ids may end in numbers themselves.
        style: the style of the answers; detected if empty.

    Raises:
        TrajectoryError: a file cannot be read, or is not a SWE-agent trajectory.
    """
    files = sorted(path.rglob(f"*{_ENDING}")) if path.is_dir() else [path]
    for file in files:
        yield _example(file, path, evaluation, numbered, style)


def _example(file: Path, run: Path, evaluation: Path | None, numbered: bool, style: str) -> Example:
    body = _object(file)
    name = file.name.removesuffix(_ENDING)
    info = body.get("info")
    info = info if isinstance(info, Mapping) else {}
    prediction = _object(file.with_suffix(".pred")) if file.with_suffix(".pred").is_file() else {}
    instance_id, attempt = _named(name, prediction.get("instance_id"), numbered)
    messages = messages_of(body.get("history"), str(file))
    status = info.get("exit_status")
    digest = hashlib.sha256(f"{run.resolve()}\0{file}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return Example(
        traj_id=f"{name}.{digest}",
        instance_id=instance_id,
        attempt=attempt,
        messages=messages,
        style=style or style_of(messages),
        submission=_patch(file, info, prediction),
        reward=_reward(file, name, instance_id, evaluation, info, prediction),
        exit_status=status if isinstance(status, str) else None,
        model=_model(body, prediction),
        agent="swe-agent",
        source=run.name,
    )


def _named(name: str, known: object, numbered: bool) -> tuple[str, int]:
    """Return the task's id and the number of the rollout."""
    match = _NUMBER.fullmatch(name)
    if match is not None and (numbered or known == match[1]):
        return match[1], int(match[2])
    return (known if isinstance(known, str) and known and not numbered else name), 0


def _patch(file: Path, info: Mapping[str, object], prediction: Mapping[str, object]) -> bytes | None:
    patch_file = file.with_suffix(".patch")
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
    info: Mapping[str, object],
    prediction: Mapping[str, object],
) -> float | None:
    """Prefer an evaluation's report, as SWE-smith's own collection does."""
    report = (file.parent if evaluation is None else evaluation / name) / _REPORT
    if report.is_file():
        body = _object(report)
        own = body.get(name, body.get(instance_id, body))
        return reward_of(own) if isinstance(own, Mapping) else None
    if evaluation is not None:
        return None
    return reward_of(info) if "reward" in info else reward_of(prediction)


def _model(body: Mapping[str, object], prediction: Mapping[str, object]) -> str:
    """Return the model's name from the configuration that SWE-agent keeps as JSON text, else the prediction's."""
    config: object = body.get("replay_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            config = None
    for key in ("agent", "model", "name"):
        config = config.get(key) if isinstance(config, Mapping) else None
    name = config or prediction.get("model_name_or_path")
    return name if isinstance(name, str) else ""


def _object(file: Path) -> Mapping[str, object]:
    try:
        value = json.loads(file.read_bytes().decode("utf-8", "replace"))
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read", reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{file} is not JSON", reason=f"it may be damaged: {error}") from error
    if not isinstance(value, dict):
        raise TrajectoryError(f"{file} is not a JSON object", reason="it is not a file of SWE-agent's")
    return value
