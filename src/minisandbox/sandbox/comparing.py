"""List the changes of a workspace, by comparing its uppers with the image in a second sandbox.

Processes of the workspace do not take part and so cannot hide a change, and the host opens no path that they made.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

from minisandbox.errors import FileAccessError, SandboxGone
from minisandbox.launch.jobs import frames
from minisandbox.launch.plan import Plan
from minisandbox.sandbox.io_sync import converse
from minisandbox.sandbox.launcher import Launcher
from minisandbox.sandbox.plans import SandboxRequest, make_viewer_plan
from minisandbox.sandbox.protocol.wire import Call
from minisandbox.sandbox.run import SandboxRun
from minisandbox.sandbox.snapshots import Tree
from minisandbox.types import Change, ChangeKind, FileType

_USR = PurePosixPath("/usr")


class ChangesCall(Call):
    """Request the changes from the worker in the second sandbox.

    Args:
        tree_count: number of uppers to compare.
        compared_path: the path to compare, with everything below it.
        has_usr: whether the uppers contain changes of ``/usr`` too.
        skipped_paths: paths that exist only as mount points.
        max_characters: limit for the characters of all paths together.
    """

    def __init__(
        self, tree_count: int, compared_path: str, *, has_usr: bool, skipped_paths: Sequence[str], max_characters: int
    ) -> None:
        super().__init__({
            "verb": "changes", "trees": tree_count, "below": compared_path, "usr": has_usr, "skip": list(skipped_paths),
            "characters": max_characters,
        })  # fmt: skip
        self._changes: list[Change] = []

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - the header has everything
        if header["event"] == "end":
            self.done = True
            return
        rows = header["rows"]
        assert isinstance(rows, list)
        for path, kind, file_type in rows:
            self._changes.append(Change(PurePosixPath(path), ChangeKind(kind), FileType(file_type)))

    def result(self) -> tuple[Change, ...]:
        """Return the changes, sorted by path.

        Raises:
            FileAccessError: a path could not be compared.
        """
        self._raise_error()
        return tuple(sorted(self._changes, key=lambda change: change.path))


def changes(
    launcher: Launcher,
    request: SandboxRequest,
    trees: Sequence[Tree],
    compared_path: PurePosixPath,
    timeout: float | None,
    max_characters: int,
) -> tuple[Change, ...]:
    """Compare the uppers of a workspace, including the current one, with its image.

    Args:
        launcher: launcher of the second sandbox.
        request: description of the workspace.
        trees: uppers of the workspace, lowest first.
        compared_path: the path to compare, with everything below it.
        timeout: wall-clock seconds that the comparison may take, or None.
        max_characters: limit for the characters of all paths together, because an agent can write half a million
            files, and each of them costs the host time and memory.

    Raises:
        FileAccessError: a path could not be compared, the comparison took too long, or there are too many changes.
        SandboxCreationError: the second sandbox could not be created.
    """
    skipped_paths = [str(mount.target) for mount in request.mounts]
    covers_usr = _USR.is_relative_to(compared_path) or compared_path.is_relative_to(_USR)
    has_usr = covers_usr and request.image.host_usr and request.writable_usr
    call = ChangesCall(
        len(trees), str(compared_path), has_usr=has_usr, skipped_paths=skipped_paths, max_characters=max_characters
    )
    viewer = Viewer(launcher, request, trees)
    try:
        viewer.answer(call, timeout)
    finally:
        viewer.end()
    return call.result()


class Viewer:
    """A second sandbox that sees the uppers and the image of a workspace.

    Args:
        launcher: launcher of the second sandbox.
        request: description of the workspace.
        trees: uppers of the workspace, lowest first.

    Raises:
        SandboxCreationError: the second sandbox could not be created.
    """

    def __init__(self, launcher: Launcher, request: SandboxRequest, trees: Sequence[Tree]) -> None:
        plan: Plan = make_viewer_plan(request, len(trees))
        # a socket pair stands in for the job listener, to which nobody connects; workers exit when the other end closes
        job_listener, self._peer = socket.socketpair()
        with job_listener:
            self._run = SandboxRun(launcher, plan, job_listener, trees, "comparison")
        try:
            self._run.await_ready()
        except BaseException:  # even on Ctrl-C
            self.end()
            raise

    def answer(self, call: Call, timeout: float | None) -> None:
        """Make a call.

        Args:
            call: the call.
            timeout: wall-clock seconds that the call may take, or None.

        Raises:
            FileAccessError: the call took too long.
            SandboxGone: the second sandbox has ended.
        """
        try:
            with self._run.open_job() as job:
                converse(call, job, None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            message = f"cannot compare the workspace with its image: not done within {timeout:g} s"
            raise FileAccessError(message, path="/", errno=errno.ETIMEDOUT) from None
        except BrokenPipeError:
            pass  # reported below
        if not call.done:
            raise SandboxGone("the comparison was cut off", reason="its process was killed from outside")

    def end(self) -> None:
        """Stop the second sandbox; calling it again does nothing."""
        self._run.end()
        self._peer.close()
