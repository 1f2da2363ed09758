"""Report channels: how the plugin inside a grading sandbox hands its report to us.

The file is the first and the weakest: code under test that looks for it can find and rewrite it, though not without
the nonce. A pipe to the supervisor takes its place behind the same protocol.
"""

from __future__ import annotations

import errno
import secrets
from typing import Protocol

from minisandbox.errors import FileAccessError
from minisandbox.grade.report import Report
from minisandbox.sandbox import Sandbox
from minisandbox.types import MiB

MAX_REPORT = 64 * MiB
"""Bytes of the largest report that is read: about 200,000 tests."""


class ReportChannel(Protocol):
    """One run's way from the plugin to us."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tell the plugin about the channel."""
        ...

    def collect(self, box: Sandbox) -> Report:
        """Read the report after the run.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        ...


class FileChannel:
    """A file with a random name, whose every line carries a random nonce.

    Args:
        directory: absolute directory inside, which exists.
    """

    def __init__(self, directory: str) -> None:
        self._nonce = secrets.token_hex(16)
        self._path = f"{directory}/{secrets.token_hex(8)}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tell the plugin about the channel; it removes them when it is loaded."""
        return {"MINISANDBOX_REPORT": f"{self._nonce}:{self._path}"}

    def collect(self, box: Sandbox) -> Report:
        """Read the report after the run; one that is not there is empty, one that cannot be ours is damaged.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        try:
            data = box.files.read_bytes(self._path, limit=MAX_REPORT)
        except FileAccessError as error:
            return _unreadable(error)
        return Report.parse(data, self._nonce)


def _unreadable(error: FileAccessError) -> Report:
    if error.errno == errno.ENOENT:
        return Report()
    return Report(damage=f"the report cannot be read: {error.what}")
