"""Create the base layer: generated directories and links, and allow-listed files of the host's /etc."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.host.file_systems import USR_LINKS

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
    # Distributions' /etc/profile resets PATH in login shells. This one does not, so that the PATH of the image stays.
    "profile": 'if [ "${PS1-}" ] && [ "${BASH-}" ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n',
    "bash.bashrc": "[ -z \"$PS1\" ] || PS1='\\u@\\h:\\w\\$ '\n",
}
# Every sandbox has its own /run, in which the launcher creates the targets of these links.
_RUNTIME_LINKS = {"hosts": "../run/hosts", "resolv.conf": "../run/resolv.conf", "mtab": "../proc/self/mounts"}


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """A file, directory or link of the base layer.

    Attributes:
        path: the path relative to the root.
        mode: the type and permissions, as in ``st_mode``.
        data: the content of a file, or the target of a link.
    """

    path: str
    mode: int
    data: bytes = b""


def base_entries(host: Path = Path("/")) -> tuple[BaseEntry, ...]:
    """List the entries of the base layer.

    Args:
        host: the root directory whose ``/etc`` is read.

    Returns:
        The entries, sorted by path, so that each directory comes before its contents.

    Raises:
        OSError: a file of the allow-list exists but cannot be read.
    """
    entries = {entry.path: entry for entry in _entries(host)}
    for path in list(entries):
        while path := os.path.dirname(path):
            entries.setdefault(path, BaseEntry(path, stat.S_IFDIR | 0o755))
    return tuple(entries[path] for path in sorted(entries))


def base_key(entries: tuple[BaseEntry, ...]) -> str:
    """Return the key of the base layer: the hash of its content."""
    return _hash(_MARK, entries)


def platform_key(host: Path = Path("/")) -> str:
    """Return the platform's key, from which the keys of all build steps are derived.

    The key covers everything outside the steps that their results depend on: the generated part of the base layer, the
    distribution with its version, and the machine's architecture. It ignores the host's certificates, library cache
    and time zone, because package upgrades change these files without changing any result.

    Args:
        host: the root directory whose ``os-release`` is read.
    """
    files = (host / "etc/os-release", host / "usr/lib/os-release")  # os-release(5): the first existing file is read
    os_release = next((path.read_text("utf-8", "replace") for path in files if path.is_file()), "")
    distribution = sorted(_DISTRIBUTION.findall(os_release))
    return _hash(_PLATFORM_MARK + repr((platform.machine(), distribution)).encode(), (*_directories(), *_made()))


def _hash(prefix: bytes, entries: tuple[BaseEntry, ...]) -> str:
    digest = hashlib.sha256(prefix)
    for entry in entries:
        digest.update(b"%s\0%o\0%d\0" % (os.fsencode(entry.path), entry.mode, len(entry.data)))
        digest.update(entry.data)
    return digest.hexdigest()


def write_base(entries: tuple[BaseEntry, ...], tree: Path) -> None:
    """Write the base layer into a new directory.

    Raises:
        OSError: the directory cannot be created or written.
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
    for name, content in _MADE.items():
        yield BaseEntry(f"etc/{name}", stat.S_IFREG | 0o644, content.encode())
    for name, target in _RUNTIME_LINKS.items():
        yield BaseEntry(f"etc/{name}", stat.S_IFLNK | 0o777, target.encode())


def _top_level(host: Path, name: str) -> Iterator[BaseEntry]:
    """Yield a top-level path: a link into /usr as on the host, or else an empty directory as a mount point."""
    path = host / name
    if path.is_symlink():
        target = os.readlink(path)
        if target.removeprefix("/").split("/")[0] in {"usr", *USR_LINKS}:  # also a link like lib64 -> lib
            yield BaseEntry(name, stat.S_IFLNK | 0o777, os.fsencode(target))
    elif path.is_dir():
        yield BaseEntry(name, stat.S_IFDIR | 0o755)


def _copied(host: Path, name: str) -> Iterator[BaseEntry]:
    """Yield the entries of an allow-listed path; follow a link to a directory only if the link is allow-listed."""
    path = f"{host}/{name}"
    if os.path.isdir(path) and not (os.path.islink(path) and _shown(os.readlink(path), name)):
        for child in sorted(os.listdir(path)):
            if not _leads_to_directory(f"{path}/{child}"):
                yield from _copied(host, f"{name}/{child}")
    else:
        yield from _single(path, name)


def _single(path: str, name: str) -> Iterator[BaseEntry]:
    """Yield a file or link; replace a link by a copy of its target if the target does not exist in sandboxes."""
    if os.path.islink(path) and _shown(os.readlink(path), name):
        yield BaseEntry(name, stat.S_IFLNK | 0o777, os.fsencode(os.readlink(path)))
    elif os.path.isfile(path) and not name.startswith("etc/alternatives/") and os.access(path, os.R_OK):
        yield BaseEntry(name, stat.S_IFREG | 0o644, Path(path).read_bytes())


def _leads_to_directory(path: str) -> bool:
    """Return whether a path is a link to a directory; following the link could copy files outside the allow-list."""
    return os.path.islink(path) and os.path.isdir(path)


def _shown(target: str, name: str) -> bool:
    """Return whether a link's target exists in a sandbox: below /usr, or next to the link."""
    resolved = os.path.normpath(os.path.join("/", os.path.dirname(name), target))
    is_sibling = "/" not in target and target not in {".", ".."}
    return is_sibling or resolved.split("/")[1] in {"usr", *USR_LINKS}
