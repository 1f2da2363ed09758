"""The changes of a workspace: a second sandbox compares the uppers with the image.

Nothing of the workspace takes part: its processes cannot hide a change, and the host opens no path that they made.
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
    """Ask what differs.

    Args:
        trees: how many trees are looked at.
        below: the path that is compared, with all below it.
        usr: whether they hold changes of ``/usr`` too.
        skip: paths that the sandbox's own mounts made.
        max_characters: characters of paths, more of which are an error.
    """

    def __init__(self, trees: int, below: str, *, usr: bool, skip: Sequence[str], max_characters: int) -> None:
        options = {"trees": trees, "below": below, "usr": usr, "skip": list(skip), "characters": max_characters}
        super().__init__({"verb": "changes", **options})
        self._changes: list[Change] = []

    def _answer(self, header: frames.Header, payload: bytes) -> None:  # noqa: ARG002 - all is in the header
        if header["event"] == "end":
            self.done = True
            return
        rows = header["rows"]
        assert isinstance(rows, list)
        for path, kind, what in rows:
            self._changes.append(Change(PurePosixPath(path), ChangeKind(kind), FileType(what)))

    def result(self) -> tuple[Change, ...]:
        """Return the changes, sorted by path.

        Raises:
            FileAccessError: something could not be compared.
        """
        self._raise_error()
        return tuple(sorted(self._changes, key=lambda change: change.path))


def changes(
    launcher: Launcher,
    request: SandboxRequest,
    trees: Sequence[Tree],
    below: PurePosixPath,
    timeout: float | None,
    max_characters: int,
) -> tuple[Change, ...]:
    """Compare sealed trees, and the upper that is being written, with an image.

    Args:
        launcher: who makes the sandbox that looks.
        request: what the workspace is.
        trees: what was written, the lowest first.
        below: the path that is compared, with all below it.
        timeout: wall seconds that comparing may take, or None.
        max_characters: most characters of paths: an agent can write half a million files, and each costs the host
            time and memory.

    Raises:
        FileAccessError: something could not be compared, or not in time, or there is too much of it.
        SandboxCreationError: the sandbox that looks could not be made.
    """
    plan: Plan = make_viewer_plan(request, len(trees))
    skip = [str(mount.target) for mount in request.mounts]
    shown = _USR.is_relative_to(below) or below.is_relative_to(_USR)
    usr = shown and request.image.host_usr and request.writable_usr
    call = ChangesCall(len(trees), str(below), usr=usr, skip=skip, max_characters=max_characters)
    door, outside = socket.socketpair()  # a listener that has no path
    with door, outside:
        run = SandboxRun(launcher, plan, door, trees, "comparison")
        _ask(run, call, timeout)
    if not call.done:
        raise SandboxGone("the comparison was cut off", reason="its process was killed from outside")
    return call.result()


def _ask(run: SandboxRun, call: Call, timeout: float | None) -> None:
    try:
        run.await_ready()
        with run.open_job() as job:
            converse(call, job, None if timeout is None else time.monotonic() + timeout)
    except TimeoutError:
        what = f"cannot compare the workspace with its image: not done within {timeout:g} s"
        raise FileAccessError(what, path="/", errno=errno.ETIMEDOUT) from None
    finally:
        run.end()
