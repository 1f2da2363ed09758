"""How an interpreter is started that sandboxes are forked from.

The program that a process executes is in its reach as ``/proc/self/exe``, also where the process is about to execute
another one: a script whose first line is ``#!/proc/self/exe`` gets it (CVE-2019-5736 was of this kind). Were that the
host's interpreter, code inside could read its path, and as an ordinary user, whose file it often is, change its mode;
were it any file of the host, it could lock and watch that. So what is executed is the dynamic loader, as a program that
is told to load the interpreter, and of that a sealed copy in memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from dataclasses import dataclass

from minisandbox.errors import HostError

_MAGIC = b"\x7fELF\x02\x01"
"""A program of 64 bits, little-endian (elf(5))."""
_PLACE, _SIZE_AND_COUNT = struct.Struct("<Q"), struct.Struct("<HH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3
_MFD_EXEC = 0x10
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class Start:
    """How to start it.

    Attributes:
        program: what is executed.
        words: the first words of its arguments; the interpreter's follow.
        descriptor: what must be open where it is executed, and is to be closed afterwards.
    """

    program: str
    words: tuple[str, ...]
    descriptor: int


def find(interpreter: str) -> Start:
    """Look how an interpreter is started so that no file of the host is in reach of what it forks.

    Args:
        interpreter: its path.

    Raises:
        HostError: it is no program of this machine, or the kernel lets no copy in memory be executed.
    """
    loader = _loader(interpreter)
    program = os.path.realpath(loader or interpreter)
    descriptor = _copy(program)
    return Start(f"/proc/self/fd/{descriptor}", (program, interpreter) if loader else (interpreter,), descriptor)


def _loader(program: str) -> str | None:
    """The dynamic loader that a program asks for, or None for a static one.

    Raises:
        HostError: it is no program.
    """
    try:
        with open(program, "rb") as source:
            head = source.read(64)
            if len(head) < 64 or not head.startswith(_MAGIC):
                raise HostError(f"{program} is no program of 64 bits", hint="run MiniSandbox with a Python of its own")
            (place,), (size, count) = _PLACE.unpack_from(head, 32), _SIZE_AND_COUNT.unpack_from(head, 54)
            source.seek(place)
            table = source.read(size * count)
            for at in range(0, len(table), size):
                kind, _, offset, _, _, length, _, _ = _SEGMENT.unpack_from(table, at)
                if kind == _PT_INTERP:
                    source.seek(offset)
                    return os.fsdecode(source.read(length).rstrip(b"\0"))
    except OSError as error:
        raise HostError(f"cannot read {program}: {error.strerror}") from error
    return None


def _copy(program: str) -> int:
    """A copy in memory that nobody can write to any more.

    Raises:
        HostError: there is none.
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
        reason="sandboxes must not have the host's own in reach; the kernel may refuse it (sysctl vm.memfd_noexec=2)",
        hint="run 'sysctl vm.memfd_noexec=1' as root",
    )
