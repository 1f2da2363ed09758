"""Upgrade trajectories and examples of earlier versions to the current format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Reason

_SINCE: Mapping[int, Mapping[str, Mapping[str, object]]] = {
    3: {
        "": {"model": "", "sampling": {}, "configuration": {}, "messages": [], "turns": [], "rows": [], "tries": []},
        "timings": {"queued": 0.0, "image": 0.0, "model": 0.0, "commands": 0.0},
        "steps": {"turn": 0, "began": 0.0, "stateful": False},
    },
    4: {
        "": {"patches": []},
        "turns": {"queued": 0.0},
        "rows": {"versions": []},
        "grade": {"score": None, "misread": []},  # some records of version 3 already have these fields
    },
}
"""The fields that each version added, by the object that contains them ("" is the root), with default values."""


def pop_version(body: dict[str, object], latest: int, *, noun: str, file_format: str, location: str) -> int:
    """Check and remove an object's format and version; return the version.

    Args:
        body: the decoded object.
        latest: the newest version that can be read.
        noun: the object's name in error messages, with its article.
        file_format: the required format.
        location: where the object is, for error messages.

    Raises:
        TrajectoryError: the object has another format, an invalid version, or a newer version.
    """
    version = body.pop("version", None)
    if body.pop("format", None) != file_format:
        raise TrajectoryError(f"{location} is not {noun}", hint=f'{noun} has "format": "{file_format}"')
    if type(version) is not int or version < 1:
        raise TrajectoryError(f"{location} has the version {version!r}", reason="it is damaged")
    if version > latest:
        raise TrajectoryError(
            f"{location} has version {version}; this MiniSandbox reads up to {latest}",
            reason="a newer MiniSandbox wrote it",
            hint="update MiniSandbox",
        )
    return version


def upgrade(body: dict[str, object], version: int) -> None:
    """Upgrade a decoded trajectory in place.

    Args:
        body: the trajectory.
        version: its version.
    """
    for grade in _objects(body.get("grade")) if version == 1 else ():
        _rename_verdict(grade)
    for since, tables in _SINCE.items():
        for name, fields in tables.items() if version < since else ():
            for item in _objects(body.get(name) if name else body):
                item.update({field: value for field, value in fields.items() if field not in item})


def upgrade_rows(body: dict[str, object]) -> None:
    """Upgrade the token rows of an example of version 1, which had no policy versions."""
    for row in _objects(body.get("rows")):
        row.setdefault("versions", [])


def _rename_verdict(grade: dict[str, object]) -> None:
    """Derive the verdict from its reason, because version 1 had only three verdicts, and add details to flags."""
    reason = grade.get("reason")
    if grade.get("verdict") in ("unresolved", "failed_to_grade") and reason in tuple(Reason):
        grade["verdict"] = str(Reason(str(reason)).verdict)
    for flag in _objects(grade.get("flags")):
        flag.setdefault("detail", "")


def _objects(value: object) -> Iterator[dict[str, object]]:
    """Yield a JSON object, or the objects of a list. Leave other values for the decoder to reject."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield item
