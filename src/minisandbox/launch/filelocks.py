"""How many file locks a sandbox holds. The kernel sets no limit to them, and charges their memory to nobody.

It would also take hours to end processes with millions of them: closing a file looks through all locks of it.
``/proc/locks`` shows those of the reader's pid namespace, and of open file descriptions (fcntl(2)) those of the whole
machine, without a process: of these the file systems tell which are the sandbox's. A lock whose taker has ended while
another has the file open still, or its table of descriptors, is shown in the first pid namespace alone (fs/locks.c):
the host's list is read too. Where only processes can tell, their descriptors are looked at, and which of the files
without names (pipe(2), memfd_create(2)) they have mapped: a mapping keeps a lock beyond its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from .asking import sum_as_users
from .jobs.descendants import may_hold

MOST_LOCKS = 4_000
"""So many locks at once are more than any program needs; the kernel's memory for them is 192 bytes each."""
_LONGEST_LINE = 128
_PIECE = 1 << 16
_MOST_SANDBOXES = 100
"""So many that hold all they may are read through on the host's list."""
_WORDS = 8
_Lock = bytes
"""What a list says of a lock but for who took it."""
_OWN_SYSTEMS = (b"overlay", b"tmpfs", b"proc", b"devpts", b"mqueue")


def _nameless() -> Iterator[bytes]:
    made: list[int] = []
    with contextlib.suppress(OSError):  # a kernel without one of them
        made.extend(os.pipe())
        made.append(os.memfd_create("here", os.MFD_CLOEXEC))
        made.append(os.eventfd(0))
        made.append(os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
        made.append(socket.socket(socket.AF_UNIX).detach())
        made.append(os.pidfd_open(os.getpid()))
    for descriptor in made:
        device = os.fstat(descriptor).st_dev
        os.close(descriptor)
        yield b"%02x:%02x" % (os.major(device), os.minor(device))


_NAMELESS = frozenset(_nameless())
"""The numbers of the file systems of files that have no names, of which the machine has one each."""
_hosts_systems: frozenset[bytes] = frozenset()
"""The numbers of the host's file systems, of which sandboxes are shown parts: ``/dev`` of a container is a tmpfs."""


def open_hosts_list() -> int:
    """Open the list of the pid namespace of whoever is above this process, for as long as ``/proc`` shows it; or -1.

    It is called before there is a mount of a sandbox, by whom every pid 1 is forked of: the file systems that are
    there now are the host's.
    """
    global _hosts_systems  # noqa: PLW0603 - set once in the life of a process
    _hosts_systems = frozenset(number for number, _ in _mounted())
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


def seem_too_many(lists: Sequence[int], tables: Iterator[str], spared: Collection[int]) -> bool:
    """Whether the sandbox of the caller, its pid 1, seems to hold more locks than :data:`MOST_LOCKS`.

    One look does not decide: a process that begins or ends shows no descriptors for a moment, and where others take
    locks a list shows some of them twice.

    Args:
        lists: as :func:`open_lists` opened them.
        tables: the descriptor tables of its processes, as paths below ``/proc``.
        spared: our own, which are not among them.
    """
    shown, *others = lists
    ours, live, unclear = _shown(shown)
    for other in others:
        theirs, _, beside = _shown(other, everybody=True)
        ours = max(ours, theirs)
        unclear |= beside  # the larger number of each
    if ours + live > MOST_LOCKS:
        return True
    if ours + live + unclear.total() <= MOST_LOCKS:
        return False
    return ours + max(live, _held(tables, spared, lists, unclear)) > MOST_LOCKS


def _shown(shown: int, *, everybody: bool = False) -> tuple[int, int, Counter[bytes]]:
    """Count the locks of a sandbox's file systems, of others by its processes, and for each file what may be its own.

    There may be more of all.

    Args:
        shown: the list.
        everybody: whether it is the whole machine's, in which only the file systems tell.
    """
    lines = _read(shown, (_MOST_SANDBOXES if everybody else 4) * MOST_LOCKS * _LONGEST_LINE).splitlines()
    ours, live, unclear = 0, 0, Counter[bytes]()
    if len(lines) <= MOST_LOCKS:  # nearly always: nothing more to find out
        return ours, live, unclear
    own, common = _systems()
    for line in lines:
        words = _words(line)
        if len(words) < _WORDS:
            continue
        system = words[5].rpartition(b":")[0]
        if system in own:
            ours += 1
        elif words[4] != b"-1" and not everybody:
            live += 1
        elif system in common or not everybody:
            unclear[words[5]] += 1
    return ours, live, unclear


def _words(line: bytes) -> list[bytes]:
    # 1: OFDLCK ADVISORY  WRITE -1 00:2f:1234 0 EOF; those that wait for another have "->" behind the number
    return line.replace(b"-> ", b"").split()


def _lock(words: Sequence[bytes]) -> _Lock:
    return b" ".join((words[1], words[3], *words[5:8]))


def _read(shown: int, most: int) -> bytes:
    """A list from its beginning; little memory at once, for pid 1 must not want what there is none of."""
    os.lseek(shown, 0, os.SEEK_SET)
    found = bytearray()
    while len(found) < most and (piece := os.read(shown, _PIECE)):
        found += piece
    return bytes(found)


def _systems() -> tuple[frozenset[bytes], frozenset[bytes]]:
    """The numbers of file systems that nobody else has, and of others in reach, as ``/proc/locks`` writes them."""
    own: set[bytes] = set()
    common = set(_NAMELESS)
    for number, kind in _mounted():
        (own if kind in _OWN_SYSTEMS and number not in _hosts_systems else common).add(number)
    return frozenset(own), frozenset(common)


def _mounted() -> Iterator[tuple[bytes, bytes]]:
    """The number of each file system that is mounted here, as ``/proc/locks`` writes it, and its type."""
    with open("/proc/self/mountinfo", "rb") as source:
        for line in source:
            before, _, after = line.partition(b" - ")
            major, minor = before.split()[2].split(b":")
            yield b"%02x:%02x" % (int(major), int(minor)), after.split(b" ", 1)[0]


def _held(tables: Iterator[str], spared: Collection[int], lists: Sequence[int], unclear: Counter[bytes]) -> int:
    """How many locks processes hold of files that are not the sandbox's; no more are counted than are too many.

    Who inherits a descriptor shows its locks too: of those that look the same no more count than are listed. A
    descriptor that its own user may not look at, and one that is under way in a message, could hold any number.

    Args:
        tables: the descriptor tables of processes.
        spared: our own.
        lists: as for :func:`seem_too_many`.
        unclear: how many locks there are of each file.
    """
    own, _ = _systems()
    wanted = {name for name in unclear if name.rpartition(b":")[0] in _NAMELESS}
    seen: Counter[_Lock] = Counter()
    closed: list[str] = []
    opened: set[bytes] = set()
    mapped: set[bytes] = set()
    for table in tables:
        thread = os.path.dirname(table)
        try:
            for name in os.listdir(table):
                locks, inode, sends = _of_descriptor(f"{thread}/fdinfo/{name}")
                opened.add(inode)
                seen.update(_lock(words) for words in locks if words[5].rpartition(b":")[0] not in own)
                if sends or len(seen) > MOST_LOCKS:
                    return MOST_LOCKS + 1
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError:
            if may_hold(thread, spared):
                closed.append(table)
            continue
        if wanted - mapped:
            mapped |= wanted & _mapped(thread)
    count = (seen & _listed(lists, seen)).total()
    count += sum(unclear[name] for name in mapped if name.rpartition(b":")[2] not in opened)
    return count + sum_as_users(
        closed, lambda theirs: _held(iter(theirs), (), lists, unclear), MOST_LOCKS + 1, MOST_LOCKS + 1 - count
    )


def _listed(lists: Sequence[int], wanted: Collection[_Lock]) -> Counter[_Lock]:
    """How often the lists have each of some locks."""
    found: Counter[_Lock] = Counter()
    for shown in lists if wanted else ():
        lines = _read(shown, _MOST_SANDBOXES * MOST_LOCKS * _LONGEST_LINE).splitlines()
        locks = (_lock(words) for words in map(_words, lines) if len(words) >= _WORDS)
        found |= Counter(lock for lock in locks if lock in wanted)
    return found


def _mapped(thread: str) -> set[bytes]:
    """The files that a process has mapped, as ``/proc/locks`` writes them."""
    with contextlib.suppress(OSError), open(f"{thread}/maps", "rb") as source:
        return {b"%b:%b" % (words[3], words[4]) for words in (line.split(None, 5) for line in source)}
    return set()


def _of_descriptor(path: str) -> tuple[list[list[bytes]], bytes, bool]:
    """The locks of a descriptor, the number of its file, and whether descriptors are under way in it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(path, "rb") as source:
            lines = source.read(4 * MOST_LOCKS * _LONGEST_LINE).splitlines()
        sends = any(line.startswith(b"scm_fds:") and int(line.split()[1]) for line in lines)
        inode = next((line.split()[1] for line in lines if line.startswith(b"ino:")), b"")
        # as in the lists, behind a word of its own
        locks = [_words(line)[1:] for line in lines if line.startswith(b"lock:")]
        return [words for words in locks if len(words) >= _WORDS], inode, sends
    return [], b"", False
