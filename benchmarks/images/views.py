"""What a directory tree holds, path by path, and where two trees differ."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Each sandbox and each container has these of its own.
NOT_COMPARED = ("/dev", "/proc", "/sys", "/run", "/tmp", "/etc/hosts", "/etc/resolv.conf", "/etc/mtab")
FIELDS = ("kind", "mode", "owner", "content", "link", "names", "attributes", "mtime", "device")

Facts = Mapping[str, object]
View = Mapping[str, Facts]
"""Facts by path, from the root; bytes that are not UTF-8 are surrogate escapes."""
Owner = Callable[[int, int], tuple[int, int]]


def list_tree(root: Path, owner: Owner = lambda uid, gid: (uid, gid)) -> View:
    """List a tree.

    Args:
        root: its directory.
        owner: what a file's owner and group are called in it.

    Returns:
        Facts of each path: ``kind``, ``mode``, ``owner``, ``attributes``, and what its kind has. ``names`` are all
        names of an inode that has several; ``mtime`` is in whole seconds and of all but directories.
    """
    found: dict[str, dict[str, object]] = {}
    inodes: dict[tuple[int, int], list[str]] = {}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for name in os.listdir(f"{root}{folder or '/'}"):
            path = f"{folder}/{name}"
            if path in NOT_COMPARED:
                continue
            info = os.lstat(f"{root}{path}")
            found[path] = _facts(f"{root}{path}", info, owner)
            if stat.S_ISDIR(info.st_mode):
                waiting.append(path)
            else:
                inodes.setdefault((info.st_dev, info.st_ino), []).append(path)
    for names in inodes.values():
        for name in names if len(names) > 1 else ():
            found[name]["names"] = tuple(sorted(names))
    return found


def _facts(path: str, info: os.stat_result, owner: Owner) -> dict[str, object]:
    kind = stat.S_IFMT(info.st_mode)
    facts: dict[str, object] = {
        "kind": kind, "mode": oct(stat.S_IMODE(info.st_mode)), "owner": owner(info.st_uid, info.st_gid),
        "attributes": _attributes(path, owner),
    }  # fmt: skip
    if not stat.S_ISDIR(info.st_mode):
        facts["mtime"] = info.st_mtime_ns // 10**9
    if stat.S_ISLNK(info.st_mode):
        facts["link"] = os.readlink(path)
    elif stat.S_ISREG(info.st_mode):
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            facts["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        facts["device"] = (os.major(info.st_rdev), os.minor(info.st_rdev))
    return facts


def _attributes(path: str, owner: Owner) -> tuple[tuple[str, bytes], ...]:
    names = sorted(name for name in os.listxattr(path, follow_symlinks=False) if ".overlay." not in name)
    return tuple((name, _inside(name, os.getxattr(path, name, follow_symlinks=False), owner)) for name in names)


def _inside(name: str, value: bytes, owner: Owner) -> bytes:
    """Return an attribute's value as its sandbox sees it: capabilities(7), "Namespaced file capabilities"."""
    if name != "security.capability" or value[3] != 3 or owner(int.from_bytes(value[20:], "little"), 0)[0]:
        return value
    return value[:3] + b"\2" + value[4:20]


@dataclass(slots=True)
class Comparison:
    """Two views compared.

    Attributes:
        paths: how many there are in either.
        differences: by path and field, what nothing explains.
        explained: how many paths differ in a way that is documented, by the reason.
    """

    paths: int = 0
    differences: list[str] = field(default_factory=list)
    explained: dict[str, int] = field(default_factory=dict)


def compare(theirs: View, ours: View, *, owners: bool) -> Comparison:
    """Compare the engine's view with ours.

    Args:
        theirs: the engine's.
        ours: ours.
        owners: whether owners and capabilities have to be kept.
    """
    result = Comparison(len({*theirs, *ours}))
    for path in sorted({*theirs, *ours}):
        one, other = theirs.get(path), ours.get(path)
        if one is None or other is None:
            _note(result, path, "device" if one and "device" in one else "path", one, other, ("device",))
            continue
        for name in FIELDS:
            if one.get(name) != other.get(name):
                known = () if owners or not _is_owner(name, one, other) else (name,)
                _note(result, path, name, one.get(name), other.get(name), known)
    return result


def _is_owner(name: str, one: Facts, other: Facts) -> bool:
    """Whether a difference is one of owners: capabilities of files belong to a user namespace."""
    if name != "attributes":
        return name == "owner"
    values = [dict(facts["attributes"]) for facts in (one, other)]  # type: ignore[call-overload]
    for value in values:
        value.pop("security.capability", None)
    return bool(values[0] == values[1])


def _note(result: Comparison, path: str, name: str, one: object, other: object, known: Collection[str]) -> None:
    if name in known:
        result.explained[name] = result.explained.get(name, 0) + 1
    else:
        result.differences.append(f"{path!r}: {name}: engine {one}, here {other}")


def id_map(lines: Iterable[str]) -> Callable[[int], int]:
    """Return the function from the host's ids to those inside, from the lines of ``/proc/PID/uid_map``."""
    rows = [tuple(map(int, line.split())) for line in lines]

    def inside(outer: int) -> int:
        for first, start, count in rows:
            if start <= outer < start + count:
                return first + outer - start
        return -outer - 1

    return inside
