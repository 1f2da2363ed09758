"""Upgrade trajectories and examples of earlier versions to the current format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
