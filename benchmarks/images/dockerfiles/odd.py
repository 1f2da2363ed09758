"""Make files, change them in a second layer, and replace them in a third: python3 odd.py make|change|replace."""

import os
import shutil
import stat
import sys

ROOT = b"/odd"
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep
LONG = b"n" * 255
DEEP = b"/".join([b"directory-%02d" % number for number in range(40)])


def write(path: bytes, content: bytes = b"content\n", mode: int = 0o644) -> None:
    """Write a file below ROOT."""
    with open(os.path.join(ROOT, path), "wb") as file:
        file.write(content)
    os.chmod(os.path.join(ROOT, path), mode)


def path_of(name: bytes) -> bytes:
    """Return a path below ROOT."""
    return os.path.join(ROOT, name)


def make() -> None:
    """Every kind of file, owner, mode, name, link and attribute."""
    for name in (*b". gone/deep to-file to-link opaque/deep moved closed shared sticky".split(), DEEP):
        os.makedirs(path_of(name), exist_ok=True)
    for name in b"gone/deep/x gone/y to-file/x to-link/x opaque/deep/x opaque/y moved/x changed".split():
        write(name)
    for name in (*b"from-file removed cut grown closed/x owner attributes".split(), LONG, DEEP + b"/x"):
        write(name)
    write(b"suid", mode=0o6755)
    write(b"closed-file", mode=0)
    write(b"capability", mode=0o755)
    for name in (b"caf\xe9", b"\xff\xfe", "größe-漢字".encode(), b"with space", b"new\nline", b"-rf", b"back\\slash"):
        write(name)
    os.symlink(b"moved", path_of(b"from-link"))
    os.symlink(b"../usr/bin/env", path_of(b"relative"))
    os.symlink(b"/nowhere/" + b"t" * 300, path_of(b"dangling"))
    os.symlink(b"caf\xe9", path_of(b"link-\xe9"))
    for number in range(3):
        os.link(path_of(b"changed"), path_of(b"hard-%d" % number))
    os.link(path_of(DEEP + b"/x"), path_of(b"hard-deep"))
    os.link(path_of(b"relative"), path_of(b"hard-to-link"))
    os.link(path_of(b"suid"), path_of(b"hard-suid"))
    os.mkfifo(path_of(b"fifo"), 0o640)
    os.mknod(path_of(b"device"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with open(path_of(b"sparse"), "wb") as file:
        file.truncate(48 << 20)
        file.seek(20 << 20)
        file.write(b"in the middle")
    write(b"empty", b"")
    os.chown(path_of(b"owner"), 12345, 54321)
    os.lchown(path_of(b"relative"), 1000, 1000)
    os.chown(path_of(b"shared"), 0, 8)
    os.chmod(path_of(b"shared"), 0o2775)
    os.chmod(path_of(b"sticky"), 0o1777)
    os.chmod(path_of(b"closed"), 0)
    os.setxattr(path_of(b"attributes"), b"user.note", b"a\0b\xff")
    os.setxattr(path_of(b"attributes"), b"user.second", b"2")
    os.setxattr(path_of(b"shared"), b"user.note", b"of a directory")
    os.setxattr(path_of(b"capability"), b"security.capability", CAPABILITY)
    os.utime(path_of(b"empty"), (0, 0))
    os.utime(path_of(b"cut"), (5_000_000_000, 5_000_000_000))


def change() -> None:
    """Change what the layer below has."""
    os.remove(path_of(b"removed"))
    os.chmod(path_of(b"changed"), 0o600)
    os.truncate(path_of(b"cut"), 3)
    with open(path_of(b"grown"), "ab") as file:
        file.write(b"more\n")
    os.setxattr(path_of(b"attributes"), b"user.note", b"changed")
    os.removexattr(path_of(b"attributes"), b"user.second")
    os.chown(path_of(b"shared"), 1000, 1000)
    os.link("/usr/bin/env", path_of(b"hard-env"))
    os.rename(path_of(b"from-file"), path_of(b"renamed"))
    shutil.rmtree(path_of(b"gone/deep"))
    shutil.rmtree("/usr/share/doc/git", ignore_errors=True)


def replace() -> None:
    """Put something of another kind in the place of what the layers below have."""
    for name in (b"to-file", b"to-link", b"opaque", b"gone", b"moved"):
        shutil.rmtree(path_of(name))
    write(b"to-file")
    os.symlink(b"opaque", path_of(b"to-link"))
    os.makedirs(path_of(b"opaque/deep"))
    write(b"opaque/deep/new")
    os.makedirs(path_of(b"from-file"))
    write(b"from-file/x")
    os.remove(path_of(b"from-link"))
    os.mkdir(path_of(b"from-link"))
    write(b"from-link/x")
    os.remove(path_of(b"fifo"))
    os.mkfifo(path_of(b"fifo"), 0o600)
    os.remove(path_of(b"hard-0"))
    write(b"hard-0", b"another inode\n")


if __name__ == "__main__":
    {"make": make, "change": change, "replace": replace}[sys.argv[1]]()
