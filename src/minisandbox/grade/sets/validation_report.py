"""The reports of a validation: for programs, for people, and in the form that the field's tools read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisandbox.grade.sets.validations import LayerUse, Validated
from minisandbox.grade.validation import Status
from minisandbox.store.rundir import write_whole
from minisandbox.tasks.statuses import STATUSES_NAME, write_statuses

REPORT = "report.json"
TABLE = "report.md"

_STATUSES = {Status.VALID: "passed", Status.INVALID: "failed", Status.ERROR: "error"}
_MB = 1e6


def write_validation_reports(out: Path, found: Sequence[Validated], total: int) -> None:
    """Write what a validation found: ``report.json``, ``report.md``, ``run_batch_exit_statuses.yaml`` and logs.

    Args:
        out: the run directory.
        found: what is known of the tasks.
        total: how many tasks the set has.

    Raises:
        DiskFull: the disk is full.
        OSError: a file cannot be written.
    """
    write_whole(out / REPORT, json.dumps(validation_report(found, total), indent=1).encode() + b"\n")
    write_whole(out / TABLE, validation_table(found, total).encode("utf-8", "backslashreplace"))
    write_statuses(out / STATUSES_NAME, {one.instance_id: _STATUSES[one.status] for one in found})
    for one in found:
        log = out / "logs" / f"{one.instance_id}.log"
        if one.log:
            write_whole(log, one.log.encode("utf-8", "surrogateescape"))
        else:
            log.unlink(missing_ok=True)


def validation_report(found: Sequence[Validated], total: int) -> dict[str, object]:
    """Return the report for programs.

    What is measured, and so differs from run to run, is under ``measured`` alone.

    Args:
        found: what is known of the tasks.
        total: how many tasks the set has.
    """
    uses = _uses(found)
    layers = {layer.key: layer for one in found for layer in one.layers}
    return {
        "format": "minisandbox-validation-report",
        "version": 1,
        "tasks": total,
        "validated": len(found),
        "counts": {status.value: sum(one.status is status for one in found) for status in Status},
        "causes": dict(sorted(Counter(str(one.cause) for one in found if one.cause).items())),
        "flaky": sum(bool(one.flaky) for one in found),
        "noted": sum(bool(one.notes) for one in found),
        "measured": {
            "layer_bytes": sum(layer.bytes for layer in layers.values()),
            "build_seconds": sum(layer.seconds for layer in layers.values()),
            "validate_seconds": sum(one.seconds for one in found),
        },
        "results": [_row(one, uses) for one in found],
    }


def _row(one: Validated, uses: Mapping[str, int]) -> dict[str, object]:
    return {
        "instance_id": one.instance_id,
        "repo": one.repo,
        "verdict": one.status.value,
        "cause": one.cause,
        "detail": one.detail,
        "tests": list(one.tests),
        "flaky": list(one.flaky),
        "notes": list(one.notes),
        "python": one.python,
        "image_key": one.image_key,
        "reference": [[run.verdict, run.reason] for run in one.reference],
        "empty": [[run.verdict, run.reason] for run in one.empty],
        "measured": {
            "build_seconds": sum(layer.seconds for layer in one.layers),
            "unique_bytes": _bytes(one.layers, uses, shared=False),
            "shared_bytes": _bytes(one.layers, uses, shared=True),
            "validate_seconds": one.seconds,
            "reference_seconds": [run.seconds for run in one.reference],
            "empty_seconds": [run.seconds for run in one.empty],
        },
    }


def _uses(found: Sequence[Validated]) -> Counter[str]:
    """Count by layer the tasks whose images have it."""
    return Counter(layer.key for one in found for layer in one.layers)


def _bytes(layers: Sequence[LayerUse], uses: Mapping[str, int], *, shared: bool) -> int:
    return sum(layer.bytes for layer in layers if (uses[layer.key] > 1) is shared)


def validation_table(found: Sequence[Validated], total: int) -> str:
    """Return the report for people, in Markdown.

    Args:
        found: what is known of the tasks.
        total: how many tasks the set has.
    """
    counts = Counter(one.status for one in found)
    layers = {layer.key: layer for one in found for layer in one.layers}
    disk, built = sum(one.bytes for one in layers.values()), sum(one.seconds for one in layers.values())
    tested = sum(one.seconds for one in found)
    head = (
        f"{counts[Status.VALID]} of {total} tasks are valid, {counts[Status.INVALID]} are not; about "
        f"{counts[Status.ERROR]} we could not find out, {total - len(found)} were not looked at. Their images take "
        f"{disk / _MB:.0f} MB together and {built:.0f} s to build; validating took {tested:.0f} s."
    )
    note = (
        "*build*: seconds that all layers of the image took, shared ones counted for each task. *unique*, *shared*: "
        "megabytes of layers that no other task's image has, and of the others. *validate*: seconds of all runs."
    )
    lines = [
        "| task | interpreter | build | unique | shared | validate | verdict | cause |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    uses = _uses(found)
    lines += ["| " + " | ".join(map(_cell, _cells(one, uses))) + " |" for one in found]
    return "\n".join((head, "", note, "", *lines, ""))


def _cells(one: Validated, uses: Mapping[str, int]) -> tuple[str, ...]:
    cause = f"{one.cause}: {one.detail}" if one.cause else "; ".join(f"note: {note}" for note in one.notes)
    return (
        one.instance_id,
        one.python,
        f"{sum(layer.seconds for layer in one.layers):.1f}",
        f"{_bytes(one.layers, uses, shared=False) / _MB:.1f}",
        f"{_bytes(one.layers, uses, shared=True) / _MB:.1f}",
        f"{one.seconds:.1f}",
        one.status.value,
        cause,
    )


def _cell(text: str) -> str:
    """A text that stays in its cell."""
    return " ".join(text.replace("|", "\\|").split())[:300]
