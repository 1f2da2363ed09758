"""The lifecycle of a sandbox of this process: create, connect, seal, stop.

Everything here blocks for milliseconds at most. Sync handles call it directly, async handles call the longer parts in
a thread.
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
"""What the kernel says of a socket whose other end has been closed, or never was."""
_AT_ONCE = 4
"""Forks that are being made while the next is asked for."""


class Core:
    """A live sandbox of this process. Make one with :meth:`create`.

    Attributes:
        id: its name, unique on this machine.
        image: what is inside.
        limits: what it may use.
        environment: what every command finds in its environment.
        owned: True: this process made it.
        created_in: seconds that creation took.
    """

    owned = True

    def __init__(
        self, controller: Controller, request: SandboxRequest, settings: Settings, trees: tuple[Tree, ...]
    ) -> None:
        self.id = f"box-{secrets.token_hex(6)}"
        inside = any(mount.target.is_relative_to(request.image.workdir) for mount in request.mounts)
        one_id = controller.launcher.ids == 1 or request.one_id
        user = "" if one_id else request.image.user
        self.image = replace(request.image, clean=request.image.clean and not inside, user=user)
        self.limits = request.limits
        self.environment = command_environment(
            request.image, network_environment(request.network), settings.environment
        )
        self.created_in = 0.0
        self._controller = controller
        self._request = request
        self._settings = settings
        self._origin = trees
        self._trees = trees
        self._run: SandboxRun | None = None
        self._lease = hold_layers(controller, request.image, request.mounts)
        note_use(request.image)
        self._stopped = False
        self._changing = threading.Lock()
        self._created = time.time()
        self._asked = self._began = 0.0  # by the monotonic clock, and by the wall clock; 0: not yet

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
        """Make a sandbox and wait until it is ready; see :meth:`minisandbox.Sandbox.create`."""
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
            watched = {**request.enforcement, "disk": uppers.WATCHED}
            request = replace(request, disk_upper=True, enforcement=watched)
        check_room(trees, request.limits.disk, f"a sandbox over {len(trees)} snapshots")
        for directory in request.given_uppers:
            uppers.prepare(directory)
        settings = Settings(dict(environment or {}), tuple((labels or {}).items()))
        return cls._made(controller, request, settings, trees)

    @classmethod
    def _made(
        cls, controller: Controller, request: SandboxRequest, settings: Settings, trees: tuple[Tree, ...]
    ) -> Self:
        started = time.monotonic()
        core = cls(controller, request, settings, trees)
        try:
            with controller.turns:
                core._begin()
                core._finish()
        except BaseException:  # whatever went wrong, a Ctrl-C included: nothing half-made stays
            core.stop()
            raise
        core.created_in = time.monotonic() - started
        return core

    def _begin(self, plan: Plan | None = None) -> None:
        """Begin a life over the trees that are sealed now.

        Args:
            plan: what it is, if that is known already.
        """
        door = self._controller.listener(listeners.name_of(self.id))
        with door:
            upper = uppers.UpperDirectory(self._request.image) if self._request.disk_upper else None
            plan = plan or self._plan()
            plan = plan if upper is None else with_disk_upper(plan, upper.path)
            if not self._asked:  # its lifetime counts from here: pid 1 begins later, and ends it after it is over here
                self._asked, self._began = time.monotonic(), time.time()
            elif self.limits.lifetime is not None:  # a reset does not renew the lifetime
                plan = replace(plan, lifetime=max(1, int(self._lifetime_left() * 1000)))
            try:
                self._run = SandboxRun(self._controller.launcher, plan, door, self._trees, self.id, upper=upper)
            except BaseException:  # a Ctrl-C too: nothing half-made stays
                if upper is not None:
                    upper.discard()
                raise

    def _plan(self) -> Plan:
        held = sum(tree.held() for tree in self._trees)
        return find_plan(replace(self._request, sealed=len(self._trees), held=held))

    def _finish(self) -> None:
        """Wait until it is ready."""
        assert self._run is not None
        self._run.await_process()
        self._controller.add(self, self._record(self._run))  # now, while the sandbox is being made
        self._run.await_ready()
        if self._run.listener is not None:
            self._controller.gateway.serve(self.id, self._request.network, self._run.listener, self._run.pidfd)

    def _record(self, run: SandboxRun) -> registry.OwnerRecord:
        lifetime = self.limits.lifetime
        return registry.OwnerRecord(
            self.id, os.getpid(), self.image.name, self._created, run.pid, self._request.network.mode,
            dict(self._settings.labels), None if lifetime is None else self._began + lifetime,
            str(self.image.workdir), self.image.base_commit, self.environment, self.limits.output,
            self._request.enforcement, self._request.upper_kind, self.image.user,
        )  # fmt: skip

    # --- reaching it -------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""
        run = self._run
        return not self._stopped and run is not None and not run.over(0.0)

    @property
    def abandoned(self) -> bool:
        """Whether this process made it and never stopped it."""
        return not self._stopped and self._run is not None and self._controller.pid == os.getpid()

    def open_job(self, *, wait: bool = True) -> socket.socket:
        """Connect a stream socket for one call.

        Closing it ends the command that runs on it.

        Args:
            wait: whether to wait where so many jobs are under way that another has no room.

        Raises:
            BlockingIOError: the sandbox has no capacity, and the call may not wait.
            HostError: this process has no descriptors left, for example.
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
        """Tell a call that was cut off from a sandbox that has ended.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        run = self._run
        # the kernel closes the workers' sockets a moment before pid 1 counts as ended
        if self._stopped or run is None or run.over(0.2):
            raise self._gone()

    def _lifetime_left(self) -> float:
        """Return the seconds until its lifetime is over."""
        lifetime = self.limits.lifetime
        return float("inf") if lifetime is None else self._asked + lifetime - time.monotonic()

    def _gone(self) -> SandboxGone:
        reason = "it was stopped or killed from outside"
        if not self._stopped and self._lifetime_left() <= 0:
            reason = f"its lifetime of {self.limits.lifetime:g} s is over (Limits.lifetime)"
        return SandboxGone(f"sandbox {self.id} has ended", reason=reason)

    def info(self) -> SandboxInfo:
        """What is known about it.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        for record in registry.live_records(self._controller.launcher.runtime):
            if record.id == self.id:
                return info_of(record)
        raise self._gone()

    def refusals(self) -> Refusals:
        """What its network's allow-list has kept from it.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        if not self.alive:
            raise self._gone()
        return self._controller.gateway.refusals(self.id)

    def process_listener(self, process_id: str) -> socket.socket:
        """Open a listening socket for a process that outlives its handle; the process's worker keeps it.

        Raises:
            SandboxGone: the sandbox has ended.
            HostError: the socket cannot be created.
        """
        if not self.alive:
            raise self._gone()
        return self._controller.listener(listeners.name_of(self.id, process_id))

    def connect_process(self, process_id: str) -> socket.socket:
        """Reach a process by its door.

        Raises:
            NotFound: there is no process of that id, or its listener is gone.
        """
        return reach_process(self._controller.directory, self.id, process_id)

    def processes(self) -> tuple[str, ...]:
        """Return the ids of processes that outlive their handles.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        if not self.alive:
            raise self._gone()
        return listeners.process_ids(self._controller.directory, self.id)

    # --- its state ---------------------------------------------------------------------------------------------------

    def changes(
        self, below: PurePosixPath, timeout: float | None, max_characters: int = MOST_CHARACTERS
    ) -> tuple[Change, ...]:
        """Return the changes to the image at a path and below it; see :meth:`minisandbox.Sandbox.changes`.

        More characters of paths than ``max_characters`` are an error.
        """
        check_timeout(timeout)
        run = self._living("changes")
        trees = (*self._trees, run.tree)
        return comparing.changes(self._controller.launcher, self._request, trees, below, timeout, max_characters)

    def snapshot(self) -> Snapshot:
        """Seal what was written, and continue on top of it; see :meth:`minisandbox.Sandbox.snapshot`."""
        with self._changing:
            run = self._living("a snapshot")
            if len(self._trees) == MOST_TREES:
                raise InvalidValue(
                    f"sandbox {self.id}: {MOST_TREES} snapshots lie one over the other already",
                    hint="reset() to an earlier one, or begin anew from the image",
                )
            trees = (*self._trees, run.tree)
            check_room(trees, self.limits.disk, f"a snapshot of sandbox {self.id}")
            run.end()
            run.tree.seal()
            self._go_on(trees)
        lease = hold_layers(self._controller, self.image, self._request.mounts)
        return Snapshot(f"snap-{secrets.token_hex(6)}", self._request.image, time.time(), trees, lease)

    def fork(self, count: int) -> list[Self]:
        """Create sandboxes from the present state; see :meth:`minisandbox.Sandbox.fork`."""
        if type(count) is not int or not 1 <= count <= _MOST_FORKS:
            raise InvalidValue(f"fork({count!r})", hint=f"give how many sandboxes: 1 to {_MOST_FORKS}")
        trees = self.snapshot().trees()
        plan = replace(self._plan(), expects_commands=count == 1)  # a worker that waits too long ends
        forks: list[Self] = []
        try:
            for number in range(count + _AT_ONCE):
                if number < count:
                    forks += [type(self)(self._controller, self._request, self._settings, trees)]
                    forks[-1]._begin(plan)
                if number >= _AT_ONCE:
                    forks[number - _AT_ONCE]._finish()
        except BaseException:  # a Ctrl-C too: nothing half-made stays
            for core in forks:
                core.stop()
            raise
        return forks

    def reset(self, to: Snapshot | None) -> None:
        """Discard all changes; see :meth:`minisandbox.Sandbox.reset`."""
        trees = self._origin if to is None else to.trees()
        if to is not None and to.image != self._request.image:
            raise InvalidValue(
                f"cannot reset sandbox {self.id} to snapshot {to.id}: it is of image {to.image.name}, "
                f"and the sandbox of {self.image.name}",
                reason="the image was built again since, where the names are the same",
                hint="reset to a snapshot of this sandbox or of its forks, or create a sandbox from the snapshot",
            )
        with self._changing:
            run = self._living("reset")
            check_room(trees, self.limits.disk, f"reset of sandbox {self.id}")
            run.end()
            del run  # releases the written files
            self._go_on(trees)

    def _living(self, what: str) -> SandboxRun:
        run = self._run
        if self._stopped or run is None:
            raise SandboxGone(f"sandbox {self.id} is stopped")
        if self._lifetime_left() <= 0:
            raise self._gone()
        if self._request.given_uppers:
            raise InvalidValue(
                f"{what} of a sandbox that writes to {self._request.given_uppers[0]}",
                hint="leave out upper= at creation",
            )
        return run

    def _go_on(self, trees: tuple[Tree, ...]) -> None:
        """Begin the next life; if that fails the sandbox is over."""
        self._run = None
        self._trees = trees
        listeners.remove(self._controller.directory, self.id)
        try:
            self._begin()
            self._finish()
        except BaseException:  # a Ctrl-C too: nothing half-made stays
            self._stop_now()
            raise
        self._controller.launcher.flush()
        uppers.sweep()

    # --- its end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Stop a sandbox of our own at the end of a ``with`` block."""
        self.stop()

    def stop(self) -> None:
        """End every process of the sandbox and its mounts; calling it again does nothing.

        In a process forked from the one that made the sandbox it only forgets it: the sandbox is its maker's.

        Raises:
            SandboxGone: a process of it hangs in the kernel and did not end.
        """
        if self._controller.pid != os.getpid():
            self._stopped = True
            return
        with self._changing:
            self._stop_now()

    def _stop_now(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        run, self._run = self._run, None
        self._trees = self._origin = ()
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
    """Settings that a sandbox's forks inherit, in addition to the request.

    Attributes:
        environment: variables that every command gets, over the image's.
        labels: what its maker calls it.
    """

    environment: Mapping[str, str]
    labels: tuple[tuple[str, str], ...]


def hold_layers(controller: Controller, image: ImageSpec, mounts: Sequence[Mount]) -> Lease:
    """Keep an image's layers in their store for as long as something is made over them.

    Raises:
        NotFound: a layer has been removed.
        StoreError: the kernel refused; no descriptors left, for example.
    """
    lease = Lease(controller.layers)
    places = (*image.layers, *(path for mount in mounts for path in (mount.source, *mount.below)))
    lease.add(layer for layer in map(layer_of, places) if layer is not None)
    return lease


def note_use(image: ImageSpec) -> None:
    """Note in the store that an image is used: a use of each of its layers."""
    for layer in filter(None, map(layer_of, image.layers)):
        stamp(layer, count=True)


def info_of(record: registry.OwnerRecord) -> SandboxInfo:
    """Return the public part of a record."""
    return SandboxInfo(
        record.id, record.image, record.owner, record.pid, record.created, record.network,
        tuple(sorted(record.labels.items())), record.expires, tuple(sorted(record.enforcement.items())),
        record.upper,
    )  # fmt: skip


def reach_process(directory: Path, sandbox_id: str, process_id: str) -> socket.socket:
    """Reach a process of a sandbox by its door.

    Raises:
        NotFound: there is no process of that id, or its listener is gone.
    """
    hint = 'start it with lifetime="sandbox" to find it again'
    missing = NotFound(f"sandbox {sandbox_id} has no process {process_id!r}", hint=hint)
    if not process_id or "/" in process_id:
        raise missing
    try:
        return listeners.connect(directory, listeners.name_of(sandbox_id, process_id))
    except OSError as error:
        raise unreachable(missing, error) from error


def unreachable(ended: MiniSandboxError, error: OSError) -> MiniSandboxError:
    """Return the error for a failed connection: ``ended`` if the other end is gone, otherwise the reason."""
    if error.errno in _GONE:
        return ended
    if isinstance(error, TimeoutError):
        return SandboxGone(f"no connection to a sandbox could be made: {error.strerror}", reason="it hangs")
    return HostError(f"no connection to a sandbox could be made: {error.strerror}", reason="this process's own limits")
