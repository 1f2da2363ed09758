"""Start a task's sandboxes as Harbor starts its containers: create log directories, run the image's entrypoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from minisandbox.errors import CommandFailed, WaitTimeout
from minisandbox.sandbox import Process, Sandbox
from minisandbox.tasks import Task
from minisandbox.types import ImageSpec, Limits, Network

KEEP_ALIVE = ("sh", "-c", "sleep infinity")
"""The command that Harbor passes to an image's entrypoint (0.26, docker-compose-build.yaml)."""

_ENTRYPOINT_TIMEOUT = 10.0
_STEP_TIMEOUT = 60.0
_POLL = 0.05
_DIRECTORIES = 'mkdir -p -- "$@" && chmod a+rwx -- "$@"'
# Succeeds once a process in the sandbox runs the `sleep infinity` of KEEP_ALIVE.
_REACHED = r"""
for file in /proc/[0-9]*/cmdline; do
    command=$(cat "$file")  # without the zero bytes between its words
    [ "${command##*/}" != sleepinfinity ] || exit 0
done 2> /dev/null
exit 1
"""


@contextlib.contextmanager
def task_sandbox(task: Task, image: ImageSpec, limits: Limits | None, network: Network) -> Iterator[Sandbox]:
    """Create a sandbox for a task, start it up, and stop it when the block ends.

    Args:
        task: the task.
        image: the task's image.
        limits: the sandbox's limits; the task's own if None.
        network: the hosts that the sandbox can reach.

    Raises:
        MiniSandboxError: the sandbox cannot be created, or its entrypoint exited.
    """
    with Sandbox.create(image, limits=task.needs.limits(limits), network=network) as box:
        start_up(box, task, image)
        yield box


def start_up(box: Sandbox, task: Task, image: ImageSpec) -> None:
    """Create a task's directories in a new sandbox, and run the image's entrypoint if the task requires it.

    Args:
        box: the sandbox, which may be attached.
        task: the task.
        image: the image of the sandbox.

    Raises:
        CommandFailed: a directory cannot be created, or the entrypoint exited.
        SandboxGone: the sandbox has ended.
    """
    if task.needs.directories:
        command = ["sh", "-c", _DIRECTORIES, "directories", *task.needs.directories]
        box.exec(command, user=0, cwd="/", timeout=_STEP_TIMEOUT).check()
    if task.needs.entrypoint and image.entrypoint and not image.backend:  # engines end a process with its handle
        run_entrypoint(box, image.entrypoint)


def run_entrypoint(box: Sandbox, entrypoint: Sequence[str]) -> None:
    """Start an entrypoint in the background, as Harbor's containers do, and wait until it runs :data:`KEEP_ALIVE`.

    An entrypoint that never runs this command, e.g. a server, keeps running; after 10 seconds it counts as started.

    Args:
        box: the sandbox, which may be attached.
        entrypoint: the image's entrypoint.

    Raises:
        CommandFailed: the entrypoint exited, which would stop its container.
        SandboxGone: the sandbox has ended.
    """
    with box.start((*entrypoint, *KEEP_ALIVE), lifetime="sandbox") as process:
        process.close_stdin()
        deadline = time.monotonic() + _ENTRYPOINT_TIMEOUT
        while time.monotonic() < deadline:
            _check_running(process)
            if box.exec(["sh", "-c", _REACHED], user=0, cwd="/", timeout=_STEP_TIMEOUT).ok:
                return


def _check_running(process: Process) -> None:
    """Wait briefly for a process to exit, and raise an error if it does.

    Raises:
        CommandFailed: the process exited.
    """
    with contextlib.suppress(WaitTimeout):
        hint = 'the image\'s ENTRYPOINT has to run its arguments at the end, as in: exec "$@"'
        raise CommandFailed(process.wait(_POLL), hint=hint)
