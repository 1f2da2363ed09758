"""Values shared by every package: limits, network, mounts, images as the launcher sees them, results.

Everything here is frozen and free of behaviour beyond checking and converting itself.
"""

from __future__ import annotations

import enum
import re
import signal as _signal
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.errors import CommandFailed, InvalidValue

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_MOST = 1 << 62
_FEWEST_FILES = 16
"""Open files without which a sandbox's own processes cannot start a command."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNIT = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": 1024 * GiB}


def parse_size(value: int | str) -> int:
    """Convert a size to bytes.

    Args:
        value: bytes as an int, or text such as ``"512M"``, ``"2G"``, ``"64KiB"`` (powers of 1024).

    Returns:
        The size in bytes.

    Raises:
        InvalidValue: the text is not a size, or the size is negative or larger than the kernel takes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MOST:
            raise InvalidValue(f"size {value} is negative or too large", hint="give bytes, or text such as '2G'")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{value!r} is not a size", hint="give bytes as an int, or text such as '512M' or '2G'")
    size = float(match[1]) * _UNIT[match[2].upper()]
    if size > _MOST:
        raise InvalidValue(f"size {value!r} is more than any kernel takes", hint=f"give at most {_MOST} bytes")
    return int(size)


@dataclass(frozen=True, slots=True, init=False)
class Limits:
    """What one sandbox may use. Every limit given here is enforced, or creation fails.

    Attributes:
        disk: bytes that all writes together may take (the size of the tmpfs upper, ``/tmp`` and ``/dev/shm`` included).
        processes: how many processes and threads may exist at once.
        open_files: open descriptors per process, at least 16.
        file_size: bytes of one file, or None for no limit of its own.
        output: bytes kept of each of a command's stdout and stderr (half from the head, half from the tail).
    """

    disk: int
    processes: int
    open_files: int
    file_size: int | None
    output: int

    def __init__(
        self,
        *,
        disk: int | str = 2 * GiB,
        processes: int = 1024,
        open_files: int = 4096,
        file_size: int | str | None = None,
        output: int | str = MiB,
    ) -> None:
        for name, count in (("processes", processes), ("open_files", open_files)):
            if type(count) is not int or not 1 <= count <= _MOST:  # True is an int too
                raise InvalidValue(f"Limits.{name} is {count!r}", hint="give a positive int")
        if open_files < _FEWEST_FILES:
            raise InvalidValue(
                f"Limits.open_files is {open_files}",
                reason=f"no command can be started with less than {_FEWEST_FILES}",
                hint=f"give {_FEWEST_FILES} or more",
            )
        if parse_size(disk) == 0:  # of a tmpfs, 0 means no limit (tmpfs(5))
            raise InvalidValue("Limits.disk is 0", hint="give a size, for instance '64M'")
        put = object.__setattr__
        put(self, "disk", parse_size(disk))
        put(self, "processes", processes)
        put(self, "open_files", open_files)
        put(self, "file_size", None if file_size is None else parse_size(file_size))
        put(self, "output", parse_size(output))


@dataclass(frozen=True, slots=True)
class Network:
    """What a sandbox can reach. Make one with :meth:`off` or :meth:`host`."""

    mode: str = "off"

    @classmethod
    def off(cls) -> Network:
        """Loopback only, up, and private to the sandbox."""
        return cls("off")

    @classmethod
    def host(cls) -> Network:
        """The host's own network; for image builds."""
        return cls("host")


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file shown inside a sandbox.

    Attributes:
        source: absolute host path of a directory or regular file.
        target: absolute path inside; made if it is not there.
        read_only: only reading is supported so far; a writable mount is refused at creation.
    """

    source: Path
    target: PurePosixPath
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """An image as the launcher sees it: produced by ``images``, consumed by ``sandbox``.

    Attributes:
        name: what people and logs call it.
        layers: absolute host paths of read-only directory trees, bottom first, without mounts in them.
        environment: variables every command gets, captured when the image was built.
        workdir: where commands start.
        host_usr: whether the host's ``/usr`` (and ``/bin``, ``/lib`` and so on where they are directories) is shown.
        base_commit: the commit that ``Sandbox.patch`` compares with.
    """

    name: str
    layers: tuple[Path, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: PurePosixPath = PurePosixPath("/")
    host_usr: bool = True
    base_commit: str = "HEAD"


class Outcome(enum.Enum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command and its waited-for children used.

    Attributes:
        user: CPU seconds in user mode.
        system: CPU seconds in the kernel.
        max_rss: bytes of the largest resident set.
    """

    user: float = 0.0
    system: float = 0.0
    max_rss: int = 0


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A command's fate. A non-zero exit, a signal and a timeout are values here, never exceptions.

    Attributes:
        command: what was run, as given.
        outcome: exited, signaled or timeout.
        exit_code: 0 to 255 where it exited, else None.
        signal: the number of the signal that ended it, else None.
        stdout_bytes: what was kept of its output (head and tail, with a line between that counts what is missing).
        stderr_bytes: the same of its errors.
        dropped_stdout: bytes of stdout that were not kept.
        dropped_stderr: bytes of stderr that were not kept.
        duration: wall seconds from start to the leader's end.
        usage: CPU and memory of the leader and the children it waited for.
        left_running: background processes of the command that were alive when its leader ended.
    """

    command: str | tuple[str, ...]
    outcome: Outcome
    exit_code: int | None
    signal: int | None
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    dropped_stdout: int = 0
    dropped_stderr: int = 0
    duration: float = 0.0
    usage: Usage = Usage()
    left_running: int = 0

    @property
    def stdout(self) -> str:
        """The kept output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The kept errors as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the command exited with status 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def fate(self) -> str:
        """How it ended, in words: ``exit status 2``, ``killed by SIGKILL``, ``timed out after 3.0 s``."""
        if self.outcome is Outcome.TIMEOUT:
            return f"timed out after {self.duration:.1f} s"
        if self.signal is not None:
            try:
                return f"killed by {_signal.Signals(self.signal).name}"
            except ValueError:  # real-time signals have numbers, not names
                return f"killed by signal {self.signal}"
        return f"exit status {self.exit_code}"

    def check(self) -> ExecResult:
        """Return self if the command exited with status 0.

        Raises:
            CommandFailed: it did not; the error carries this result.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self
