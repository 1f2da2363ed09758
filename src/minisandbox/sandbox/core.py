"""Create, connect to, seal and stop a sandbox of this process.

Every function blocks for milliseconds at most. Sync handles call it directly; async handles call the longer functions
in a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

from minisandbox.errors import HostError, InvalidValue, MiniSandboxError, NotFound, SandboxGone
from minisandbox.host import listeners, registry
from minisandbox.launch.jobs.changes import MOST_CHARACTERS
from minisandbox.launch.plan import Plan, Tmpfs
from minisandbox.sandbox import comparing, uppers
from minisandbox.sandbox.controller import Controller, current_controller
from minisandbox.sandbox.network import check_network
from minisandbox.sandbox.plans import HOSTNAME, SandboxRequest, check_mounts, find_plan, with_disk_upper
from minisandbox.sandbox.protocol.environment import command_environment, network_environment
from minisandbox.sandbox.run import SandboxRun
from minisandbox.sandbox.snapshots import MOST_TREES, Snapshot, Tree, check_room
from minisandbox.sandbox.validation import check_creation, check_timeout
from minisandbox.store.leases import Lease, layer_of, stamp
from minisandbox.types import Change, ImageSpec, Limits, Mount, Network, Refusals, SandboxInfo

_MOST_FORKS = 100_000
_GONE = frozenset(
    (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOENT, errno.ENOTCONN, errno.EBADF, errno.ENAMETOOLONG)
)
"""Errors of the kernel for a socket whose peer is gone or never existed."""
_AT_ONCE = 4
"""Maximum number of forks that are still in progress when the next one is requested."""


class Core:
    """A live sandbox of this process. Create it with :meth:`create`.

    Attributes:
        id: its id, unique on this machine.
        image: its image.
        limits: its resource limits.
        environment: environment variables of every command.
        owned: True, because this process created it.
        created_in: seconds that creation took.
    """

    owned = True

    def __init__(
        self, controller: Controller, request: SandboxRequest, settings: Settings, trees: tuple[Tree, ...]
    ) -> None:
        self.id = f"box-{secrets.token_hex(6)}"
        mounts_in_workdir = any(mount.target.is_relative_to(request.image.workdir) for mount in request.mounts)
        one_id = controller.launcher.ids == 1 or request.one_id
        user = "" if one_id else request.image.user
        self.image = replace(request.image, clean=request.image.clean and not mounts_in_workdir, user=user)
        self.limits = request.limits
        self.environment = command_environment(
            request.image, network_environment(request.network), settings.environment
        )
        self.created_in = 0.0
        self._controller = controller
        self._request = request
        self._settings = settings
        self._initial_trees = trees
        self._trees = trees
        self._run: SandboxRun | None = None
        self._lease = hold_layers(controller, request.image, request.mounts)
        note_use(request.image)
        self._stopped = False
        self._state_lock = threading.Lock()
        self._created = time.time()
        self._begun_monotonic = self._begun = 0.0  # monotonic and wall-clock time of the first run; 0 before

    @classmethod
    def create(
        cls,
        image: ImageSpec | Snapshot,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
        pretend_owners: bool = False,
        keep_tmp: bool = False,
        tmpfs: tuple[Tmpfs, ...] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """Create a sandbox and wait until it is ready; see :meth:`minisandbox.Sandbox.create`."""
        check_creation(image, limits, network, mounts, environment, upper, labels)
        controller = current_controller()
        base = image.image if isinstance(image, Snapshot) else image
        trees = image.trees() if isinstance(image, Snapshot) else ()
        request = SandboxRequest(
            base, limits or Limits(), check_network(network or Network.off()), check_mounts(mounts), HOSTNAME, upper,
            controller.launcher.writable_usr, controller.launcher.layered_usr,
            controller.launcher.host_sockets if base.host_usr else (),
            enforcement=controller.launcher.enforcement | ({"disk": "tmpfs"} if upper is None else {}),
            pretend_owners=pretend_owners, keep_tmp=keep_tmp, tmpfs=tmpfs,
        )  # fmt: skip
        if upper is None and not controller.launcher.memory_upper:
            enforcement = {**request.enforcement, "disk": uppers.WATCHED}
            request = replace(request, disk_upper=True, enforcement=enforcement)
        check_room(trees, request.limits.disk, f"a sandbox over {len(trees)} snapshots")
        for directory in request.given_uppers:
            uppers.prepare(directory)
        settings = Settings(dict(environment or {}), tuple((labels or {}).items()))
        return cls._create(controller, request, settings, trees)

    @classmethod
    def _create(
        cls, controller: Controller, request: SandboxRequest, settings: Settings, trees: tuple[Tree, ...]
    ) -> Self:
        start_time = time.monotonic()
        core = cls(controller, request, settings, trees)
        try:
            with controller.turns:
                core._begin()
                core._finish()
        except BaseException:  # even on Ctrl-C, leave no partial sandbox
            core.stop()
            raise
        core.created_in = time.monotonic() - start_time
        return core

    def _begin(self, plan: Plan | None = None) -> None:
        """Start a run of the sandbox on top of its sealed trees.

        Args:
            plan: the plan, if it is known already.
        """
        job_listener = self._controller.listener(listeners.name_of(self.id))
        with job_listener:
            upper = uppers.UpperDirectory(self._request.image) if self._request.disk_upper else None
            plan = plan or self._plan()
            plan = plan if upper is None else with_disk_upper(plan, upper.path)
            if not self._begun_monotonic:  # start the lifetime before pid 1 starts its own timer
                self._begun_monotonic, self._begun = time.monotonic(), time.time()
            elif self.limits.lifetime is not None:  # a reset does not renew the lifetime
                plan = replace(plan, lifetime=max(1, int(self._lifetime_left() * 1000)))
            try:
                self._run = SandboxRun(self._controller.launcher, plan, job_listener, self._trees, self.id, upper=upper)
            except BaseException:  # even on Ctrl-C, clean up
                if upper is not None:
                    upper.discard()
                raise

    def _plan(self) -> Plan:
        sealed_size = sum(tree.disk_usage() for tree in self._trees)
        return find_plan(replace(self._request, sealed=len(self._trees), sealed_size=sealed_size))

    def _finish(self) -> None:
        """Wait until the run is ready, and record the sandbox."""
        assert self._run is not None
        self._run.await_process()
        self._controller.add(self, self._record(self._run))  # now, while the launcher sets up the sandbox
        self._run.await_ready()
        if self._run.listener is not None:
            self._controller.gateway.serve(self.id, self._request.network, self._run.listener, self._run.pidfd)

    def _record(self, run: SandboxRun) -> registry.OwnerRecord:
        lifetime = self.limits.lifetime
        return registry.OwnerRecord(
            self.id, os.getpid(), self.image.name, self._created, run.pid, self._request.network.mode,
            dict(self._settings.labels), None if lifetime is None else self._begun + lifetime,
            str(self.image.workdir), self.image.base_commit, self.environment, self.limits.output,
            self._request.enforcement, self._request.upper_kind, self.image.user,
        )  # fmt: skip

    # --- connections -------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""
        return not self._has_ended(0.0)

    @property
    def abandoned(self) -> bool:
        """Whether this process created the sandbox and has not stopped it."""
        return not self._stopped and self._run is not None and self._controller.pid == os.getpid()

    def open_job(self, *, wait: bool = True) -> socket.socket:
        """Connect a stream socket for one call. Closing the socket kills the command that runs on it.

        Args:
            wait: whether to wait if too many jobs are pending.

        Raises:
            BlockingIOError: too many jobs are pending, and the call may not wait.
            HostError: the connection failed, for example because this process has no descriptors left.
            SandboxGone: the sandbox has ended.
        """
        run = self._run
        if self._stopped or run is None:
            raise SandboxGone(f"sandbox {self.id} is stopped")
        if not wait and not run.has_room():
            raise BlockingIOError
        try:
            return run.open_job()
        except OSError as error:
            raise unreachable(self._gone(), error) from error

    def check_alive(self) -> None:
        """Check whether the sandbox has ended, after a call was cut off.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running(0.2)  # wait briefly: the kernel closes the workers' sockets just before pid 1 has exited

    def _check_running(self, seconds: float = 0.0) -> None:
        """Raise SandboxGone if the sandbox has ended or ends within this many seconds."""
        if self._has_ended(seconds):
            raise self._gone()

    def _has_ended(self, seconds: float) -> bool:
        run = self._run
        return self._stopped or run is None or run.has_ended(seconds)

    def _lifetime_left(self) -> float:
        """Return the seconds until its lifetime is over."""
        lifetime = self.limits.lifetime
        return float("inf") if lifetime is None else self._begun_monotonic + lifetime - time.monotonic()

    def _gone(self) -> SandboxGone:
        reason = "it was stopped or killed from outside"
        if not self._stopped and self._lifetime_left() <= 0:
            reason = f"its lifetime of {self.limits.lifetime:g} s is over (Limits.lifetime)"
        return SandboxGone(f"sandbox {self.id} has ended", reason=reason)

    def info(self) -> SandboxInfo:
        """Return the recorded facts about the sandbox.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        for record in registry.live_records(self._controller.launcher.runtime):
            if record.id == self.id:
                return info_of(record)
        raise self._gone()

    def refusals(self) -> Refusals:
        """Return the requests that the network's allow-list has refused.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running()
        return self._controller.gateway.refusals(self.id)

    def process_listener(self, process_id: str) -> socket.socket:
        """Open a listening socket for a process that outlives its handle; the process's worker holds it open.

        Raises:
            SandboxGone: the sandbox has ended.
            HostError: the socket cannot be created.
        """
        self._check_running()
        return self._controller.listener(listeners.name_of(self.id, process_id))

    def connect_process(self, process_id: str) -> socket.socket:
        """Connect to the listening socket of a process.

        Raises:
            NotFound: there is no process with that id, or its socket is gone.
        """
        return reach_process(self._controller.directory, self.id, process_id)

    def processes(self) -> tuple[str, ...]:
        """Return the ids of processes that outlive their handles.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        self._check_running()
        return listeners.process_ids(self._controller.directory, self.id)

    # --- state -------------------------------------------------------------------------------------------------------

    def changes(
        self, below: PurePosixPath, timeout: float | None, max_characters: int = MOST_CHARACTERS
    ) -> tuple[Change, ...]:
        """Return the changes to the image at a path and below it; see :meth:`minisandbox.Sandbox.changes`.

        It is an error if all paths together have more than ``max_characters``.
        """
        check_timeout(timeout)
        run = self._writable_run("changes")
        trees = (*self._trees, run.tree)
        return comparing.changes(self._controller.launcher, self._request, trees, below, timeout, max_characters)

    def uppers(self) -> tuple[object, int]:
        """Return an object that identifies the current run, and the number of uppers."""
        return self._run, len(self._trees) + 1

    def open_viewer(self, purpose: str) -> comparing.Viewer:
        """Start a second sandbox that sees the uppers and the image.

        Args:
            purpose: what it is for, in errors.
        """
        run = self._writable_run(purpose)
        return comparing.Viewer(self._controller.launcher, self._request, (*self._trees, run.tree))

    def snapshot(self) -> Snapshot:
        """Seal the upper, and continue on top of it; see :meth:`minisandbox.Sandbox.snapshot`."""
        with self._state_lock:
            run = self._writable_run("a snapshot")
            if len(self._trees) == MOST_TREES:
                raise InvalidValue(
                    f"sandbox {self.id}: {MOST_TREES} snapshots lie one over the other already",
                    hint="reset() to an earlier one, or begin anew from the image",
                )
            trees = (*self._trees, run.tree)
            check_room(trees, self.limits.disk, f"a snapshot of sandbox {self.id}")
            run.end()
            run.tree.seal()
            self._continue_on(trees)
        lease = hold_layers(self._controller, self.image, self._request.mounts)
        return Snapshot(f"snap-{secrets.token_hex(6)}", self._request.image, time.time(), trees, lease)

    def fork(self, count: int) -> list[Self]:
        """Create sandboxes from the current state; see :meth:`minisandbox.Sandbox.fork`."""
        if type(count) is not int or not 1 <= count <= _MOST_FORKS:
            raise InvalidValue(f"fork({count!r})", hint=f"give how many sandboxes: 1 to {_MOST_FORKS}")
        trees = self.snapshot().trees()
        plan = replace(self._plan(), expects_commands=count == 1)  # idle workers of many forks would exit unused
        forks: list[Self] = []
        try:
            for index in range(count + _AT_ONCE):
                if index < count:
                    forks += [type(self)(self._controller, self._request, self._settings, trees)]
                    forks[-1]._begin(plan)
                if index >= _AT_ONCE:
                    forks[index - _AT_ONCE]._finish()
        except BaseException:  # even on Ctrl-C, clean up
            for core in forks:
                core.stop()
            raise
        return forks

    def reset(self, to: Snapshot | None) -> None:
        """Discard all changes; see :meth:`minisandbox.Sandbox.reset`."""
        trees = self._initial_trees if to is None else to.trees()
        if to is not None and to.image != self._request.image:
            raise InvalidValue(
                f"cannot reset sandbox {self.id} to snapshot {to.id}: it is of image {to.image.name}, "
                f"and the sandbox of {self.image.name}",
                reason="the image was built again since, where the names are the same",
                hint="reset to a snapshot of this sandbox or of its forks, or create a sandbox from the snapshot",
            )
        with self._state_lock:
            run = self._writable_run("reset")
            check_room(trees, self.limits.disk, f"reset of sandbox {self.id}")
            run.end()
            del run  # drops the last reference to the upper
            self._continue_on(trees)

    def _writable_run(self, operation: str) -> SandboxRun:
        run = self._run
        if self._stopped or run is None:
            raise SandboxGone(f"sandbox {self.id} is stopped")
        if self._lifetime_left() <= 0:
            raise self._gone()
        if self._request.given_uppers:
            raise InvalidValue(
                f"{operation} of a sandbox that writes to {self._request.given_uppers[0]}",
                hint="leave out upper= at creation",
            )
        return run

    def _continue_on(self, trees: tuple[Tree, ...]) -> None:
        """Start the next run on top of sealed trees; stop the sandbox if that fails."""
        self._run = None
        self._trees = trees
        listeners.remove(self._controller.directory, self.id)
        try:
            self._begin()
            self._finish()
        except BaseException:  # even on Ctrl-C, clean up
            self._stop_now()
            raise
        self._controller.launcher.flush()
        uppers.sweep()

    # --- end ---------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Stop the sandbox at the end of a ``with`` block."""
        self.stop()

    def stop(self) -> None:
        """Kill every process of the sandbox and remove its mounts; calling it again does nothing.

        In a forked child it only drops the handle, because the sandbox belongs to the parent.

        Raises:
            SandboxGone: a process of the sandbox hangs in the kernel and did not exit.
        """
        if self._controller.pid != os.getpid():
            self._stopped = True
            return
        with self._state_lock:
            self._stop_now()

    def _stop_now(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        run, self._run = self._run, None
        self._trees = self._initial_trees = ()
        try:
            if run is not None:
                run.end()
                run.discard()
        finally:
            self._controller.remove(self)
            self._lease.release()
        del run
        self._controller.launcher.flush()
        uppers.sweep()
        for directory in self._request.given_uppers:
            uppers.finish(directory)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that the forks of a sandbox inherit, in addition to the request.

    Attributes:
        environment: variables of every command, which override the image's.
        labels: (name, value) pairs given by the caller.
    """

    environment: Mapping[str, str]
    labels: tuple[tuple[str, str], ...]


def hold_layers(controller: Controller, image: ImageSpec, mounts: Sequence[Mount]) -> Lease:
    """Lease the layers of an image and of mounts, so that the store keeps them while the sandbox uses them.

    Raises:
        NotFound: a layer has been removed.
        StoreError: the kernel refused, for example because no descriptors are left.
    """
    lease = Lease(controller.layers)
    paths = (*image.layers, *(path for mount in mounts for path in (mount.source, *mount.below)))
    lease.add(layer for layer in map(layer_of, paths) if layer is not None)
    return lease


def note_use(image: ImageSpec) -> None:
    """Record in the store that each layer of an image was used."""
    for layer in filter(None, map(layer_of, image.layers)):
        stamp(layer, count=True)


def info_of(record: registry.OwnerRecord) -> SandboxInfo:
    """Return the public fields of a record."""
    return SandboxInfo(
        record.id, record.image, record.owner, record.pid, record.created, record.network,
        tuple(sorted(record.labels.items())), record.expires, tuple(sorted(record.enforcement.items())),
        record.upper,
    )  # fmt: skip


def reach_process(directory: Path, sandbox_id: str, process_id: str) -> socket.socket:
    """Connect to the listening socket of a process in a sandbox.

    Raises:
        NotFound: there is no process with that id, or its socket is gone.
    """
    hint = 'start it with lifetime="sandbox" to find it again'
    not_found = NotFound(f"sandbox {sandbox_id} has no process {process_id!r}", hint=hint)
    if not process_id or "/" in process_id:
        raise not_found
    try:
        return listeners.connect(directory, listeners.name_of(sandbox_id, process_id))
    except OSError as error:
        raise unreachable(not_found, error) from error


def unreachable(missing_error: MiniSandboxError, error: OSError) -> MiniSandboxError:
    """Return the error for a failed connection: ``missing_error`` if the peer is gone, else a HostError."""
    if error.errno in _GONE:
        return missing_error
    if isinstance(error, TimeoutError):
        return SandboxGone(f"no connection to a sandbox could be made: {error.strerror}", reason="it hangs")
    return HostError(f"no connection to a sandbox could be made: {error.strerror}", reason="this process's own limits")
