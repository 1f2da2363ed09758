"""Whom copied files belong to, and their permission bits: ``--chown`` and ``--chmod``."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator

from minisandbox.images.tree import LinkError, Tree, resolve

_MOST_IDS = (1 << 32) - 2
_MOST_FILE = 16 << 20
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=][rwxXst]*)+)")
_WHO = {"u": (stat.S_IRWXU, 6), "g": (stat.S_IRWXG, 3), "o": (stat.S_IRWXO, 0)}


def find_owner(text: str, image: Tree) -> tuple[int, int]:
    """Return the ids that ``USER[:GROUP]`` means in an image.

    A user's group is the one of its line in ``/etc/passwd``; an id's group is the same number.

    Raises:
        ValueError: the image has no user or group of that name.
    """
    user, colon, group = text.partition(":")
    if not user or (colon and not group):
        raise ValueError(f"{text!r} is not USER[:GROUP]")
    if user.isdigit():
        uid = gid = int(user)
    else:
        uid, gid = _find(image, "passwd", user, (2, 3))
    if group.isdigit():
        gid = int(group)
    elif group:
        gid = _find(image, "group", group, (2,))[0]
    if max(uid, gid) > _MOST_IDS:
        raise ValueError(f"{text!r} has a number that no user has")
    return uid, gid


def find_home(user: str, image: Tree) -> str:
    """Return the home directory of a user: a name or an id; "" is root."""
    user = user or "0"
    for row in _rows(image, "passwd"):
        if len(row) > 5 and user in (row[0], row[2]) and row[5]:
            return row[5]
    return "/root" if user in ("0", "root") else "/"


def _find(image: Tree, file: str, name: str, columns: tuple[int, ...]) -> tuple[int, ...]:
    if name == "root":
        return (0,) * len(columns)
    for row in _rows(image, file):
        if row[0] == name and len(row) > max(columns) and all(row[one].isdigit() for one in columns):
            return tuple(int(row[one]) for one in columns)
    raise ValueError(f"the image's /etc/{file} has no {name!r}")


def _rows(image: Tree, file: str) -> Iterator[list[str]]:
    try:
        path = resolve(image, ("etc", file))
    except LinkError:
        return
    info = image.status(path)
    if info is not None and stat.S_ISREG(info.st_mode):
        with image.open(path) as opened:
            for line in opened.read(_MOST_FILE).decode("utf-8", "surrogateescape").splitlines():
                yield line.split(":")


def changed_mode(text: str, mode: int, *, is_folder: bool) -> int:
    """Return the permission bits that ``--chmod`` gives a file: octal, or as chmod(1) has them (``u=rwX,go=rX``).

    Raises:
        ValueError: the text is neither.
    """
    if re.fullmatch(r"[0-7]{1,5}", text) and int(text, 8) <= 0o7777:
        return int(text, 8)
    for clause in text.split(","):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise ValueError(f"{text!r} is not a mode: write it like 755 or u=rwX,go=rX")
        who = "ugo" if "a" in found[1] or not found[1] else found[1]
        for sign, letters in re.findall(r"([-+=])([rwxXst]*)", found[2]):
            mode = _applied(mode, who, sign, letters, is_folder=is_folder)
    return mode


def _applied(mode: int, who: str, sign: str, letters: str, *, is_folder: bool) -> int:
    runs = "x" in letters or ("X" in letters and (is_folder or mode & 0o111))
    bits = 4 * ("r" in letters) + 2 * ("w" in letters) + bool(runs)
    given = mask = 0
    for one in who:
        area, shift = _WHO[one]
        mask |= area
        given |= bits << shift
        if "s" in letters and one in "ug":
            given |= stat.S_ISUID if one == "u" else stat.S_ISGID
    if "t" in letters:
        given |= stat.S_ISVTX
    if sign == "=":
        return mode & ~mask | given
    return mode | given if sign == "+" else mode & ~given
