# Generated from _async/sandbox.py by tools/make_sync.py: change that file, then run the tool.
"""The synchronous sandbox.

Creating, stopping and sealing take milliseconds in the kernel. They run to their end even if the caller is interrupted.
"""

from __future__ import annotations

import builtins
import types
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
    MiB,
    Mount,
    Network,
    Refusals,
    SandboxInfo,
    SandboxUsage,
    Terminal,
)


class Sandbox:
    """One isolated, writable, throw-away workspace over an image. Make one with :meth:`create`.

    It is a context manager, may be shared by threads, and ends with the process that made
    it.

    Args:
        core: the sandbox that this is a handle on.
    """

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    @property
    def id(self) -> str:
        """Its name, unique on this machine."""
        return self._core.id

    @property
    def image(self) -> ImageSpec:
        """What is inside."""
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
        """The file verbs."""
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
        """Make a sandbox and wait until it is ready for commands. Ctrl-C stops what was made.

        Args:
            image: what is inside: an image, or the state of another sandbox.
            limits: what it may use; the defaults of :class:`Limits` if None.
            network: what it can reach; nothing but its own loopback if None.
            mounts: host directories and files to show inside, read-only.
            environment: variables that every command gets, over the image's.
            upper: an existing, empty host directory that takes the writes instead of memory. After :meth:`stop` its
                ``tree`` is a complete layer. Nothing but its disk limits how much that is, not ``Limits.disk``.
            labels: what to call it, for people and for :meth:`list`.

        Returns:
            The sandbox, ready.

        Raises:
            InvalidValue: an argument cannot be used.
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
        """Take hold of a live sandbox of this user, whichever process made it.

        Everything works but :meth:`snapshot`, :meth:`fork`, :meth:`reset` and :meth:`changes`, which are its owner's.
        Leaving a ``with`` block only closes the handle; :meth:`stop` ends the sandbox.

        Args:
            id: its name.

        Returns:
            A handle on it.

        Raises:
            NotFound: no live sandbox has that name.
        """
        core: AttachedCore = call_or_undo(AttachedCore.leave, AttachedCore.attach, id)
        return cls(core)

    @staticmethod
    def list(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """Return the live sandboxes of this user, whichever process made them.

        Args:
            labels: only those that have all of these labels.

        Returns:
            What is known about each, the oldest first.
        """
        return call_blocking(live_sandboxes, labels=labels)

    def __enter__(self) -> Self:
        """Use the sandbox in a ``with`` block; its end stops it, or closes the handle of an attached one."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Stop the sandbox, or close the handle of an attached one."""
        call_blocking(self._core.leave)

    def __del__(self) -> None:
        """Stop a sandbox that was never stopped and is garbage now."""
        core = getattr(self, "_core", None)  # absent where creation failed
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
        """Run a command and wait for its end.

        Returns when the command's own process has ended; background processes it leaves run until the sandbox stops.
        A non-zero exit, a signal and a timeout are values, not exceptions. Ctrl-C ends the command's whole
        tree; the sandbox stays usable.

        Args:
            command: text for ``bash -c`` (no login shell), or an argument list.
            timeout: wall seconds after which the command's whole tree (and nothing else) is killed; None: no limit.
            cwd: directory to start in; relative ones are below the image's workdir, which is also the default.
            env: variables for this command, over those of the sandbox.
            stdin: its standard input; empty if None.
            user: name or uid of the user inside who runs it, without any capability, or ``"USER:GROUP"``; a uid that
                ``/etc/passwd`` lacks has group 0; root, with its capabilities, if 0 or ``"root"``; the image's user,
                most often root, if None. No protection from commands that ran as root before: a process that one of
                them left running can become this user, and change what this command does and prints.

        Returns:
            How it ended and what it printed.

        Raises:
            InvalidValue: an argument cannot be used, there is no such user here, or its name stands for root.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        operation = commands.run(self._core, command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=user)
        return carry_out(self._core, operation)

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
        """Start a command and return while it runs. Ctrl-C ends it, whatever its lifetime.

        Args:
            command: text for ``bash -c`` (no login shell), or an argument list.
            timeout: wall seconds after which its whole tree is killed; None: no limit.
            cwd: directory to start in; relative ones are below the image's workdir, which is also the default.
            env: variables for this command, over those of the sandbox.
            user: name or uid of the user inside who runs it, as for :meth:`exec`.
            pty: size of a terminal to run it on; None: pipes.
            lifetime: ``"handle"``: it ends when its handle is closed. ``"sandbox"``: it goes on until it or the sandbox
                ends. Once its handle is closed, :meth:`process` attaches to it again, from this process or another.

        Returns:
            The running process.

        Raises:
            InvalidValue: an argument cannot be used, or there is no such user here.
            FileAccessError: ``cwd`` cannot be entered.
            SandboxGone: the sandbox has ended.
        """
        channel = commands.process_channel(
            self._core, command, timeout=timeout, cwd=cwd, env=env, user=user, pty=pty, lifetime=lifetime
        )
        return Process._started(self._core, channel, owned=lifetime == "handle")

    def process(self, id: str) -> Process:  # noqa: A002 - the same word as the property
        """Attach to a running process that was started with ``lifetime="sandbox"``.

        A process has one holder at a time. What it printed without a holder was kept, head and tail, and comes first.

        Args:
            id: its name, as :attr:`Process.id` and :meth:`processes` say it.

        Returns:
            A handle on it.

        Raises:
            InvalidValue: another handle holds the process.
            NotFound: there is no such process, or its result was taken.
            SandboxGone: the sandbox has ended.
        """
        return Process._reached(self._core, id)

    def processes(self) -> tuple[str, ...]:
        """Return the names of the processes with ``lifetime="sandbox"``, to which :meth:`process` attaches."""
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
            cwd: directory to start in; relative ones are below the image's workdir, which is also the default.
            env: variables for it, over those of the sandbox.
            user: name or uid of the user inside who runs it, as for :meth:`exec`.

        Returns:
            The shell, ready.

        Raises:
            InvalidValue: an argument cannot be used, or there is no such user here.
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
        """Return a git patch of what differs from a commit in a repository, new, deleted and binary files included.

        The index and the work tree stay as they are. Files that git ignores are left out. Git runs as the
        owner of the repository's directory, and so do filters that its configuration names.

        Args:
            path: the repository; the image's workdir if None.
            base: the commit to compare with; the one the image was made of if None.
            limit: most bytes; a larger patch is an error. None: no limit.
            timeout: wall seconds that git has, each time that it is asked: twice if it cannot take what was written;
                what an agent left in the repository can hold it. None: no limit.

        Returns:
            The patch; empty if nothing differs.

        Raises:
            FileAccessError: the patch is larger than the limit.
            CommandFailed: git could not compute it, for example because the repository was destroyed, or not in time.
            SandboxGone: the sandbox has ended.
        """
        written = call_blocking(find_written, self._core, path, base=base, timeout=timeout)
        operation = make_patch(self._core, path, written, base=base, limit=limit, timeout=timeout)
        return carry_out(self._core, operation)

    def changes(self, *, timeout: float | None = 300.0) -> tuple[Change, ...]:
        """Return every path that differs from the image, but for those that differ in extended attributes alone.

        What is mounted over the image, such as ``/run``, ``/dev/shm`` and your mounts, is no part of it.

        Args:
            timeout: wall seconds that comparing may take. None: no limit.

        Returns:
            The changes, sorted by path.

        Raises:
            FileAccessError: something could not be compared, or not in time (``errno`` is ETIMEDOUT).
            InvalidValue: the timeout is not a positive number.
            OwnerOnly: the sandbox was attached.
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.changes, PurePosixPath("/"), timeout)

    def snapshot(self) -> Snapshot:
        """Seal what was written so far, without copying it.

        Ends all processes of the sandbox; the handle goes on over the sealed state. What is sealed stays in memory and
        counts to ``Limits.disk``, what is deleted or overwritten afterwards included; the lifetime goes on.

        Returns:
            The state, from which sandboxes can be made and to which :meth:`reset` goes back.

        Raises:
            InvalidValue: sealed states leave nothing of ``Limits.disk``; the sandbox is unchanged.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step of going on; the error names it.
            SandboxGone: the sandbox has ended.
        """
        return call_or_undo(Snapshot.close, self._core.snapshot)

    def fork(self, count: int = 1) -> builtins.list[Self]:
        """Make sandboxes that begin with what this one holds, with the same limits, network and labels.

        Ends all processes of this sandbox, as :meth:`snapshot` does; nothing is copied. Ctrl-C stops the new
        ones.

        Args:
            count: how many.

        Returns:
            The new sandboxes; the caller stops each.

        Raises:
            InvalidValue: ``count`` is not a positive number.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step; the error names it, and none is left over.
            SandboxGone: the sandbox has ended.
        """
        cores = call_or_undo(_stop_all, self._core.fork, count)
        return [type(self)(core) for core in cores]

    def reset(self, to: Snapshot | None = None) -> None:
        """Go back to an earlier state; ends all processes and forgets everything written since.

        Args:
            to: a snapshot over the same image; what the sandbox was made from if None.

        Raises:
            InvalidValue: the snapshot is closed, or of another image.
            OwnerOnly: the sandbox was attached.
            SandboxCreationError: the kernel refused a step; the error names it.
            SandboxGone: the sandbox has ended.
        """
        call_blocking(self._core.reset, to)

    def usage(self) -> SandboxUsage:
        """Return what the sandbox uses right now.

        Returns:
            CPU, memory, disk and processes.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.usage())

    def refusals(self) -> Refusals:
        """Return what the allow-list of :meth:`minisandbox.Network.allow` has kept from the sandbox so far.

        Returns:
            How many requests were refused, and why the latest were.

        Raises:
            OwnerOnly: the sandbox was attached.
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.refusals)

    def info(self) -> SandboxInfo:
        """Return what is known about the sandbox: its image, owner, labels, when it was made and when it expires.

        Returns:
            What is known.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        return call_blocking(self._core.info)

    def stop(self) -> None:
        """End every process of the sandbox and its mounts; calling it again does nothing.

        In a process forked from the one that made the sandbox, it only forgets it: the sandbox is its parent's.

        Raises:
            SandboxGone: a process of it hangs in the kernel and did not end.
        """
        call_blocking(self._core.stop)


def _stop_all(cores: Sequence[SandboxCore]) -> None:
    for core in cores:
        core.stop()
