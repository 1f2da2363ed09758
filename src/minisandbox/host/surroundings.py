"""What can be read off a machine without trying: kernel release, cgroups, limits, programs, disks."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisandbox.launch import limits

from . import fixes, reaper

_GIB = 1 << 30
_OLDEST = (5, 12)  # mount_setattr(2), idmapped mounts
_COMFORTABLE = (6, 6)  # user.* attributes on tmpfs
_FILES = 4096  # what one sandbox's commands get by default
_INSTANCES = 128
_FREE_WANTED = 10 * _GIB
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # how mountinfo has white space in paths
_UNFIT_STORES = {"overlay", "nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "vfat", "ramfs"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was read.

    Attributes:
        status: ``ok``, ``degraded`` or ``missing``.
        detail: what was seen.
        fix: the line that would better it, or "".
    """

    status: str
    detail: str
    fix: str = ""


def kernel() -> Finding:
    """The kernel's release."""
    release = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    detail = f"{platform.system()} {release} ({platform.machine()})"
    newer = "boot a kernel >= 6.6"
    if platform.system() != "Linux" or version < _OLDEST:
        return Finding("missing", f"{detail}; at least Linux 5.12 is needed", newer)
    if version < _COMFORTABLE:
        return Finding("degraded", f"{detail}; from 6.6 on, writes can be kept in memory", newer)
    return Finding("ok", detail)


def program(name: str) -> Finding:
    """Whether a program is on PATH."""
    found = shutil.which(name)
    return Finding("ok", found) if found else Finding("missing", f"there is no {name} on PATH", fixes.install(name))


def rlimits() -> Finding:
    """How many files and processes this user may have."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    detail = f"open files: {_limit(files)}, processes: {_limit(processes)}"
    if resource.RLIM_INFINITY != files < _FILES:
        line = f"echo '{fixes.user_name()} - nofile 65536' | sudo tee -a /etc/security/limits.conf  # then log in again"
        return Finding("degraded", f"{detail}; a sandbox's commands get {_FILES} files by default", line)
    return Finding("ok", detail)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def inotify() -> Finding:
    """How many file watchers this user may have."""
    instances = fixes.read_sysctl("fs.inotify.max_user_instances")
    watches = fixes.read_sysctl("fs.inotify.max_user_watches")
    if instances is None:
        return Finding("degraded", "this kernel has no inotify", "boot a kernel built with CONFIG_INOTIFY_USER")
    detail = f"{instances} instances, {watches} watches per user"
    if int(instances) < _INSTANCES:
        return Finding("degraded", detail, "sudo sysctl -w fs.inotify.max_user_instances=1024")
    return Finding("ok", detail)


# --- the store -------------------------------------------------------------------------------------------------------


def nearest_directory(path: Path | None) -> Path:
    """The deepest existing directory at or above ``path``; without a path, that for temporary files."""
    for candidate in (path, *path.parents) if path is not None else ():
        if candidate.is_dir():
            return candidate
    return Path(tempfile.gettempdir())


def is_writable(directory: Path) -> bool:
    """Whether this user may make files in a directory."""
    return os.access(directory, os.W_OK | os.X_OK)


def store(directory: Path) -> Finding:
    """The file system on which the store lies, and the room on it."""
    if not is_writable(directory):
        return Finding(
            "missing", f"{directory} may not be written", "export MINISANDBOX_STORE=DIRECTORY  # of your own"
        )
    kind = file_system(directory)
    size, _, free = shutil.disk_usage(directory)
    detail = f"{kind}, {free / _GIB:.1f} GiB free at {directory}"
    elsewhere = "export MINISANDBOX_STORE=DIRECTORY  # on "
    if not size:  # proc, sysfs and the like keep no files
        return Finding("missing", detail, elsewhere + "a disk")
    if kind in _UNFIT_STORES or kind.startswith("fuse."):
        return Finding("degraded", detail, elsewhere + "a local ext4, xfs or btrfs")
    if kind == "tmpfs":
        return Finding("degraded", f"{detail}; it is gone after a restart", elsewhere + "a local ext4, xfs or btrfs")
    if free < _FREE_WANTED:
        return Finding("degraded", detail, elsewhere + "a disk with 10 GiB free")
    return Finding("ok", detail)


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory, by the mount table (proc_pid_mountinfo(5))."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found, longest = "unknown", -1
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = os.fsdecode(line).split()
        point = os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4]))
        # by device first; btrfs subvolumes show another number than stat(2) does, so the longest prefix decides there
        inside = directory == Path(point) or Path(point) in directory.parents
        weight = len(point) + (10_000 if fields[2] == wanted else 0)
        if inside and weight > longest:
            found, longest = fields[fields.index("-") + 1], weight
    return found


# --- cgroups ---------------------------------------------------------------------------------------------------------


def cgroups() -> Finding:
    """Whether this process may make cgroups that limit memory and processes; tried with an empty one."""
    own = [line.split(":", 2) for line in _lines(Path("/proc/self/cgroup"))]
    unified = [Path("/sys/fs/cgroup" + path) for number, names, path in own if number == "0" and names == ""]
    for directory in unified:
        controllers = set(" ".join(_lines(directory / "cgroup.controllers")).split())
        if {"memory", "pids"} <= controllers and _can_make_one(directory):
            return Finding("ok", f"version 2, may be used: {', '.join(sorted(controllers))}")
    writable = sorted(name for name, directory in _version_1(own) if _can_make_one(directory))
    if {"memory", "pids"} <= set(writable):
        return Finding("ok", f"version 1, may be used: {', '.join(writable)}")
    return _no_cgroups(bool(unified and (unified[0] / "cgroup.controllers").exists()))


def _no_cgroups(has_version_2: bool) -> Finding:
    if has_version_2:
        line = "systemd-run --user --scope --property=Delegate=yes -- minisandbox ..."
        return Finding("degraded", "version 2, but this process may not make groups with memory and pids", line)
    user = fixes.user_name()
    line = (
        f"for d in /sys/fs/cgroup/{{memory,pids}}/{user}; do "
        "sudo mkdir -p $d && sudo chown -R $USER $d && echo $$ | sudo tee $d/cgroup.procs; done"
    )
    return Finding("degraded", "version 1, but this process may not make groups with memory and pids", line)


def _version_1(own: list[list[str]]) -> Iterator[tuple[str, Path]]:
    for number, names, path in own:
        for name in names.split(",") if number != "0" else ():
            if name in ("memory", "pids", "cpu", "cpuset"):
                yield name, Path(f"/sys/fs/cgroup/{name}{path}")


def _can_make_one(parent: Path) -> bool:
    probe = parent / f"{limits.PREFIX}{reaper.owner_name()}{reaper.DOCTOR}"  # one that outlives us is reclaimed
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
