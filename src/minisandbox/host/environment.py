"""Examine the kernel release, control groups, limits, programs and disks of the machine, mostly without trials."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minisandbox.launch.kernel import cgroups, syscalls

from . import fixes, registry
from .file_systems import file_system, is_network

_GIB = 1 << 30
_OLDEST, _OLDEST_TRIED = (5, 14), (6, 1)
# default limits of one sandbox: open files of each command, and processes
_FILES = 4096
_OWN_PROCESSES = 1024
_PROCESSES = 4 * _OWN_PROCESSES
_INSTANCES = 128
_MACHINE_FILES = _OWN_PROCESSES * _FILES + 65536  # one sandbox with default limits, and the host
_FREE_WANTED = 10 * _GIB
_WANTED = set(cgroups.NEEDED)
_UNFIT_STORES = {"vfat", "ramfs"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of the machine.

    Attributes:
        status: ``ok``, ``degraded`` or ``missing``.
        detail: result of the examination.
        fix: the command line that would improve it, or "".
    """

    status: str
    detail: str
    fix: str = ""


def kernel() -> Finding:
    """Report the kernel's release."""
    version, detail = fixes.kernel_version(), f"{platform.system()} {platform.release()} ({platform.machine()})"
    fix = "boot a kernel >= 6.6"
    if platform.system() != "Linux" or version < _OLDEST:
        return Finding("missing", f"{detail}; at least Linux 5.14 is needed", fix)
    if version < _OLDEST_TRIED:
        return Finding("degraded", f"{detail}; MiniSandbox has not been tried on kernels before 6.1", fix)
    return Finding("ok", detail)


def program(name: str) -> Finding:
    """Report whether a program is on PATH."""
    path = shutil.which(name)
    return Finding("ok", path) if path else Finding("missing", f"there is no {name} on PATH", fixes.install(name))


def rlimits() -> Finding:
    """Report how many files and processes this user may have."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    detail = f"open files: {_limit(files)}, processes: {_limit(processes)}"
    if resource.RLIM_INFINITY != files < _FILES:
        line = f"echo '{fixes.user_name()} - nofile 65536' | sudo tee -a /etc/security/limits.conf  # then log in again"
        return Finding("degraded", f"{detail}; a sandbox's commands get {_FILES} files by default", line)
    if resource.RLIM_INFINITY != processes < _PROCESSES and os.getuid() != 0:  # root's sandboxes have separate uids
        line = f"echo '{fixes.user_name()} - nproc 65536' | sudo tee -a /etc/security/limits.conf  # then log in again"
        return Finding("degraded", f"{detail}; one sandbox may have {_OWN_PROCESSES} by default, of the same", line)
    return Finding("ok", detail)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def file_max() -> Finding:
    """Report how many files the whole machine may have open, because sandboxes have no separate limit."""
    maximum = fixes.read_sysctl("fs.file-max")
    if maximum is None:
        return Finding("degraded", "/proc/sys/fs/file-max cannot be read")
    detail = f"{maximum} open files on the whole machine"
    if int(maximum) < _MACHINE_FILES:
        line = "sudo sysctl -w fs.file-max=9223372036854775807"
        return Finding("degraded", f"{detail}: one sandbox with default limits can use them up", line)
    return Finding("ok", detail)


def core_pattern() -> Finding:
    """Report whether the kernel starts a host program for a crash inside a sandbox."""
    pattern = fixes.read_sysctl("kernel.core_pattern") or ""
    if pattern.startswith("|"):
        program = pattern[1:].split(" ")[0]
        return Finding(
            "degraded",
            f"a program of the host's reads what crashes inside a sandbox: {program}",
            "sudo sysctl -w kernel.core_pattern=core",
        )
    return Finding("ok", f"no program is started for a crash: {pattern or 'no pattern'}")


def inotify() -> Finding:
    """Report how many file watchers this user may have."""
    instances = fixes.read_sysctl("fs.inotify.max_user_instances")
    watches = fixes.read_sysctl("fs.inotify.max_user_watches")
    if instances is None:
        return Finding("degraded", "this kernel has no inotify", "boot a kernel built with CONFIG_INOTIFY_USER")
    detail = f"{instances} instances, {watches} watches per user"
    if int(instances) < _INSTANCES:
        return Finding("degraded", detail, "sudo sysctl -w fs.inotify.max_user_instances=1024")
    return Finding("ok", detail)


def landlock() -> Finding:
    """Report whether Landlock can hide the host's abstract unix sockets from sandboxes with the host's network."""
    abi = syscalls.landlock_abi()
    if abi >= syscalls.SCOPED_ABI:
        return Finding("ok", f"version {abi}")
    detail = f"version {abi}" if abi else "not of this kernel, or not switched on"
    return Finding("degraded", detail, "boot Linux 6.12 or newer, with landlock in its lsm= list")


_VOLUME = (
    "start the container with: docker run -v DIRECTORY:/store -e MINISANDBOX_STORE=/store ...  # on ext4, xfs or btrfs"
)

# --- the store -------------------------------------------------------------------------------------------------------


def nearest_directory(path: Path | None) -> Path:
    """Return the deepest existing directory at or above ``path``; without a path, the temporary directory."""
    for directory in (path, *path.parents) if path is not None else ():
        if directory.is_dir():
            return directory
    return Path(tempfile.gettempdir())


def is_writable(directory: Path) -> bool:
    """Return whether this user may create files in a directory."""
    return os.access(directory, os.W_OK | os.X_OK)


def store(directory: Path) -> Finding:  # noqa: PLR0911 - one return for each finding
    """Report the file system that holds the store, and its free space."""
    if not is_writable(directory):
        return Finding(
            "missing", f"{directory} may not be written", "export MINISANDBOX_STORE=DIRECTORY  # of your own"
        )
    kind = file_system(directory)
    size, _, free_size = shutil.disk_usage(directory)
    detail = f"{kind}, {free_size / _GIB:.1f} GiB free at {directory}"
    choose_store = "export MINISANDBOX_STORE=DIRECTORY  # on "
    if kind == "overlay" and fixes.in_container():
        return Finding("missing", f"{detail}; no store can lie on a container's own file system", _VOLUME)
    if not size or kind == "overlay" or is_network(kind):  # a file system without a size, as proc, stores no files
        return Finding("missing", f"{detail}; no store can lie there", choose_store + "a local ext4, xfs or btrfs")
    if kind in _UNFIT_STORES:
        return Finding("degraded", detail, choose_store + "a local ext4, xfs or btrfs")
    if kind == "tmpfs":
        return Finding("degraded", f"{detail}; it is gone after a restart", choose_store + "a local ext4, xfs or btrfs")
    if free_size < _FREE_WANTED:
        return Finding("degraded", detail, choose_store + "a disk with 10 GiB free")
    return Finding("ok", detail)


# --- cgroups ---------------------------------------------------------------------------------------------------------

_ENABLE = (
    "sudo sh -c 'd={directory}; mkdir -p $d/others && for p in $(cat $d/cgroup.procs); do "
    "echo $p > $d/others/cgroup.procs; done; echo +memory +pids +cpu > $d/cgroup.subtree_control'"
)
_DELEGATE = "systemd-run --user --scope --property=Delegate=yes -- minisandbox ..."
_CONTAINER = "start the container with: docker run --cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw ..."
_MOUNT = "sudo mount -t cgroup2 cgroup2 /sys/fs/cgroup  # a kernel built with CONFIG_MEMCG and CONFIG_CGROUP_PIDS"
_GIVE = (
    "for d in /sys/fs/cgroup/{{memory,pids,cpu}}/{user}; do "
    "sudo mkdir -p $d && sudo chown -R $USER $d && echo $$ | sudo tee $d/cgroup.procs; done"
)


_CPU = "echo +cpu | sudo tee {directory}/cgroup.subtree_control  # and in each group above that lacks it"
_CPU_OF_USERS = (
    "sudo mkdir -p /etc/systemd/system/user@.service.d && printf '[Service]\\nDelegate=cpu memory pids\\n' | "
    "sudo tee /etc/systemd/system/user@.service.d/delegate.conf && sudo systemctl daemon-reload  # then log in again"
)


def control_groups(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Finding:
    """Report whether the launcher can limit memory, processes and CPU, by creating an empty control group.

    In version 2 this moves the processes of this process's group to a leaf, as the first sandbox would.

    Args:
        root: mount point of control groups.
        membership: the file that lists this process's groups (cgroups(7)).
    """
    roots = _usable_roots(root, membership)
    if roots.version:
        detail = f"version {roots.version}, may be used: {', '.join(sorted(roots.controllers))}"
        if "cpu" in roots.controllers:
            return Finding("ok", detail)
        return Finding("degraded", f"{detail}; without cpu, Limits.cpu is refused", _cpu(roots))
    unified = next((mount for mount in (Path(root), Path(root, "unified")) if _controllers(mount) >= _WANTED), None)
    if unified is not None:
        line = _version_2(unified, membership)
        return Finding("degraded", "version 2, but this process may not make groups with memory and pids", line)
    if all(Path(root, name, "cgroup.procs").exists() for name in cgroups.NEEDED):
        line = _CONTAINER if fixes.in_container() else _GIVE.format(user=fixes.user_name())
        return Finding("degraded", "version 1, but this process may not make groups with memory and pids", line)
    line = _CONTAINER if fixes.in_container() else _MOUNT
    return Finding("degraded", f"there are no groups for memory and pids at {root}", line)


def _cpu(roots: cgroups.CgroupRoots) -> str:
    """Return the command that enables CPU limits, if groups can limit only memory and processes."""
    if fixes.in_container():
        return _CONTAINER
    if roots.version == 1:
        return _GIVE.format(user=fixes.user_name())
    directory = Path(roots.directories[0][1])
    if "cpu" in _controllers(directory):
        return _CPU.format(directory=directory)
    return _CPU_OF_USERS if os.geteuid() else _CPU.format(directory=directory.parent)


def _version_2(mount: Path, membership: str) -> str:
    """Return the command that lets this process create groups of the mounted version 2."""
    paths = [line.split(":", 2)[2].rstrip("\n") for line in cgroups.lines(membership) if line.startswith("0::")]
    group = Path(cgroups.own_group(str(mount), paths[0] if paths else ""))
    if _controllers(group) >= _WANTED and os.access(group, os.W_OK):
        return _ENABLE.format(directory=group)  # the group is writable, but contains processes that cannot be moved
    return _CONTAINER if fixes.in_container() else _DELEGATE


def _controllers(group: Path) -> set[str]:
    return set(cgroups.words(f"{group}/cgroup.controllers"))


def _usable_roots(root: str, membership: str) -> cgroups.CgroupRoots:
    """Return the directories in which groups can be created, after creating one."""
    # if this process is killed, the reaper recognises the groups by this name
    name = f"{registry.owner_name()}{registry.DOCTOR}"
    roots = cgroups.find_roots(root, membership)
    try:
        usable_roots = cgroups.enable_controllers(roots)
        if usable_roots.version:
            cgroups.OwnerCgroups(usable_roots, name)
    except OSError:
        return cgroups.CgroupRoots(0)
    finally:
        for _, directory in roots.directories:
            cgroups.remove_owner(f"{directory}/{cgroups.PREFIX}{name}")
    return usable_roots
