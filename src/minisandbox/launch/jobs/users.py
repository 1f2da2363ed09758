"""Look up the user of a command in the sandbox's own files, and become that user in a forked child.

The modules ``pwd`` and ``grp`` and initgroups(3) would load name service libraries (nsswitch.conf(5)), which an agent
can replace. So this module reads /etc/passwd and /etc/group as text.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from minisandbox.launch.kernel import syscalls as sc

_MOST_BYTES = 1 << 20
_MOST_DIGITS = 10
_MOST_GROUPS = 63
"""Maximum number of supplementary groups."""
_ROOT = 0
_ROOTS_NAMES = (_ROOT, "root")


@dataclass(frozen=True, slots=True)
class Account:
    """One user of the sandbox.

    Attributes:
        name: its login name, or its number without an entry in /etc/passwd.
        uid: its user id inside the sandbox.
        gid: its primary group.
        groups: its supplementary groups.
        home: its home directory.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @property
    def is_root(self) -> bool:
        """Whether the user is root, with any group."""
        return self.uid == _ROOT

    @property
    def is_default(self) -> bool:
        """Whether the account is root:root, the default user of commands."""
        return self.is_root and self.gid == _ROOT

    def complete(self, environment: dict[str, str]) -> None:
        """Set HOME, USER and LOGNAME unless they are set."""
        for name, value in (("HOME", self.home), ("USER", self.name), ("LOGNAME", self.name)):
            environment.setdefault(name, value)

    def chown_pipe(self, descriptor: int) -> None:
        """Make the user the owner of a pipe; opening /dev/stdout checks permissions (proc(5))."""
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # not /dev/null, which all processes share
            os.fchown(descriptor, self.uid, self.gid)

    def become(self) -> None:
        """Become this user permanently; every user but root loses all capabilities (capabilities(7))."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        if not self.is_root:
            sc.capset(0)


def find(user: str | int) -> Account:
    """Look up a user as container engines do (moby/sys/user, GetExecUser).

    Args:
        user: a name or a uid. A uid needs no entry in /etc/passwd and then has group 0. ``USER:GROUP`` replaces the
            group and removes all supplementary groups. An empty USER is root; an empty GROUP is ignored.

    Raises:
        OSError: ENOENT: there is no such name; EACCES: the name is an alias of root; EPERM: this sandbox has only one
            id; ERANGE: an id is not mapped into the sandbox; E2BIG: the user is in too many groups.
    """
    name, group = _split(user)
    account = _listed(name) or (Account(str(name), name, 0, (), "/") if isinstance(name, int) else None)
    gid = _group(group)
    if account is None or gid is None:
        raise FileNotFoundError(errno.ENOENT, "no such user")
    if group or account.is_root:
        account = dataclasses.replace(account, gid=gid, groups=())
    if account.is_root and name not in _ROOTS_NAMES:  # a command run as root may have edited /etc/passwd
        raise PermissionError(errno.EACCES, "a name that stands for root")
    if len(account.groups) > _MOST_GROUPS:
        raise OSError(errno.E2BIG, f"in more than {_MOST_GROUPS} groups")
    for id_kind, numbers in (("uid", (account.uid,)), ("gid", (account.gid, *account.groups))):
        ranges = tuple(_ranges(f"/proc/self/{id_kind}_map"))
        if not all(any(first <= number < end for first, end in ranges) for number in numbers):
            has_one_id = sum(end - first for first, end in ranges) == 1
            raise OSError(errno.EPERM if has_one_id else errno.ERANGE, f"a {id_kind} that is not mapped")
    return account


def _split(user: str | int) -> tuple[str | int, str]:
    """Split ``USER:GROUP`` into the user, as int if numeric, and the group or ""."""
    if isinstance(user, int):
        return user, ""
    name, _, group = user.partition(":")
    return (int(name or _ROOT) if _is_id(name or str(_ROOT)) else name), group


def _group(group: str) -> int | None:
    """Return the id of a group, 0 for an empty name, or None if there is no such group."""
    if not group or _is_id(group):
        return int(group or 0)
    return next(
        (int(row[2]) for row in _rows("/etc/group") if len(row) > 3 and row[0] == group and _is_id(row[2])), None
    )


def _listed(user: str | int) -> Account | None:
    """Return the account of a name or uid in /etc/passwd, or None if there is no entry."""
    field, key = (0, user) if isinstance(user, str) else (2, str(user))
    for row in _rows("/etc/passwd"):
        if len(row) > 5 and row[field] == key and _is_id(row[2]) and _is_id(row[3]):
            gid = int(row[3])
            return Account(row[0], int(row[2]), gid, _groups(row[0], gid), row[5] or "/")
    return None


def _groups(name: str, primary: int) -> tuple[int, ...]:
    rows = (row for row in _rows("/etc/group") if len(row) > 3 and _is_id(row[2]) and name in row[3].split(","))
    return tuple(sorted({int(row[2]) for row in rows} | {primary}))


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _rows(path: str) -> Iterator[list[str]]:
    """Yield the rows of a table. An agent may have replaced it, so anything but a regular file counts as empty."""
    try:
        descriptor = sc.openat2(sc.AT_FDCWD, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, sc.RESOLVE_NO_MAGICLINKS)
    except OSError:
        return
    with sc.closing(descriptor):
        text = os.read(descriptor, _MOST_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    # skip rows with a NUL, which an environment variable cannot hold
    yield from (line.split(":") for line in lines if "\0" not in line)


def _ranges(path: str) -> Iterator[tuple[int, int]]:
    """Yield the ids mapped into this sandbox: (first, end) of each range (user_namespaces(7))."""
    with open(path, encoding="ascii") as table:
        for line in table:
            first, _, count = map(int, line.split())
            yield first, first + count
