"""Paths inside build sandboxes, and the order of the build steps."""

from __future__ import annotations

from pathlib import PurePosixPath

BUILD = PurePosixPath("/tmp/build")  # noqa: S108 - in the sandbox, removed with it
IMAGE = PurePosixPath("/image")
"""The path where MiniSandbox's own tools see the root of the image."""
MOUNTS = PurePosixPath("/run/minisandbox")

RANKS = ("base", "system", "python", "requirements", "source", "install", "by_hand", "tests", "repository", "task")
"""The names of the steps, from the bottom up. The modification time of a file depends on the rank of its step."""
