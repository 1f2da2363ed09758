"""Read predictions, i.e. the patches to evaluate, in the formats of common agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import PredictionError, TaskFileError
from minisandbox.tasks import Task
from minisandbox.tasks.formats.jsonl import json_lines, json_value

GOLD = "gold"
"""Selects the tasks' references instead of a file of predictions, as in swebench."""
EMPTY = "empty"
"""Selects an empty patch for each task instead of a file; unlike an empty prediction, it is graded."""
NAMELESS = "unknown"
"""The model's name in a prediction that names no model."""

_NAMES = ("preds.json", "all_preds.jsonl")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's prediction for one task.

    Attributes:
        instance_id: the task's id.
        model: the name of the model (``model_name_or_path``).
        patch: the patch (``model_patch``); may be empty.
        place: the file and the position in it.
        problem: why the prediction is unusable, or "".
        stands_for: :data:`GOLD` or :data:`EMPTY`, or "" for a model's prediction.
    """

    instance_id: str
    model: str
    patch: bytes = b""
    place: str = ""
    problem: str = ""
    stands_for: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether a model submitted no patch in swebench's sense: null or an empty string."""
        return not (self.patch or self.problem or self.stands_for)


def read_predictions(path: Path) -> tuple[Prediction, ...]:
    """Read predictions from a file or a directory.

    Args:
        path: ``preds.json`` (an object by id, or a list), a JSONL file with one prediction per line, a ``.pred`` file,
            or a directory with ``.pred`` files at any depth, as SWE-agent writes them. In a directory without them,
            ``preds.json`` or ``all_preds.jsonl`` is read.

    Returns:
        The predictions, in the order of the files. An unusable prediction that names its task has a ``problem``.

    Raises:
        PredictionError: a file cannot be read, an entry names no task, or two entries name the same task.
    """
    predictions: dict[str, Prediction] = {}
    for prediction in _from_directory(path) if path.is_dir() else _from_file(path):
        name = prediction.instance_id
        if name in predictions:
            raise PredictionError(
                f"{prediction.place}: {name!r} has a prediction already, at {predictions[name].place}",
                reason="two runs were put together, or a task was attempted more than once",
                hint="take one of them out: each task is evaluated once",
            )
        predictions[name] = prediction
    if not predictions:
        raise PredictionError(f"{path} has no predictions", hint="give preds.json, a JSONL file, or SWE-agent's output")
    return tuple(predictions.values())


def reference_predictions(tasks: Iterable[Task]) -> tuple[Prediction, ...]:
    """Return a prediction for each task that stands for the task's reference."""
    return tuple(Prediction(task.instance_id, GOLD, stands_for=GOLD) for task in tasks)


def empty_predictions(tasks: Iterable[Task]) -> tuple[Prediction, ...]:
    """Return a prediction for each task that stands for an empty patch."""
    return tuple(Prediction(task.instance_id, EMPTY, stands_for=EMPTY) for task in tasks)


def _from_directory(path: Path) -> Iterator[Prediction]:
    files = sorted(file for file in path.rglob("*.pred") if file.is_file())  # skip named pipes: opening one would block
    if not files:
        files = [path / name for name in _NAMES if (path / name).is_file()][:1]
    if not files:
        raise PredictionError(
            f"{path} has no predictions",
            reason=f"there is no .pred file below it, and no {' or '.join(_NAMES)} in it",
            hint="give a run's directory, or a file of predictions",
        )
    for file in files:
        yield from _from_file(file)


def _from_file(path: Path) -> Iterator[Prediction]:
    for entry, position, key in _entries(path):
        yield _prediction(entry, position, key=key)


def _entries(path: Path) -> list[tuple[object, str, str | None]]:
    """Return each entry of a file with its position, and its key, if any."""
    try:
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            return [(row.values, row.place, None) for row in json_lines(content.split(b"\n"), path)]
        value = json_value(content, path, line=None)
    except TaskFileError as error:
        hint = (
            "a file with one prediction in each line has to end in .jsonl" if "Extra data" in error.what else error.hint
        )
        raise PredictionError(error.what, reason=error.reason, hint=hint) from None
    except OSError as error:
        raise PredictionError(
            f"{path} cannot be read",
            reason=error.strerror or str(error),
            hint=f"give a file or a directory of predictions, {GOLD!r}, or {EMPTY!r}",
        ) from error
    if path.suffix == ".pred":
        return [(value, str(path), None)]
    if isinstance(value, list):
        return [(entry, f"{path}, entry {index}", None) for index, entry in enumerate(value)]
    if isinstance(value, dict):
        return [(entry, f"{path}, {name!r}", name) for name, entry in value.items()]
    raise PredictionError(f"{path} is neither an object nor a list", reason="it is JSON of another kind")


def _prediction(entry: object, position: str, *, key: str | None = None) -> Prediction:
    """Read one entry.

    Raises:
        PredictionError: the entry names no task.
    """
    fields = entry if isinstance(entry, dict) else {}
    name, model, patch = fields.get("instance_id", key), fields.get("model_name_or_path"), fields.get("model_patch")
    if not isinstance(name, str) or not name:
        raise PredictionError(
            f"{position}: it has no instance_id", reason="it is not a prediction", hint="each names its task"
        )
    if not _is_text(name):
        raise PredictionError(
            f"{position}: its instance_id {name!a} has an unpaired surrogate",
            reason="it is not valid Unicode, so it is no task's id",
            hint="write the id as the task set has it",
        )
    if isinstance(entry, dict) and key is not None and name != key:
        raise PredictionError(f"{position}: its instance_id is {name!r}", reason="it was put under another task's id")
    problem, patch_bytes = _problem(entry, fields), b""
    if isinstance(patch, str) and not problem:
        try:
            patch_bytes = patch.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            problem = "has a model_patch with characters that stand for no bytes"
    has_model = isinstance(model, str) and model and _is_text(model)
    return Prediction(name, str(model) if has_model else NAMELESS, patch_bytes, position, problem)


def _problem(entry: object, fields: Mapping[str, object]) -> str:
    """Return why an entry is unusable, or ""."""
    if not isinstance(entry, dict):
        return f"is of type {type(entry).__name__}, not an object"
    if "model_patch" not in fields:
        return "has no model_patch"
    for field in ("model_patch", "model_name_or_path"):
        if not isinstance(fields.get(field), str | None):
            return f"has a {field} of type {type(fields[field]).__name__}, not text"
    model = fields.get("model_name_or_path")
    if isinstance(model, str) and not _is_text(model):
        return "has a model_name_or_path with an unpaired surrogate, which is not valid Unicode"
    return ""


def _is_text(value: str) -> bool:
    """Return whether a string is valid Unicode: JSON's escapes allow unpaired surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
