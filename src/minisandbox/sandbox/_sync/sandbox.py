# Generated from _async/sandbox.py by tools/make_sync.py: change that file, then run the tool.
"""The handle on a sandbox.

Creating, stopping and sealing a sandbox take milliseconds in the kernel. They run to completion even if the caller
is interrupted.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from minisandbox.sandbox import uppers
from minisandbox.sandbox._sync.files import Files
from minisandbox.sandbox._sync.process import Process
from minisandbox.sandbox._sync.shell import Shell
from minisandbox.sandbox.attached import AttachedCore, live_sandboxes
from minisandbox.sandbox.backend import SandboxCore, warn_abandoned
from minisandbox.sandbox.engines import create_core, stop_core
from minisandbox.sandbox.io_sync import call_blocking, call_or_undo, carry_out
from minisandbox.sandbox.protocol import commands, file_operations
from minisandbox.sandbox.protocol.patching import find_written, make_patch
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.types import (
    Change,
    ExecResult,
    ImageSpec,
    Limits,
    Mount,
    Network,
    Refusals,
    SandboxInfo,
    SandboxUsage,
    Terminal,
)
from minisandbox.values import MiB


class Sandbox:
    """An isolated, writable, throw-away workspace based on an image. Create it with :meth:`create`.

    It is a context manager, may be shared by threads, and ends with the process that
    created it.

    Args:
        core: the backend of the sandbox.
    """

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    @property
    def id(self) -> str:
        """Its id, unique on this machine."""
        return self._core.id

    @property
    def image(self) -> ImageSpec:
        """Its image."""
        return self._core.image

    @property
    def created_in(self) -> float:
        """Seconds that creation took."""
        return self._core.created_in

    @property
    def alive(self) -> bool:
        """Whether the sandbox is running."""
        return self._core.alive

    @property
    def files(self) -> Files:
        """The files of the sandbox: read, write, copy."""
        return Files(self._core)

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
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """Create a sandbox and wait until it is ready for commands. Ctrl-C stops the new sandbox.

        Args:
            image: an image, or a snapshot of another sandbox.
            limits: resource limits; the defaults of :class:`Limits` if None.
            network: network access; only its own loopback if None.
            mounts: host directories and files to mount inside, read-only.
            environment: variables for every command, which override the image's.
            upper: an existing, empty host directory to write to instead of memory. After :meth:`stop` its ``tree`` is a
                complete layer. Only the disk limits its size, not ``Limits.disk``.
            labels: names and values that describe the sandbox, for the user and for :meth:`list`.

        Returns:
            The sandbox, ready for commands.

        Raises:
            InvalidValue: an argument is invalid.
            HostError: this machine lacks a kernel feature.
            SandboxCreationError: the kernel refused a step; the error names it.
        """
        uppers.check_mounts(mounts)
        if upper is not None:
            uppers.check_limits(limits)
        core: SandboxCore = call_or_undo(
            stop_core, create_core, image, limits=limits, network=network, mounts=mounts, environment=environment,
            upper=upper, labels=labels,
        )  # fmt: skip
        return cls(core)

    @classmethod
    def attach(cls, id: str) -> Self:  # noqa: A002 - the same word as the property and the command line
        """Attach to a live sandbox of this user, even if another process created it.

        Only the owner can call :meth:`snapshot`, :meth:`fork`, :meth:`reset`, :meth:`changes` and :meth:`refusals`.
        Leaving a ``with`` block only closes the handle; :meth:`stop` stops the sandbox.

        Args:
            id: id of the sandbox.

        Returns:
            A handle on the sandbox.

        Raises:
            NotFound: no live sandbox has that id.
        """
        core: AttachedCore = call_or_undo(AttachedCore.leave, AttachedCore.attach, id)
        return cls(core)

    @staticmethod
    def list(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """Return the live sandboxes of this user, of all processes.

        Args:
            labels: return only sandboxes that have all of these labels.

        Returns:
            The recorded facts about each sandbox, oldest first.
        """
        return call_blocking(live_sandboxes, labels=labels)

    def __enter__(self) -> Self:
        """Use the sandbox in a ``with`` block, whose end stops it, or closes the handle of an attached one."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the sandbox, or close the handle of an attached one."""
        call_blocking(self._core.leave)

    def __del__(self) -> None:
        """Stop a sandbox that is garbage-collected without having been stopped."""
        core = getattr(self, "_core", None)  # absent if creation failed
        if core is not None and core.abandoned:
            warn_abandoned(self, core.id)
            core.stop()

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command and wait until it has exited.

        It returns when the command's own process has exited; its background processes run until the sandbox stops. A
        non-zero exit, a signal and a timeout are results, not exceptions. Ctrl-C kills the command's process
        tree; the sandbox stays usable.

        Args:
            command: text for ``bash -c`` (no login shell), or an argument list.
            timeout: wall-clock seconds after which the command's process tree, and nothing else, is killed; None: no
                limit.
            cwd: directory to start in; a relative path is below the image's workdir, which is also the default.
            env: variables for this command, which override those of the sandbox.
            stdin: its standard input; empty if None.
            user: name or uid of the user inside that runs it, without any capability, or ``"USER:GROUP"``. A uid that
                is not in ``/etc/passwd`` has group 0. 0 and ``"root"`` run it as root with the sandbox's capabilities.
                None: the image's user, most often root. This does not protect the command from earlier commands that
                ran as root: a process that one of them left running can become this user, and change what the command
                does and prints.

        Returns:
            The exit status and output of the command.

        Raises:
            InvalidValue: an argument is invalid, there is no such user, or the user's name is an alias of root.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        operation = commands.run(self._core, command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=user)
        return carry_out(self._core, operation, early=True)

    def start(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        pty: Terminal | None = None,
        lifetime: Literal["handle", "sandbox"] = "handle",
    ) -> Process:
        """Start a command and return while it runs. Ctrl-C kills it, whatever its lifetime.

        Args:
            command: text for ``bash -c`` (no login shell), or an argument list.
            timeout: wall-clock seconds after which its process tree is killed; None: no limit.
            cwd: directory to start in; a relative path is below the image's workdir, which is also the default.
            env: variables for this command, which override those of the sandbox.
            user: name or uid of the user inside that runs it, as for :meth:`exec`.
            pty: size of a terminal to run it on; None: pipes.
            lifetime: ``"handle"``: it is killed when its handle is closed. ``"sandbox"``: it runs until it exits or the
                sandbox stops. Once its handle is closed, :meth:`process` can attach to it, from this process or
                another.

        Returns:
            A handle on the running process.

        Raises:
            InvalidValue: an argument is invalid, or there is no such user.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        channel = commands.process_channel(
            self._core, command, timeout=timeout, cwd=cwd, env=env, user=user, pty=pty, lifetime=lifetime
        )
        return Process._started(self._core, channel, owned=lifetime == "handle")

    def process(self, id: str) -> Process:  # noqa: A002 - the same word as the property
        """Attach to a running process that was started with ``lifetime="sandbox"``.

        Only one handle at a time can hold a process. The head and tail of the output that it printed without a handle
        were kept, and come first.

        Args:
            id: id of the process, from :attr:`Process.id` or :meth:`processes`.

        Returns:
            A handle on the process.

        Raises:
            InvalidValue: another handle holds the process.
            NotFound: there is no such process, or another handle has received its result.
            SandboxGone: the sandbox has ended.
        """
        return Process._reached(self._core, id)

    def processes(self) -> tuple[str, ...]:
        """Return the names of the processes with ``lifetime="sandbox"``, to which :meth:`process` can attach."""
        return call_blocking(self._core.processes)

    def shell(
        self,
        *,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> Shell:
        """Start a bash that keeps its state from one :meth:`Shell.run` to the next.

        Args:
            cwd: directory to start in; a relative path is below the image's workdir, which is also the default.
            env: variables for the shell, which override those of the sandbox.
            user: name or uid of the user inside that runs it, as for :meth:`exec`.

        Returns:
            The shell, ready for scripts.

        Raises:
            InvalidValue: an argument is invalid, or there is no such user.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        return Shell._opened(self._core, commands.shell_channel(self._core, cwd=cwd, env=env, user=user))

    def patch(
        self,
        path: str | PurePosixPath | None = None,
        *,
        base: str | None = None,
        limit: int | None = 100 * MiB,
        timeout: float | None = 300.0,
    ) -> bytes:
        """Return a git patch of the changes in a repository since a commit, with new, deleted and binary files.

        The index and the work tree are not changed. Ignored files are left out. Git runs as the owner of the
        repository's directory, and so do filters that its configuration names.

        Args:
            path: the repository; the image's workdir if None.
            base: the commit to compare with; the commit of the image if None.
            limit: maximum size of the patch in bytes; a larger patch is an error. None: no limit.
            timeout: wall-clock seconds for each run of git, because files that an agent left in the repository can
                block it. Git runs a second time if the faster comparison of written files fails. None: no limit.

        Returns:
            The patch; empty if nothing differs.

        Raises:
            FileAccessError: the patch is larger than the limit.
            CommandFailed: git failed, for example because the repository was destroyed, or took too long.
            SandboxGone: the sandbox has ended.
        """
        written = call_blocking(find_written, self._core, path, base=base, timeout=timeout)
        operation = make_patch(self._core, path, written, base=base, limit=limit, timeout=timeout)
        return carry_out(self._core, operation)

    def changes(self, *, timeout: float | None = 300.0) -> tuple[Change, ...]:
        """Return every path that differs from the image, except in extended attributes alone.

        Paths mounted on top of the image, such as ``/run``, ``/dev/shm`` and your mounts, are not compared.

        Args:
            timeout: wall-clock seconds that the comparison may take. None: no limit.

        Returns:
            The changes, sorted by path.

        Raises:
            FileAccessError: a path could not be compared, or the timeout was reached (``errno`` is ETIMEDOUT).
            InvalidValue: the timeout is not a positive number.
            OwnerOnly: the sandbox was attached.
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.changes, PurePosixPath("/"), timeout)

    def snapshot(self) -> Snapshot:
        """Seal the current state of the sandbox, without copying it.

        It kills all processes of the sandbox, which then continues on top of the sealed state. Sealed files stay in
        memory and count to ``Limits.disk``, even if they are deleted or overwritten later. The lifetime keeps running.

        Returns:
            The snapshot, to create sandboxes from and to :meth:`reset` to.

        Raises:
            InvalidValue: sealed states use up ``Limits.disk``; the sandbox is unchanged.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step when the sandbox was to continue; the error names it.
            SandboxGone: the sandbox has ended.
        """
        return call_or_undo(Snapshot.close, self._core.snapshot)

    def fork(self, count: int = 1) -> builtins.list[Self]:
        """Create sandboxes from the current state of this one, with the same limits, network and labels.

        It kills all processes of this sandbox, as :meth:`snapshot` does, and copies nothing. Ctrl-C stops the
        new sandboxes.

        Args:
            count: number of sandboxes.

        Returns:
            The new sandboxes; the caller stops each of them.

        Raises:
            InvalidValue: ``count`` is not a positive number.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step, which the error names; no new sandbox remains.
            SandboxGone: the sandbox has ended.
        """
        cores = call_or_undo(_stop_all, self._core.fork, count)
        return [type(self)(core) for core in cores]

    def reset(self, to: Snapshot | None = None) -> None:
        """Return to an earlier state: kill all processes and discard all files written since.

        Args:
            to: a snapshot of the same image; the initial state of the sandbox if None.

        Raises:
            InvalidValue: the snapshot is closed, or belongs to another image.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step; the error names it.
            SandboxGone: the sandbox has ended.
        """
        call_blocking(self._core.reset, to)

    def usage(self) -> SandboxUsage:
        """Return the current resource use of the sandbox.

        Returns:
            CPU, memory, disk and processes.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.usage())

    def refusals(self) -> Refusals:
        """Return the requests that the allow-list of :meth:`minisandbox.Network.allow` has refused so far.

        Returns:
            The number of refused requests, and the reasons of the latest.

        Raises:
            OwnerOnly: the sandbox was attached.
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.refusals)

    def info(self) -> SandboxInfo:
        """Return the recorded facts about the sandbox.

        Returns:
            Its image, owner, labels, creation time, expiry time and more.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.info)

    def stop(self) -> None:
        """Kill every process of the sandbox and remove its mounts; calling it again does nothing.

        In a forked child it only drops the handle, because the sandbox belongs to the parent.

        Raises:
            SandboxGone: a process of the sandbox hangs in the kernel and did not exit.
        """
        call_blocking(self._core.stop)


def _stop_all(cores: Sequence[SandboxCore]) -> None:
    for core in cores:
        core.stop()
