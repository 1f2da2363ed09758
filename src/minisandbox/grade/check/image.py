"""Checks of images: whether they can be built, and what of the answer is in them."""

from __future__ import annotations

from collections.abc import Iterator

from minisandbox.grade.check.evidence import Evidence, Problem

SLOW_BUILD = 1800.0
"""Seconds."""


def not_built(seen: Evidence) -> Iterator[Problem]:
    """The image cannot be built or pulled."""
    if seen.failure is not None:
        yield Problem(f"{type(seen.failure).__name__}: {seen.failure}")


def slow_build(seen: Evidence) -> Iterator[Problem]:
    """The image takes more than half an hour to build."""
    if seen.build_seconds > SLOW_BUILD:
        yield Problem(f"its layers took {seen.build_seconds / 60:.0f} minutes to build")


def solution_in_image(seen: Evidence) -> Iterator[Problem]:
    """A file of the image has the lines of the reference."""
    return _leaks(seen, "reference")


def tests_in_image(seen: Evidence) -> Iterator[Problem]:
    """A file of the image has the lines of hidden tests."""
    return _leaks(seen, "tests")


def history_in_image(seen: Evidence) -> Iterator[Problem]:
    """The history of a repository in the image goes beyond the task's commit, or has the answer."""
    return _leaks(seen, "history")


def archive_in_image(seen: Evidence) -> Iterator[Problem]:
    """An archive of the project is in the image."""
    return _leaks(seen, "archive")


def _leaks(seen: Evidence, kind: str) -> Iterator[Problem]:
    for leak in seen.found.leaks:
        if leak.kind == kind:
            yield Problem(leak.detail, leak.place)
