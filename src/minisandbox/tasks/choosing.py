"""Select tasks: one per environment, by status, or in random splits."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minisandbox.errors import InvalidValue
from minisandbox.tasks.builds import Build
from minisandbox.tasks.taskset import TaskSet

MISSING = "missing"
"""The status of a task that is missing from the report."""


def unique_images(tasks: TaskSet) -> dict[str, tuple[str, ...]]:
    """Group the tasks whose images are built alike, except for the tasks' patches and hidden files.

    Args:
        tasks: the tasks.

    Returns:
        The ids of each group, keyed by the id of its first task.
    """
    groups: dict[Build, list[str]] = {}
    for task in tasks:
        groups.setdefault(task.build, []).append(task.instance_id)
    return {ids[0]: tuple(ids) for ids in groups.values()}


def with_status(ids: Iterable[str], statuses: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    """Return the ids whose status matches a pattern.

    Args:
        ids: the ids.
        statuses: the status by id.
        patterns: statuses or globs; :data:`MISSING` selects ids without a status.
    """

    def fits(status: str) -> bool:
        return status in patterns or any(fnmatch.fnmatchcase(status, pattern) for pattern in patterns)

    return [instance_id for instance_id in ids if fits(statuses.get(instance_id, MISSING))]


def shuffled(ids: Sequence[str], seed: int) -> list[str]:
    """Shuffle ids; the order depends only on the seed.

    Args:
        ids: the ids.
        seed: any whole number.
    """
    shuffled_ids = list(ids)
    random.Random(seed).shuffle(shuffled_ids)  # noqa: S311 - the order is no secret
    return shuffled_ids


def parts_of(ids: Sequence[str], fractions: Mapping[str, float], seed: int) -> dict[str, list[str]]:
    """Split ids at random; each part keeps the original order.

    Args:
        ids: the ids.
        fractions: the share of each part by name; the shares add up to at most 1. Leftover ids are in no part.
        seed: the seed of the split.

    Raises:
        InvalidValue: a share is not above 0, or the shares add up to more than 1.
    """
    if any(not 0 < total_share <= 1 for total_share in fractions.values()) or sum(fractions.values()) > 1 + 1e-9:
        shares = ", ".join(f"{name}={total_share:g}" for name, total_share in fractions.items())
        raise InvalidValue(f"these are no parts of a whole: {shares}", hint="for instance train=0.9 and test=0.1")
    shuffled_ids = shuffled(ids, seed)
    parts: dict[str, list[str]] = {}
    total_share = 0.0
    for name, fraction in fractions.items():
        start, total_share = round(total_share * len(ids)), total_share + fraction
        part_ids = set(shuffled_ids[start : round(total_share * len(ids))])
        parts[name] = [instance_id for instance_id in ids if instance_id in part_ids]
    return parts


@dataclass(frozen=True, slots=True)
class Changed:
    """A task whose status a later file changed.

    Attributes:
        instance_id: the task.
        before: its earlier status.
        after: its status in the later file.
        by: the index of the later file, from 0.
    """

    instance_id: str
    before: str
    after: str
    by: int


def merged(files: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[Changed]]:
    """Merge the statuses of several runs; later runs take precedence.

    Args:
        files: the statuses by id, of each run in order.

    Returns:
        The statuses by id, and the statuses that a later run changed.
    """
    merged_statuses: dict[str, str] = {}
    changes: list[Changed] = []
    for run, statuses in enumerate(files):
        for instance_id, status in statuses.items():
            earlier = merged_statuses.get(instance_id, status)
            if earlier != status:
                changes.append(Changed(instance_id, earlier, status, run))
            merged_statuses[instance_id] = status
    return merged_statuses, changes
