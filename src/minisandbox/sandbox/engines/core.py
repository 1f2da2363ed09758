"""Create, connect to and stop a sandbox that is a container."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn

from minisandbox.errors import HostError, SandboxCreationError, SandboxGone, Unsupported
from minisandbox.launch.container import READY
from minisandbox.sandbox.engines import runtime
from minisandbox.sandbox.engines.client import LABEL, Client
from minisandbox.sandbox.engines.images import copy_in, ensure_image, mount_options
from minisandbox.sandbox.plans import HOSTNAME, check_mounts
from minisandbox.sandbox.protocol.environment import command_environment
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.sandbox.validation import check_creation
from minisandbox.types import ImageSpec, Limits, Mount, Network, Refusals, SandboxInfo

_PATIENCE = 120.0
"""Seconds to wait for a container to stop."""
_ENDING = 0.5
"""Seconds to wait for the engine to notice that a container has ended."""
_OWN_PROCESSES = 16
"""Processes added to the limit: the first process, and for each concurrent job a worker and its relay process."""


class ContainerCore:
    """A live container of this process; see :class:`minisandbox.sandbox.backend.SandboxCore`.

    The container's first process exits when its standard input closes, and the container ends with it. This works even
    if this process is killed.
    """

    owned = True

    def __init__(self, client: Client, image: ImageSpec, limits: Limits, network: Network) -> None:
        start_time = time.monotonic()
        self.id = f"box-{secrets.token_hex(6)}"
        self.image = replace(image, clean=False)  # the engine cannot report written files
        self.limits = limits
        self.environment: dict[str, str] = {}
        self._client, self._network = client, network
        self._created = time.time()
        self._labels: tuple[tuple[str, str], ...] = ()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the sandbox
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._started = start_time
        self.created_in = 0.0

    @classmethod
    def create(
        cls,
        image: ImageSpec,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> ContainerCore:
        """Create a container and wait until it is ready; see :meth:`minisandbox.Sandbox.create`.

        Raises:
            InvalidValue: an argument is invalid.
            Unsupported: containers do not support an argument: an allow-list, an upper, stacked mounts.
            HostError: the engine is missing, or refuses the image.
            SandboxCreationError: the engine did not start the container.
        """
        check_creation(image, limits, network, mounts, environment, upper, labels)
        network = network or Network.off()
        if upper is not None or network.mode == "allow" or any(mount.below or mount.upper for mount in mounts):
            raise Unsupported("a container takes no upper, no allow-list and no stacked mounts", hint="leave it out")
        client = Client.find(image.backend)
        core = cls(client, image, limits or Limits(), network)
        core.environment = command_environment(image, dict(environment or {}))
        core._labels = tuple(sorted((labels or {}).items()))
        sources = [(mount.source.resolve(), mount.target) for mount in check_mounts(mounts)]
        try:
            core._start(ensure_image(client, image)[0], sources)
        except BaseException:  # even on Ctrl-C, clean up
            core.stop()
            raise
        core.created_in = time.monotonic() - core._started
        return core

    def _start(self, reference: str, sources: Sequence[tuple[Path, PurePosixPath]]) -> None:
        mounts = [(runtime.runtime(), PurePosixPath(runtime.TARGET)), *sources]
        usr_mounts = [(Path("/usr"), PurePosixPath("/usr"))] if self.image.host_usr else []
        options = self._options() + ([] if self._client.remote else mount_options([*usr_mounts, *mounts]))
        command = [*runtime.COMMAND[1:], "first", f"{self.limits.lifetime or 0:g}"]
        self._client.run("create", *options, "--entrypoint", runtime.COMMAND[0], reference, *command)
        if self._client.remote:
            copy_in(self._client, self.id, mounts)
        self._created = time.time()  # the lifetime starts here
        self._process = self._client.open(
            "start", "--attach", "--interactive", self.id,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.read(len(READY)) != READY:
            raise SandboxCreationError(
                f"{self._client.name} did not start a container", errno=None, reason=self._client_output() or None,
                hint=f"try '{self._client.name} run {reference} true'",
            )  # fmt: skip

    def _options(self) -> list[str]:
        """Return the options that create the container, except its mounts."""
        limits = self.limits
        options = [
            "--name", self.id, "--label", f"{LABEL}=container", "--rm", "--interactive", "--pull", "never",
            "--network", "none" if self._network.mode == "off" else "host", "--user", "0:0", "--workdir", "/",
            "--security-opt", "no-new-privileges",
            "--pids-limit", str(limits.processes + _OWN_PROCESSES), "--shm-size", str(limits.disk),
        ]  # fmt: skip
        options += [] if self._network.mode == "host" else ["--hostname", HOSTNAME]
        if limits.memory is not None:
            options += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
        options += [] if limits.cpu is None else ["--cpus", f"{limits.cpu:g}"]
        return options + [option for name, text in self._labels for option in ("--label", f"{name}={text}")]

    def _client_output(self) -> str:
        """Return the end of the engine client's output."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-1000:]

    @property
    def alive(self) -> bool:
        """Whether the container is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def abandoned(self) -> bool:
        """Whether this process created the container and has not stopped it."""
        return self._process is not None and self._pid == os.getpid()

    def open_job(self, *, wait: bool = True) -> socket.socket:  # noqa: ARG002 - a job never waits here
        """Start a worker in the container, and return a stream socket that is connected to it.

        Raises:
            SandboxGone: the container has ended.
            HostError: the client could not be started.
        """
        self._check_running()
        rlimits = {"CORE": 0, "NOFILE": self.limits.open_files}
        if self.limits.file_size is not None:
            rlimits["FSIZE"] = self.limits.file_size
        job_socket, worker_end = socket.socketpair()
        command = ("exec", "--interactive", self.id, *runtime.COMMAND, "job", json.dumps(rlimits))
        with worker_end:
            try:
                client = self._client.open(*command, stdin=worker_end, stdout=worker_end, stderr=self._log)
            except OSError as error:
                job_socket.close()
                raise HostError(f"{self._client.name} could not be started: {error.strerror}") from error
        with self._lock:
            self._jobs = [job for job in self._jobs if job.poll() is None] + [client]
        return job_socket

    def check_alive(self) -> None:
        """Check whether the container has ended, after a call was cut off.

        Raises:
            SandboxGone: the container has ended.
        """
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)
        self._check_running()
        # ask the engine, because its client exits long after the container; the end would look like that of a command
        if "true" not in self._client.output("inspect", "--format", "{{.State.Running}}", self.id):
            raise self._gone()

    def _check_running(self) -> None:
        if not self.alive:
            raise self._gone()

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped or killed from outside")

    def info(self) -> SandboxInfo:
        """Return the recorded facts about the sandbox.

        Raises:
            SandboxGone: the container has ended.
        """
        if self._process is None or not self.alive:
            raise self._gone()
        expires = None if self.limits.lifetime is None else self._created + self.limits.lifetime
        enforced = tuple((name, self._client.name) for name in ("cpu", "memory", "processes"))
        return SandboxInfo(
            self.id, self.image.name, self._pid, self._process.pid, self._created, self._network.mode, self._labels,
            expires, enforced, "container",
        )  # fmt: skip

    def refusals(self) -> Refusals:
        """Return no refusals, because containers have no network filter."""
        self._check_running()
        return Refusals()

    def processes(self) -> tuple[str, ...]:
        """Return no processes, because none can outlive its handle."""
        self._check_running()
        return ()

    def process_listener(self, process_id: str) -> NoReturn:  # noqa: ARG002 - as of every core
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse('a process with lifetime="sandbox"')

    def connect_process(self, process_id: str) -> NoReturn:  # noqa: ARG002 - as of every core
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse("attaching to a process")

    def snapshot(self) -> Snapshot:
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse("a snapshot")

    def fork(self, count: int) -> NoReturn:  # noqa: ARG002 - as of every core
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse("fork")

    def reset(self, to: Snapshot | None) -> None:  # noqa: ARG002 - as of every core
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse("reset")

    def changes(self, below: PurePosixPath, timeout: float | None, max_characters: int = 0) -> NoReturn:  # noqa: ARG002 - as of every core
        """Raise Unsupported; see :meth:`_refuse`."""
        self._refuse("changes")

    def _refuse(self, operation: str) -> NoReturn:
        """Raise Unsupported, or SandboxGone if the container has ended."""
        self._check_running()
        hint = 'leave out the backend: sandboxes (backend="") can'
        raise Unsupported(
            f"{operation} of sandbox {self.id}", reason=f"it is a container of {self._client.name}", hint=hint
        )

    def leave(self) -> None:
        """Stop the container at the end of a ``with`` block."""
        self.stop()

    def stop(self) -> None:
        """Stop and remove the container; calling it again does nothing."""
        with self._lock:
            process, self._process = self._process, None
            jobs, self._jobs = self._jobs, []
        if self._pid != os.getpid():  # in a forked child: the container belongs to its parent
            return
        if process is None:
            if not self._log.closed:  # the container may exist, although it did not start
                self._client.succeeds("rm", "--force", self.id)
        else:
            self._end(process)
        for job in jobs:
            job.wait(_PATIENCE)
        self._log.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Close the first process's standard input, and wait until the engine has removed the container."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._client.succeeds("rm", "--force", self.id)
            process.kill()
        process.stdout.close()
