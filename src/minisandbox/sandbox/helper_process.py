"""Start a helper process of the controller: the launcher or the network gateway.

Sandboxes are forked from the launcher, and code inside can open the program of a process as ``/proc/self/exe``, for
example with a script that starts with ``#!/proc/self/exe`` (CVE-2019-5736 was such an attack). If that program were the
host's interpreter, code inside could read its path, lock and watch the file, and change its mode if the user owns it.
So a helper executes a sealed in-memory copy of the dynamic loader, which then loads the interpreter.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.launch.kernel import syscalls as sc

_PATIENCE = 5.0
_MAGIC = b"\x7fELF\x02\x01"
"""Start of a 64-bit little-endian program (elf(5))."""
_TABLE_OFFSET, _SIZE_AND_COUNT = struct.Struct("<Q"), struct.Struct("<HH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3
_MFD_EXEC = 0x10
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def bootstrap(module: str) -> str:
    """Return the code with which a helper calls ``main`` of a module of this package.

    The package's path is passed on stdin, because a command line would show a host path to other users and inside
    every sandbox.
    """
    return (
        "import os, socket, sys; path, *settings = os.read(0, 65536).decode('utf-8', 'surrogateescape').split('\\0'); "
        "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, n) for n in (0, 1, 2)]; os.close(null); "
        f"sys.path.append(path); from minisandbox.{module} import main; "
        "main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), *settings)"
    )


def start(bootstrap: str, helper_end: socket.socket, settings: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start an isolated interpreter that inherits only a socket and a pidfd of this process.

    Args:
        bootstrap: the Python code to run; its arguments are the numbers of the two descriptors. Its stdin holds the
            path of this package and the settings, separated by NUL characters.
        helper_end: the helper's end of the connection.
        settings: strings for the helper.

    Raises:
        HostError: the process cannot be started.
    """
    loader = sealed_loader(sys.executable)
    package = Path(__file__).parents[2]
    try:
        with sc.closing(loader.descriptor), sc.closing(os.pidfd_open(os.getpid())) as controller:
            process = subprocess.Popen(
                [*loader.arguments, "-I", "-S", "-B", "-c", bootstrap, str(helper_end.fileno()), str(controller)],
                executable=loader.program,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(helper_end.fileno(), controller, loader.descriptor),
                cwd="/",
                env={},
                start_new_session=True,  # only the controller handles Ctrl-C
            )
            os.fchmod(loader.descriptor, 0)  # the program has started; code inside must not open or execute it
            assert process.stdin is not None
            process.stdin.write("\0".join((str(package), *settings)).encode("utf-8", "surrogateescape"))
            process.stdin.close()
    except OSError as error:
        raise HostError(f"cannot start {sys.executable}: {error.strerror}") from error
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a helper to exit after its connection was closed; kill it if it does not, for example if stopped.

    Raises:
        TimeoutExpired: the helper hangs in the kernel.
    """
    try:
        process.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_PATIENCE)


@dataclass(frozen=True, slots=True)
class Loader:
    """The command line that starts an interpreter.

    Attributes:
        program: path of the file to execute.
        arguments: its first arguments; the interpreter's arguments follow.
        descriptor: descriptor of the file, which must stay open until execve(2); the caller closes it.
    """

    program: str
    arguments: tuple[str, ...]
    descriptor: int


def sealed_loader(interpreter: str) -> Loader:
    """Copy an interpreter's dynamic loader into memory, so that its forks have no access to a file of the host.

    Args:
        interpreter: path of the interpreter.

    Raises:
        HostError: the file is not a program of this machine, or the kernel refuses to execute a copy in memory.
    """
    loader = _loader(interpreter)
    program = os.path.realpath(loader or interpreter)
    descriptor = _copy(program)
    return Loader(f"/proc/self/fd/{descriptor}", (program, interpreter) if loader else (interpreter,), descriptor)


def _loader(program: str) -> str | None:
    """Return the dynamic loader that a program names, or None for a static program.

    Raises:
        HostError: the file is not a 64-bit program, or cannot be read.
    """
    try:
        with open(program, "rb") as source:
            header = source.read(64)
            if len(header) < 64 or not header.startswith(_MAGIC):
                raise HostError(f"{program} is not a 64-bit program", hint="run MiniSandbox with a Python of its own")
            (table_offset,) = _TABLE_OFFSET.unpack_from(header, 32)
            size, count = _SIZE_AND_COUNT.unpack_from(header, 54)
            source.seek(table_offset)
            table = source.read(size * count)
            for entry_offset in range(0, len(table), size):
                kind, _, offset, _, _, length, _, _ = _SEGMENT.unpack_from(table, entry_offset)
                if kind == _PT_INTERP:
                    source.seek(offset)
                    return os.fsdecode(source.read(length).rstrip(b"\0"))
    except OSError as error:
        raise HostError(f"cannot read {program}: {error.strerror}") from error
    return None


def _copy(program: str) -> int:
    """Copy a program to memory and seal the copy against writes.

    Raises:
        HostError: the kernel refused.
    """
    try:
        descriptor = os.memfd_create("loader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _no_copy(program, error) from error
        descriptor = os.memfd_create("loader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # before Linux 6.3
    try:
        with open(program, "rb") as source, open(descriptor, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise _no_copy(program, error) from error
    return descriptor


def _no_copy(program: str, error: OSError) -> HostError:
    return HostError(
        f"cannot make a copy of {program} in memory that can be executed: {error.strerror}",
        reason="sandboxes must not reach the host's own; the kernel may refuse it (sysctl vm.memfd_noexec=2)",
        hint="run 'sysctl vm.memfd_noexec=1' as root",
    )
