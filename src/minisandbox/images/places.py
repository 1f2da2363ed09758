"""Paths inside build sandboxes."""

from __future__ import annotations

from pathlib import PurePosixPath

BUILD = PurePosixPath("/tmp/build")  # noqa: S108 - in the sandbox, gone with it
IMAGE = PurePosixPath("/image")
"""Where our own tools see the image's tree."""
MOUNTS = PurePosixPath("/run/minisandbox")

RANKS = ("base", "system", "python", "requirements", "source", "install", "by_hand", "tests", "repository", "task")
"""Steps by name, from the bottom up. What a step writes gets a time of its rank."""
