"""How many file locks a sandbox holds. The kernel sets no limit to them, and charges their memory to nobody.

It would also take hours to end processes with millions of them: closing a file looks through all locks of it.
``/proc/locks`` shows those of the reader's pid namespace, and of open file descriptions (fcntl(2)) those of the whole
machine, without a process: of these the file systems tell which are the sandbox's. A lock of flock(2) whose taker has
ended while another has the file open still is shown in the first pid namespace alone (fs/locks.c): the host's list is
read too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from .descendants import may_hold

MOST_LOCKS = 4_000
"""So many locks at once are more than any program needs; the kernel's memory for them is 192 bytes each."""
_LONGEST_LINE = 128
_PIECE = 1 << 16
_MOST_SANDBOXES = 100
"""So many that hold all they may are read through on the host's list."""
_OWN_SYSTEMS = (b"overlay", b"tmpfs")
_PAUSES = (0.0, 0.01, 0.02)
"""Seconds before each look at descriptors."""


def open_hosts_list() -> int:
    """Open the list of the pid namespace of whoever is above this process, for as long as ``/proc`` shows it; or -1."""
    try:
        return os.open("/proc/locks", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a container may hide it
        return -1


def open_lists(proc: int, hosts: int) -> tuple[int, ...]:
    """Open the list of locks of a mount of proc, before it is hidden, and anew that of the host: others read it too.

    Args:
        proc: the mount's descriptor.
        hosts: as :func:`open_hosts_list` opened it.

    Returns:
        The first, and the other one if there is any.

    Raises:
        OSError: the kernel has none.
    """
    shown = [os.open("locks", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)]
    if hosts != -1:
        with contextlib.suppress(OSError):
            shown.append(os.open(f"/proc/self/fd/{hosts}", os.O_RDONLY | os.O_CLOEXEC))
        os.close(hosts)
    return tuple(shown)


def are_too_many(lists: Sequence[int], tables: Callable[[], Iterator[str]], spared: Collection[int]) -> bool:
    """Whether the sandbox of the caller, its pid 1, holds more locks than :data:`MOST_LOCKS`.

    Args:
        lists: as :func:`open_lists` opened them.
        tables: lists the descriptor tables of its processes, as paths below ``/proc``.
        spared: our own, which are not among them.
    """
    shown, *others = lists
    ours, unclear = _shown(shown)
    if ours > MOST_LOCKS or any(_shown(other, everybody=True)[0] > MOST_LOCKS for other in others):
        return True
    if ours + unclear <= MOST_LOCKS:
        return False
    for pause in _PAUSES:  # one that begins or ends shows nothing for a moment: it must be so each time
        time.sleep(pause)
        if ours + _held(tables(), spared) <= MOST_LOCKS:
            return False
    return True


def _shown(shown: int, *, everybody: bool = False) -> tuple[int, int]:
    """How many locks are listed that are the sandbox's, and that may be; there may be more of both.

    Args:
        shown: the list.
        everybody: whether it is the whole machine's, in which only the file systems tell.
    """
    lines = _read(shown, (_MOST_SANDBOXES if everybody else 4) * MOST_LOCKS * _LONGEST_LINE).splitlines()
    if len(lines) <= MOST_LOCKS:  # nearly always: nothing more to find out
        return 0, 0
    systems = frozenset(_own_systems())
    ours = unclear = 0
    for line in lines:
        # 1: OFDLCK ADVISORY  WRITE -1 00:2f:1234 0 EOF; those that wait for another have "->" behind the number
        words = line.replace(b"-> ", b"").split()
        if len(words) < 6:
            continue
        if words[5].rpartition(b":")[0] in systems or (words[4] != b"-1" and not everybody):
            ours += 1
        else:
            unclear += 1
    return ours, unclear


def _read(shown: int, most: int) -> bytes:
    """A list from its beginning; little memory at once, for pid 1 must not want what there is none of."""
    os.lseek(shown, 0, os.SEEK_SET)
    found = bytearray()
    while len(found) < most and (piece := os.read(shown, _PIECE)):
        found += piece
    return bytes(found)


def _own_systems() -> Iterator[bytes]:
    """The numbers of the file systems that nobody else has, as ``/proc/locks`` writes them."""
    with open("/proc/self/mountinfo", "rb") as source:
        for line in source:
            before, _, after = line.partition(b" - ")
            if after.split(b" ", 1)[0] in _OWN_SYSTEMS:
                major, minor = before.split()[2].split(b":")
                yield b"%02x:%02x" % (int(major), int(minor))


def _held(tables: Iterator[str], spared: Collection[int]) -> int:
    """How many locks the descriptors of processes hold; no more are counted than are too many.

    A descriptor that is not shown, and one that is under way in a message, could hold any number.
    """
    count = 0
    for table in tables:
        thread = os.path.dirname(table)
        try:
            for name in os.listdir(table):
                count += _of_descriptor(f"{thread}/fdinfo/{name}")
                if count > MOST_LOCKS:
                    return count
        except PermissionError:
            if may_hold(thread, spared):
                return MOST_LOCKS + 1
        except OSError:  # it has ended
            continue
    return count


def _of_descriptor(path: str) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(path, "rb") as source:
            lines = source.read(4 * MOST_LOCKS * _LONGEST_LINE).splitlines()
        if any(line.startswith(b"scm_fds:") and int(line.split()[1]) for line in lines):
            return MOST_LOCKS + 1
        return sum(line.startswith(b"lock:") for line in lines)
    return 0
