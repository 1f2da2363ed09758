"""A fake sandbox for the tests of other packages: it runs anywhere, and IT ISOLATES NOTHING.

Commands of a fake are ordinary processes of this machine and of this user: they see its files, its processes and its
network, and can destroy all that the user can. Give it nothing that you would not type into your own shell. It needs no
namespace, no mount and no privilege, and so it runs where a real sandbox cannot.

It is a fake at the bottom alone: handles, protocol, supervisor, workers and file verbs are those of a real sandbox, and
it passes the same conformance suite (``tests/conformance``), minus the cases that need a kernel. What differs:

* The workdir is a temporary directory, whose path is in ``image.workdir``: use relative paths. Of an image's layers it
  holds a copy of what lies below their workdir; everything else is the host's.
* Snapshots, forks and resets copy the workdir; changes are found by comparing it with such a copy.
* A pty can be had where this user may open ``/dev/pts/ptmx``: as root, mostly. ``usage`` counts the whole machine.
* Of the limits, those of single processes hold (open files, file size, output kept); ``network`` and ``mounts`` are
  refused unless they ask for nothing.
"""

from __future__ import annotations

import filecmp
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from minisandbox.errors import HostError, InvalidValue, NotFound, SandboxGone
from minisandbox.host import listeners, registry
from minisandbox.launch.setup import LIFETIME
from minisandbox.sandbox import scratch
from minisandbox.sandbox._async.sandbox import AsyncSandbox
from minisandbox.sandbox._sync.sandbox import Sandbox
from minisandbox.sandbox.attached import AttachedCore
from minisandbox.sandbox.core import info_of, reach_process
from minisandbox.sandbox.io_async import call_or_undo
from minisandbox.sandbox.protocol.environment import command_environment
from minisandbox.sandbox.protocol.file_calls import FILE_TYPES
from minisandbox.sandbox.run import new_job, readable
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.sandbox.validation import check_creation, check_timeout
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import Change, ChangeKind, FileType, ImageSpec, Limits, Mount, Network, Refusals, SandboxInfo

_BOOTSTRAP = (
    "import json, os, sys; sys.path.append(os.read(0, 65536).decode('utf-8', 'surrogateescape')); "
    "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
    "from minisandbox.launch import unisolated; "
    "unisolated.main(*map(int, sys.argv[1:4]), json.loads(sys.argv[4]))"
)
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0
NOTHING = ImageSpec("fake", ())
"""An image for fakes that need none: an empty workdir."""


class _FakeRun:
    """The supervisor of a fake and all that it started.

    Attributes:
        pid: of the supervisor.
    """

    def __init__(self, door: socket.socket, numbers: Mapping[str, int]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = 0
        self._pidfd = -1
        with theirs:
            self._process = _start(theirs, door, numbers)
        try:
            self._control.settimeout(_START_TIMEOUT)
            self.pid = int(self._receive()["pid"])
            self._pidfd = os.pidfd_open(self.pid)
            self._receive()
        except BaseException:  # a Ctrl-C too: nothing half-made stays
            self.end()
            raise

    def _receive(self) -> dict[str, Any]:
        data = self._control.recv(1 << 16)
        if not data:
            raise HostError("the fake's supervisor ended at its start")
        answer = json.loads(data)
        assert isinstance(answer, dict)
        return answer

    def over(self, seconds: float) -> bool:
        """Whether the supervisor has ended, or does within so many seconds."""
        return self._pidfd < 0 or registry.start_time(self.pid) is None or readable(self._pidfd, seconds)

    def open_job(self) -> socket.socket:
        """A connected stream socket of a new job."""
        return new_job(self._control)

    def end(self) -> None:
        """Hang up and wait until everything has ended; calling it again does nothing."""
        self._control.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self._process.wait(_STOP_TIMEOUT)


def _start(theirs: socket.socket, door: socket.socket, numbers: Mapping[str, int]) -> subprocess.Popen[bytes]:
    owner = os.pidfd_open(os.getpid())
    handed = (theirs.fileno(), door.fileno(), owner)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP, *map(str, handed), json.dumps(dict(numbers))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=handed,
            cwd="/",
            env={},
            start_new_session=True,  # Ctrl-C is for the owner to handle
        )
    finally:
        os.close(owner)
    assert process.stdin is not None
    process.stdin.write(os.fsencode(Path(__file__).parent.parent))
    process.stdin.close()
    return process


class FakeSnapshot(Snapshot):
    """The sealed state of a fake: a copy of its workdir.

    Attributes:
        bottom: what its image holds at the workdir.
    """

    def __init__(self, image: ImageSpec, bottom: _Copy, sealed: _Copy) -> None:
        super().__init__(f"snap-{secrets.token_hex(6)}", image, time.time(), ())
        self.bottom = bottom
        self._sealed: _Copy | None = sealed

    def sealed(self) -> _Copy:
        """The copy.

        Raises:
            InvalidValue: it is closed.
        """
        if self._sealed is None:
            raise InvalidValue(f"snapshot {self.id} is closed", hint="close it when nothing more is made over it")
        return self._sealed

    def close(self) -> None:
        """Give it up. Calling it again does nothing."""
        self._sealed = None
        super().close()


class FakeCore:
    """The life of a fake; see :class:`minisandbox.sandbox.backend.SandboxCore`."""

    owned = True

    def __init__(self, bottom: _Copy, origin: _Copy, image: ImageSpec, settings: _Settings) -> None:
        started = time.monotonic()
        self.id = f"fake-{secrets.token_hex(6)}"
        self._base = image
        self._settings = settings
        self._bottom, self._origin = bottom, origin
        self._changing = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._place = scratch.new_scratch()
        runs: list[_FakeRun] = []
        self._runs = runs
        self._close = weakref.finalize(self, _clean_up, self._pid, runs, self._place)
        for name in ("doors", "home", "tmp", "work"):
            (self._place / name).mkdir()
        self.image = replace(image, workdir=PurePosixPath(self._place / "work"))
        self.limits = settings.limits
        own = {"HOME": str(self._place / "home"), "TMPDIR": str(self._place / "tmp")}
        self.environment = command_environment(image, own, dict(image.environment), settings.environment)
        self._created = time.time()
        origin.restore(self._place / "work")
        self._start()
        self.created_in = time.monotonic() - started
        _fakes.add(self)

    @classmethod
    def create(cls, image: ImageSpec | Snapshot, settings: _Settings) -> FakeCore:
        """A fake over an image or a snapshot of a fake."""
        scratch.reap()
        if isinstance(image, Snapshot):
            if not isinstance(image, FakeSnapshot):
                raise InvalidValue(f"snapshot {image.id} is of a real sandbox", hint="a fake takes those of fakes")
            return cls(image.bottom, image.sealed(), image.image, settings)
        bottom = _Copy.of(*(layer / image.workdir.relative_to("/") for layer in image.layers))
        return cls(bottom, bottom, image, settings)

    def _start(self) -> None:
        lifetime = self.limits.lifetime
        numbers = {"CORE": 0, "NOFILE": self.limits.open_files, LIFETIME: int((lifetime or 0) * 1000)}
        if self.limits.file_size is not None:
            numbers["FSIZE"] = self.limits.file_size
        with listeners.make(self._place / "doors", listeners.name_of(self.id), scratch.ELSEWHERE) as door:
            self._runs.append(_FakeRun(door, numbers))
        self._expires = None if lifetime is None else time.time() + lifetime

    def record(self) -> registry.Record:
        """What others need to know to attach."""
        return registry.Record(
            self.id, self._pid, self.image.name, self._created, self._runs[-1].pid, "off",
            dict(self._settings.labels), self._expires, str(self.image.workdir), self.image.base_commit,
            self.environment, self.limits.output,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether the fake is running."""
        return not self._stopped and bool(self._runs) and not self._runs[-1].over(0.0)

    @property
    def abandoned(self) -> bool:
        """Whether this process made it and never stopped it."""
        return not self._stopped and self._pid == os.getpid()

    def open_job(self, *, wait: bool = True) -> socket.socket:  # noqa: ARG002 - a job never has to wait here
        """A connected stream socket on which one call is carried through.

        Raises:
            SandboxGone: the fake has ended.
        """
        try:
            return self._living().open_job()
        except OSError as error:
            raise self._gone() from error

    def check_alive(self) -> None:
        """Tell a call that was cut off from a fake that has ended.

        Raises:
            SandboxGone: the fake has ended.
        """
        if self._living().over(0.2):
            raise self._gone()

    def _living(self) -> _FakeRun:
        if self._stopped or not self._runs:
            raise self._gone()
        return self._runs[-1]

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self.id} has ended", reason="it was stopped or killed from outside")

    def info(self) -> SandboxInfo:
        """What is known about it."""
        if not self.alive:
            raise self._gone()
        return info_of(self.record())

    def refusals(self) -> Refusals:
        """Nothing is refused."""
        if not self.alive:
            raise self._gone()
        return Refusals()

    def attach(self) -> AttachedCore:
        """Another handle's core."""
        return AttachedCore(self._place / "doors", self.record(), os.pidfd_open(self._living().pid))

    def process_listener(self, process_id: str) -> socket.socket:
        """A listening socket for a process that outlives its handle."""
        return listeners.make(self._place / "doors", listeners.name_of(self.id, process_id), scratch.ELSEWHERE)

    def connect_process(self, process_id: str) -> socket.socket:
        """Reach a process by its door; NotFound if it does not exist."""
        return reach_process(self._place / "doors", self.id, process_id)

    def processes(self) -> tuple[str, ...]:
        """The ids of processes that outlive their handles."""
        self._living()
        return listeners.process_ids(self._place / "doors", self.id)

    def changes(self, below: PurePosixPath, timeout: float | None, most: int = 0) -> tuple[Change, ...]:  # noqa: ARG002 - few here
        """What differs in the workdir from the image, at a path and below it."""
        check_timeout(timeout)
        self._living()
        changes = _compare(self._bottom.path, self._place / "work", self.image.workdir)
        return tuple(change for change in changes if change.path.is_relative_to(below))

    def snapshot(self) -> FakeSnapshot:
        """Copy the workdir; all processes end."""
        with self._changing:
            self._living().end()
            sealed = _Copy.of(self._place / "work")
            self._go_on()
        return FakeSnapshot(self._base, self._bottom, sealed)

    def fork(self, count: int) -> list[FakeCore]:
        """Fakes over a copy of the workdir."""
        if type(count) is not int or count < 1:
            raise InvalidValue(f"fork({count!r})", hint="give how many sandboxes: 1 or more")
        sealed = self.snapshot().sealed()
        return [type(self)(self._bottom, sealed, self._base, self._settings) for _ in range(count)]

    def reset(self, to: Snapshot | None = None) -> None:
        """Put the workdir back; all processes end."""
        if to is not None and not isinstance(to, FakeSnapshot):
            raise InvalidValue(f"snapshot {to.id} is of a real sandbox", hint="a fake takes those of fakes")
        sealed = self._origin if to is None else to.sealed()
        with self._changing:
            self._living().end()
            sealed.restore(self._place / "work")
            self._go_on()

    def _go_on(self) -> None:
        self._runs.clear()
        listeners.remove(self._place / "doors", self.id)
        self._start()

    def leave(self) -> None:
        """What leaving a ``with`` block does."""
        self.stop()

    def stop(self) -> None:
        """End every process of the fake and remove its directory; calling it again does nothing."""
        if self._pid != os.getpid():
            self._stopped = True
            return
        with self._changing:
            self._stopped = True
            self._close()


class _Settings:
    """What a fake's forks have in common with it besides the image."""

    def __init__(
        self,
        limits: Limits | None,
        environment: Mapping[str, str] | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        self.limits = limits or Limits()
        self.environment = dict(environment or {})
        self.labels = tuple((labels or {}).items())


def _clean_up(maker: int, runs: list[_FakeRun], place: Path) -> None:
    """End a fake that was stopped, dropped or left to the end of its process."""
    if os.getpid() != maker:  # a fork inherited it
        return
    for run in runs:
        run.end()
    _remove(place)


class _Fakes:
    """The live fakes of this process, so that they can be listed and attached to as real ones can."""

    def __init__(self) -> None:
        self._cores: weakref.WeakValueDictionary[str, FakeCore] = weakref.WeakValueDictionary()

    def add(self, core: FakeCore) -> None:
        self._cores[core.id] = core

    def attach(self, identifier: str) -> AttachedCore:
        core = self._cores.get(identifier)
        if core is None or not core.alive:
            raise NotFound(f"no sandbox {identifier!r} is live", hint="fakes are found by their own process only")
        return core.attach()

    def list(self, labels: Mapping[str, str] | None) -> tuple[SandboxInfo, ...]:
        wanted = set((labels or {}).items())
        infos = [core.info() for core in list(self._cores.values()) if core.alive]
        return tuple(info for info in infos if wanted <= set(info.labels))


_fakes = _Fakes()


class FakeSandbox(Sandbox):
    """A sandbox that isolates NOTHING: commands are processes of this machine and of this user. For tests only.

    All but creation is inherited from :class:`minisandbox.Sandbox`.
    """

    @classmethod
    def create(
        cls,
        image: ImageSpec | Snapshot = NOTHING,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """Make a fake; the arguments are those of :meth:`minisandbox.Sandbox.create`.

        Raises:
            InvalidValue: an argument cannot be used, or asks for what no fake has (mounts, upper, the host's network).
            HostError: the supervisor could not be started.
        """
        check_creation(image, limits, network, mounts, environment, upper, labels)
        _refuse_isolation(network, mounts, upper)
        return cls(FakeCore.create(image, _Settings(limits, environment, labels)))

    @classmethod
    def attach(cls, id: str) -> Self:  # noqa: A002 - the contract's word
        """A handle on a live fake of this process. Raises NotFound if there is none of that id."""
        return cls(_fakes.attach(id))

    @staticmethod
    def list(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """The live fakes of this process, or those among them that have the labels."""
        return _fakes.list(labels)


class AsyncFakeSandbox(AsyncSandbox):
    """The asynchronous twin of :class:`FakeSandbox`: it isolates NOTHING either."""

    @classmethod
    async def create(
        cls,
        image: ImageSpec | Snapshot = NOTHING,
        *,
        limits: Limits | None = None,
        network: Network | None = None,
        mounts: Sequence[Mount] = (),
        environment: Mapping[str, str] | None = None,
        upper: Path | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Self:
        """As :meth:`FakeSandbox.create`."""
        check_creation(image, limits, network, mounts, environment, upper, labels)
        _refuse_isolation(network, mounts, upper)
        settings = _Settings(limits, environment, labels)
        core: FakeCore = await call_or_undo(FakeCore.stop, FakeCore.create, image, settings)
        return cls(core)

    @classmethod
    async def attach(cls, id: str) -> Self:  # noqa: A002 - the contract's word
        """As :meth:`FakeSandbox.attach`."""
        return cls(_fakes.attach(id))

    @staticmethod
    async def list(*, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """As :meth:`FakeSandbox.list`."""
        return _fakes.list(labels)


def _refuse_isolation(network: Network | None, mounts: Sequence[Mount], upper: Path | None) -> None:
    if mounts or upper is not None:
        raise InvalidValue("a fake sandbox has no mounts and no upper", hint="use relative paths below its workdir")
    if network is not None and network.mode != "off":
        raise InvalidValue("a fake sandbox promises nothing about the network", hint="leave network out")


# --- trees of fakes: of one's own tests, so nothing here is defended ------------------------------------------------


class _Copy:
    """A copy of a tree, which is removed with the last that holds it.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._remove = weakref.finalize(self, _remove, path, os.getpid())

    @classmethod
    def of(cls, *sources: Path) -> _Copy:
        """Copy directories over each other; those that do not exist are left out."""
        copy = cls(scratch.new_scratch())
        copy.path.chmod(0o755)
        for source in sources:
            if source.is_dir():
                _copy(source, copy.path)
        return copy

    def restore(self, target: Path) -> None:
        """Make a directory the same as this copy, in its place."""
        _remove(target)
        target.mkdir()
        _copy(self.path, target)


def _copy(source: Path, target: Path) -> None:
    done = subprocess.run(
        ["cp", "-a", "--", f"{source}/.", f"{target}/"], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise HostError(f"cannot copy {source}: {done.stderr.decode(errors='replace').strip()}")


def _remove(path: Path, maker: int | None = None) -> None:
    """Remove a tree, unless this process is a fork of its maker."""
    if maker is None or maker == os.getpid():
        remove_tree(path)


def _compare(before: Path, after: Path, shown: PurePosixPath) -> Iterator[Change]:
    """What differs between two trees, sorted by path.

    Args:
        before: as it was.
        after: as it is.
        shown: the path that stands for both in the answer.
    """
    yield from sorted(_differences(before, after, shown), key=lambda change: change.path)


def _differences(before: Path, after: Path, shown: PurePosixPath) -> Iterator[Change]:
    old, new = _entries(before), _entries(after)
    for name in old.keys() | new.keys():
        was, now, path = old.get(name), new.get(name), shown / name
        if now is None and was is not None:
            yield Change(path, ChangeKind.DELETED, _type(was))
        elif was is None and now is not None:
            yield Change(path, ChangeKind.ADDED, _type(now))
        elif was is not None and now is not None and _differs(before / name, after / name, was, now):
            yield Change(path, ChangeKind.MODIFIED, _type(now))
        if any(status is not None and stat.S_ISDIR(status.st_mode) for status in (was, now)):
            yield from _differences(before / name, after / name, path)


def _entries(directory: Path) -> dict[str, os.stat_result]:
    """What lies in a directory; nothing if it is not a directory, or has gone meanwhile."""
    found: dict[str, os.stat_result] = {}
    try:
        names = os.listdir(directory) if not directory.is_symlink() else []
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        try:
            found[name] = (directory / name).lstat()
        except FileNotFoundError:  # removed since it was listed
            continue
    return found


def _type(status: os.stat_result) -> FileType:
    return FILE_TYPES[stat.S_IFMT(status.st_mode)]


def _differs(before: Path, after: Path, was: os.stat_result, now: os.stat_result) -> bool:
    if (was.st_mode, was.st_uid, was.st_gid) != (now.st_mode, now.st_uid, now.st_gid):
        return True
    if stat.S_ISLNK(now.st_mode):
        return os.readlink(before) != os.readlink(after)
    if stat.S_ISREG(now.st_mode):
        return was.st_size != now.st_size or not filecmp.cmp(before, after, shallow=False)
    return False
