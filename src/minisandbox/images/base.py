"""The base layer: generated directories and links, and an allow-list of the host's files of /etc."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.sandbox.plans import USR_LINKS

_MARK = b"minisandbox base 1\n"
_PLATFORM_MARK = b"minisandbox platform 1\n"
_DISTRIBUTION = re.compile(r"""^(ID|VERSION_ID)=["']?([^"'\n]*)""", re.MULTILINE)

_COPIED = (
    "alternatives",
    "ca-certificates",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "mime.types",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "protocols",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
)
_DIRECTORIES = (
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("testbed", 0o755),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
)
_MADE = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
    "user:x:1000:1000:user:/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\nbin:x:2:\nadm:x:4:\ntty:x:5:\nmail:x:8:\nstaff:x:50:\nusers:x:100:\n"
    "user:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
    "protocols: files\nservices: files\nethers: files\nrpc: files\n",
    # PATH comes with the image; a login shell must not replace it, as distributions' profiles do.
    "profile": 'if [ "${PS1-}" ] && [ "${BASH-}" ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n',
    "bash.bashrc": "[ -z \"$PS1\" ] || PS1='\\u@\\h:\\w\\$ '\n",
}
# Written by the launcher for each sandbox, where /run is the sandbox's own.
_RUNTIME_LINKS = {"hosts": "../run/hosts", "resolv.conf": "../run/resolv.conf", "mtab": "../proc/self/mounts"}


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """A file, directory or link of the base layer.

    Attributes:
        path: its path relative to the root.
        mode: type and permissions, as in ``st_mode``.
        data: a file's content, or a link's target.
    """

    path: str
    mode: int
    data: bytes = b""


def base_entries(host: Path = Path("/")) -> tuple[BaseEntry, ...]:
    """List the entries of the base layer.

    Args:
        host: the root directory whose ``/etc`` is looked at.

    Returns:
        Entries sorted by path, so that a directory comes before what is in it.

    Raises:
        OSError: a file of the allow-list exists and cannot be read.
    """
    entries = {entry.path: entry for entry in _entries(host)}
    for path in list(entries):
        for parent in Path(path).parents:
            if (name := str(parent)) != ".":
                entries.setdefault(name, BaseEntry(name, stat.S_IFDIR | 0o755))
    return tuple(entries[path] for path in sorted(entries))


def base_key(entries: tuple[BaseEntry, ...]) -> str:
    """Return the key of the base layer: the hash of its content."""
    return _hash(_MARK, entries)


def platform_key(host: Path = Path("/")) -> str:
    """Return the key that the keys of all build steps start from: what results depend on below the first step.

    That is the made part of the base layer, the distribution with its version, and the machine's architecture, which
    decide what the host's ``/usr`` can run. The host's certificates, library cache and time zone do not count: a
    package upgrade changes them, and no result.

    Args:
        host: the root directory whose ``os-release`` is read.
    """
    files = (host / "etc/os-release", host / "usr/lib/os-release")  # os-release(5): the first one counts
    text = next((path.read_text("utf-8", "replace") for path in files if path.is_file()), "")
    distribution = sorted(_DISTRIBUTION.findall(text))
    return _hash(_PLATFORM_MARK + repr((platform.machine(), distribution)).encode(), (*_directories(), *_made()))


def _hash(mark: bytes, entries: tuple[BaseEntry, ...]) -> str:
    digest = hashlib.sha256(mark)
    for entry in entries:
        digest.update(b"%s\0%o\0%d\0" % (os.fsencode(entry.path), entry.mode, len(entry.data)))
        digest.update(entry.data)
    return digest.hexdigest()


def write_base(entries: tuple[BaseEntry, ...], tree: Path) -> None:
    """Write the base layer into a new directory.

    Raises:
        OSError: it cannot be written.
    """
    tree.mkdir()
    tree.chmod(0o755)
    for entry in entries:
        path = tree / entry.path
        if stat.S_ISLNK(entry.mode):
            path.symlink_to(os.fsdecode(entry.data))
            continue
        if stat.S_ISDIR(entry.mode):
            path.mkdir()
        else:
            path.write_bytes(entry.data)
        path.chmod(stat.S_IMODE(entry.mode))


def _entries(host: Path) -> Iterator[BaseEntry]:
    yield from _directories()
    for name in USR_LINKS:
        yield from _top_level(host, name)
    for name in _COPIED:
        yield from _copied(host, f"etc/{name}")
    yield from _made()


def _directories() -> Iterator[BaseEntry]:
    for path, mode in _DIRECTORIES:
        yield BaseEntry(path, stat.S_IFDIR | mode)


def _made() -> Iterator[BaseEntry]:
    for name, text in _MADE.items():
        yield BaseEntry(f"etc/{name}", stat.S_IFREG | 0o644, text.encode())
    for name, target in _RUNTIME_LINKS.items():
        yield BaseEntry(f"etc/{name}", stat.S_IFLNK | 0o777, target.encode())


def _top_level(host: Path, name: str) -> Iterator[BaseEntry]:
    """Yield a link into /usr as on the host, or an empty directory as a mount point for a real one."""
    path = host / name
    if path.is_symlink():
        target = os.readlink(path)
        if target.removeprefix("/").split("/")[0] in {"usr", *USR_LINKS}:  # also lib64 -> lib, where lib is real
            yield BaseEntry(name, stat.S_IFLNK | 0o777, os.fsencode(target))
    elif path.is_dir():
        yield BaseEntry(name, stat.S_IFDIR | 0o755)


def _copied(host: Path, name: str) -> Iterator[BaseEntry]:
    """Yield a file or directory of the allow-list; it may be a link to a directory, its contents may not."""
    path = host / name
    if path.is_dir() and not (path.is_symlink() and _shown(os.readlink(path), name)):
        for child in sorted(os.listdir(path)):
            if not _leads_to_directory(path / child):
                yield from _copied(host, f"{name}/{child}")
    else:
        yield from _single(path, name)


def _single(path: Path, name: str) -> Iterator[BaseEntry]:
    """Yield a file or link; a link that leaves the visible files becomes a copy of its target."""
    if path.is_symlink() and _shown(os.readlink(path), name):
        yield BaseEntry(name, stat.S_IFLNK | 0o777, os.fsencode(os.readlink(path)))
    elif path.is_file() and not name.startswith("etc/alternatives/") and os.access(path, os.R_OK):
        yield BaseEntry(name, stat.S_IFREG | 0o644, path.read_bytes())


def _leads_to_directory(path: Path) -> bool:
    """Return whether this is a link to a directory; following it could copy files outside the allow-list."""
    return path.is_symlink() and path.is_dir()


def _shown(target: str, name: str) -> bool:
    """Return whether a link's target exists in a sandbox: below /usr, or next to the link."""
    resolved = os.path.normpath(os.path.join("/", os.path.dirname(name), target))
    is_sibling = "/" not in target and target not in {".", ".."}
    return is_sibling or resolved.split("/")[1] in {"usr", *USR_LINKS}
