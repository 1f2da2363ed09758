"""SWE-smith: the patch is a bug that was put into a repository at a known commit."""

from __future__ import annotations

import re
from collections.abc import Mapping

from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.swesmith import task_from_swesmith
from minisandbox.tasks.task import Task

# owner__repo.commit8.kind__hash, and swesmith.x86_64.owner_1776_repo.commit8 with or without a registry's user
_ID = re.compile(r"[\w.-]+__[\w.-]+\.[0-9a-f]{8}\.[\w.-]+")
_IMAGE = re.compile(r"(?:[\w.-]+/)?(?:sweb\.eval|swesmith)\.[\w.-]+", re.IGNORECASE)


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has an image, or an id, as SWE-smith calls them."""
    if not row.keys() >= {"instance_id", "patch", "FAIL_TO_PASS"} or "environment_setup_commit" in row:
        return False
    image = row.get("image_name")
    return _ID.fullmatch(str(row["instance_id"])) is not None or (
        isinstance(image, str) and "swesmith" in image and _IMAGE.match(image) is not None
    )


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or nothing says how the row is built.
        PatchError: a patch is malformed or unsafe.
    """
    return task_from_swesmith(row, pins=context.pins)
